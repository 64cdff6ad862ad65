"""The states of recorded steps, right or wrong, by a hidden Markov model of trees and expectation maximisation.

A step is right, or wrong; what follows a wrong step is wrong. What is seen of it: the verifier's score, whose
distribution differs between right and wrong steps, and whether the paths through it end right. Fitted are both
distributions (histograms over quantiles of all scores) and, for each problem, how often a step after a right one is
wrong, drawn towards the mean of all problems.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence

from espalier.experiments.advice.recorded import RecordedStep, RecordedTree

_BINS = 12
_ROUNDS = 12
_PRIOR = 2.0
"""Steps of an average problem that are added to each problem's own."""
_LUCK = 0.02
"""Probability that a path with a wrong step ends with the right answer, before it is fitted."""


def fit_step_states(trees: Sequence[RecordedTree]) -> None:
    """Set `stays_right` of every recorded step."""
    bounds = _bounds([s.score for tree in trees for s in tree.steps if s.score is not None])
    bins = [[_bin(step, bounds) for step in tree.steps] for tree in trees]
    right, wrong = _start(len(bounds) + 1)
    errors, luck = [0.2] * len(trees), _LUCK
    for _ in range(_ROUNDS):
        counts = [[0.5] * len(right), [0.5] * len(right)]
        slips: list[tuple[float, float]] = []
        lucky = [_LUCK, 1.0]  # expected wrong paths with the right answer, and all wrong paths
        for tree, its, error in zip(trees, bins, errors, strict=True):
            _upward(tree, its, right, wrong, error, luck)
            slips.append(_downward(tree, its, counts, lucky))
        mean = (sum(s for s, _ in slips) + _PRIOR / 10) / (sum(n for _, n in slips) + _PRIOR)
        errors = [(slip + _PRIOR * mean) / (seen + _PRIOR) for slip, seen in slips]
        luck = lucky[0] / lucky[1]
        right, wrong = ([count / sum(each) for count in each] for each in counts)


def _bounds(scores: list[float]) -> list[float]:
    """Inner bounds of bins with as many scores each; fewer where scores are equal."""
    ranked = sorted(scores)
    return sorted({ranked[len(ranked) * i // _BINS] for i in range(1, _BINS)} - set(ranked[:1])) if ranked else []


def _bin(step: RecordedStep, bounds: list[float]) -> int | None:
    return None if step.score is None else bisect_right(bounds, step.score)


def _start(bins: int) -> tuple[list[float], list[float]]:
    """Distributions that rise and fall with the score, so that a high one means right."""
    rising = [2 * (i + 1) / (bins * (bins + 1)) for i in range(bins)]
    return rising, rising[::-1]


def _upward(
    tree: RecordedTree, bins: list[int | None], right: list[float], wrong: list[float], error: float, luck: float
) -> None:
    """Set `stays_right` from the likelihoods of what is seen at and below each step, in its two states."""
    ends: dict[RecordedStep, tuple[float, float]] = {}  # logarithms of the likelihoods: right, wrong
    for step, its in zip(reversed(tree.steps), reversed(bins), strict=True):
        if_right = if_wrong = 0.0
        if its is not None:
            if_right, if_wrong = math.log(right[its]), math.log(wrong[its])
        if step.complete:
            if_right += 0.0 if step.right else -math.inf
            if_wrong += math.log(luck) if step.right else math.log1p(-luck)
        for child in step.children:
            child_right, child_wrong = ends.pop(child)
            stay, slip = math.log1p(-error) + child_right, math.log(error) + child_wrong
            both = max(stay, slip) + math.log1p(math.exp(-abs(stay - slip)))
            child.stays_right = math.exp(stay - both)
            if_right += both
            if_wrong += child_wrong
        ends[step] = if_right, if_wrong


def _downward(
    tree: RecordedTree, bins: list[int | None], counts: list[list[float]], lucky: list[float]
) -> tuple[float, float]:
    """Add the expected scores of right and wrong steps to `counts`; return expected slips, and chances for one."""
    at: dict[RecordedStep, float] = {tree.root: 1.0}
    slips = seen = 0.0
    for step, its in zip(tree.steps[1:], bins[1:], strict=True):
        assert step.parent is not None
        before = at[step.parent]
        at[step] = before * step.stays_right
        slips += before - at[step]
        seen += before
        if its is not None:
            counts[0][its] += at[step]
            counts[1][its] += 1 - at[step]
        if step.complete:
            lucky[0] += step.count * (1 - at[step]) * step.right
            lucky[1] += step.count * (1 - at[step])
    return slips, seen
