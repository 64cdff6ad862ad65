"""Reward-balanced search: every round spends one budget of samples, shared out by the verifier's scores."""

import math
from collections.abc import Sequence

from espalier.search.algorithms.base import Expand, path_score
from espalier.search.request import Aggregation
from espalier.search.tree import Node


def apportion(budget: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to `weights` that sum to `budget`: the method of largest remainders.

    Args:
        budget: what is shared out.
        weights: not negative, not all 0. Of equal remainders, the earlier is rounded up.
    """
    total = math.fsum(weights)
    quotas = [budget * weight / total for weight in weights]
    shares = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda i: shares[i] - quotas[i])
    for i in by_remainder[: budget - sum(shares)]:
        shares[i] += 1
    return shares


class RewardBalancedSearch:
    """REBASE (Wu et al., 2024, "Inference Scaling Laws", 3.1.2).

    The root samples B first steps. In each round after that the open nodes share B samples, less one for each path that
    is complete by then, in proportion to exp(score / T): good paths get many children, bad ones few or none. The paper
    rounds each share on its own; here shares are rounded so that they sum to the budget. Equal siblings are one node
    that gets the shares of all, so merging changes no outcome. Ties go to the lower path.
    """

    uses_scores = True

    def __init__(self, root: Node, budget: int, temperature: float, aggregation: Aggregation) -> None:
        self._budget = budget
        self._temperature = temperature
        self._aggregation = aggregation
        self._shares: dict[Node, int] = {root: budget}
        self._complete: list[Node] = []

    def ask(self) -> Sequence[Expand]:
        """Every open node's share."""
        return [Expand(node, share) for node, share in self._shares.items()]

    def tell(self, nodes: Sequence[Node]) -> None:
        """Take the complete paths out of the budget and share out what is left of it."""
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
        """When the budget is spent, or nothing is open."""
        return not self._shares

    def kept(self) -> Sequence[Node]:
        """The open nodes that have a share, and the complete paths."""
        return [*self._shares, *self._complete]
