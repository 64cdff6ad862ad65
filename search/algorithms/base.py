"""The contract of a search algorithm: pure ask and tell.

The orchestrator calls `ask`, grows what it asks for, calls `tell` with all nodes so grown, and goes on until
`finished`. An algorithm sees nodes and scores only. It may set the `termination` of a node that it gives up to
`pruned`; a node it neither expands, keeps nor counts as complete costs memory for nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from espalier.search.node import Node


@dataclass(frozen=True, slots=True)
class Expand:
    """A node to extend by `children` new children.

    Attributes:
        to_end: grow each child step by step to its end, as one independent path; `tell` gets the leaves, paths that
            drew the same tokens as one leaf with their multiplicity. Otherwise each child is one step, and siblings
            with the same text are merged into one with their multiplicity.
    """

    node: Node
    children: int
    to_end: bool = False


class SearchAlgorithm(Protocol):
    """See the module.

    Attributes:
        uses_scores: whether nodes must be scored before `tell`.
    """

    uses_scores: bool

    def ask(self) -> Sequence[Expand]:
        """What to grow next; at least one expansion unless finished."""
        ...

    def tell(self, nodes: Sequence[Node]) -> None:
        """Take in every node of the last `ask`, ordered by path; duplicates of a sibling are left out."""
        ...

    def finished(self) -> bool:
        """Whether there is nothing left to ask."""
        ...

    def kept(self) -> Sequence[Node]:
        """The nodes the search stands on now: what it will expand, and the complete paths that vote."""
        ...
