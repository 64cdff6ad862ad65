"""Drafting for the branches of a generator: the contract of drafters, and the drafts of each step.

A draft is never trusted: the step that computes it draws each token itself, by the branch's own stream, and keeps the
draft as far as it equals the draws. So texts and scores are the same to the bit whatever is drafted, or nothing.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from espalier.engine.guidance.matcher import Matcher
from espalier.engine.memory.sequences import SequenceTable
from espalier.engine.scheduling.planner import StepPlan
from espalier.engine.scheduling.requests import RunningRequest
from espalier.engine.scheduling.running_samples import Draws
from espalier.engine.speculation.lengths import MeasuredLength
from espalier.engine.work import Generated


class Drafter(Protocol):
    """Proposes tokens. It may be wrong, and different at every call."""

    def propose(self, branches: Sequence[RunningRequest], most: Sequence[int]) -> Sequence[Sequence[int]]:
        """Tokens that may come next in each branch, none if it has no idea.

        Args:
            branches: each with all of its tokens in the table but for those to come.
            most: how many tokens are wanted of each, at least one.
        """
        ...

    def learn(self, finished: Sequence[Generated]) -> None:
        """Take note of finished steps, whose sequences still stand in the table."""
        ...


class Speculation:
    """Drafts of one model's branches.

    Attributes:
        length: tokens that branches draft at most in the next step.
    """

    def __init__(
        self, table: SequenceTable, drafter: Drafter, lengths: MeasuredLength, max_positions: int, vocab_size: int
    ) -> None:
        """Draft for branches of `table`: sequences of at most `max_positions` tokens, of ids below `vocab_size`."""
        self._table = table
        self._drafter = drafter
        self._lengths = lengths
        self._max_positions = max_positions
        self._vocab_size = vocab_size
        self.length = lengths.choose(1)

    def draft(self, branches: Sequence[RunningRequest]) -> bool:
        """Set the drafts of branches that the next step may go on with; returns whether any has one."""
        for branch in branches:
            branch.draft = []
        if not self.length or not branches:
            return False
        rows = np.array([branch.row for branch in branches], dtype=np.int64)
        ends = np.array([branch.start + branch.work.max_tokens for branch in branches], dtype=np.int64)
        lengths = self._table.lengths[rows]
        # A branch whose KV is to be computed again drafts nothing, and none has more than it may have but for its draw.
        room = np.minimum(np.minimum(ends, self._max_positions) - lengths - 1, self.length)
        able = (room > 0) & (lengths - self._table.computed[rows] == 1)
        able = np.flatnonzero(able).tolist()
        if not able:
            return False
        chosen = [branches[i] for i in able]
        for branch, most, proposed in zip(
            chosen, room[able].tolist(), self._drafter.propose(chosen, room[able].tolist()), strict=True
        ):
            for token in proposed[:most]:
                if not 0 <= token < self._vocab_size:
                    break
                branch.draft.append(int(token))
            if branch.matcher:
                _bind(branch, branch.matcher)
        return any(branch.draft for branch in chosen)

    def update(self, draws: Draws, finished: Sequence[Generated]) -> None:
        """Take note of what was drawn, and of what finished with it; its sequences stand in the table still."""
        if draws.depths is not None:
            branches = int((draws.depths == 0).sum())
            self._table.counters.drafted_tokens += len(draws.depths) - branches
            self._table.counters.accepted_tokens += draws.tokens - branches
        self._drafter.learn(finished)

    def record(self, plan: StepPlan, running: int, seconds: float) -> None:
        """Take note of what a step took, with its drafting, and choose how much `running` branches draft next."""
        if plan.draws and not plan.chunks:
            tokens = plan.draws.tokens if plan.draws.depths is not None else len(plan.branches)
            self._lengths.record(len(plan.branches), plan.draft_length, tokens, seconds)
        if running:
            self.length = self._lengths.choose(running)


def _bind(branch: RunningRequest, matcher: Matcher) -> None:
    """Cut the draft of a guided branch before its first token that may not come there."""
    branch.draft_matchers = []
    for place, token in enumerate(branch.draft):
        matcher = matcher.copy()
        matcher.advance(token)
        if matcher.error:
            del branch.draft[place:]
            return
        branch.draft_matchers.append(matcher)
