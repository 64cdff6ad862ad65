"""Beam search over steps, guided by the verifier."""

from collections.abc import Sequence

from espalier.search.aggregation import aggregate
from espalier.search.algorithms.base import Expand
from espalier.search.node import Node, Termination
from espalier.search.request import Aggregation


class BeamSearch:
    """Keeps the N best paths after each step; each samples M children (Snell et al., 2024).

    A complete path keeps its place and its score, is not expanded again, and can still be overtaken. With c complete
    paths kept, the next step samples (N - c) * M children: what a complete path frees is not filled again. Equal
    siblings are one node, so fewer than N paths may be left; those share the same (N - c) * M children evenly, the
    better ones taking what is over. Equal scores keep the lower path.
    """

    uses_scores = True

    def __init__(self, root: Node, beam_width: int, expansion: int, aggregation: Aggregation) -> None:
        self._beam_width = beam_width
        self._expansion = expansion
        self._aggregation = aggregation
        self._root = root
        self._kept: list[Node] | None = None

    def ask(self) -> Sequence[Expand]:
        """N*M first steps, then the same number, less what complete paths free, over the paths still growing."""
        if self._kept is None:
            return [Expand(self._root, self._beam_width * self._expansion)]
        growing = [node for node in self._kept if not node.complete]
        places = self._beam_width - (len(self._kept) - len(growing))
        each, over = divmod(places * self._expansion, len(growing))
        return [Expand(node, each + (i < over)) for i, node in enumerate(growing)]

    def tell(self, nodes: Sequence[Node]) -> None:
        """Keep the N best of the new nodes and the complete paths; prune the rest."""
        complete = [node for node in self._kept or [] if node.complete]
        viable = [node for node in nodes if node.termination is None or node.complete]
        ranked = sorted([*complete, *viable], key=lambda node: (-self._score(node), node.path))
        self._kept = ranked[: self._beam_width]
        for node in ranked[self._beam_width :]:
            node.termination = Termination.PRUNED

    def finished(self) -> bool:
        """When every kept path is complete."""
        return self._kept is not None and all(node.complete for node in self._kept)

    def kept(self) -> Sequence[Node]:
        """The beam."""
        return self._kept or []

    def _score(self, node: Node) -> float:
        score = aggregate(node.step_scores(), self._aggregation)
        return 0.0 if score is None else score
