"""Token budgets of one search, split among its paths so that they are never exceeded."""

from espalier.search.request import SearchRequest
from espalier.search.run.usage import UsageMeter
from espalier.search.tree import Node, Termination

_UNLIMITED = 2**62


class Budget:
    """Tracks how many tokens each path may still use under the request's budgets.

    Before each round, the rest of each budget is split evenly among the round's paths; unused tokens return for the
    next round. Thus a budget is never exceeded, and each path's share does not depend on the order of computation.
    """

    def __init__(self, request: SearchRequest, meter: UsageMeter, uses_verifier: bool) -> None:
        self._generator_budget = request.generator_budget
        self._verifier_budget = request.verifier_budget if uses_verifier else None
        self._meter = meter
        self._generator_share = self._verifier_share = _UNLIMITED
        self._round_roots: dict[Node, Node] = {}
        self._refused: set[Node] = set()

    @property
    def covers_the_problem(self) -> bool:
        """Whether the verifier's budget covers the problem's tokens."""
        return self._left(self._verifier_budget, self._meter.verifier_tree_tokens) >= 0

    def deal(self, paths: int) -> bool:
        """Start a round of `paths` paths; returns whether each of them gets at least one token of each model."""
        self._round_roots.clear()
        self._refused.clear()
        self._generator_share = self._left(self._generator_budget, self._meter.generated_tokens) // paths
        self._verifier_share = self._left(self._verifier_budget, self._meter.verifier_tree_tokens) // paths
        return min(self._generator_share, self._verifier_share) >= 1

    def begin(self, node: Node, round_root: Node) -> None:
        """Record that `node` was expanded from `round_root` in this round; its path's share counts from there."""
        self._round_roots[node] = round_root

    def generator_left(self, node: Node, round_root: Node) -> int:
        """Tokens that the path from `round_root` to `node` may still sample in this round."""
        return self._generator_share - (node.path_tokens() - round_root.path_tokens())

    def verifier_left(self, node: Node) -> int:
        """Verifier tokens that the path of `node` may still use in this round."""
        spent, step, round_root = 0, node.parent, self._round_roots[node]
        while step is not None and step is not round_root:
            spent, step = spent + step.verifier_tokens, step.parent
        return self._verifier_share - spent

    def refuse(self, node: Node) -> None:
        """Record that `node` is not scored because its path's share is used up."""
        self._refused.add(node)

    def why_unscored(self, node: Node) -> Termination:
        """The termination of a path with a step that could not be scored."""
        return Termination.BUDGET if self._refused.intersection(node.lineage()) else Termination.LENGTH

    @staticmethod
    def _left(budget: int | None, spent: int) -> int:
        return _UNLIMITED if budget is None else budget - spent
