"""Independent paths to the end: greedy decoding, a single chain, self-consistency and best-of-N."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from espalier.search.algorithms.base import SAMPLING, Expand, Growth, SearchAlgorithm
from espalier.search.common_fields import CommonFields
from espalier.search.tree import Node


class IndependentPaths(SearchAlgorithm):
    """N paths sampled independently from the root to their ends.

    Paths that have sampled the same tokens so far are one node with a multiplicity and fork where they diverge: the
    distribution is the same, and each token is computed once.
    """

    growth = Growth.INDEPENDENT
    whole_paths = True

    def __init__(self, request: CommonFields, root: Node) -> None:
        self._root = root
        paths, first = self.candidates(request), 0
        if (unsure := request.stop_unsure.value) and "stop_unsure" in self.uses:
            first = min(paths, unsure.first)
        self._rounds = [count for count in (first, paths - first) if count]  # paths of the rounds to come
        self._complete: list[Node] = []

    def ask(self) -> Sequence[Expand]:
        """All paths at once; with `stop_unsure` first those from which its bar is learned."""
        return [Expand(self._root, self._rounds[0], to_end=True)]

    def tell(self, nodes: Sequence[Node]) -> None:
        """Store the paths that reached an answer."""
        self._complete += [node for node in nodes if node.complete]
        del self._rounds[0]

    def finished(self) -> bool:
        """True if all paths have ended."""
        return not self._rounds

    def kept(self) -> Sequence[Node]:
        """The complete paths, and the root while more are to come."""
        return [*([self._root] if self._rounds else []), *self._complete]


class Chain(IndependentPaths):
    """One sampled path, a chain of thought (Wei et al., 2022)."""

    scores = "none"
    uses = SAMPLING


class Greedy(Chain):
    """One path of the likeliest tokens."""

    uses = ()
    fixed: ClassVar[Mapping[str, Any]] = {"temperature": 0.0}


class Majority(IndependentPaths):
    """N paths, and the answer that most of them give: self-consistency (Wang et al., 2022)."""

    scores = "none"
    uses = ("beam_width", "vote", "early_stop", "stop_unsure", *SAMPLING)


class BestOfN(Majority):
    """N paths, whose scores weigh their answers (Cobbe et al., 2021)."""

    scores = "answers"
