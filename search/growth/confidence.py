"""The confidence filter: stops paths that the generator is unsure of. See `voting.unsure` for how it is measured."""

from espalier.engine.work import Generated
from espalier.search.algorithms.base import viable
from espalier.search.growth.policies import Branch, PathPolicy
from espalier.search.result import Candidate
from espalier.search.run.usage import UsageMeter
from espalier.search.tree import Termination
from espalier.search.unsure_rule import UnsureRule
from espalier.search.voting.unsure import ConfidenceBar


class LogProbabilities(PathPolicy):
    """Keeps the log-probability of each token, for votes by confidence."""

    def sampled(self, branch: Branch, done: Generated) -> None:
        """See `PathPolicy`."""
        branch.node.log_probabilities = tuple(done.log_probabilities)


class ConfidenceFilter(LogProbabilities):
    """Stops paths below the bar that the first paths have set."""

    def __init__(self, rule: UnsureRule, meter: UsageMeter) -> None:
        self._bar = ConfidenceBar(rule)
        self._meter = meter

    def begin_round(self, paths: int) -> bool:
        """See `PathPolicy`."""
        self._bar.begin_round()
        return True

    def grown(self, branch: Branch, done: Generated) -> None:
        """See `PathPolicy`."""
        node = branch.node
        if not (viable(node) and self._bar.drops(node)):
            return
        if node.open:
            self._meter.stopped_paths += node.multiplicity
            self._meter.stopped_tokens += self._bar.tokens_left(node)
        node.termination = Termination.PRUNED

    def settled(self, branch: Branch, candidate: Candidate | None) -> None:
        """See `PathPolicy`."""
        if candidate:
            self._bar.end(branch.node)
