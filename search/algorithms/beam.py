"""Beam search over steps, guided by the verifier."""

from collections.abc import Iterable, Sequence

from espalier.search.algorithms.base import Expand, path_score, viable
from espalier.search.request import Aggregation
from espalier.search.tree import Node


def fill_places(ranked: Iterable[Node], places: int) -> list[Node]:
    """The first of `ranked` that fit: a node takes as many places as it has equal siblings, or as many as are left."""
    taken: list[Node] = []
    for node in ranked:
        if not places:
            break
        node.multiplicity = min(node.multiplicity, places)
        places -= node.multiplicity
        taken.append(node)
    return taken


class BeamSearch:
    """Keeps the N best paths after each step; each samples M children (Snell et al., 2024).

    Equal siblings are one node with a multiplicity: it takes as many of the N places as there are of it and samples M
    children for each, so merging saves computation and changes no outcome. A complete path keeps its places and its
    score, is not expanded again, and can still be overtaken; what it holds is not sampled for again. Equal scores keep
    the lower path.
    """

    uses_scores = True

    def __init__(self, root: Node, beam_width: int, expansion: int, aggregation: Aggregation) -> None:
        self._beam_width = beam_width
        self._expansion = expansion
        self._aggregation = aggregation
        self._root = root
        self._kept: list[Node] | None = None

    def ask(self) -> Sequence[Expand]:
        """N*M first steps, then M children for each place of a path that is not complete."""
        if self._kept is None:
            return [Expand(self._root, self._beam_width * self._expansion)]
        return [Expand(node, node.multiplicity * self._expansion) for node in self._kept if node.open]

    def tell(self, nodes: Sequence[Node]) -> None:
        """Keep the N best of the new nodes and the complete paths."""
        complete = [node for node in self._kept or [] if node.complete]
        contenders = [*complete, *filter(viable, nodes)]
        ranked = sorted(contenders, key=lambda node: (-path_score(node, self._aggregation), node.path))
        self._kept = fill_places(ranked, self._beam_width)

    def finished(self) -> bool:
        """When every kept path is complete."""
        return self._kept is not None and all(node.complete for node in self._kept)

    def kept(self) -> Sequence[Node]:
        """The beam."""
        return self._kept or []
