"""The contract of search algorithms: a pure ask-and-tell interface.

The orchestrator calls `ask`, expands the requested nodes, passes all resulting nodes to `tell`, and repeats until
`finished`. An algorithm sees nodes and scores only. It may set the `multiplicity` of a complete node to the number of
its votes, and nothing else. Its decisions are a function of its request, its root and the nodes it was told; they must
not depend on node ids, the order within `tell`, a clock, or randomness other than `algorithms.draws`.

`kept` lists the nodes to keep. After each `tell`, the sequences of all other nodes are released permanently, and leaves
among them are marked as pruned (`tree.prune`). A node that was not kept cannot be requested again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from espalier.search.request import Aggregation
from espalier.search.tree import Node, aggregate


@dataclass(frozen=True, slots=True)
class Expand:
    """A request for `children` new children of a node. A kept node may be expanded again in a later round.

    Attributes:
        to_end: sample each child step by step to its end, as an independent path; `tell` gets the leaves, and paths
            with the same tokens as one leaf with a multiplicity. Otherwise each child is one step, and siblings with
            the same text are merged into one with a multiplicity.
        greedy: sample at temperature 0, whatever the request's. The children are marked as rollouts, which never become
            answers.
    """

    node: Node
    children: int
    to_end: bool = False
    greedy: bool = False


class SearchAlgorithm(Protocol):
    """The interface of an algorithm; see the module.

    Attributes:
        uses_scores: whether nodes must be scored before `tell`.
    """

    uses_scores: bool

    def ask(self) -> Sequence[Expand]:
        """Expansions to run next, each node at most once; at least one unless finished."""
        ...

    def tell(self, nodes: Sequence[Node]) -> None:
        """Take every node of the last `ask`, ordered by path; merged duplicates are left out."""
        ...

    def finished(self) -> bool:
        """Whether there is nothing left to request."""
        ...

    def kept(self) -> Sequence[Node]:
        """Nodes that may be expanded later, possibly including the root, and the complete paths that vote."""
        ...


def path_score(node: Node, how: Aggregation) -> float:
    """Score of the path that ends in `node`, complete or not; 0 for a path without scored steps."""
    score = aggregate(node.step_scores(), how)
    return 0.0 if score is None else score


def viable(node: Node) -> bool:
    """Whether the path has an answer or may still reach one."""
    return node.open or node.complete
