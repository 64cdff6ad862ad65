"""The confidence of paths: how probable the generator found the tokens that it drew; no verifier is needed.

    confidence          geometric mean of the probabilities of all tokens of the path, thought and answer
    tail-confidence     of the last 2,048 of them
    lowest-confidence   the least such mean of 2,048 neighbouring tokens, where a long sure path cannot hide a doubt

A path of less than four times as many tokens has groups of a quarter of its length. Each vote sums these over the paths
of an answer, so it weighs confidence and consistency together. Source: Fu et al., Deep Think with Confidence
(arXiv:2508.15260), whose confidence of a token is the mean log-probability of the 20 likeliest; here it is that of the
token drawn, under the untempered model, which costs nothing.

With `stop_unsure` paths that the generator is unsure of are stopped, by the online algorithm of the same paper:

    first paths ──▶ run to their ends ──▶ bar: a percentile of their least sure groups
    later paths ──▶ stopped at the end of the step in which a group falls below the bar; they cast no vote

The bar is of one problem and one model, so none has to be known beforehand. It is set between rounds, from all paths
that have ended by then, so a search gives the same result whatever runs beside it.
"""

import math
from collections.abc import Sequence

import numpy as np

from espalier.engine.work import Generated
from espalier.search.algorithms.base import viable
from espalier.search.common_fields import Vote
from espalier.search.growth.policies import Branch, PathPolicy
from espalier.search.result import Candidate
from espalier.search.rules import DEFAULT_GROUP, UnsureRule
from espalier.search.run.running import UsageMeter
from espalier.search.tree import Node, Termination


def lowest_group(log_probabilities: Sequence[float], size: int) -> float:
    """The least mean of `size` neighbouring values; that of all where they are fewer, 0 where there are none."""
    if not log_probabilities:
        return 0.0
    size = min(size, len(log_probabilities))
    sums = np.concatenate(([0.0], np.cumsum(log_probabilities)))
    return float((sums[size:] - sums[:-size]).min()) / size


def path_confidence(log_probabilities: Sequence[float], vote: Vote) -> float:
    """Return the confidence, in [0, 1], that a vote reads of a path with these log-probabilities of tokens."""
    count = len(log_probabilities)
    if not count:
        return 0.0
    size = min(DEFAULT_GROUP, -(-count // 4))
    match vote:
        case Vote.TAIL_CONFIDENCE:
            mean = math.fsum(log_probabilities[-size:]) / size
        case Vote.LOWEST_CONFIDENCE:
            mean = lowest_group(log_probabilities, size)
        case _:
            mean = math.fsum(log_probabilities) / count
    return min(1.0, math.exp(mean))


def _last_log_probabilities(node: Node, count: int) -> list[float]:
    """Log-probabilities of the last `count` tokens of a path, or of all."""
    parts, found, step = list[tuple[float, ...]](), 0, node
    while step and found < count:
        parts.append(step.log_probabilities)
        found += len(step.log_probabilities)
        step = step.parent
    values = [value for part in reversed(parts) for value in part]
    return values[-count:] if count else []


class LogProbabilities(PathPolicy):
    """Keeps the log-probability of each token, for votes by confidence."""

    def sampled(self, branch: Branch, done: Generated) -> None:
        """See `PathPolicy`."""
        branch.node.log_probabilities = tuple(done.log_probabilities)


class ConfidenceFilter(LogProbabilities):
    """Stops paths below the bar that the first paths have set.

    Attributes:
        bar: the least mean log-probability of a group; None until enough paths have ended.
    """

    def __init__(self, rule: UnsureRule, meter: UsageMeter) -> None:
        self.bar: float | None = None
        self._rule = rule
        self._meter = meter
        self._ended: list[tuple[float, int, int]] = []  # least sure group, tokens, multiplicity

    def begin_round(self, paths: int) -> bool:
        """See `PathPolicy`; sets the bar, once, if enough paths have ended."""
        if self.bar is None and sum(count for *_, count in self._ended) >= self._rule.first:
            groups = sorted(group for group, _, count in self._ended for _ in range(count))
            self.bar = groups[math.floor(len(groups) * (100 - self._rule.keep) / 100)]
        return True

    def grown(self, branch: Branch, done: Generated) -> None:
        """See `PathPolicy`."""
        node = branch.node
        if not (viable(node) and self.drops(node)):
            return
        if node.open:
            self._meter.stopped_paths += node.multiplicity
            mean = sum(n * count for _, n, count in self._ended) / sum(count for *_, count in self._ended)
            self._meter.stopped_tokens += round(node.multiplicity * max(0.0, mean - node.path_tokens()))
        node.termination = Termination.PRUNED

    def drops(self, node: Node) -> bool:
        """Return whether a path is below the bar in the step of `node`, which was sampled last."""
        if self.bar is None:
            return False
        size = self._rule.group
        values = _last_log_probabilities(node, node.num_tokens + size - 1)
        if len(values) < size and node.open:
            return False  # the first group is not full
        return lowest_group(values, size) < self.bar

    def settled(self, branch: Branch, candidate: Candidate | None) -> None:
        """See `PathPolicy`."""
        if candidate:
            values = _last_log_probabilities(branch.node, branch.node.path_tokens())
            self._ended.append((lowest_group(values, self._rule.group), len(values), branch.node.multiplicity))
