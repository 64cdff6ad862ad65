"""The `stop_when` of a request: the rule by which a thought is closed once its probes agree, read from its text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_AGREEING = 64
_FORM = "takes agree:K,tokens:T or agree:K,certainty:C,tokens:T, as in agree:3,certainty:0.9,tokens:512"
_TEXT = re.compile(r"agree:(?P<agree>\d{1,2})(?:,certainty:(?P<certainty>\d(?:\.\d+)?))?,tokens:(?P<tokens>\d{1,7})")


class ProbedAnswer(Protocol):
    """An answer that was read from a path; see `tree.Probe`."""

    @property
    def answer(self) -> str:
        """The answer; empty if there is none."""
        ...

    @property
    def certainty(self) -> float:
        """The model's certainty, in [0, 1]."""
        ...


@dataclass(frozen=True, slots=True)
class StopRule:
    """The condition for closing a thought before the model does.

    The floor on tokens is no option: answers of early probes are guesses, and guesses agree.

    Attributes:
        agree: number of last probes of the path that must give the same answer.
        tokens: least tokens of the path.
        certainty: least certainty of each of these probes.
    """

    agree: int
    tokens: int
    certainty: float = 0.0

    def __str__(self) -> str:
        """The rule as a request says it."""
        certainty = f"certainty:{self.certainty:g}," if self.certainty else ""
        return f"agree:{self.agree},{certainty}tokens:{self.tokens}"

    def holds(self, probes: Sequence[ProbedAnswer], tokens: int) -> bool:
        """Return whether a path with these probes, the last one first, and so many tokens has thought enough."""
        from espalier.search.grading.answers import exact_match_key  # here, as a client needs the rule and no grading

        last = probes[: self.agree]
        if tokens < self.tokens or len(last) < self.agree or not all(probe.answer for probe in last):
            return False
        sure = min(probe.certainty for probe in last) >= self.certainty
        return sure and len({exact_match_key(probe.answer) for probe in last}) == 1


def read_stop_rule(text: str) -> StopRule:
    """Read a rule like `agree:3,certainty:0.9,tokens:512`.

    Raises:
        ValueError: it is no rule, or a number is out of range.
    """
    if not (found := re.fullmatch(_TEXT, text)):
        raise ValueError(f"{_FORM}; is {text[:40]!r}")
    rule = StopRule(int(found["agree"]), int(found["tokens"]), float(found["certainty"] or 0))
    if not (1 <= rule.agree <= MAX_AGREEING and rule.certainty <= 1 and rule.tokens >= 1):
        raise ValueError(f"agree is from 1 to {MAX_AGREEING}, certainty from 0 to 1, tokens at least 1; is {text!r}")
    return rule
