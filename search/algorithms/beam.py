"""Beam search over steps, scored by the verifier."""

from collections.abc import Iterable, Mapping, Sequence

from espalier.search.algorithms.base import Expand, Growth, SearchAlgorithm, path_score, viable
from espalier.search.common_fields import CommonFields
from espalier.search.tree import Node


def fill_places(ranked: Iterable[Node], places: int) -> list[Node]:
    """Fill `places` from `ranked`, one for each merged sibling, and set each node's multiplicity to those it takes."""
    taken: list[Node] = []
    for node in ranked:
        if not places:
            break
        node.multiplicity = min(node.multiplicity, places)
        places -= node.multiplicity
        taken.append(node)
    return taken


class BeamSearch(SearchAlgorithm):
    """Keeps the N best paths after each step and samples M children from each (Snell et al., 2024).

    A node of merged siblings takes one place for each of them and samples M children per place, so merging does not
    change the outcome. A complete path keeps its places and its score and is not expanded, but better paths can still
    replace it. Ties go to the lower path.
    """

    growth = Growth.BEST

    def __init__(self, request: CommonFields, root: Node) -> None:
        self._beam_width = request.beam_width
        self._expansion = request.expansion
        self._aggregation = request.aggregation
        self._root = root
        self._kept: list[Node] | None = None

    def ask(self) -> Sequence[Expand]:
        """N*M first steps, then M children for each place of an incomplete path."""
        if self._kept is None:
            return [Expand(self._root, self._beam_width * self._expansion)]
        return [Expand(node, node.multiplicity * self._expansion) for node in self._kept if node.open]

    def tell(self, nodes: Sequence[Node]) -> None:
        """Keep the N best among the new nodes and the complete paths."""
        self._keep_best({node: path_score(node, self._aggregation) for node in self._contenders(nodes)})

    def finished(self) -> bool:
        """True if every kept path is complete."""
        return self._kept is not None and all(node.complete for node in self._kept)

    def kept(self) -> Sequence[Node]:
        """The beam."""
        return self._kept or []

    def _contenders(self, nodes: Sequence[Node]) -> list[Node]:
        """The new nodes and the complete paths."""
        return [*(node for node in self._kept or [] if node.complete), *filter(viable, nodes)]

    def _keep_best(self, scores: Mapping[Node, float]) -> None:
        ranked = sorted(scores, key=lambda node: (-scores[node], node.path))
        self._kept = fill_places(ranked, self._beam_width)
