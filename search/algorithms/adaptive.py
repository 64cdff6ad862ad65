"""Adaptive best-of-N: stops sampling paths when the vote is decided."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from annotated_types import Interval

from espalier.engine.errors import Violation
from espalier.search.algorithms.base import SAMPLING, Expand, MemoryEstimate, SearchAlgorithm, path_score
from espalier.search.common_fields import CommonFields, Vote, answer_in
from espalier.search.schema import option
from espalier.search.tree import Node


def leader_stays_first(first: int, second: int) -> float:
    """Probability that the answer with the most votes is the more likely one of the two leading answers.

    With a uniform prior on their ratio, this is the mass of Beta(first + 1, second + 1) above one half (Aggarwal et
    al., 2023, "Let's Sample Step by Step"), which is a binomial sum for whole numbers.
    """
    tosses = first + second + 1
    return sum(math.comb(tosses, heads) for heads in range(first + 1)) / 2**tosses


class AdaptivePaths(SearchAlgorithm):
    """Up to N independent paths, sampled M at a time until the vote is decided.

    A majority vote is decided when the remaining paths could not lift another answer to the leader's count, or when
    `leader_stays_first` reaches a `confidence` below 1; a weighted vote when they could not close the gap with scores
    of 1; a naive one when a path has the score 1. Paths without an answer use up samples.

    Answers are counted by exact match, as comparing values would block the engine thread. Answers that may turn out
    equal in the vote count as equal unless one of them is the leader's, so the search may sample more than necessary
    but never stops before its vote is decided.
    """

    scores = "none"
    uses = ("beam_width", "expansion", "vote", "stop_unsure", *SAMPLING)
    whole_paths = True

    @dataclass(frozen=True)
    class Parameters:
        """Parameters of `adaptive`."""

        confidence: float = option(
            0.95,
            "stop when the leading answer is the true majority with this probability; with 1, when nothing can "
            "overtake it",
            Interval(ge=0.5, le=1),
        )

    def __init__(self, request: CommonFields, root: Node) -> None:
        self._request = request
        self._root = root
        self._left = request.beam_width
        self._batch = request.expansion
        self._vote = request.vote
        self._confidence: float = self.parameters(request).confidence
        self._aggregation = request.aggregation
        self._complete: list[Node] = []
        self._answers: dict[Node, str] = {}
        self._decided = False

    @classmethod
    def candidates(cls, request: CommonFields) -> int:
        """M paths, or all N."""
        return min(request.beam_width, request.expansion)

    @classmethod
    def memory(cls, request: CommonFields) -> tuple[MemoryEstimate, ...]:
        """The paths of one round; those before it have ended."""
        paths = cls.candidates(request)
        return (MemoryEstimate(paths=paths, partial_blocks=paths - 1),)

    @classmethod
    def sampled(cls, request: CommonFields) -> tuple[int, int]:
        """N paths at most."""
        return request.beam_width, 0

    @classmethod
    def violations(cls, request: CommonFields) -> list[Violation]:
        """See `SearchAlgorithm`; confidences are not known before the vote."""
        wrong = request.vote is not None and Vote(request.vote).reads_confidence
        why = "adaptive is decided by the votes majority, weighted and naive; majority takes votes by confidence"
        return [*super().violations(request), *([Violation("vote", why)] if wrong else [])]

    def ask(self) -> Sequence[Expand]:
        """The next M paths, or all remaining ones."""
        return [Expand(self._root, min(self._batch, self._left), to_end=True)]

    def tell(self, nodes: Sequence[Node]) -> None:
        """Count the answers."""
        from espalier.search.grading import answers  # here, as a client needs the declarations and no grading

        self._left -= sum(node.multiplicity for node in nodes)
        complete = [node for node in nodes if node.complete]
        self._complete += complete
        for node in complete:
            if answer := answer_in(node.answer_text(), self._request):
                self._answers[node] = answers.exact_match_key(answer)
        self._decided = self._is_decided()

    def finished(self) -> bool:
        """True if the vote is decided or all paths are sampled."""
        return self._decided or not self._left

    def kept(self) -> Sequence[Node]:
        """The complete paths, and the root while more paths may be sampled."""
        return [*([] if self.finished() else [self._root]), *self._complete]

    def _is_decided(self) -> bool:
        from espalier.search.grading import answers

        votes: dict[str, list[Node]] = defaultdict(list)
        for node in sorted(self._answers, key=lambda node: node.path):
            votes[self._answers[node]].append(node)
        if not votes:
            return False
        if self._vote is Vote.NAIVE:
            return max(self._score(node) for group in votes.values() for node in group) >= 1.0
        if self._vote is Vote.WEIGHTED:
            weights = {key: math.fsum(n.multiplicity * self._score(n) for n in group) for key, group in votes.items()}
            first, second = answers.leader_and_rival(weights)
            return first > second + self._left
        counts = {key: sum(node.multiplicity for node in group) for key, group in votes.items()}
        first, second = answers.leader_and_rival(counts)
        if first > second + self._left:
            return True
        # A probability below 1 may round to 1.
        return self._confidence < 1.0 and leader_stays_first(first, second) >= self._confidence

    def _score(self, node: Node) -> float:
        return path_score(node, self._aggregation)
