"""How sampled solutions become one answer: majority, best of N, and score-weighted votes."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from espalier.experiments.demo.oracle import parse_answer


@dataclass(frozen=True, slots=True)
class Vote:
    """One solution's say.

    Attributes:
        answer: The boxed answer, or None where there is none: no vote.
        last: Score of the last step.
        lowest: Lowest score of any step.
    """

    answer: str | None
    last: float
    lowest: float


def cast(steps: Sequence[str], scores: Sequence[float]) -> Vote:
    """Returns the vote of a solution with one score a step."""
    answer = parse_answer(steps[-1]) if steps else None
    return Vote(answer, scores[-1] if scores else 0.0, min(scores, default=0.0))


def majority(votes: Sequence[Vote]) -> str | None:
    """Returns the most frequent answer; of equals, the first seen."""
    return _heaviest((vote.answer, 1.0) for vote in votes)


def weighted(votes: Sequence[Vote], lowest: bool = False) -> str | None:
    """Returns the answer with the largest sum of scores."""
    return _heaviest((vote.answer, vote.lowest if lowest else vote.last) for vote in votes)


def naive(votes: Sequence[Vote], lowest: bool = False) -> str | None:
    """Returns the answer of the solution with the highest score."""
    best = max(votes, key=lambda vote: (vote.answer is not None, vote.lowest if lowest else vote.last), default=None)
    return best.answer if best else None


def _heaviest(pairs: Iterable[tuple[str | None, float]]) -> str | None:
    totals: dict[str, float] = defaultdict(float)
    for answer, weight in pairs:
        if answer is not None:
            totals[answer] += weight
    return max(totals, key=lambda answer: totals[answer], default=None)
