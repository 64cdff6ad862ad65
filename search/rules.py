"""Rules in small languages, read from the text of a request's fields.

step_rule               where steps end
thinking, stop_when     whether the generator thinks, and when its thoughts are closed
stop_unsure             when paths that it is unsure of are stopped
answer_form, text_form  the form that an answer or a whole text must have
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from annotated_types import Interval

from espalier.engine.errors import InvalidRequestError, nearest
from espalier.search.schema import from_values

if TYPE_CHECKING:
    from espalier.engine.guidance.grammar import Grammar

PARAGRAPH = "\n\n"
"""Delimiter of the steps of the rule `paragraph`."""
MARKERS = (
    *("Wait", "Hmm", "Hold on", "So", "Let me", "Let's", "But", "However", "Alternatively"),
    *("Actually", "Therefore", "Thus", "Now", "Okay", "Then"),
)
"""Words with which a new thought begins, at the start of a sentence."""
MAX_STEP_TOKENS = 2**20
OVERRUN = 8
"""Tokens by which a step may exceed its length to finish a letter of several bytes, or a mark that is not one token."""
_MAX_TEXT = 64


@dataclass(frozen=True, slots=True)
class StepRule:
    """The places where steps end, besides the ends of paths. A step that is full ends too, and its path goes on.

    Attributes:
        delimiter: text that ends a step with other content; empty for none.
        markers: words that end a step where a sentence begins with one of them.
        tokens: tokens of every step; None if its length is limited by `max_step_tokens` alone.
    """

    delimiter: str = ""
    markers: tuple[str, ...] = ()
    tokens: int | None = None

    def overrun(self, thinks: bool) -> int:
        """Tokens by which a full step may go on, see `OVERRUN`; none where steps end with paragraphs of an answer."""
        return OVERRUN if thinks or self.delimiter != PARAGRAPH else 0


def read_step_rule(text: str) -> StepRule:
    """Read a rule: `paragraph`, `markers`, `tokens:64` or `text:###`.

    Raises:
        ValueError: it is none of these, or its number or text is out of range.
    """
    name, _, value = text.partition(":")
    match name, value:
        case "paragraph", "":
            return StepRule(PARAGRAPH)
        case "markers", "":
            return StepRule(markers=MARKERS)
        case "tokens", _:
            if not re.fullmatch(r"[1-9]\d{0,6}", value, re.ASCII) or int(value) > MAX_STEP_TOKENS:
                raise ValueError(f"tokens: takes a whole number from 1 to {MAX_STEP_TOKENS}, as in tokens:64")
            return StepRule(tokens=int(value))
        case "text", _ if 1 <= len(value) <= _MAX_TEXT:
            return StepRule(value)
        case "text", _:
            raise ValueError(f"text: takes 1 to {_MAX_TEXT} characters, as in text:###")
    rule = f"must be paragraph, markers, tokens:NUMBER or text:DELIMITER, is {text[:_MAX_TEXT]!r}"
    raise ValueError(rule + nearest(name, ("paragraph", "markers", "tokens", "text")))


MAX_THINKING = 2**20


class ThinkingMode(StrEnum):
    """Mode of thinking: as its chat template has it, never, or always."""

    AUTO = "auto"
    OFF = "off"
    ON = "on"


SWITCHES: Mapping[ThinkingMode, Mapping[str, bool]] = {
    ThinkingMode.AUTO: {},
    ThinkingMode.OFF: {"enable_thinking": False, "thinking": False},
    ThinkingMode.ON: {"enable_thinking": True, "thinking": True},
}
"""Variables by which chat templates switch thinking on and off."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """The `thinking` of a request.

    Attributes:
        mode: whether the model is to think.
        budget: most tokens of a thought; None for as many as a path has room for.
    """

    mode: ThinkingMode
    budget: int | None = None


def read_thinking(text: str) -> Thinking:
    """Read `auto`, `off`, `on` or a number of tokens.

    Raises:
        ValueError: it is none of these.
    """
    if re.fullmatch(r"[1-9]\d{0,6}", text, re.ASCII) and int(text) <= MAX_THINKING:
        return Thinking(ThinkingMode.ON, int(text))
    if text not in list(ThinkingMode):
        modes = ", ".join(ThinkingMode)
        rule = f"must be {modes} or a number of tokens from 1 to {MAX_THINKING}, is {text[:40]!r}"
        raise ValueError(rule + nearest(text, ThinkingMode))
    return Thinking(ThinkingMode(text))


T = TypeVar("T")


def _read_pairs(kind: type[T], example: str, text: str) -> T:
    """Read the fields of a rule from names and numbers like `example`.

    Raises:
        ValueError: it is no rule, or a number is out of range.
    """
    parts = [part.partition(":") for part in text.split(",")]
    values = {name: value for name, _, value in parts}
    try:
        if len(values) < len(parts):
            raise ValueError(text)
        return from_values(kind, {name: json.loads(value) for name, value in values.items()})
    except InvalidRequestError as error:
        raise ValueError(f"is written like {example}: {error}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"is written like {example}; is {text[:40]!r}") from None


@dataclass(frozen=True, slots=True)
class Probe:
    """The answer that a path gives if it has to answer at the end of a step.

    Attributes:
        answer: as the model writes it into a box; empty where it does not finish one.
        certainty: geometric mean of the probabilities of the answer's tokens, in [0, 1]; 0 without an answer.
        tokens: tokens computed for it, written by the host and sampled.
    """

    answer: str
    certainty: Annotated[float, Interval(ge=0, le=1)]
    tokens: Annotated[int, Interval(ge=0)]


@dataclass(frozen=True, slots=True)
class StopRule:
    """The condition for closing a thought before the model does.

    The floor on tokens is no option: answers of early probes are guesses, and guesses agree.

    Attributes:
        agree: number of last probes of the path that must give the same answer.
        tokens: least tokens of the path.
        certainty: least certainty of each of these probes.
    """

    agree: Annotated[int, Interval(ge=1, le=64)]
    tokens: Annotated[int, Interval(ge=1)]
    certainty: Annotated[float, Interval(ge=0, le=1)] = 0.0

    def __str__(self) -> str:
        """The rule as a request says it."""
        certainty = f"certainty:{self.certainty:g}," if self.certainty else ""
        return f"agree:{self.agree},{certainty}tokens:{self.tokens}"

    def holds(self, probes: Sequence[Probe], tokens: int) -> bool:
        """Return whether a path with these probes, the last one first, and so many tokens has thought enough."""
        from espalier.search.grading.answers import exact_match_key  # here, as a client needs the rule and no grading

        last = probes[: self.agree]
        if tokens < self.tokens or len(last) < self.agree or not all(probe.answer for probe in last):
            return False
        sure = min(probe.certainty for probe in last) >= self.certainty
        return sure and len({exact_match_key(probe.answer) for probe in last}) == 1


def read_stop_rule(text: str) -> StopRule:
    """Read a rule like `agree:3,certainty:0.9,tokens:512`; see `_read_pairs`."""
    return _read_pairs(StopRule, "agree:3,tokens:512 or agree:3,certainty:0.9,tokens:512", text)


DEFAULT_GROUP = 2048
"""Tokens of a group, and of the tail of a path, over which confidence is averaged."""


@dataclass(frozen=True, slots=True)
class UnsureRule:
    """The condition for stopping a path.

    Attributes:
        first: number of paths that run to their ends before there is a bar.
        keep: the share of them that is above the bar, in percent.
        group: tokens over which the confidence is averaged; a shorter path is one group once it has ended.
    """

    first: Annotated[int, Interval(ge=2, le=9999)]
    keep: Annotated[int, Interval(ge=1, le=99)]
    group: Annotated[int, Interval(ge=1, le=2**15)] = DEFAULT_GROUP


def read_unsure_rule(text: str) -> UnsureRule:
    """Read a rule like `first:16,keep:90`; see `_read_pairs`."""
    return _read_pairs(UnsureRule, "first:16,keep:90 or first:16,keep:90,group:512", text)


FORMS = ("answer_form", "text_form")
"""Fields of requests that hold one."""
MAX_FORM_BYTES = 64 * 1024
_FORM_KINDS = ("regex", "json", "grammar")
_PLAIN = r"[^{}\\]|\\+[^\\]"
_IN_BRACES = rf"(?:{_PLAIN}|\{{(?:{_PLAIN}|\{{(?:{_PLAIN})*\}})*\}})*"
"""Texts whose braces match, up to two in one another; a brace behind a backslash is a letter."""
_BOX = re.compile(r"\\(?:boxed|fbox)\{")
_IN_BOX = r"""start: (before @answer "}")+ AFTER
before[lazy]: BEFORE
BEFORE: /(?s:.*)\\(boxed|fbox)\{/ & ~/(?s:.*)\\(boxed|fbox)[^{](?s:.*)/
AFTER: ~/(?s:.*)\\(boxed|fbox)(?s:.*)/
"""
"""A text with at least one box, each of which holds an answer. Boxes without braces are none."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form.

    Attributes:
        kind: `regex`, `json` or `grammar`.
        text: of that kind.
    """

    kind: str
    text: str

    @property
    def schema(self) -> Any:
        """The schema of a JSON value."""
        return json.loads(self.text)

    def grammar(self) -> "Grammar":
        """The grammar of texts that have the form."""
        from espalier.engine.guidance.grammar import json_grammar, lark_grammar, regex_grammar

        if self.kind == "json":
            return json_grammar(self.schema)
        return regex_grammar(self.text) if self.kind == "regex" else lark_grammar(self.text)

    def in_box(self) -> "Grammar":
        """The grammar of texts with boxes that each hold a text of the form.

        The braces of a regular expression's texts match, up to two in one another, so that the box's own is found.
        """
        return self._before_brace().within(_IN_BOX)

    def to_brace(self) -> "Grammar":
        """The grammar of what is left of a box that is open: a text of the form and the closing brace."""
        return self._before_brace().within('start: @answer "}"')

    def content_before_brace(self, text: str) -> str | None:
        """The content of a box whose text begins behind its opening brace; None if the box is not closed."""
        if self.kind == "json":  # whose texts hold braces that do not match
            try:
                end = json.JSONDecoder().raw_decode(text)[1]
            except (ValueError, RecursionError):
                return None
            return text[:end] if text.startswith("}", end) else None
        from espalier.search.grading.answers import content_before_brace  # here, as a client needs no grading

        return content_before_brace(text)

    def last_in_box(self, text: str) -> str:
        """The content of the last box of a text; empty without one, or if that is not closed."""
        boxes = list(_BOX.finditer(text))
        return self.content_before_brace(text[boxes[-1].end() :]) or "" if boxes else ""

    def _before_brace(self) -> "Grammar":
        from espalier.engine.guidance.grammar import regex_grammar

        return regex_grammar(self.text, _IN_BRACES) if self.kind == "regex" else self.grammar()


def read_form(text: str) -> Form:
    """Read a form; whether its grammar can be compiled is found out later.

    Raises:
        ValueError: it is too long, or a schema is no JSON.
    """
    if len(text.encode(errors="replace")) > MAX_FORM_BYTES:
        raise ValueError(f"must be at most {MAX_FORM_BYTES} bytes")
    kind, colon, rest = text.partition(":")
    form = Form(kind, rest) if colon and kind in _FORM_KINDS else Form("regex", text)
    if form.kind == "json":
        try:
            schema = form.schema
        except (ValueError, RecursionError) as error:
            raise ValueError(f"json: takes a JSON schema: {error or 'it is nested too deep'}") from None
        if not isinstance(schema, dict | bool):
            raise ValueError("json: takes a JSON schema, which is an object, true or false")
    elif not form.text.strip():
        raise ValueError(f"{form.kind} is empty")
    return form
