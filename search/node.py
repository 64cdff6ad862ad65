"""The search tree: one node per step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

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
