"""Beam search over steps, scored by the verifier."""

from collections.abc import Iterable, Sequence

from espalier.search.algorithms.base import Expand, path_score, viable
from espalier.search.request import Aggregation
from espalier.search.tree import Node


def fill_places(ranked: Iterable[Node], places: int) -> list[Node]:
    """Fill `places` from `ranked`: a node takes a place for each of its merged siblings, as far as places are left."""
    taken: list[Node] = []
    for node in ranked:
        if not places:
            break
        node.multiplicity = min(node.multiplicity, places)
        places -= node.multiplicity
        taken.append(node)
    return taken


class BeamSearch:
    """Keeps the N best paths after each step and samples M children from each (Snell et al., 2024).

    A node of merged siblings takes one place for each of them and samples M children per place, so merging does not
    change the outcome. A complete path keeps its places and its score and is not expanded, but better paths can still
    replace it. Ties go to the lower path.
    """

    uses_scores = True

    def __init__(self, root: Node, beam_width: int, expansion: int, aggregation: Aggregation) -> None:
        self._beam_width = beam_width
        self._expansion = expansion
        self._aggregation = aggregation
        self._root = root
        self._kept: list[Node] | None = None

    def ask(self) -> Sequence[Expand]:
        """N*M first steps, then M children for each place of an incomplete path."""
        if self._kept is None:
            return [Expand(self._root, self._beam_width * self._expansion)]
        return [Expand(node, node.multiplicity * self._expansion) for node in self._kept if node.open]

    def tell(self, nodes: Sequence[Node]) -> None:
        """Keep the N best among the new nodes and the complete paths."""
        complete = [node for node in self._kept or [] if node.complete]
        contenders = [*complete, *filter(viable, nodes)]
        ranked = sorted(contenders, key=lambda node: (-path_score(node, self._aggregation), node.path))
        self._kept = fill_places(ranked, self._beam_width)

    def finished(self) -> bool:
        """Whether every kept path is complete."""
        return self._kept is not None and all(node.complete for node in self._kept)

    def kept(self) -> Sequence[Node]:
        """The beam."""
        return self._kept or []
