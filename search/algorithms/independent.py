"""Independent paths to the end: greedy decoding, self-consistency (majority) and best-of-N differ only in the vote."""

from collections.abc import Sequence

from espalier.search.algorithms.base import Expand
from espalier.search.node import Node


class IndependentPaths:
    """N paths sampled from the root to their ends.

    With one path at temperature 0 this is greedy decoding; with a majority vote, self-consistency (Wang et al., 2022);
    with the verifier's scores, best-of-N. Paths that have drawn the same tokens so far are one node with a
    multiplicity, and part where they differ: the same distribution, each token computed once.
    """

    def __init__(self, root: Node, paths: int, uses_scores: bool) -> None:
        self.uses_scores = uses_scores
        self._root = root
        self._paths = paths
        self._leaves: list[Node] | None = None

    def ask(self) -> Sequence[Expand]:
        """All paths at once."""
        return [Expand(self._root, self._paths, to_end=True)]

    def tell(self, nodes: Sequence[Node]) -> None:
        """Keep the leaves."""
        self._leaves = list(nodes)

    def finished(self) -> bool:
        """After the one round."""
        return self._leaves is not None

    def kept(self) -> Sequence[Node]:
        """Every leaf."""
        return self._leaves or []
