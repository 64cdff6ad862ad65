"""The `step_rule` of a request, which says where steps end, read from its text."""

import re
from dataclasses import dataclass

from espalier.engine.errors import nearest

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
