"""The `thinking` of a request, off, on or a number of tokens, read from its text."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from espalier.engine.errors import nearest

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
