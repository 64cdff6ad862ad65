"""Early stop: independent paths go on step by step until their vote is decided. See `voting.decided`."""

from espalier.search.growth.policies import Branch, Expansion, NodeLife, PathPolicy
from espalier.search.request import SearchRequest
from espalier.search.result import Candidate
from espalier.search.run.usage import UsageMeter
from espalier.search.tree import Node
from espalier.search.voting.decided import make_gate


class EarlyStopping(PathPolicy):
    """Holds the next steps of paths until it is known that the vote needs them."""

    def __init__(self, request: SearchRequest, scored: bool, meter: UsageMeter) -> None:
        """Begin a search; `scored` if a verifier scores its paths."""
        self._gate = make_gate(request, scored)
        self._meter = meter
        self._waiting: dict[Node, Expansion] = {}

    def holds(self, expansion: Expansion) -> bool:
        """See `PathPolicy`."""
        if expansion.continues:
            self._waiting[expansion.branch.node] = expansion
        return expansion.continues

    def after_work(self) -> None:
        """Let the paths go on that the gate lets pass; once the vote is decided, settle those that wait."""
        if not self._waiting:
            return
        for node in self._gate.release(self._waiting):
            self.tree.resume(self._waiting.pop(node))
        if not self._gate.decided:
            return
        if not self._meter.stopped_paths:
            self._meter.stopped_paths = sum(node.multiplicity for node in self._waiting)
            self._meter.stopped_tokens = self._gate.tokens_left(self._waiting)
        for expansion in self._waiting.values():
            if expansion.branch.life is NodeLife.SCORED:
                self.tree.settle(expansion.branch)

    def settled(self, branch: Branch, candidate: Candidate | None) -> None:
        """See `PathPolicy`."""
        if branch.node.termination is not None:
            self._gate.end(branch.node, candidate)
