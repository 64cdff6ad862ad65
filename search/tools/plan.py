"""Plans of how a request's answers may call tools: for the loaded generator, made when the request is resolved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.engine.guidance.grammar import Grammar
from espalier.engine.guidance.matcher import Matcher
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.common_fields import ToolFields
from espalier.search.rules import Form
from espalier.search.schema import Parsed
from espalier.search.tools.declared import Offered, Tool, ToolCall
from espalier.search.tools.forms import FORMS, CallForm, no_form
from espalier.search.tools.guiding import FromMark, calls_grammar
from espalier.search.tools.reading import CallReader

R = TypeVar("R", bound=ToolFields)
Compile = Callable[[str, Callable[[], Grammar]], Grammar]
"""Compiles a grammar of a field; see `Resolver.compile`."""


@dataclass(frozen=True, slots=True)
class CallPlan(Offered):
    """The calls of one request's answers.

    Attributes:
        callable: the tools that may be called.
        form: how the generator writes calls.
        one: whether an answer has one call at most.
        grammar: binds answers, or what stands behind a mark in them; None where nothing is bound.
        from_mark: whether they are bound from a mark on.
        warnings: whole sentences.
    """

    callable: tuple[Tool, ...]
    form: CallForm
    one: bool
    grammar: Grammar | None = None
    from_mark: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def plan(self) -> "CallPlan":  # pyright: ignore[reportIncompatibleMethodOverride]
        """See `Offered`."""
        return self

    def reader(self) -> CallReader:
        """A reader at the beginning of an answer."""
        return CallReader(self.form, self.callable, self.one)

    def split(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """The content and the calls of a whole answer."""
        reader = self.reader()
        content = reader.feed(text) + reader.end(cut=False)
        return content, tuple(reader.calls)

    def guide(self, grammar: Matcher, tokenizer: TextTokenizer) -> Matcher:
        """What binds an answer, of the matcher of its grammar."""
        return FromMark(grammar, self.form.trigger.encode(), tokenizer) if self.from_mark else grammar


def with_plan(request: R, tokenizer: TextTokenizer, form: CallForm | None, text: Form | None, compile: Compile) -> R:
    """A request whose tools have a plan, if one of them may be called.

    Args:
        request: the request.
        tokenizer: of the generator.
        form: how the generator writes calls; None if that is not known.
        text: the form of answers that are no calls; None for any.
        compile: compiles a grammar.

    Raises:
        InvalidRequestError: the form is not known, or calls that are required cannot be bound.
    """
    if not (tools := request.callable_tools):
        return request
    listed = request.tools.value.tools if request.tools.value else ()
    if form is None:
        raise InvalidRequestError([Violation("tools", f"cannot be called: {no_form(tokenizer)}")])
    plan = CallPlan(listed, tools, form, not request.parallel_tool_calls)
    must, bound = request.must_call, form
    if must or text or form.trigger:
        behind, other = "" if must or text else form.trigger, None if must else text

        def grammar() -> Grammar:
            return calls_grammar(bound, tools, request.parallel_tool_calls, behind, other.grammar() if other else None)

        try:
            plan = replace(plan, grammar=compile("tools", grammar), from_mark=not (must or text))
        except InvalidRequestError as error:
            if must or text:
                raise
            why = error.violations[0].description
            plan = replace(plan, warnings=(f"Calls of tools are not bound to their schemas: tools {why}.",))
    return replace(request, tools=Parsed(str(request.tools), plan))


def calls_in(text: str, plan: CallPlan | None, tools: tuple[Tool, ...], several: bool) -> Sequence[ToolCall]:
    """The calls of a whole answer to a request that offers `tools`.

    Of a request that was read from a file, the generator is not known: its form is the first in which there are calls.
    """
    plans = [plan] if plan else [CallPlan(tools, tools, form, not several) for form in FORMS if form.mark in text]
    return next(filter(None, (each.split(text)[1] for each in plans)), ())
