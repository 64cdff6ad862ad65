"""The recorded trees of a run of independent paths, with the answers of their paths graded.

Which of their steps are right follows from a hidden Markov model of trees and expectation maximisation. A step is
right, or wrong; what follows a wrong step is wrong. What is seen of it: the verifier's score, whose distribution
differs between right and wrong steps, and whether the paths through it end right. Fitted are both distributions
(histograms over quantiles of all scores) and, for each problem, how often a step after a right one is wrong, drawn
towards the mean of all problems.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from espalier.experiments.runs.benchmarks import Problem
from espalier.experiments.runs.evaluate import checker_of
from espalier.search.grading.answers import canonical, extract_answer
from espalier.search.grading.math_verify import Grader
from espalier.search.result import NodeRecord, content_of
from espalier.search.tree import Termination

_BINS = 12
_ROUNDS = 12
_PRIOR = 2.0
"""Steps of an average problem that are added to each problem's own."""
_LUCK = 0.02
"""Probability that a path with a wrong step ends with the right answer, before it is fitted."""


@dataclass(slots=True, eq=False)
class RecordedStep:
    """A step of a recorded tree.

    Attributes:
        parent: the step before; None for the root, which holds no text.
        score: the verifier's; None if it did not read the step.
        tokens: that were sampled for it.
        text: the step.
        count: recorded paths that drew it.
        end: how its path ended here; None if it went on.
        answer: of a complete path, in its canonical form; empty without one.
        right: whether that answer is right.
        stays_right: probability that the step is right given that its parent is; see `fit_step_states`.
    """

    parent: "RecordedStep | None"
    score: float | None = None
    tokens: int = 0
    count: int = 1
    end: Termination | None = None
    answer: str = ""
    right: bool = False
    children: list["RecordedStep"] = field(default_factory=list)
    stays_right: float = 1.0
    text: str = ""

    @property
    def depth(self) -> int:
        """Steps from the root."""
        return 0 if self.parent is None else self.parent.depth + 1

    @property
    def complete(self) -> bool:
        """True if the path ends here with an answer, or where one should be."""
        return self.end in (Termination.EOS, Termination.BOXED)

    def lineage(self) -> "list[RecordedStep]":
        """The path's steps, the first one first, without the root."""
        return [] if self.parent is None else [*self.parent.lineage(), self]

    def scores(self) -> list[float]:
        """Scores of the path's steps that have one."""
        return [step.score for step in self.lineage() if step.score is not None]


@dataclass(frozen=True, slots=True)
class RecordedTree:
    """The recorded paths of one problem.

    Attributes:
        steps: the root first, and every step behind its parent.
        prompt_tokens: of the generator.
        problem_id: the problem's.
    """

    steps: tuple[RecordedStep, ...]
    prompt_tokens: int = 0
    problem_id: str = ""

    @property
    def root(self) -> RecordedStep:
        """The root."""
        return self.steps[0]

    def ends(self) -> Iterator[RecordedStep]:
        """The last step of each distinct path."""
        return (step for step in self.steps if step.end is not None)

    @property
    def paths(self) -> int:
        """Number of recorded paths."""
        return sum(step.count for step in self.ends())

    @property
    def right(self) -> int:
        """Number of those that are right."""
        return sum(step.count for step in self.ends() if step.right)


def recorded_tree(problem: Problem, nodes: Sequence[NodeRecord], prompt_tokens: int, grader: Grader) -> RecordedTree:
    """The tree of a search of independent paths; each distinct answer is graded once."""
    by_id: dict[int, RecordedStep] = {}
    lineages: dict[int, list[NodeRecord]] = {}  # without the root
    is_right = checker_of(problem, grader)
    for node in sorted(nodes, key=lambda node: node.path):
        parent = None if node.parent_id is None else by_id[node.parent_id]
        end = Termination(node.termination) if node.termination else None
        step = RecordedStep(parent, node.score, node.tokens, node.multiplicity, end, text=node.text)
        by_id[node.node_id] = step
        lineages[node.node_id] = [] if node.parent_id is None else [*lineages[node.parent_id], node]
        if parent is not None:
            parent.children.append(step)
        if step.complete:
            answer = extract_answer("".join(content_of(lineages[node.node_id])))
            step.answer, step.right = (canonical(answer) if answer else ""), is_right(answer)
    return RecordedTree(tuple(by_id.values()), prompt_tokens, problem.unique_id)


class OwnTokens:
    """Tokens of a step that no sibling before it begins with, too: those that the generator computes for it.

    Samples of one step are one sequence until they diverge. How far that is depends on how many siblings there are, by
    the texts of the recorded ones.
    """

    def __init__(self, trees: Sequence[RecordedTree]) -> None:
        """Measure by how many siblings a step has before it what share of it is its own; a mean over tokens."""
        groups = [step.children for tree in trees for step in tree.steps if len(step.children) > 1]
        own, all_of = np.zeros((2, max(map(len, groups), default=1)))  # by siblings before
        for children in groups:
            for before, child in enumerate(children):
                shared = max((_alike(child.text, other.text) for other in children[:before]), default=0)
                own[before] += child.tokens * (1 - shared / max(1, len(child.text)))
                all_of[before] += child.tokens
        # Few steps have many siblings: a share is at most that of one sibling fewer.
        shares = np.divide(own, all_of, out=np.ones_like(own), where=all_of > 0)
        self._shares: list[float] = np.minimum.accumulate(shares).tolist()

    def of(self, step: RecordedStep, before: int) -> float:
        """The tokens of a step that are its own, with so many distinct siblings before it."""
        return step.tokens * self._shares[min(before, len(self._shares) - 1)]

    def of_all(self, steps: Iterable[RecordedStep]) -> float:
        """The tokens of different steps of one tree, those that siblings share counted once."""
        siblings = Counter[RecordedStep | None]()
        total = 0.0
        for step in steps:
            total += self.of(step, siblings[step.parent])
            siblings[step.parent] += 1
        return total


def _alike(one: str, other: str) -> int:
    """The number of characters that two texts begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# ---- states of steps


def fit_step_states(trees: Sequence[RecordedTree]) -> None:
    """Set `stays_right` of every recorded step."""
    ranked = sorted(s.score for tree in trees for s in tree.steps if s.score is not None)
    # Inner bounds of bins with as many scores each; fewer where scores are equal.
    bounds = sorted({ranked[len(ranked) * i // _BINS] for i in range(1, _BINS)} - {ranked[0]}) if ranked else []
    bins = [[None if s.score is None else bisect_right(bounds, s.score) for s in tree.steps] for tree in trees]
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
