"""Lookahead search: beam search that scores children after a rollout."""

from collections.abc import Sequence
from dataclasses import dataclass

from annotated_types import Interval

from espalier.search.algorithms.base import Expand, MemoryEstimate, path_score, viable
from espalier.search.algorithms.beam import BeamSearch
from espalier.search.common_fields import CommonFields
from espalier.search.schema import option
from espalier.search.tree import Node


class LookaheadSearch(BeamSearch):
    """Beam search that scores a child after k more greedy steps (Snell et al., 2024, 5.2).

    Each open child is rolled out for up to k steps at temperature 0; its score is that of the path to the rollout's
    end, including the rollout's steps. If a rollout is cut off, its last whole step counts. Then the N best children
    are kept as in beam search, and the rollouts are dropped; their steps are not reused.
    """

    growth = None

    @dataclass(frozen=True)
    class Parameters:
        """Parameters of `lookahead`."""

        lookahead_steps: int = option(1, "greedy steps rolled out before a child is scored", Interval(ge=1, le=16))

    def __init__(self, request: CommonFields, root: Node) -> None:
        super().__init__(request, root)
        self._steps: int = self.parameters(request).lookahead_steps
        self._ends: dict[Node, Node] = {}  # the current end of each candidate's rollout
        self._rolling: list[Node] = []  # candidates with an unfinished rollout
        self._steps_left = 0

    @classmethod
    def memory(cls, request: CommonFields) -> tuple[MemoryEstimate, ...]:
        """As beam search, plus a rollout of each child, whose last step but one is held while the last is sampled."""
        return (MemoryEstimate(paths=request.beam_width, steps=cls.sampled(request)[0]),)

    @classmethod
    def sampled(cls, request: CommonFields) -> tuple[int, int]:
        """N*M children and their rollouts."""
        return cls.candidates(request) * (1 + cls.parameters(request).lookahead_steps), 0

    def ask(self) -> Sequence[Expand]:
        """A greedy step of each unfinished rollout, else the expansions of beam search."""
        if self._rolling:
            return [Expand(self._ends[node], 1, greedy=True) for node in self._rolling]
        return super().ask()

    def tell(self, nodes: Sequence[Node]) -> None:
        """Start or continue the rollouts; when they have ended, keep the N best candidates."""
        if self._rolling:
            self._roll(nodes)
        else:
            self._ends = {node: node for node in self._contenders(nodes)}
            self._rolling = [node for node in self._ends if node.open]
            self._steps_left = self._steps
        if not self._rolling:
            self._keep_best({node: path_score(end, self._aggregation) for node, end in self._ends.items()})

    def finished(self) -> bool:
        """True if every kept path is complete."""
        return not self._rolling and super().finished()

    def kept(self) -> Sequence[Node]:
        """The beam; during rollouts, all candidates and the rollouts' ends."""
        ends = [self._ends[node] for node in self._rolling]
        return list(dict.fromkeys([*self._ends, *ends])) if self._rolling else super().kept()

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
