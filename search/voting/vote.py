"""Votes: selects one answer from a search's complete paths."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from espalier.search.fairness import NOBODY, Account
from espalier.search.grading.answers import canonical, exact_match_key, is_number
from espalier.search.grading.reading import marks_agree, read
from espalier.search.request import EXACT_MATCH, Vote
from espalier.search.result import Candidate, ProbedAnswer
from espalier.search.tree import Node, Termination
from espalier.search.voting.equivalence import MathVerify

VOTE_SECONDS = 60.0
"""CPU seconds after which a vote falls back to exact match; adversarial answers could otherwise delay it for hours."""


class VoteResult(NamedTuple):
    """The winning candidate, None if no candidate has an answer; and the name of what compared the answers."""

    best: Candidate | None
    grader: str = EXACT_MATCH


def select(
    candidates: Sequence[Candidate],
    vote: Vote,
    equivalence: MathVerify | None = None,
    stopped: Callable[[], bool] = lambda: False,
    account: Account = NOBODY,
) -> VoteResult:
    """Select an answer by a vote of the candidates.

    Answers with the same canonical text vote together: 18 with 18 cm, and 5 with x = 5. Whether other answers have the
    same value is asked of `equivalence`, if that can change the winner; see `_equal_answers`. But if that would join
    18 cm with 18 m, a bare 18 could mean either, and each of the three votes separately.

    Candidates without an answer never win. Ties go to the higher path score, then to the earlier candidate. Weighted
    and majority votes return the best-scored path with the winning answer.

    Args:
        candidates: complete paths, in an order that does not depend on timing.
        vote: how to count them.
        equivalence: compares answers, possibly slowly; None for exact match only.
        stopped: checked before each comparison; once it returns True, the vote falls back to exact match. So it does
            once its comparisons have taken `VOTE_SECONDS`.
        account: who is charged for comparisons.
    """
    grader, group_of = EXACT_MATCH, dict[str, str]()
    if equivalence is not None and vote is not Vote.NAIVE and not is_decided(candidates, vote):
        grader, group_of = _equal_answers(candidates, equivalence, stopped, account)
    answered = [candidate for candidate in candidates if candidate.answer]
    if not answered:
        return VoteResult(None, grader)
    if vote is Vote.NAIVE:
        return VoteResult(max(answered, key=_score), grader)
    groups = _groups(answered, group_of)
    winner = max(groups, key=lambda group: (_weight(group, vote), max(map(_score, group))))
    return VoteResult(max(winner, key=_score), grader)


def is_decided(candidates: Sequence[Candidate], vote: Vote) -> bool:
    """Return whether one canonical answer outweighs all others together, so that comparing them changes nothing."""
    groups: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        if candidate.answer:
            groups[exact_match_key(candidate.answer)].append(candidate)
    weights = sorted((_weight(group, vote) for group in groups.values()), reverse=True)
    return not weights or weights[0] > math.fsum(weights[1:])


def _equal_answers(
    candidates: Sequence[Candidate], equivalence: MathVerify, stopped: Callable[[], bool], account: Account
) -> tuple[str, dict[str, str]]:
    """Return the name of what compared the answers, and for each canonical answer the one whose group it joins.

    Answers are processed in order of first occurrence. Each joins the first earlier group whose first answer it equals,
    or founds a group. Each pair is compared at most once, the earlier answer first. Two plain numbers are never
    compared, as their canonical texts decide.
    """
    answers: dict[str, str] = {}
    for candidate in candidates:
        if candidate.answer:
            answers.setdefault(canonical(candidate.answer), candidate.answer)
    grader, group_of, founders, seconds = EXACT_MATCH, dict[str, str](), list[str](), 0.0
    for key, answer in answers.items():
        for founder in founders:
            if is_number(founder) and is_number(key):
                continue
            if stopped() or seconds >= VOTE_SECONDS:
                return EXACT_MATCH, {}
            grader = equivalence.name
            found = equivalence.compare(answers[founder], answer, account)
            seconds += found.cpu_seconds
            if found.equal:
                group_of[key] = founder
                break
        else:
            founders.append(key)
    return grader, group_of


def _groups(candidates: list[Candidate], group_of: dict[str, str]) -> list[list[Candidate]]:
    """Group candidates whose answers vote together."""
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


_NOT_COUNTED = (Termination.PRUNED, Termination.DUPLICATE)


def probed_answer(nodes: Sequence[Node]) -> ProbedAnswer | None:
    """Return the answer that the probes of a tree's paths give; None before the first one.

    Paths that the search dropped for others have no vote. Answers are counted by exact match.

    Args:
        nodes: all nodes of the tree, the root first.
    """
    parents = {node.parent for node in nodes}
    leaves = [n for n in nodes if n not in parents and n.termination not in _NOT_COUNTED and not n.rollout]
    votes: list[Candidate] = []
    for leaf in sorted(leaves, key=lambda node: node.path):
        probes = ((node, node.probe) for node in reversed(leaf.lineage()) if node.probe and node.probe.answer)
        if last := next(probes, None):
            node, probe = last
            votes.append(Candidate(node.node_id, probe.answer, probe.certainty, leaf.multiplicity, ()))
    best = select(votes, Vote.WEIGHTED).best
    if best is None:
        return None
    key = exact_match_key(best.answer)
    weights = [(vote.multiplicity * (vote.score or 0.0), exact_match_key(vote.answer) == key) for vote in votes]
    whole = math.fsum(weight for weight, _ in weights)
    share = math.fsum(weight for weight, its in weights if its) / whole if whole else 0.0
    return ProbedAnswer(best.answer, share, best.node_id)
