"""Electing one answer from complete paths."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import StrEnum

from espalier.search.answers import canonical, spelled
from espalier.search.reading import marks_agree, read
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

    Answers with the same `group_of` vote together, 18 with 18 cm and 5 with x = 5. But where a group holds 18 cm and
    18 m, nobody can tell which of them the bare 18 means, and each of the three votes for itself.
    Candidates without an answer never win. Ties go to the higher-scored path, then to the earlier candidate, so the
    order of `candidates` must not depend on timing. Weighted and majority return the best-scored path of the winning
    answer.
    """
    answered = [c for c in candidates if c.answer]
    if not answered:
        return None
    if vote is Vote.NAIVE:
        return max(answered, key=_score)
    winner = max(_groups(answered, group_of), key=lambda group: (_weight(group, vote), max(map(_score, group))))
    return max(winner, key=_score)


def _groups(candidates: list[Candidate], group_of: Callable[[str], str]) -> list[list[Candidate]]:
    of_value: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        of_value[group_of(candidate.answer)].append(candidate)
    groups: list[list[Candidate]] = []
    for group in of_value.values():
        readings = [read(candidate.answer) for candidate in group]
        of_mark: dict[str, list[Candidate]] = defaultdict(list)
        apart = not marks_agree(readings)
        for candidate, reading in zip(group, readings, strict=True):
            of_mark[reading.mark if apart else ""].append(candidate)
        groups += of_mark.values()
    return groups


def is_decided(candidates: Sequence[Candidate], vote: Vote) -> bool:
    """Whether one spelling of an answer outweighs all others together, whichever of these mean the same."""
    groups: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        if candidate.answer:
            groups[spelled(candidate.answer)].append(candidate)
    weights = sorted((_weight(group, vote) for group in groups.values()), reverse=True)
    return not weights or weights[0] > math.fsum(weights[1:])


def _weight(group: list[Candidate], vote: Vote) -> float:
    if vote is Vote.MAJORITY:
        return float(sum(c.multiplicity for c in group))
    return math.fsum(_score(c) * c.multiplicity for c in group)


def _score(candidate: Candidate) -> float:
    return 0.0 if candidate.score is None else candidate.score
