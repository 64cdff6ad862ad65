"""Diverse verifier tree search: a greedy search in each of N subtrees."""

from collections import Counter
from collections.abc import Sequence

from espalier.search.algorithms.base import Expand, Growth, SearchAlgorithm, path_score, viable
from espalier.search.common_fields import CommonFields
from espalier.search.tree import Node


class DiverseTreeSearch(SearchAlgorithm):
    """N independent subtrees: each samples M children per step and continues from the best one.

    Beeching et al., 2024 ("Scaling test-time compute with open models"), who named it DVTS. The root samples N*M first
    steps; the first M belong to the first subtree, the next M to the second. A node of merged siblings may belong to
    several subtrees: it samples M children for each of them, assigned in the order of the subtrees, so each gets M
    draws of its own and merging does not change the outcome. A subtree is lost if all its M children were cut off, and
    done if its best child is complete. Ties go to the earlier draw.
    """

    growth = Growth.SUBTREES

    def __init__(self, request: CommonFields, root: Node) -> None:
        self._expansion = request.expansion
        self._aggregation = request.aggregation
        self._tips: list[Node | None] = [root] * request.beam_width
        self._told = False

    def ask(self) -> Sequence[Expand]:
        """M children for each unfinished subtree."""
        subtrees = Counter(tip for tip in self._tips if tip and tip.open)
        return [Expand(tip, count * self._expansion) for tip, count in subtrees.items()]

    def tell(self, nodes: Sequence[Node]) -> None:
        """Assign the children to the subtrees, and move each subtree to its best child."""
        self._told = True
        drawn: dict[Node, list[tuple[int, Node]]] = {}
        for node in nodes:
            assert node.parent is not None
            drawn.setdefault(node.parent, []).extend((draw, node) for draw in node.draws)
        piles = {parent: iter(sorted(pairs, key=lambda pair: pair[0])) for parent, pairs in drawn.items()}
        for i, tip in enumerate(self._tips):
            if tip and tip.open:
                self._tips[i] = self._best([next(piles[tip]) for _ in range(self._expansion)])
        for node, count in Counter(tip for tip in self._tips if tip).items():
            node.multiplicity = count

    def finished(self) -> bool:
        """True if every subtree is done or lost."""
        return not any(tip and tip.open for tip in self._tips)

    def kept(self) -> Sequence[Node]:
        """The current node of each subtree."""
        return list(dict.fromkeys(tip for tip in self._tips if tip)) if self._told else []

    def _best(self, dealt: list[tuple[int, Node]]) -> Node | None:
        contenders = [(-path_score(node, self._aggregation), draw, node) for draw, node in dealt if viable(node)]
        return min(contenders, key=lambda contender: contender[:2])[2] if contenders else None
