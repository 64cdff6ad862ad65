"""Choosing the search, its N and its M by how hard the first steps look."""

import math
from collections.abc import Sequence

from espalier.search.algorithms.base import Expand, SearchAlgorithm, path_score, viable
from espalier.search.algorithms.beam import BeamSearch
from espalier.search.algorithms.dvts import DiverseTreeSearch
from espalier.search.node import Node
from espalier.search.request import Aggregation

EASY = 0.9
"""Mean score of the first steps from which a problem counts as easy.

On 500 fresh problems of the demo recipe, none of its benchmark's, with 16 candidates a step: of 269 at or above it, 8
subtrees of 2 solved 249 and a 4 x 4 beam 239; of 231 below, 200 and 201. It was set on half of them, and on either half
values between 0.5 and 0.93 differ by two problems at most. With 4 candidates all splits solve the same.
"""


def ease(nodes: Sequence[Node], aggregation: Aggregation) -> float:
    """The mean score of sampled steps, equal siblings counted each, those cut short as 0."""
    scores = [n.multiplicity * path_score(n, aggregation) for n in nodes if viable(n)]
    return math.fsum(scores) / sum(node.multiplicity for node in nodes)


def many_subtrees(candidates: int) -> tuple[int, int]:
    """N subtrees of M children each, N*M of them `candidates`: as many as leave each at least two to choose of."""
    subtrees = max((n for n in range(1, candidates // 2 + 1) if candidates % n == 0), default=1)
    return subtrees, candidates // subtrees


def square_beam(candidates: int) -> tuple[int, int]:
    """N paths of M children each, N*M of them `candidates`: as even as divides these, N the smaller."""
    width = max(n for n in range(1, math.isqrt(candidates) + 1) if candidates % n == 0)
    return width, candidates // width


class AutoSearch:
    """Picks the search, and how its N*M candidates a step are split into N and M, by the scores of the first N*M steps.

    After Snell et al., 2024 (compute-optimal scaling): on problems that the generator finds easy, samples that do not
    compete do best, because what fails there is the choice between them: a search drives into what the verifier
    overrates. On harder ones a search does best, because good steps are rare and have to be found. The verifier's own
    scores tell which is which. They average the scores of whole sampled answers and compare with other problems; here
    the first steps of this problem are all there is.

    The rule: with a mean score of the first steps of at least `EASY` they are the first round of diverse subtrees
    (DVTS), as many as leave each two children to choose of; below it, of a beam search with N and M as even as may be.
    Subtrees of two, and not independent paths, because a step that goes wrong once in ten spoils most paths of ten
    steps. Of the request's N and M only the product counts: a step of any split samples so many candidates, so all
    cost the same tokens. Nothing is sampled twice.
    """

    uses_scores = True

    def __init__(self, root: Node, candidates: int, aggregation: Aggregation) -> None:
        self._root = root
        self._candidates = candidates
        self._aggregation = aggregation
        self._chosen: SearchAlgorithm | None = None

    def ask(self) -> Sequence[Expand]:
        """All first steps, then what the chosen search asks for."""
        return self._chosen.ask() if self._chosen else [Expand(self._root, self._candidates)]

    def tell(self, nodes: Sequence[Node]) -> None:
        """Choose a search by its first round; tell it."""
        self._chosen = self._chosen or self._choose(ease(nodes, self._aggregation))
        self._chosen.tell(nodes)

    def finished(self) -> bool:
        """When the chosen search is."""
        return self._chosen is not None and self._chosen.finished()

    def kept(self) -> Sequence[Node]:
        """What the chosen search keeps."""
        return self._chosen.kept() if self._chosen else []

    def _choose(self, mean_score: float) -> SearchAlgorithm:
        if mean_score >= EASY:
            return DiverseTreeSearch(self._root, *many_subtrees(self._candidates), self._aggregation)
        return BeamSearch(self._root, *square_beam(self._candidates), self._aggregation)
