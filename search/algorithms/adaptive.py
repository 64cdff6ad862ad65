"""Adaptive best-of-N: sample no more paths than the vote needs."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeVar

from espalier.search.algorithms.base import Expand, path_score
from espalier.search.request import Aggregation, Vote
from espalier.search.tree import Node
from espalier.search.voting.answers import exact_match_key, extract_answer, is_number

Weight = TypeVar("Weight", int, float)


def leader_stays_first(first: int, second: int) -> float:
    """The probability that the answer with most votes is the one the generator gives more often.

    Of the two answers ahead, with a uniform prior on their ratio: the mass of Beta(first + 1, second + 1) above one
    half (Aggarwal et al., 2023, "Let's Sample Step by Step"), which for whole numbers is a binomial sum.
    """
    tosses = first + second + 1
    return sum(math.comb(tosses, heads) for heads in range(first + 1)) / 2**tosses


def leader_and_rival(weights: Mapping[str, Weight]) -> tuple[Weight, Weight]:
    """The largest weight of an answer, and the most that another can have, whichever of the others mean the same.

    Args:
        weights: by exact match. Of two plain numbers it is certain that they are different answers.
    """
    leader = max(weights, key=lambda key: weights[key])
    numbers = [weight for key, weight in weights.items() if key != leader and is_number(key)]
    unsure = [weight for key, weight in weights.items() if key != leader and not is_number(key)]
    return weights[leader], sum(unsure, start=max(numbers, default=weights[leader] * 0))


class AdaptivePaths:
    """At most N independent paths, sampled M at a time, until nothing can change the vote any more, or hardly anything.

    A majority is decided when the paths not sampled yet could not lift another answer to the leader's votes, or when
    `leader_stays_first` reaches a `confidence` below 1; a weighted vote when the paths not sampled yet could not close
    the gap with a score of 1 each; a naive one when a path has the score 1. Paths that give no answer are samples
    spent.

    Answers are counted as they are `spelled`. Whether two of them have the same value is found out in the vote, and not
    here, where nothing may wait: answers that may yet turn out to be equal count as if they were, unless they are the
    leader's. So the search may sample more than it had to, and never ends before its vote is decided.
    """

    def __init__(
        self, root: Node, paths: int, batch: int, vote: Vote, confidence: float, aggregation: Aggregation
    ) -> None:
        self.uses_scores = vote is not Vote.MAJORITY
        self._root = root
        self._left = paths
        self._batch = batch
        self._vote = vote
        self._confidence = confidence
        self._aggregation = aggregation
        self._complete: list[Node] = []
        self._answers: dict[Node, str] = {}
        self._decided = False

    def ask(self) -> Sequence[Expand]:
        """The next M paths, or as many as are left."""
        return [Expand(self._root, min(self._batch, self._left), to_end=True)]

    def tell(self, nodes: Sequence[Node]) -> None:
        """Count the answers."""
        self._left -= sum(node.multiplicity for node in nodes)
        complete = [node for node in nodes if node.complete]
        self._complete += complete
        for node in complete:
            if answer := extract_answer(node.path_text()):
                self._answers[node] = exact_match_key(answer)
        self._decided = self._is_decided()

    def finished(self) -> bool:
        """When the vote is decided or the paths are spent."""
        return self._decided or not self._left

    def kept(self) -> Sequence[Node]:
        """The complete paths, and the root while more may come."""
        return [*([] if self.finished() else [self._root]), *self._complete]

    def _is_decided(self) -> bool:
        votes: dict[str, list[Node]] = defaultdict(list)
        for node in sorted(self._answers, key=lambda node: node.path):
            votes[self._answers[node]].append(node)
        if not votes:
            return False
        if self._vote is Vote.NAIVE:
            return max(self._score(node) for group in votes.values() for node in group) >= 1.0
        if self._vote is Vote.WEIGHTED:
            weights = {key: math.fsum(n.multiplicity * self._score(n) for n in group) for key, group in votes.items()}
            first, second = leader_and_rival(weights)
            return first > second + self._left
        first, second = leader_and_rival({key: sum(n.multiplicity for n in group) for key, group in votes.items()})
        if first > second + self._left:
            return True
        # A probability below 1 may round to it.
        return self._confidence < 1.0 and leader_stays_first(first, second) >= self._confidence

    def _score(self, node: Node) -> float:
        return path_score(node, self._aggregation)
