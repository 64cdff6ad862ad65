"""Lookahead search: beam search that scores children after a rollout."""

from collections.abc import Sequence

from espalier.search.algorithms.base import Expand, path_score, viable
from espalier.search.algorithms.beam import fill_places
from espalier.search.request import Aggregation
from espalier.search.tree import Node


class LookaheadSearch:
    """Beam search that scores a child after k more greedy steps (Snell et al., 2024, 5.2).

    Each open child is rolled out for up to k steps at temperature 0; its score is that of the path to the rollout's
    end, including the rollout's steps. If a rollout is cut off, its last whole step counts. Then the N best children
    are kept as in beam search, and the rollouts are dropped; their steps are not reused.
    """

    uses_scores = True

    def __init__(self, root: Node, beam_width: int, expansion: int, steps: int, aggregation: Aggregation) -> None:
        self._root = root
        self._beam_width = beam_width
        self._expansion = expansion
        self._steps = steps
        self._aggregation = aggregation
        self._kept: list[Node] | None = None
        self._candidates: list[Node] = []
        self._ends: dict[Node, Node] = {}  # the current end of each candidate's rollout
        self._rolling: list[Node] = []  # candidates with an unfinished rollout
        self._steps_left = 0

    def ask(self) -> Sequence[Expand]:
        """A greedy step of each unfinished rollout, else the expansions of beam search."""
        if self._rolling:
            return [Expand(self._ends[node], 1, greedy=True) for node in self._rolling]
        if self._kept is None:
            return [Expand(self._root, self._beam_width * self._expansion)]
        return [Expand(node, node.multiplicity * self._expansion) for node in self._kept if node.open]

    def tell(self, nodes: Sequence[Node]) -> None:
        """Start or continue the rollouts; when they have ended, keep the N best candidates."""
        if self._rolling:
            self._roll(nodes)
        else:
            complete = [node for node in self._kept or [] if node.complete]
            self._candidates = [*complete, *filter(viable, nodes)]
            self._ends = {node: node for node in self._candidates}
            self._rolling = [node for node in self._candidates if node.open]
            self._steps_left = self._steps
        if not self._rolling:
            self._keep_the_best()

    def finished(self) -> bool:
        """Whether every kept path is complete."""
        return not self._rolling and self._kept is not None and all(node.complete for node in self._kept)

    def kept(self) -> Sequence[Node]:
        """The beam; during rollouts, all candidates and the rollouts' ends."""
        ends = [self._ends[node] for node in self._rolling]
        return list(dict.fromkeys([*self._candidates, *ends])) if self._rolling else self._kept or []

    def _roll(self, nodes: Sequence[Node]) -> None:
        told = {node.parent: node for node in nodes}
        self._steps_left -= 1
        going_on = []
        for candidate in self._rolling:
            end = told[self._ends[candidate]]
            if viable(end):
                self._ends[candidate] = end
            if end.open and self._steps_left:
                going_on.append(candidate)
        self._rolling = going_on

    def _keep_the_best(self) -> None:
        scores = {node: path_score(end, self._aggregation) for node, end in self._ends.items()}
        ranked = sorted(self._candidates, key=lambda node: (-scores[node], node.path))
        self._kept = fill_places(ranked, self._beam_width)
        self._candidates, self._ends = [], {}
