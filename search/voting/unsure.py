"""Stopping paths that the generator is unsure of: the bar learned in a search with `stop_unsure`.

    first paths ──▶ run to their ends ──▶ bar: a percentile of their least sure groups
    later paths ──▶ stopped at the end of the step in which a group falls below the bar; they cast no vote

Source: the online algorithm of Fu et al., Deep Think with Confidence (arXiv:2508.15260); for the confidence of a group
see `confidence`. The bar is of one problem and one model, so none has to be known beforehand. It is set between rounds,
from all paths that have ended by then, so a search gives the same result whatever runs beside it.
"""

import math

from espalier.search.tree import Node
from espalier.search.unsure_rule import UnsureRule
from espalier.search.voting.confidence import lowest_group


class ConfidenceBar:
    """The bar of one search.

    Attributes:
        value: the least mean log-probability of a group; None until enough paths have ended.
    """

    def __init__(self, rule: UnsureRule) -> None:
        self.value: float | None = None
        self._rule = rule
        self._ended: list[tuple[float, int, int]] = []  # least sure group, tokens, multiplicity

    def end(self, node: Node) -> None:
        """Count a complete path."""
        values = _last_log_probabilities(node, node.path_tokens())
        self._ended.append((_least_sure(values, self._rule.group), len(values), node.multiplicity))

    def begin_round(self) -> None:
        """Set the bar, once, if enough paths have ended."""
        if self.value is not None or sum(count for *_, count in self._ended) < self._rule.first:
            return
        groups = sorted(group for group, _, count in self._ended for _ in range(count))
        self.value = groups[math.floor(len(groups) * (100 - self._rule.keep) / 100)]

    def drops(self, node: Node) -> bool:
        """Return whether a path is below the bar in the step of `node`, which was sampled last."""
        if self.value is None:
            return False
        size = self._rule.group
        values = _last_log_probabilities(node, node.num_tokens + size - 1)
        if len(values) < size and node.open:
            return False  # the first group is not full
        return _least_sure(values, size) < self.value

    def tokens_left(self, node: Node) -> int:
        """Tokens that a path would still sample if it became as long as the mean path that has ended."""
        mean = sum(n * count for _, n, count in self._ended) / sum(count for *_, count in self._ended)
        return round(node.multiplicity * max(0.0, mean - node.path_tokens()))


def _last_log_probabilities(node: Node, count: int) -> list[float]:
    """Log-probabilities of the last `count` tokens of a path, or of all."""
    parts, found, step = list[tuple[float, ...]](), 0, node
    while step and found < count:
        parts.append(step.log_probabilities)
        found += len(step.log_probabilities)
        step = step.parent
    values = [value for part in reversed(parts) for value in part]
    return values[-count:] if count else []


def _least_sure(log_probabilities: list[float], size: int) -> float:
    return lowest_group(log_probabilities, size) if log_probabilities else 0.0
