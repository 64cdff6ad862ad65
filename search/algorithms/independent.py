"""Independent paths to the end: greedy decoding, a single chain, self-consistency and best-of-N."""

from collections.abc import Sequence

from espalier.search.algorithms.base import Expand
from espalier.search.node import Node


class IndependentPaths:
    """N paths sampled from the root to their ends.

    With one path this is a chain of thought (Wei et al., 2022), at temperature 0 greedy decoding; with a majority vote,
    self-consistency (Wang et al., 2022); with the verifier's scores, best-of-N (Cobbe et al., 2021). Paths that have
    drawn the same tokens so far are one node with a multiplicity, and part where they differ: the same distribution,
    each token computed once.
    """

    def __init__(self, root: Node, paths: int, uses_scores: bool) -> None:
        self.uses_scores = uses_scores
        self._starts = [(root, paths)]
        self._complete: list[Node] = []
        self._done = False

    @classmethod
    def from_first_steps(cls, nodes: Sequence[Node]) -> "IndependentPaths":
        """Paths, read by a verifier, whose first steps are sampled already: one for each equal sibling of a node."""
        paths = cls(nodes[0], 0, uses_scores=True)
        paths._starts = [(node, node.multiplicity) for node in nodes if node.open]
        paths._complete = [node for node in nodes if node.complete]
        paths._done = not paths._starts
        return paths

    def ask(self) -> Sequence[Expand]:
        """All paths at once."""
        return [Expand(node, paths, to_end=True) for node, paths in self._starts]

    def tell(self, nodes: Sequence[Node]) -> None:
        """Take the paths that reached an answer."""
        self._complete += [node for node in nodes if node.complete]
        self._done = True

    def finished(self) -> bool:
        """After the one round."""
        return self._done

    def kept(self) -> Sequence[Node]:
        """The complete paths, and until all are, where they start."""
        return self._complete if self._done else [*(node for node, _ in self._starts), *self._complete]
