"""A search of the user's own: a class named `MODULE:CLASS`, and checks of what it declares."""

import inspect
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar

from espalier.engine.errors import EspalierError, InvalidRequestError, Violation
from espalier.engine.own_code import load_code, place_and_reason
from espalier.search.algorithms.base import USABLE, Expand, MemoryEstimate, SearchAlgorithm, parameters_in
from espalier.search.common_fields import CommonFields, Vote
from espalier.search.schema import KINDS, CodeName, declared, from_values
from espalier.search.tree import Node

T = TypeVar("T")
_SCORES = ("none", "answers", "steps")
_CONTRACT = "search/algorithms/README.md has the contract and an example"
_RETURNED: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "candidates": ("a whole number above 0", lambda value: isinstance(value, int) and value > 0),
    "memory": ("at least one MemoryEstimate", lambda value: bool(value) and _are_all(MemoryEstimate, value)),
    "sampled": ("two whole numbers", lambda value: _are_all(int, value) and len(value) == 2),
    "violations": ("a list of Violations", lambda value: _are_all(Violation, value)),
}
"""The class methods that take a request, and what each must return."""


def own_class(name: CodeName) -> type[SearchAlgorithm]:
    """Load a class and check what it declares.

    Its class methods raise an `InvalidRequestError` where they fail or return what they must not.

    Args:
        name: `MODULE:CLASS`, or `MODULE:CLASS:NAME=VALUE...` with parameters of its own.

    Raises:
        InvalidRequestError: it cannot be loaded, lacks something, or has no such parameters; says what.
    """
    module, _, rest = name.partition(":")
    code, _, given = rest.partition(":")
    try:
        found = load_code(f"{module}:{code}")
    except EspalierError as error:
        hint = f"; write {module.removesuffix('.py')}:{code}, without .py" if module.endswith(".py") else ""
        hint = "; define the class at the top of its module" if "." in code else hint
        raise _refusal(name, f"{error}{hint}") from error
    return _checked(found, name, given)


@cache
def _checked(found: Any, name: CodeName, given: str) -> type[SearchAlgorithm]:
    if not (isinstance(found, type) and issubclass(found, SearchAlgorithm)):
        raise _refusal(name, f"must be a subclass of espalier.search.algorithms.base.SearchAlgorithm; {_CONTRACT}")
    if wrong := list(_wrong_declarations(found)):
        raise _refusal(name, f"{', '.join(wrong)}; {_CONTRACT}")
    if wrong := list(_wrong_parameters(found, parameters_in(name), given)):
        raise _refusal(name, ", ".join(wrong))
    return _guarded(name, found)


def _guarded(name: CodeName, its: type[SearchAlgorithm]) -> type[SearchAlgorithm]:
    """A subclass that checks the class methods at each call, as they may fail for some requests only."""

    def guard(method: str) -> Any:
        def call(cls: Any, request: CommonFields) -> Any:
            try:
                value = getattr(super(guarded, cls), method)(request)
            except InvalidRequestError:
                raise
            except Exception as error:  # whatever somebody's class does
                raise _refusal(name, f"{method} failed, {place_and_reason(error)}") from error
            what, fits = _RETURNED[method]
            if not fits(value):
                raise _refusal(name, f"{method} must return {what}, returned {reprlib.repr(value)}")
            return value

        return classmethod(call)

    members = {method: guard(method) for method in _RETURNED}
    guarded = type(its.__name__, (its,), {"__module__": its.__module__, **members})
    return guarded


def _are_all(kind: type, values: Any) -> bool:
    return isinstance(values, Sequence) and all(isinstance(value, kind) for value in values)


def _wrong_declarations(its: type[SearchAlgorithm]) -> Iterator[str]:
    if missing := sorted(getattr(its, "__abstractmethods__", ())):
        yield f"lacks the methods {', '.join(missing)}"
    try:
        inspect.signature(its).bind(None, None)
    except (TypeError, ValueError):
        yield "lacks a constructor that takes a request and a root"
    if its.scores not in _SCORES:
        yield f"its scores must be one of {', '.join(_SCORES)}, is {its.scores!r}"
    if its.vote not in (None, *Vote):
        yield f"its vote must be one of {', '.join(Vote)}, is {its.vote!r}"
    if isinstance(its.uses, str) or not isinstance(its.uses, Collection):
        yield f"its uses must be a tuple of names, is {its.uses!r}"
    elif unknown := [str(name) for name in its.uses if str(name) not in USABLE]:
        yield f"its uses must be of {', '.join(sorted(USABLE))}, has {', '.join(unknown)}"
    yield from _wrong_fixed(its.fixed)
    if not is_dataclass(its.Parameters) or any(field.default is MISSING for field in fields(its.Parameters)):
        yield "its Parameters must be a dataclass with a default for each field"
    else:
        yield from _wrong_fields(its.Parameters)
    for method in _RETURNED:
        if not isinstance(inspect.getattr_static(its, method), classmethod | staticmethod):
            yield f"its {method} must be a class method"


def _wrong_fixed(fixed: Any) -> Iterator[str]:
    if not isinstance(fixed, Mapping):
        yield f"its fixed must be a mapping of fields to values, is {fixed!r}"
        return
    known = {field.name: field for field in declared(CommonFields) if field.option}
    for name, value in fixed.items():
        if name not in known:
            yield f"its fixed has {name!r}, which is no option of a search"
        elif wrong := known[name].violation(value):
            yield f"its fixed {name} {wrong}"


def _wrong_fields(parameters: type) -> Iterator[str]:
    try:
        known = declared(parameters)
    except Exception as error:  # whatever somebody's annotations are
        yield f"its Parameters cannot be read, {place_and_reason(error)}"
        return
    for field in known:
        if field.kind not in KINDS and not (isinstance(field.kind, type) and issubclass(field.kind, StrEnum)):
            yield f"its parameter {field.name} must be an int, a float, a bool, a str or a StrEnum"
        elif wrong := field.violation(field.default):
            yield f"the default of its parameter {field.name} {wrong}"


def _wrong_parameters(its: type[SearchAlgorithm], values: Mapping[str, Any], given: str) -> Iterator[str]:
    if given and not all("=" in part for part in given.split(":")):
        yield f"parameters are written NAME=VALUE:NAME=VALUE, not {given}"
        return
    known = [field.name for field in declared(its.Parameters)]
    try:
        from_values(its.Parameters, values)
    except InvalidRequestError as error:
        yield from (f"{wrong.field} {wrong.description}" for wrong in error.violations)
        if not values.keys() <= set(known):
            yield f"its parameters are {', '.join(known)}" if known else "it has no parameters"
    except Exception as error:  # whatever somebody's dataclass does
        yield f"creating its Parameters failed, {place_and_reason(error)}"


def make_own(name: CodeName, request: CommonFields, root: Node) -> SearchAlgorithm:
    """Create the algorithm of a resolved request.

    Raises:
        InvalidRequestError: its constructor fails; says where.
    """
    its = own_class(name)
    declared_memory = inspect.getattr_static(its.__base__, "memory")
    most = its.candidates(request) if declared_memory is vars(SearchAlgorithm)["memory"] else None
    try:
        search = its(request, root)  # pyright: ignore[reportCallIssue] - see `SearchAlgorithm`
        return _Guarded(name, search, root, most)
    except Exception as error:  # whatever somebody's class does
        raise _refusal(name, f"creating it failed, {place_and_reason(error)}") from error


class _Guarded(SearchAlgorithm):
    """A search of the user's own; what it breaks of the contract, or raises, fails the search in one line.

    Without `memory` of its own it may hold no more than `most` open paths, and ask for no more children in a round:
    that much is reserved, and the rest would be that of other searches.
    """

    def __init__(self, name: CodeName, its: SearchAlgorithm, root: Node, most: int | None) -> None:
        self._name = name
        self._its = its
        self._root = root
        self._most = most
        self._kept: list[Node] = [root]

    def ask(self) -> Sequence[Expand]:
        asked = self._call(lambda: list(self._its.ask()), "ask")
        if not asked:
            raise self._broken("is not finished and asks for nothing")
        allowed = set(self._kept)
        if not all(isinstance(each, Expand) and each.node in allowed and each.node.open for each in asked):
            raise self._broken("asks for what is no Expand of a node that it kept and that has not ended")
        self._check_room("asks for", "children in a round", sum(each.children for each in asked))
        return asked

    def tell(self, nodes: Sequence[Node]) -> None:
        self._call(lambda: self._its.tell(nodes), "tell")
        self._kept = self._call(lambda: list(self._its.kept()), "kept")
        self._check_room("keeps", "open paths", sum(node.open and node is not self._root for node in set(self._kept)))

    def finished(self) -> bool:
        return self._call(lambda: bool(self._its.finished()), "finished")

    def kept(self) -> Sequence[Node]:
        return self._kept

    def _call(self, method: Callable[[], T], name: str) -> T:
        try:
            return method()
        except Exception as error:  # whatever somebody's class does
            raise self._broken(f"{name} failed, {place_and_reason(error)}") from error

    def _check_room(self, does: str, what: str, count: int) -> None:
        if self._most is not None and count > self._most:
            raise self._broken(
                f"{does} {count} {what}; its `candidates(request)` allows {self._most}: override it, or `memory`"
            )

    def _broken(self, what: str) -> EspalierError:
        return EspalierError(f"--algorithm {self._name}: {what}")


def _refusal(name: CodeName, why: str) -> InvalidRequestError:
    return InvalidRequestError([Violation("algorithm", f"{name}: {why}")])
