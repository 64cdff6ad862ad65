"""Chooses the search, its N and its M by the scores of the first steps and the remaining token budget."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from statistics import fmean
from typing import TypeVar

from espalier.search.algorithms.advised import AdvisedSearch, best_within
from espalier.search.algorithms.base import Expand, Request, SearchAlgorithm, path_score, viable
from espalier.search.algorithms.dvts import DiverseTreeSearch
from espalier.search.algorithms.rebase import RewardBalancedSearch
from espalier.search.common_fields import Aggregation, CommonFields
from espalier.search.tree import Node

Search = TypeVar("Search", DiverseTreeSearch, RewardBalancedSearch)

EASY = 0.9
"""Mean score of the first steps from which a problem counts as easy.

Measured on 450 fresh problems of the demo recipe, outside its benchmark. With 16 candidates a step, 250 problems: of
133 easy ones, 8 subtrees of 2 solved 123, REBASE 123 and a 4 x 4 beam 115; of 117 others 101, 102 and 104. With 64
candidates, 200 problems: of 110 easy ones, 32 subtrees of 2 solved 104, REBASE 103 and an 8 x 8 beam 97; of 90 others
70, 72 and 65.
"""
MARGIN = 0.8
"""Share of the remaining budget that paths are expected to use, as some grow longer than the first.

Measured on 125 fresh problems within 300, 600, 1200 and 2400 tokens (500 runs): 0.6, 0.8 and 1 solved 428, 433 and
427 (with a beam in place of REBASE).
"""
_PILOT = 2


def first_scores(nodes: Sequence[Node], aggregation: Aggregation) -> list[float]:
    """Scores of the sampled steps: each merged sibling counts, steps that were cut off score 0."""
    return [s for n in nodes for s in n.multiplicity * [path_score(n, aggregation) if viable(n) else 0.0]]


def many_subtrees(candidates: int) -> tuple[int, int]:
    """N and M for as many subtrees as possible of at least two children each, N*M at most `candidates`."""
    subtrees = max(1, candidates // 2)
    return subtrees, candidates // subtrees


class AutoSearch(SearchAlgorithm):
    """Chooses the search, its N and its M by the scores of the first steps and by the cost of a path.

    After Snell et al., 2024 (compute-optimal scaling): on problems that are easy for the generator, samples that do not
    compete work best, because selection fails there: a search prefers what the verifier overrates. On harder problems,
    a search works best, because good steps are rare. The verifier's scores tell which is the case. Snell et al. average
    the scores of whole answers and compare problems; here only the first steps of this problem are available. They use
    a beam on harder problems; here REBASE is used, which continues from all promising steps instead of the N best (Wu
    et al., 2024).

    Rule: if the mean score of the first steps is at least `EASY`, they become the first round of diverse subtrees
        (DVTS),
    as many as possible with two children each; otherwise, of REBASE. Subtrees of two are better than independent paths
    because a step that fails once in ten spoils most paths of ten steps. Only the product of the request's N and M
    matters: both searches sample about that many candidates per step, so they cost the same tokens.

    If a budget might not cover N*M paths, one subtree of two (the pilot) runs to its end first. It gives an early
    answer, votes, and measures the cost of a path; the rest gets as many candidates per step as `MARGIN` of the
    remaining budget covers, at most N*M. A small budget thus buys a few whole paths instead of many incomplete ones. No
    sample is drawn twice. Pilot steps that the verifier did not read, because they were cut off or over budget, count
    as if it had read them; otherwise an unread pilot would suggest paths without cost.

    With an advice file (`--advice`), the measurements behind the rule are those of this generator and verifier: the
    best of its searches runs instead.
    """

    Parameters = RewardBalancedSearch.Parameters

    @classmethod
    def advised(cls, request: Request, searches: Sequence[AdvisedSearch]) -> Request:
        """The best of the advised searches with at most N*M candidates, within the budgets; `auto` if none is."""
        best = best_within(searches, cls.candidates(request), request.generator_budget, request.verifier_budget)
        if best is None:
            return request
        return replace(
            request, algorithm=best.algorithm, beam_width=best.beam_width, expansion=best.expansion,
            vote=request.vote or best.vote, aggregation=best.aggregation,
        )  # fmt: skip

    def __init__(self, request: CommonFields, root: Node) -> None:
        self._root = root
        self._request = request
        self._candidates = self.candidates(request)
        self._longest_path = request.path_limit
        self._sampled = self._read = self._readable = 0
        self._first_scores: list[float] = []
        self._chosen: SearchAlgorithm | None = None

    def ask(self) -> Sequence[Expand]:
        """The pilot's steps, then all first steps, then the requests of the chosen search."""
        if self._pilot and not self._pilot.finished():
            return self._pilot.ask()
        return self._chosen.ask() if self._chosen else [Expand(self._root, self._candidates)]

    def tell(self, nodes: Sequence[Node]) -> None:
        """Pass nodes to the pilot and measure its cost; or choose a search after the first round, and pass them on."""
        if self._chosen is None:
            first_steps = [node for node in nodes if node.parent is self._root]
            self._first_scores += first_scores(first_steps, self._request.aggregation)
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
        """True if the chosen search is finished, or the pilot if the budget allows no other."""
        return self._chosen.finished() if self._chosen else self._candidates == 0

    def kept(self) -> Sequence[Node]:
        """The nodes of the pilot, with the root until a search is chosen, then with those of that search."""
        rest = self._chosen.kept() if self._chosen else [] if self.finished() else [self._root]
        return [*(self._pilot.kept() if self._pilot else []), *rest]

    @cached_property
    def _pilot(self) -> DiverseTreeSearch | None:
        """The subtree that runs first, None without one. Created at the first `ask`, when the root has been read."""
        tight = any(left is not None and left < self._candidates * self._longest_path for left in self._left())
        if not tight or self._candidates <= _PILOT:
            return None
        return self._start(DiverseTreeSearch, 1, _PILOT)

    def _affordable(self) -> int:
        """Candidates per step that the budgets cover at the pilot's cost: an even number, or N*M."""
        most = self._candidates
        for left, cost in zip(self._left(), (self._sampled, self._readable), strict=True):
            if left is not None:
                most = min(most, _PILOT * int(MARGIN * left / max(1, cost)))
        return max(0, most)

    def _left(self) -> list[int | None]:
        """The rest of the generator's budget and of the verifier's, which includes the problem, in tokens."""
        budgets = self._request.generator_budget, self._request.verifier_budget
        spent = self._sampled, self._root.verifier_tokens + self._read
        return [None if budget is None else budget - gone for budget, gone in zip(budgets, spent, strict=True)]

    def _choose(self, mean_score: float) -> SearchAlgorithm:
        if mean_score >= EASY:
            return self._start(DiverseTreeSearch, *many_subtrees(self._candidates))
        return self._start(RewardBalancedSearch, self._candidates, 1)

    def _start(self, kind: type[Search], beam_width: int, expansion: int) -> Search:
        return kind(replace(self._request, beam_width=beam_width, expansion=expansion), self._root)
