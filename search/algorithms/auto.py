"""Choosing the search, its N and its M by how hard the first steps look and by what tokens are left."""

from collections.abc import Sequence
from functools import cached_property
from statistics import fmean

from espalier.search.algorithms.base import Expand, SearchAlgorithm, path_score, viable
from espalier.search.algorithms.dvts import DiverseTreeSearch
from espalier.search.algorithms.rebase import RewardBalancedSearch
from espalier.search.request import Aggregation
from espalier.search.tree import Node

EASY = 0.9
"""Mean score of the first steps from which a problem counts as easy.

On 450 fresh problems of the demo recipe, none of its benchmark's. With 16 candidates a step, 250 problems: of 133 easy
ones 8 subtrees of 2 solved 123, REBASE 123 and a 4 x 4 beam 115; of 117 others 101, 102 and 104. With 64, 200 problems:
of 110 easy ones 32 subtrees of 2 solved 104, REBASE 103 and an 8 x 8 beam 97; of 90 others 70, 72 and 65.
"""
MARGIN = 0.8
"""Share of what a budget leaves that paths may be expected to take: some grow longer than the first.

On 125 fresh problems within 300, 600, 1200 and 2400 tokens, 0.6, 0.8 and 1 solved 428, 433 and 427 of the 500 (with a
beam in REBASE's place).
"""
_PILOT = 2


def first_scores(nodes: Sequence[Node], aggregation: Aggregation) -> list[float]:
    """Scores of sampled steps: equal siblings counted each, those cut short as 0."""
    return [s for n in nodes for s in n.multiplicity * [path_score(n, aggregation) if viable(n) else 0.0]]


def many_subtrees(candidates: int) -> tuple[int, int]:
    """N subtrees of M children each, N*M at most `candidates`: as many as leave each at least two to choose of."""
    subtrees = max(1, candidates // 2)
    return subtrees, candidates // subtrees


class AutoSearch:
    """Picks the search, its N and its M by the scores of the first steps and by what a path costs.

    After Snell et al., 2024 (compute-optimal scaling): on problems that the generator finds easy, samples that do not
    compete do best, because what fails there is the choice between them: a search drives into what the verifier
    overrates. On harder ones a search does best, because good steps are rare and have to be found. The verifier's own
    scores tell which is which. They average the scores of whole sampled answers and compare with other problems; here
    the first steps of this problem are all there is. They search harder problems by a beam; here REBASE does
    that, which goes on from all that look good and not from the N best alone (Wu et al., 2024).

    The rule: with a mean score of the first steps of at least `EASY` they are the first round of diverse subtrees
    (DVTS), as many as leave each two children to choose of; below it, of REBASE. Subtrees of two, and not independent
    paths, because a step that goes wrong once in ten spoils most paths of ten steps. Of the request's N and M only the
    product counts: a step of either search samples about so many candidates, so both cost the same tokens.

    Where a budget might not pay for N*M paths, one subtree of two grows to its end first. It gives an answer early, it
    votes, and it tells what a path costs here: the rest has as many candidates a step as `MARGIN` of what is left will
    pay for, at most N*M. So a small budget buys few whole paths and not many beginnings. Nothing is sampled twice.
    Steps of the pilot that the verifier did not read, for want of tokens or because they were cut short, count as if it
    had read what was sampled: otherwise a pilot that it read nothing of would promise paths that cost nothing.

    Args:
        root: of the tree.
        candidates: N*M of the request.
        aggregation: how a path's score comes of its steps'.
        temperature: of REBASE.
        budgets: limits on the search's tokens, the generator's and the verifier's, which pays for the problem too; None
            for none.
        longest_path: the most tokens that a path may have.
    """

    uses_scores = True

    def __init__(
        self,
        root: Node,
        candidates: int,
        aggregation: Aggregation,
        temperature: float,
        budgets: tuple[int | None, int | None] = (None, None),
        longest_path: int = 0,
    ) -> None:
        self._root = root
        self._candidates = candidates
        self._aggregation = aggregation
        self._temperature = temperature
        self._budgets = budgets
        self._longest_path = longest_path
        self._sampled = self._read = self._readable = 0
        self._first_scores: list[float] = []
        self._chosen: SearchAlgorithm | None = None

    def ask(self) -> Sequence[Expand]:
        """The pilot's steps, then all first steps, then what the chosen search asks for."""
        if self._pilot and not self._pilot.finished():
            return self._pilot.ask()
        return self._chosen.ask() if self._chosen else [Expand(self._root, self._candidates)]

    def tell(self, nodes: Sequence[Node]) -> None:
        """Tell the pilot, and see what it cost; or choose a search by its first round, and tell it."""
        if self._chosen is None:
            self._first_scores += first_scores([node for node in nodes if node.parent is self._root], self._aggregation)
        if self._pilot and not self._pilot.finished():
            self._sampled += sum(node.multiplicity * node.num_tokens for node in nodes)
            self._read += sum(node.verifier_tokens for node in nodes)
            self._readable += sum(node.verifier_tokens or node.num_tokens for node in nodes)
            self._pilot.tell(nodes)
            if self._pilot.finished():
                self._candidates = self._affordable()
            return
        self._chosen = self._chosen or self._choose(fmean(self._first_scores))
        self._chosen.tell(nodes)

    def finished(self) -> bool:
        """When the chosen search is, or the pilot where nothing is left for another."""
        return self._chosen.finished() if self._chosen else self._candidates == 0

    def kept(self) -> Sequence[Node]:
        """What the pilot keeps, and the root until a search is chosen or what that search keeps."""
        rest = self._chosen.kept() if self._chosen else [] if self.finished() else [self._root]
        return [*(self._pilot.kept() if self._pilot else []), *rest]

    @cached_property
    def _pilot(self) -> DiverseTreeSearch | None:
        """The subtree that grows first; None where there is none. Made at the first `ask`, when the root is read."""
        tight = any(left is not None and left < self._candidates * self._longest_path for left in self._left())
        if not tight or self._candidates <= _PILOT:
            return None
        return DiverseTreeSearch(self._root, 1, _PILOT, self._aggregation)

    def _affordable(self) -> int:
        """Candidates a step that the budgets pay for, each as much as the pilot's: an even number, or N*M."""
        most = self._candidates
        for left, cost in zip(self._left(), (self._sampled, self._readable), strict=True):
            if left is not None:
                most = min(most, _PILOT * int(MARGIN * left / max(1, cost)))
        return max(0, most)

    def _left(self) -> list[int | None]:
        """What is left of either budget."""
        spent = self._sampled, self._root.verifier_tokens + self._read
        return [None if budget is None else budget - gone for budget, gone in zip(self._budgets, spent, strict=True)]

    def _choose(self, mean_score: float) -> SearchAlgorithm:
        if mean_score >= EASY:
            return DiverseTreeSearch(self._root, *many_subtrees(self._candidates), self._aggregation)
        return RewardBalancedSearch(self._root, self._candidates, self._temperature, self._aggregation)
