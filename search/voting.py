"""Electing one answer from complete paths."""

import math
from collections import defaultdict
from collections.abc import Callable
from enum import StrEnum

from espalier.search.answers import canonical
from espalier.search.request import Vote
from espalier.search.result import Candidate

SPELLING = "spelling"
"""Name of what tells answers apart where their canonical spellings do."""


class GroupingName(StrEnum):
    """What may tell equal answers from different ones in a vote; see `grouping`."""

    MATH_VERIFY = "math-verify"
    SPELLING = SPELLING


def elect(candidates: list[Candidate], vote: Vote, group_of: Callable[[str], str] = canonical) -> Candidate | None:
    """The candidate whose answer wins; None when no candidate has an answer.

    Answers with the same `group_of` vote together.
    Candidates without an answer never win. Ties go to the higher-scored path, then to the earlier candidate, so the
    order of `candidates` must not depend on timing. Weighted and majority return the best-scored path of the winning
    answer.
    """
    answered = [c for c in candidates if c.answer]
    if not answered:
        return None
    if vote is Vote.NAIVE:
        return max(answered, key=_score)
    groups: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in answered:
        groups[group_of(candidate.answer)].append(candidate)

    def weight(group: list[Candidate]) -> tuple[float, float]:
        best = max(map(_score, group))
        if vote is Vote.MAJORITY:
            return float(sum(c.multiplicity for c in group)), best
        return math.fsum(_score(c) * c.multiplicity for c in group), best

    return max(max(groups.values(), key=weight), key=_score)


def _score(candidate: Candidate) -> float:
    return 0.0 if candidate.score is None else candidate.score
