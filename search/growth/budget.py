"""Token budgets: splits what a search may use among the paths of each round."""

from espalier.engine.work import Generated, StopCause
from espalier.prm.limits import UNLIMITED
from espalier.prm.scorer import ScoreStatus
from espalier.search.growth.policies import Branch, Draft, Expansion, PathPolicy
from espalier.search.request import SearchRequest
from espalier.search.run.running import UsageMeter
from espalier.search.tree import Node, Termination


class Budget(PathPolicy):
    """Tracks how many tokens each path may still use under the request's budgets.

    Before each round, the rest of each budget is split evenly among the round's paths; unused tokens return for the
    next round. Thus a budget is never exceeded, and each path's share does not depend on the order of computation.
    """

    def __init__(self, request: SearchRequest, meter: UsageMeter, uses_verifier: bool) -> None:
        self._generator_budget = request.generator_budget
        self._verifier_budget = request.verifier_budget if uses_verifier else None
        self._meter = meter
        self._generator_share = self._verifier_share = UNLIMITED
        self._round_roots: dict[Node, Node] = {}  # where the share of a path begins that grew in this round
        self._exhausted: set[Node] = set()

    def begin_round(self, paths: int) -> bool:
        """See `PathPolicy`; returns whether each path gets at least one token of each model."""
        self._round_roots.clear()
        self._exhausted.clear()
        self._generator_share = _left(self._generator_budget, self._meter.generated_tokens) // paths
        self._verifier_share = _left(self._verifier_budget, self._meter.verifier_tree_tokens) // paths
        return min(self._generator_share, self._verifier_share) >= 1

    def generator_left(self, node: Node) -> int:
        """Tokens that a path may still sample behind `node` in this round."""
        if self._generator_budget is None:
            return UNLIMITED
        round_root = self._round_roots.get(node, node)
        return self._generator_share - (node.charged_tokens() - round_root.charged_tokens())

    def shape(self, expansion: Expansion, draft: Draft) -> None:
        """See `PathPolicy`."""
        draft.room = min(draft.room, self.generator_left(expansion.branch.node))

    def sampled(self, branch: Branch, done: Generated) -> None:
        """See `PathPolicy`."""
        assert branch.node.parent
        self._round_roots[branch.node] = self._round_roots.get(branch.node.parent, branch.node.parent)

    def grown(self, branch: Branch, done: Generated) -> None:
        """See `PathPolicy`; a single step that ends with its delimiter stays, and is not continued."""
        node, whole_step = branch.node, done.cause is StopCause.DELIMITER and not branch.to_end
        ended = node.termination is Termination.BOXED or done.cause in (StopCause.EOS, StopCause.ERROR)
        if not ended and not whole_step and self.generator_left(node) <= 0:
            node.termination = Termination.BUDGET

    def verifier_left(self, node: Node) -> int:
        """See `PathPolicy`."""
        if node.parent is None:
            return _left(self._verifier_budget, self._meter.verifier_tree_tokens)
        spent, step, round_root = 0, node.parent, self._round_roots[node]
        while step is not None and step is not round_root:
            spent, step = spent + step.verifier_tokens, step.parent
        return self._verifier_share - spent

    def why_unscored(self, node: Node, status: ScoreStatus | None) -> Termination | None:
        """See `PathPolicy`; the path's share of the verifier's budget is used up."""
        if status is ScoreStatus.OVER_BUDGET:
            self._exhausted.add(node)
        return Termination.BUDGET if self._exhausted.intersection(node.lineage()) else None


def _left(budget: int | None, spent: int) -> int:
    return UNLIMITED if budget is None else budget - spent
