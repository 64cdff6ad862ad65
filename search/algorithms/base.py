"""The contract of a search algorithm: pure ask and tell.

The orchestrator calls `ask`, grows what it asks for, calls `tell` with all nodes so grown, and goes on until
`finished`. An algorithm sees nodes and scores only; of a node it may set the `multiplicity`, to the votes that a
complete path has. It is a function of its request, its root and the nodes it was told: never of a node's number, of the
order within `tell`, of a clock, or of randomness other than `algorithms.draws`.

`kept` says what stays alive. After each `tell` the sequences of every other node are released, for good, and nodes that
nothing was sampled from are marked as pruned (`search.tree.prune`). What is not kept cannot be asked for again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from espalier.search.request import Aggregation
from espalier.search.tree import Node, aggregate


@dataclass(frozen=True, slots=True)
class Expand:
    """A node to extend by `children` new children. A node may be extended again in a later round, if it was kept.

    Attributes:
        to_end: grow each child step by step to its end, as one independent path; `tell` gets the leaves, paths that
            drew the same tokens as one leaf with their multiplicity. Otherwise each child is one step, and siblings
            with the same text are merged into one with their multiplicity.
        greedy: look ahead: take the likeliest tokens, whatever the request's temperature. Such a child is marked as a
            rollout and never becomes an answer.
    """

    node: Node
    children: int
    to_end: bool = False
    greedy: bool = False


class SearchAlgorithm(Protocol):
    """See the module.

    Attributes:
        uses_scores: whether nodes must be scored before `tell`.
    """

    uses_scores: bool

    def ask(self) -> Sequence[Expand]:
        """What to grow next, no node twice; at least one expansion unless finished."""
        ...

    def tell(self, nodes: Sequence[Node]) -> None:
        """Take in every node of the last `ask`, ordered by path; duplicates of a sibling are left out."""
        ...

    def finished(self) -> bool:
        """Whether there is nothing left to ask."""
        ...

    def kept(self) -> Sequence[Node]:
        """What it may expand later, the root too, and the complete paths that vote."""
        ...


def path_score(node: Node, how: Aggregation) -> float:
    """The score of the path that ends in `node`, complete or not; 0 for one without scored steps."""
    score = aggregate(node.step_scores(), how)
    return 0.0 if score is None else score


def viable(node: Node) -> bool:
    """Whether the path gives an answer or may come to give one."""
    return node.open or node.complete
