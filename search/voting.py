"""Electing one answer from complete paths."""

import math
from collections import defaultdict

from espalier.search.answers import canonical
from espalier.search.request import Vote
from espalier.search.result import Candidate

SPELLING = "spelling"
"""Name of what tells answers apart where their canonical spellings do."""


def elect(candidates: list[Candidate], vote: Vote) -> Candidate | None:
    """The candidate whose answer wins; None when no candidate has an answer.

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
        groups[canonical(candidate.answer)].append(candidate)

    def weight(group: list[Candidate]) -> tuple[float, float]:
        best = max(map(_score, group))
        if vote is Vote.MAJORITY:
            return float(sum(c.multiplicity for c in group)), best
        return math.fsum(_score(c) * c.multiplicity for c in group), best

    return max(max(groups.values(), key=weight), key=_score)


def _score(candidate: Candidate) -> float:
    return 0.0 if candidate.score is None else candidate.score
