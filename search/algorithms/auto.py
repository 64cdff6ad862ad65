"""Choosing the search by how hard the first steps look."""

import math
from collections.abc import Sequence

from espalier.search.algorithms.base import Expand, SearchAlgorithm, path_score, viable
from espalier.search.algorithms.beam import BeamSearch
from espalier.search.algorithms.independent import IndependentPaths
from espalier.search.node import Node
from espalier.search.request import Aggregation

EASY = 0.97
"""Mean score of the first steps from which a problem counts as easy.

Ten steps of which each is right with this probability are all right three times in four: most paths need no search.
"""


def ease(nodes: Sequence[Node], aggregation: Aggregation) -> float:
    """The mean score of sampled steps, equal siblings counted each, those cut short as 0."""
    scores = [n.multiplicity * path_score(n, aggregation) for n in nodes if viable(n)]
    return math.fsum(scores) / sum(node.multiplicity for node in nodes)


class AutoSearch:
    """Spends N*M candidates a step on independent paths where the problem looks easy, on beam search where it does not.

    After Snell et al., 2024 (compute-optimal scaling): parallel samples do best on problems the generator finds easy,
    search against the verifier on harder ones, and the verifier's own scores tell which is which. They average the
    scores of whole sampled answers and compare with other problems; here the first steps of this problem are all there
    is, so the rule is coarse: with a mean of at least `EASY` the N*M first steps are carried on to their ends and the
    best-of-N vote is taken; below it they are the first round of a beam search with this N and M. Nothing is sampled
    twice.
    """

    uses_scores = True

    def __init__(self, root: Node, beam_width: int, expansion: int, aggregation: Aggregation) -> None:
        self._aggregation = aggregation
        self._chosen: SearchAlgorithm | None = None
        self._beam = BeamSearch(root, beam_width, expansion, aggregation)

    def ask(self) -> Sequence[Expand]:
        """The beam's first steps, then what the chosen search asks for."""
        return (self._chosen or self._beam).ask()

    def tell(self, nodes: Sequence[Node]) -> None:
        """Choose, or tell the chosen search."""
        if self._chosen:
            self._chosen.tell(nodes)
        elif ease(nodes, self._aggregation) >= EASY:
            self._chosen = IndependentPaths.from_first_steps(nodes)
        else:
            self._chosen = self._beam
            self._beam.tell(nodes)

    def finished(self) -> bool:
        """When the chosen search is."""
        return self._chosen is not None and self._chosen.finished()

    def kept(self) -> Sequence[Node]:
        """What the chosen search keeps."""
        return self._chosen.kept() if self._chosen else []
