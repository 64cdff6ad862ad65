"""The recorded trees of a run of independent paths, with the answers of their paths graded."""

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
        stays_right: probability that the step is right given that its parent is; see `step_states`.
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
    records = {node.node_id: node for node in nodes}
    steps: list[RecordedStep] = []
    is_right = checker_of(problem, grader)
    for node in sorted(nodes, key=lambda node: node.path):
        parent = None if node.parent_id is None else by_id[node.parent_id]
        end = Termination(node.termination) if node.termination else None
        step = RecordedStep(parent, node.score, node.tokens, node.multiplicity, end, text=node.text)
        by_id[node.node_id] = step
        steps.append(step)
        if parent is not None:
            parent.children.append(step)
        if step.complete:
            answer = extract_answer("".join(content_of(_path(records, node))))
            step.answer, step.right = (canonical(answer) if answer else ""), is_right(answer)
    return RecordedTree(tuple(steps), prompt_tokens, problem.unique_id)


class OwnTokens:
    """Tokens of a step that no sibling before it begins with, too: those that the generator computes for it.

    Samples of one step are one sequence until they diverge. How far that is depends on how many siblings there are, by
    the texts of the recorded ones.
    """

    def __init__(self, trees: Sequence[RecordedTree]) -> None:
        """Measure by how many siblings a step has before it what share of it is its own; a mean over tokens."""
        own, all_of = [0.0], [0.0]  # by siblings before
        for children in (step.children for tree in trees for step in tree.steps if len(step.children) > 1):
            for before, child in enumerate(children):
                if before == len(own):
                    own.append(0.0)
                    all_of.append(0.0)
                shared = max((_alike(child.text, other.text) for other in children[:before]), default=0)
                own[before] += child.tokens * (1 - shared / max(1, len(child.text)))
                all_of[before] += child.tokens
        # Few steps have many siblings: a share is at most that of one sibling fewer.
        shares = np.array([mine / whole if whole else 1.0 for mine, whole in zip(own, all_of, strict=True)])
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


def _path(records: dict[int, NodeRecord], node: NodeRecord) -> list[NodeRecord]:
    path = [node]
    while (above := path[-1].parent_id) is not None:
        path.append(records[above])
    return path[::-1][1:]
