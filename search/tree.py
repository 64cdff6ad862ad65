"""The search tree: one node per step."""

import math
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from espalier.search.request import Aggregation
from espalier.search.result import NodeRecord


class Termination(StrEnum):
    """Why a node has no future. Only `eos` and `boxed` are complete answers, and only complete answers vote."""

    EOS = "eos"
    BOXED = "boxed"
    LENGTH = "length"
    BUDGET = "budget"
    DEGENERATE = "degenerate"
    DUPLICATE = "duplicate"
    PRUNED = "pruned"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class Node:
    """One step of one path.

    Attributes:
        node_id: order of creation within its search; the root is 0. Depends on timing: use `path` where order matters.
        parent: the node before it; None for the root, which holds no text.
        path: child indices from the root, the same whatever runs beside the search.
        text: the step, its delimiter included.
        num_tokens: tokens sampled for it.
        own_tokens: how many of these, its last ones, no sibling of a lower path has too.
        score: the verifier's score of this step, None where it has none.
        verifier_tokens: the step's tokens as the verifier reads them, the root's are the problem's; 0 where it was not
            read.
        log_probability: summed log-probability of its tokens under the generator.
        multiplicity: sampled siblings with the same text and end, this one included; a beam cuts it to its places. Of
            independent paths, how many have grown alike so far.
        num_children: children asked for so far.
        draws: which of its parent's samples it is, ascending: several where equal siblings became one. Empty where
            nobody counted.
        rollout: whether it was grown to look ahead only: neither it nor what grows from it is ever an answer.
    """

    node_id: int
    parent: "Node | None"
    path: tuple[int, ...]
    text: str = ""
    num_tokens: int = 0
    own_tokens: int = 0
    score: float | None = None
    verifier_tokens: int = 0
    log_probability: float = 0.0
    termination: Termination | None = None
    multiplicity: int = 1
    num_children: int = field(default=0)
    draws: tuple[int, ...] = ()
    rollout: bool = False

    @property
    def depth(self) -> int:
        """Steps from the root."""
        return len(self.path)

    @property
    def complete(self) -> bool:
        """Whether the path gives an answer."""
        return self.termination in (Termination.EOS, Termination.BOXED)

    @property
    def open(self) -> bool:
        """Whether the path may grow."""
        return self.termination is None

    def lineage(self) -> list["Node"]:
        """The path's nodes from the first step to this one; the root is left out."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def step_scores(self) -> list[float]:
        """Scores of the path's steps, those without one left out."""
        return [node.score for node in self.lineage() if node.score is not None]

    def path_text(self) -> str:
        """The path's whole text."""
        return "".join(node.text for node in self.lineage())

    def path_tokens(self) -> int:
        """Tokens sampled along the path."""
        return sum(node.num_tokens for node in self.lineage())

    def record(self) -> NodeRecord:
        """The node as plain data."""
        return NodeRecord(
            node_id=self.node_id,
            parent_id=None if self.parent is None else self.parent.node_id,
            path=self.path,
            text=self.text,
            score=self.score,
            termination=str(self.termination or ""),
            multiplicity=self.multiplicity,
            tokens=self.num_tokens,
        )


def computed_once(nodes: Sequence[Node]) -> int:
    """Generator tokens of a tree below the prompt, those that siblings begin with alike counted once.

    A node's last token is computed only for its children. The first of `nodes` is the root.
    """
    parents = {node.parent for node in nodes}
    return sum(node.own_tokens - (node not in parents) for node in nodes[1:])


def aggregate(step_scores: list[float], how: Aggregation) -> float | None:
    """The path's score; None for a path without scored steps.

    The product is taken in log space, where long paths do not underflow before the end.
    """
    if not step_scores:
        return None
    match how:
        case Aggregation.LAST:
            return step_scores[-1]
        case Aggregation.MIN:
            return min(step_scores)
        case Aggregation.MEAN:
            return math.fsum(step_scores) / len(step_scores)
        case Aggregation.PROD:
            return math.exp(math.fsum(map(math.log, step_scores))) if min(step_scores) > 0 else 0.0


_ALIKE = 3


def is_degenerate(steps: Sequence[str]) -> bool:
    """Whether the last of `steps`, the texts of a path from its first, leads nowhere.

    It does where it is blank, or repeats the step before it word for word for the second time in a row: a generator
    that has said the same three times goes on saying it.
    """
    last = steps[-1].split()
    return not last or (len(steps) >= _ALIKE and all(step.split() == last for step in steps[-_ALIKE:]))


def prune(standing: Iterable[Node], kept: Collection[Node], sampled_from: Container[Node]) -> None:
    """Mark as pruned the nodes of `standing` that are not kept: leaves that might have grown or voted.

    Args:
        standing: nodes that were kept until now or told just now.
        kept: what the algorithm keeps.
        sampled_from: nodes that have children of their own, rollouts not counted; such a node is no leaf.
    """
    for node in set(standing).difference(kept):
        if (node.open or node.complete) and node not in sampled_from:
            node.termination = Termination.PRUNED
