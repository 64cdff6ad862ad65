"""The vote: which answer a search's complete paths give together."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from espalier.search.request import EXACT_MATCH, Vote
from espalier.search.result import Candidate
from espalier.search.voting.answers import canonical, exact_match_key, is_number
from espalier.search.voting.equivalence import Equivalence
from espalier.search.voting.reading import marks_agree, read


class VoteResult(NamedTuple):
    """The candidate whose answer won, None where no candidate has an answer, and what told the answers apart."""

    best: Candidate | None
    grader: str = EXACT_MATCH


def select(
    candidates: Sequence[Candidate],
    vote: Vote,
    equivalence: Equivalence | None = None,
    given_up: Callable[[], bool] = lambda: False,
) -> VoteResult:
    """Let the candidates vote on an answer.

    Answers whose canonical texts match exactly vote together: 18 with 18 cm, and 5 with x = 5. Which of the others have
    the same value is asked of `equivalence`, where that can change who wins; see `_equal_answers`. But where 18 cm and
    18 m would vote together, nobody can tell which of them a bare 18 means, and each of the three votes for itself.

    Candidates without an answer never win. Ties go to the higher-scored path, then to the earlier candidate. Weighted
    and majority votes return the best-scored path of the winning answer.

    Args:
        candidates: complete paths, in an order that does not depend on timing.
        vote: how they are counted.
        equivalence: tells equal answers from different ones; None for exact match alone. It may be slow.
        given_up: asked between two questions; once it says yes, the vote goes by exact match alone.
    """
    grader, group_of = EXACT_MATCH, dict[str, str]()
    if equivalence is not None and vote is not Vote.NAIVE and not is_decided(candidates, vote):
        grader, group_of = _equal_answers(candidates, equivalence, given_up)
    answered = [candidate for candidate in candidates if candidate.answer]
    if not answered:
        return VoteResult(None, grader)
    if vote is Vote.NAIVE:
        return VoteResult(max(answered, key=_score), grader)
    groups = _groups(answered, group_of)
    winner = max(groups, key=lambda group: (_weight(group, vote), max(map(_score, group))))
    return VoteResult(max(winner, key=_score), grader)


def is_decided(candidates: Sequence[Candidate], vote: Vote) -> bool:
    """Whether the answers of one text outweigh all others together, whichever of these are equal."""
    groups: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        if candidate.answer:
            groups[exact_match_key(candidate.answer)].append(candidate)
    weights = sorted((_weight(group, vote) for group in groups.values()), reverse=True)
    return not weights or weights[0] > math.fsum(weights[1:])


def _equal_answers(
    candidates: Sequence[Candidate], equivalence: Equivalence, given_up: Callable[[], bool]
) -> tuple[str, dict[str, str]]:
    """What told the answers apart, and for each canonical answer the one that it votes with.

    The answers are taken in the order in which they first occur among the candidates. Each joins the first earlier
    group whose first answer it equals, or founds one. Each pair is asked about once at most, the earlier answer first,
    and two plain numbers never: their canonical texts say whether they are equal.
    """
    answers: dict[str, str] = {}
    for candidate in candidates:
        if candidate.answer:
            answers.setdefault(canonical(candidate.answer), candidate.answer)
    grader, group_of, founders = EXACT_MATCH, dict[str, str](), list[str]()
    for key, answer in answers.items():
        for founder in founders:
            if is_number(founder) and is_number(key):
                continue
            if given_up():
                return EXACT_MATCH, {}
            grader = equivalence.name
            if equivalence.equal(answers[founder], answer):
                group_of[key] = founder
                break
        else:
            founders.append(key)
    return grader, group_of


def _groups(candidates: list[Candidate], group_of: dict[str, str]) -> list[list[Candidate]]:
    """Candidates whose answers vote together."""
    of_value: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        key = canonical(candidate.answer)
        of_value[group_of.get(key, key)].append(candidate)
    groups: list[list[Candidate]] = []
    for group in of_value.values():
        readings = [read(candidate.answer) for candidate in group]
        of_unit: dict[str, list[Candidate]] = defaultdict(list)
        apart = not marks_agree(readings)
        for candidate, reading in zip(group, readings, strict=True):
            of_unit[reading.mark if apart else ""].append(candidate)
        groups += of_unit.values()
    return groups


def _weight(group: list[Candidate], vote: Vote) -> float:
    if vote is Vote.MAJORITY:
        return float(sum(c.multiplicity for c in group))
    return math.fsum(_score(c) * c.multiplicity for c in group)


def _score(candidate: Candidate) -> float:
    return 0.0 if candidate.score is None else candidate.score
