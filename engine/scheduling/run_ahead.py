"""Work that runs ahead: its owner may come to need it, and it takes only what a step has left."""

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from espalier.engine.memory.sequences import SequenceTable
from espalier.engine.scheduling.planner import StepPlan
from espalier.engine.scheduling.requests import RunningRequest, WaitingRequest
from espalier.engine.work import Done, Generate, Generated, Work

Target = TypeVar("Target", bound=WaitingRequest | RunningRequest)


class Claim(NamedTuple):
    """The fate of work that its owner needs.

    Attributes:
        kept: whether it goes on; False where it was dropped, and is to be submitted anew.
        tokens: that were computed for it so far.
    """

    kept: bool
    tokens: int


@dataclass(slots=True)
class _Ahead:
    """A piece of such work: the tokens computed for it, the children that are finished, and whether it was dropped."""

    tokens: int = 0
    done: list[Generated] = field(default_factory=list)
    dropped: bool = False


class RunAhead:
    """The work of one model that runs ahead.

    It fills up steps that have other work, up to a number of rows, as far as there are blocks for all. Its
    finished children are held until it is claimed, so that its KV can be given up at any time, before anybody else's.

    Attributes:
        tokens: computed ahead since it was made.
        kept_tokens: those of them whose work was claimed.
    """

    def __init__(self, table: SequenceTable, max_rows: int) -> None:
        """Fill up steps of sequences of `table` to `max_rows` tokens."""
        self.tokens = self.kept_tokens = 0
        self._table = table
        self._max_rows = max_rows
        self._works: dict[Work, _Ahead] = {}

    def __bool__(self) -> bool:
        """True if there is any that was not dropped."""
        return any(not ahead.dropped for ahead in self._works.values())

    def __contains__(self, work: Work) -> bool:
        return work in self._works

    def add(self, work: Generate) -> None:
        """Let work that was submitted run ahead."""
        self._works[work] = _Ahead()

    def needed(self, targets: list[Target]) -> list[Target]:
        """Those of `targets` that do not run ahead."""
        return [target for target in targets if target.work not in self._works]

    def rows_left(self, running: Collection[RunningRequest], waiting: Collection[WaitingRequest]) -> int:
        """Rows that more of it could fill, if all samplings of what there is part."""
        ahead = sum(len(branch.indices) for branch in running if branch.work in self._works)
        works = [item.work for item in waiting if item.work in self._works]
        ahead += sum(len(work.samplings) for work in works if isinstance(work, Generate))
        return self._max_rows - ahead - sum(branch.work not in self for branch in running)

    def fill(
        self, running: list[RunningRequest], waiting: list[WaitingRequest]
    ) -> tuple[list[RunningRequest], list[WaitingRequest]] | None:
        """The running and waiting work of a step that has room for some that runs ahead; None for one that has none.

        Args:
            running: branches that can go on, in order.
            waiting: work that can.
        """
        targets: list[RunningRequest | WaitingRequest] = [*self.needed(running), *self.needed(waiting)]
        count, left = len(targets), self._max_rows - sum(self._tokens_of(target) for target in targets)
        if not count:
            return None
        for target in (*running, *waiting):
            if target.work in self and (tokens := self._tokens_of(target)) <= left and self._goes_on(target):
                targets.append(target)
                left -= tokens
        if len(targets) == count:
            return None
        rows = np.array([target.row for target in targets], dtype=np.int64)
        counts = self._table.lengths[rows] - self._table.computed[rows]
        if not self._table.has_room(self._table.blocks_needed(rows, counts)):
            return None
        chosen = set(map(id, targets))
        return [b for b in running if id(b) in chosen], [item for item in waiting if id(item) in chosen]

    def _tokens_of(self, target: RunningRequest | WaitingRequest) -> int:
        return max(1, self._table.missing(target.row))

    def _goes_on(self, target: RunningRequest | WaitingRequest) -> bool:
        """False for a sequence whose KV was freed: it is computed again only if it is needed."""
        return isinstance(target, WaitingRequest) or self._table.missing(target.row) == 1

    def count(self, plan: StepPlan) -> None:
        """Take note of a step that is computed."""
        if not self._works:
            return
        targets = *plan.branches, *(chunk.target for chunk in plan.chunks)
        for target, tokens in zip(targets, plan.counts.tolist(), strict=True):
            if ahead := self._works.get(target.work):
                ahead.tokens += tokens
                self.tokens += tokens

    def hold(self, finished: list[Done]) -> list[Done]:
        """Keep back what is finished of work that runs ahead; returns the rest."""
        if not self._works:
            return finished
        for one in finished:
            if isinstance(one, Generated) and (ahead := self._works.get(one.work)):
                ahead.done.append(one)
        return [one for one in finished if one.work not in self._works]

    def claim(self, work: Generate) -> tuple[Claim, list[Generated]]:
        """Take work out that its owner needs; also returns its finished children."""
        ahead = self._works.pop(work, None) or _Ahead(dropped=True)
        if not ahead.dropped:
            self.kept_tokens += ahead.tokens
        return Claim(not ahead.dropped, ahead.tokens), ahead.done

    def forget(self, work: Work) -> tuple[int, list[Generated]]:
        """Take work out that nobody needs; returns the tokens computed for it, and its finished children."""
        ahead = self._works.pop(work, None) or _Ahead()
        return ahead.tokens, ahead.done

    def drop(self) -> Iterator[tuple[Work, list[Generated]]]:
        """Drop all of it, each with its finished children; what was spent stays known until its owner asks."""
        for work, ahead in self._works.items():
            if not ahead.dropped:
                done, ahead.done, ahead.dropped = ahead.done, [], True
                yield work, done

    def of_owner(self, owner: Hashable) -> list[Work]:
        """The work of an owner."""
        return [work for work in self._works if work.owner == owner]
