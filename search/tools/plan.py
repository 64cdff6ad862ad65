"""Plans of how a request's answers may call tools: for the loaded generator, made when the request is resolved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from espalier.engine.errors import InvalidRequestError
from espalier.engine.guidance.grammar import Grammar
from espalier.engine.guidance.matcher import Matcher
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.conversation import ToolCall
from espalier.search.rules import Form
from espalier.search.tools.declared import Offered, Tool
from espalier.search.tools.forms import FORMS, CallForm
from espalier.search.tools.guiding import FromMark, calls_grammar
from espalier.search.tools.reading import CallReader

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

    def reader(self) -> CallReader:
        """A reader at the beginning of an answer."""
        return CallReader(self.form, self.callable, self.one)

    def split(self, text: str, cut: bool = False) -> tuple[str, tuple[ToolCall, ...]]:
        """The content and the calls of a whole answer, or of one that a limit `cut`."""
        reader = self.reader()
        content = reader.feed(text) + reader.end(cut)
        return content, tuple(reader.calls)

    def guide(self, grammar: Matcher, tokenizer: TextTokenizer) -> Matcher:
        """The matcher of an answer, made of that of its grammar."""
        return FromMark(grammar, self.form.trigger.encode(), tokenizer) if self.from_mark else grammar


def plan_calls(
    offered: Offered,
    callable: tuple[Tool, ...],
    form: CallForm,
    *,
    must: bool,
    several: bool,
    text: Form | None,
    compile: Compile,
) -> CallPlan:
    """Plan the calls of a request.

    Args:
        offered: its tools.
        callable: those that may be called.
        form: how the generator writes calls.
        must: whether an answer is a call.
        several: whether it may be of several calls.
        text: the form of answers that are no calls; None for any.
        compile: compiles a grammar.

    Raises:
        InvalidRequestError: calls that are required cannot be bound.
    """
    plan = CallPlan(offered.tools, callable, form, not several)
    if not (must or text or form.trigger):
        return plan

    def grammar() -> Grammar:
        other = text.grammar() if text and not must else None
        return calls_grammar(form, callable, several, "" if must or text else form.trigger, other)

    try:
        return replace(plan, grammar=compile("tools", grammar), from_mark=not (must or text))
    except InvalidRequestError as error:
        if must or text:
            raise
        why = error.violations[0].description
        return replace(plan, warnings=(f"Calls of tools are not bound to their schemas: tools {why}.",))


def calls_in(text: str, plan: CallPlan | None, tools: tuple[Tool, ...], several: bool) -> Sequence[ToolCall]:
    """The calls of a whole answer to a request that offers `tools`.

    Of a request that was read from a file, the generator is not known: its form is the first in which there are calls.
    """
    plans = [plan] if plan else [CallPlan(tools, tools, form, not several) for form in FORMS if form.mark in text]
    return next(filter(None, (each.split(text)[1] for each in plans)), ())
