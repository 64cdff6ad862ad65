"""Merging siblings: steps of one parent with the same text become one node, with a multiplicity."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from espalier.search.growth.policies import Branch, PathPolicy
from espalier.search.run.usage import UsageMeter
from espalier.search.tree import Termination

if TYPE_CHECKING:
    from espalier.search.growth.thoughts import PathThoughts


class Merging(PathPolicy):
    """Merges the single steps of a round."""

    def __init__(self, thoughts: PathThoughts | None, meter: UsageMeter) -> None:
        self._thoughts = thoughts
        self._meter = meter
        self._first: dict[Hashable, Branch] = {}

    def begin_round(self, paths: int) -> bool:
        """See `PathPolicy`; steps of one round are merged with one another only."""
        self._first.clear()
        return True

    def merges(self, branch: Branch) -> bool:
        """See `PathPolicy`. The same text can be complete in one sample and cut off in another: both stay."""
        node = branch.node
        position = self._thoughts.position(node) if self._thoughts else None
        alike = node.parent, node.text, node.termination, position, node.written
        if (kept := self._first.setdefault(alike, branch)) is branch:
            return False
        if node.path < kept.node.path:
            _swap_samples(branch, kept)
        kept.node.draws = tuple(sorted((*kept.node.draws, *node.draws)))
        kept.node.multiplicity += node.multiplicity
        node.termination = Termination.DUPLICATE
        self._meter.duplicates += 1
        return True


def _swap_samples(one: Branch, other: Branch) -> None:
    """Swap what was sampled, so that descendants do not depend on which of two siblings finished first."""
    one.sequence, other.sequence = other.sequence, one.sequence
    one.streams, other.streams = other.streams, one.streams
    one.matcher, other.matcher = other.matcher, one.matcher
    a, b = one.node, other.node
    a.path, b.path = b.path, a.path
    a.num_tokens, b.num_tokens = b.num_tokens, a.num_tokens
    a.own_tokens, b.own_tokens = b.own_tokens, a.own_tokens
    a.log_probability, b.log_probability = b.log_probability, a.log_probability
    a.log_probabilities, b.log_probabilities = b.log_probabilities, a.log_probabilities
    if a.score is not None:  # it is of the tokens; other scores are of the text, which is the same
        a.score, b.score = b.score, a.score
