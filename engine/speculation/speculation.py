"""Drafting for the branches of a generator: the drafts of each step, and a drafter that looks at what was said before.

A draft is never trusted: the step that computes it draws each token itself, by the branch's own stream, and keeps the
draft as far as it equals the draws. So texts and scores are the same to the bit whatever is drafted, or nothing.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import numpy as np

from espalier.engine.guidance.matcher import Matcher
from espalier.engine.memory.sequences import SequenceTable
from espalier.engine.scheduling.planner import StepPlan
from espalier.engine.scheduling.running_samples import Draws, RunningRequest
from espalier.engine.speculation.lengths import MeasuredLength
from espalier.engine.work import Generated

_LEAST, _LONGEST = 2, 16
"""Last tokens of a branch that stand somewhere before, at least; more than the other number do not count."""
_REMEMBERED = 2**16
"""Tokens of finished steps that are kept of one owner, the last ones."""
_BETWEEN = -1
"""Stands between texts that do not follow one another; nobody says it."""


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


@dataclass(eq=False)
class Speculation:
    """Drafts of one model's branches.

    Attributes:
        table: its sequences.
        drafter: proposes tokens.
        lengths: says how many pay.
        max_positions: tokens of a sequence at most.
        vocab_size: ids of its tokens are below.
        length: tokens that branches draft at most in the next step.
    """

    table: SequenceTable
    drafter: Drafter
    lengths: MeasuredLength
    max_positions: int
    vocab_size: int

    def __post_init__(self) -> None:
        self.length = self.lengths.choose(1)

    def draft(self, branches: Sequence[RunningRequest]) -> bool:
        """Set the drafts of branches that the next step may go on with; returns whether any has one."""
        for branch in branches:
            branch.draft = []
        if not self.length or not branches:
            return False
        rows = np.array([branch.row for branch in branches], dtype=np.int64)
        ends = np.array([branch.start + branch.work.max_tokens for branch in branches], dtype=np.int64)
        lengths = self.table.lengths[rows]
        # A branch whose KV is to be computed again drafts nothing, and none has more than it may have but for its draw.
        room = np.minimum(np.minimum(ends, self.max_positions) - lengths - 1, self.length)
        able = np.flatnonzero((room > 0) & (lengths - self.table.computed[rows] == 1)).tolist()
        if not able:
            return False
        chosen, most = [branches[i] for i in able], room[able].tolist()
        for branch, room_of, proposed in zip(chosen, most, self.drafter.propose(chosen, most), strict=True):
            known = takewhile(lambda token: 0 <= token < self.vocab_size, proposed[:room_of])
            branch.draft = list(map(int, known))
            if branch.matcher:
                _bind(branch, branch.matcher)
        return any(branch.draft for branch in chosen)

    def update(self, draws: Draws, finished: Sequence[Generated]) -> None:
        """Take note of what was drawn, and of what finished with it; its sequences stand in the table still."""
        if draws.depths is not None:
            branches = int((draws.depths == 0).sum())
            self.table.counters.drafted_tokens += len(draws.depths) - branches
            self.table.counters.accepted_tokens += draws.tokens - branches
        self.drafter.learn(finished)

    def record(self, plan: StepPlan, running: int, seconds: float) -> None:
        """Take note of what a step took, with its drafting, and choose how much `running` branches draft next."""
        if plan.draws and not plan.chunks:
            tokens = plan.draws.tokens if plan.draws.depths is not None else len(plan.branches)
            self.lengths.record(len(plan.branches), plan.draft_length, tokens, seconds)
        if running:
            self.length = self.lengths.choose(running)


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


class SuffixDrafter:
    """Proposes what followed where the last tokens of a branch stood before, the longest match first, then the latest.

    It looks at the branch's own sequence, at steps being sampled and at finished ones of its owner, pruned ones too;
    never at another owner's.
    """

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._said: dict[Hashable, np.ndarray] = {}  # by owner: finished steps, each with the tokens before it

    def propose(self, branches: Sequence[RunningRequest], most: Sequence[int]) -> list[list[int]]:
        """See `Drafter`."""
        table = self._table
        steps: dict[Hashable, list[np.ndarray]] = {}
        for branch in branches:
            step = table.tokens[branch.row, max(0, branch.start - _LONGEST) : table.lengths[branch.row]]
            steps.setdefault(branch.work.owner, []).extend((step, np.array([_BETWEEN])))
        nothing = np.empty(0, dtype=np.int32)
        before = {owner: np.concatenate((self._said.get(owner, nothing), *its)) for owner, its in steps.items()}
        drafts: list[list[int]] = []
        for branch, count in zip(branches, most, strict=True):
            own = table.tokens[branch.row, : table.lengths[branch.row]]
            drafts.append(followers(np.concatenate((before[branch.work.owner], own)), own[-_LONGEST:], count))
        return drafts

    def learn(self, finished: Sequence[Generated]) -> None:
        """See `Drafter`."""
        if not finished:
            return
        for one in finished:
            table, row, owner = self._table, one.sequence.row, one.work.owner
            first = table.lengths[row] - len(one.token_ids) - _LONGEST
            step = table.tokens[row, max(0, first) : table.lengths[row]]
            said = self._said.get(owner, step[:0])
            self._said[owner] = np.concatenate((said, step, np.array([_BETWEEN], dtype=np.int32)))[-_REMEMBERED:]
        live = self._table.owners()
        self._said = {owner: said for owner, said in self._said.items() if owner in live}


def followers(text: np.ndarray, last: np.ndarray, most: int) -> list[int]:
    """Tokens that followed where the longest end of some tokens stands in a text, the last such place.

    Args:
        text: int32 `[T]`, tokens; `_BETWEEN` is none.
        last: int32 `[L]`, whose end is sought.
        most: how many tokens are given at most.

    Returns:
        Those tokens; empty where fewer than `_LEAST` of the sought ones stand anywhere before others.
    """
    places = np.flatnonzero(text[:-1] == last[-1])
    places = places[text[places + 1] != _BETWEEN]
    found, matched = places, 1
    while len(places) and matched < len(last):
        places = places[places >= matched]
        places = places[text[places - matched] == last[-1 - matched]]
        if len(places):
            found, matched = places, matched + 1
    if matched < _LEAST:
        return []
    first = int(found[-1]) + 1
    following = text[first : first + most].tolist()
    return following[: following.index(_BETWEEN)] if _BETWEEN in following else following
