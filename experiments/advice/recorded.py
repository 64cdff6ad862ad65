"""The recorded trees of a run of independent paths, with the answers of their paths graded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from espalier.experiments.runs.benchmarks import Problem
from espalier.experiments.runs.evaluate import is_right
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
    """

    steps: tuple[RecordedStep, ...]
    prompt_tokens: int = 0

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
    grades: dict[str, bool] = {}
    for node in sorted(nodes, key=lambda node: node.path):
        parent = None if node.parent_id is None else by_id[node.parent_id]
        end = Termination(node.termination) if node.termination else None
        step = RecordedStep(parent, node.score, node.tokens, node.multiplicity, end)
        by_id[node.node_id] = step
        steps.append(step)
        if parent is not None:
            parent.children.append(step)
        if step.complete:
            answer = extract_answer("".join(content_of(_path(records, node))))
            if answer not in grades:
                grades[answer] = bool(answer) and is_right(problem, answer, grader)
            step.answer, step.right = (canonical(answer) if answer else ""), grades[answer]
    return RecordedTree(tuple(steps), prompt_tokens)


def _path(records: dict[int, NodeRecord], node: NodeRecord) -> list[NodeRecord]:
    path = [node]
    while (above := path[-1].parent_id) is not None:
        path.append(records[above])
    return path[::-1][1:]
