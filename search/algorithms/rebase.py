"""Reward-balanced search: every round distributes a budget of samples by verifier scores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from annotated_types import Interval

from espalier.search.algorithms.base import Expand, SearchAlgorithm, path_score
from espalier.search.common_fields import CommonFields
from espalier.search.schema import option
from espalier.search.tree import Node


def apportion(budget: int, weights: Sequence[float]) -> list[int]:
    """Distribute `budget` in whole numbers in proportion to `weights`, by the method of largest remainders.

    Args:
        budget: total to distribute; the result sums to it.
        weights: non-negative, not all 0. Of equal remainders, the earlier is rounded up.
    """
    total = math.fsum(weights)
    quotas = [budget * weight / total for weight in weights]
    shares = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda i: shares[i] - quotas[i])
    for i in by_remainder[: budget - sum(shares)]:
        shares[i] += 1
    return shares


class RewardBalancedSearch(SearchAlgorithm):
    """REBASE (Wu et al., 2024, "Inference Scaling Laws", 3.1.2).

    The root samples N*M first steps. In each later round, the open nodes share as many samples, minus one for each
    complete path, in proportion to exp(score / T). The paper rounds each share separately; here they are rounded so
    that they sum to the budget. A node of merged siblings gets the shares of all of them, so merging does not change
    the outcome. Ties go to the lower path.
    """

    @dataclass(frozen=True)
    class Parameters:
        """Parameters of `rebase` and `auto`."""

        rebase_temperature: float = option(
            0.1, "softmax temperature over scores when samples are allocated", Interval(ge=0.001, le=100)
        )

    def __init__(self, request: CommonFields, root: Node) -> None:
        self._budget = self.candidates(request)
        self._temperature: float = self.parameters(request).rebase_temperature
        self._aggregation = request.aggregation
        self._shares: dict[Node, int] = {root: self._budget}
        self._complete: list[Node] = []

    def ask(self) -> Sequence[Expand]:
        """Each open node's share of the samples."""
        return [Expand(node, share) for node, share in self._shares.items()]

    def tell(self, nodes: Sequence[Node]) -> None:
        """Subtract complete paths from the budget, and distribute the rest."""
        self._complete += [node for node in nodes if node.complete]
        left = self._budget - sum(node.multiplicity for node in self._complete)
        copies = sorted(
            ((node.path[:-1], draw, node) for node in nodes if node.open for draw in node.draws),
            key=lambda copy: copy[:2],
        )
        self._shares = {}
        if not copies or not left:
            return
        scores = [path_score(node, self._aggregation) for *_, node in copies]
        best = max(scores)
        weights = [math.exp((score - best) / self._temperature) for score in scores]
        for (*_, node), share in zip(copies, apportion(left, weights), strict=True):
            if share:
                self._shares[node] = self._shares.get(node, 0) + share

    def finished(self) -> bool:
        """True if the budget is used up or no node is open."""
        return not self._shares

    def kept(self) -> Sequence[Node]:
        """The open nodes with a share, and the complete paths."""
        return [*self._shares, *self._complete]
