"""Stopping paths that the generator is unsure of: the `stop_unsure` of a request, and the bar learned in its search.

    first paths ──▶ run to their ends ──▶ bar: a percentile of their least sure groups
    later paths ──▶ stopped at the end of the step in which a group falls below the bar; they cast no vote

Source: the online algorithm of Fu et al., Deep Think with Confidence (arXiv:2508.15260); for the confidence of a group
see `confidence`. The bar is of one problem and one model, so none has to be known beforehand. It is set between rounds,
from all paths that have ended by then, so a search gives the same result whatever runs beside it.
"""

import math
import re
from dataclasses import dataclass

from espalier.search.tree import Node

DEFAULT_GROUP = 2048
_FORM = "takes first:K,keep:P or first:K,keep:P,group:T, as in first:16,keep:90"
_TEXT = re.compile(r"first:(?P<first>\d{1,4}),keep:(?P<keep>\d{1,2})(?:,group:(?P<group>\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class UnsureRule:
    """The condition for stopping a path.

    Attributes:
        first: number of paths that run to their ends before there is a bar.
        keep: the share of them that is above the bar, in percent.
        group: tokens over which the confidence is averaged; a shorter path is one group once it has ended.
    """

    first: int
    keep: int
    group: int = DEFAULT_GROUP


def read_unsure_rule(text: str) -> UnsureRule:
    """Read a rule like `first:16,keep:90`.

    Raises:
        ValueError: it is no rule, or a number is out of range.
    """
    if not (found := re.fullmatch(_TEXT, text)):
        raise ValueError(f"{_FORM}; is {text[:40]!r}")
    rule = UnsureRule(int(found["first"]), int(found["keep"]), int(found["group"] or DEFAULT_GROUP))
    if not (rule.first >= 2 and rule.keep >= 1 and 1 <= rule.group <= 2**15):
        raise ValueError(f"first is at least 2, keep from 1 to 99, group from 1 to {2**15}; is {text!r}")
    return rule


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
    from espalier.search.voting.confidence import lowest_group  # here, as a client needs the rule alone

    return lowest_group(log_probabilities, size) if log_probabilities else 0.0
