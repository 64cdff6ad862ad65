"""A search of the user's own: a class named `MODULE:CLASS`, and what it must have."""

import hashlib
import inspect
from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from espalier.engine.errors import EspalierError, InvalidRequestError, Violation
from espalier.search.algorithms.base import Expand, SearchAlgorithm
from espalier.search.algorithms.own_code import load_code, place_and_reason
from espalier.search.request import SearchRequest, Vote
from espalier.search.schema import CodeName
from espalier.search.tree import Node

T = TypeVar("T")
_METHODS = ("ask", "tell", "finished", "kept")
_CONTRACT = "search/algorithms/README.md has the contract and an example"


@cache
def own_class(name: CodeName) -> Any:
    """Load a class and check that it is a search; see `base`.

    Raises:
        InvalidRequestError: it cannot be loaded, or lacks something; says what.
    """
    try:
        found = load_code(name)
    except EspalierError as error:
        raise _refusal(name, str(error)) from error
    if not isinstance(found, type):
        raise _refusal(name, f"must be a class; {_CONTRACT}")
    missing = [f"the method {method}" for method in _METHODS if not callable(getattr(found, method, None))]
    if not isinstance(getattr(found, "uses_scores", None), bool):
        missing.append("the class attribute uses_scores, True or False")
    try:
        inspect.signature(found).bind(None, None)
    except (TypeError, ValueError):
        missing.append("a constructor that takes a request and a root")
    if missing:
        raise _refusal(name, f"lacks {', '.join(missing)}; {_CONTRACT}")
    return found


def own_defaults(name: CodeName, fields: Collection[str]) -> tuple[Vote, dict[str, int | float]]:
    """The default vote of a class, and its defaults of the optional request fields that it uses, among `fields`.

    Raises:
        InvalidRequestError: as `own_class`, or one of them is no vote or no such field.
    """
    its = own_class(name)
    vote = getattr(its, "vote", Vote.WEIGHTED if its.uses_scores else Vote.MAJORITY)
    usual = getattr(its, "usual", {})
    if vote not in list(Vote):
        raise _refusal(name, f"its vote must be one of {', '.join(Vote)}, is {vote!r}")
    if not isinstance(usual, dict) or not usual.keys() <= set(fields):
        raise _refusal(name, f"its usual must be a dict with defaults of {', '.join(sorted(fields))}, is {usual!r}")
    return Vote(vote), usual


def make_own(name: CodeName, request: SearchRequest, root: Node) -> SearchAlgorithm:
    """Create the algorithm of a resolved request.

    Raises:
        InvalidRequestError: its constructor fails; says where.
    """
    its = own_class(name)
    try:
        return _Guarded(name, its(request, root), root, None if hasattr(its, "memory") else request.candidates)
    except Exception as error:  # whatever somebody's class does
        raise _refusal(name, f"creating it failed, {place_and_reason(error)}") from error


class _Guarded:
    """A search of the user's own; what it breaks of the contract, or raises, fails the search in one line.

    Without `memory` of its own it may hold no more than `most` open paths, and ask for no more children in a round:
    that much is reserved, and the rest would be that of other searches.
    """

    def __init__(self, name: CodeName, its: SearchAlgorithm, root: Node, most: int | None) -> None:
        self.uses_scores = its.uses_scores
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
            raise self._broken(f"{does} {count} {what}, and without its own `memory` may at most {self._most}, N*M")

    def _broken(self, what: str) -> EspalierError:
        return EspalierError(f"--algorithm {self._name}: {what}")


def code_digest(name: CodeName) -> str:
    """SHA-256 of the file that holds a class, which tells two versions apart; empty for one without a file."""
    try:
        return hashlib.sha256(Path(inspect.getfile(own_class(name))).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return ""


def _refusal(name: CodeName, why: str) -> InvalidRequestError:
    return InvalidRequestError([Violation("algorithm", f"{name}: {why}")])
