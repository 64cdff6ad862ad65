"""Independent paths to the end: greedy decoding, a single chain, self-consistency and best-of-N."""

from collections.abc import Sequence

from espalier.search.algorithms.base import Expand
from espalier.search.tree import Node


class IndependentPaths:
    """N paths sampled independently from the root to their ends.

    With one path this is a chain of thought (Wei et al., 2022), at temperature 0 greedy decoding; with a majority vote,
    self-consistency (Wang et al., 2022); with verifier scores, best-of-N (Cobbe et al., 2021). Paths that have sampled
    the same tokens so far are one node with a multiplicity and fork where they diverge: the distribution is the same,
    and each token is computed once.
    """

    def __init__(self, root: Node, paths: int, uses_scores: bool) -> None:
        self.uses_scores = uses_scores
        self._root = root
        self._paths = paths
        self._complete: list[Node] = []
        self._done = False

    def ask(self) -> Sequence[Expand]:
        """All paths at once."""
        return [Expand(self._root, self._paths, to_end=True)]

    def tell(self, nodes: Sequence[Node]) -> None:
        """Store the paths that reached an answer."""
        self._complete = [node for node in nodes if node.complete]
        self._done = True

    def finished(self) -> bool:
        """Whether the only round is over."""
        return self._done

    def kept(self) -> Sequence[Node]:
        """The complete paths."""
        return self._complete
