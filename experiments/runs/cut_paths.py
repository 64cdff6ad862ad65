"""Paths that were cut before their end: how many, and whether too many for a verdict on what they show."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from espalier.experiments.runs.record import Unanswered

_MANY = 0.2
"""Share of the paths. One that is cut counts as wrong, so that any accuracy may be too low by as much."""
_CUT = (Unanswered.MAX_TOKENS, Unanswered.MAX_STEPS, Unanswered.MAX_STEP_TOKENS, Unanswered.CONTEXT,
        Unanswered.BUDGET, Unanswered.VERIFIER)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CutPaths:
    """The paths of some searches that were cut.

    Attributes:
        counts: how many, by reason.
        paths: cut or not.
    """

    counts: Mapping[Unanswered, int]
    paths: int

    @classmethod
    def among(cls, lost: Iterable[Mapping[Unanswered, int]], paths: int) -> "CutPaths":
        """The cut ones among paths without an answer, see `lost_paths`, of several trees."""
        total = sum(map(Counter, lost), Counter[Unanswered]())
        return cls({reason: total[reason] for reason in _CUT if total[reason]}, paths)

    @property
    def many(self) -> bool:
        """True if a verdict that follows from the paths may be the limit's and not the model's."""
        return sum(self.counts.values()) > _MANY * self.paths

    def __str__(self) -> str:
        """Say how many were cut by what, and what would help; empty where none was."""
        if not self.counts:
            return ""
        reasons = sorted(self.counts, key=lambda reason: -self.counts[reason])
        why = reasons[0].text
        if reasons[1:]:
            why = ", ".join(["cut before their end", *(f"{self.counts[reason]:,} {reason.text}" for reason in reasons)])
        advice = ", ".join(reason.advice for reason in reasons)
        return f"{sum(self.counts.values()):,} of {self.paths:,} paths were {why}; {advice}"
