"""Choosing the tokens that one step of a model computes, and taking blocks for them."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from espalier.engine.errors import PoolExhaustedError
from espalier.engine.memory.sequences import KVSequence, SequenceTable
from espalier.engine.scheduling.running_samples import Draws, RunningRequest
from espalier.engine.work import Score, Work

MakeRoom = Callable[[Collection[Hashable]], bool]
"""Makes one owner give up its KV for those given, all with work that finds no blocks; returns whether one did."""


@dataclass(frozen=True, slots=True)
class BlockedWork:
    """Work that found no blocks in a step.

    Attributes:
        owner: whose work it is.
        blocks: how many blocks of each KV group it needs before it can go on, int `[groups]`.
    """

    owner: Hashable
    blocks: np.ndarray


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """Work whose sequence still has tokens to compute.

    Attributes:
        work: as it was submitted.
        base: the sequence's length before it, so the position of a Score's first token.
        computed_tokens: tokens computed for it so far.
        values: what the head gave so far, float32 `[1, k]` for each read.
    """

    work: Work
    base: int
    computed_tokens: int = 0
    values: list[np.ndarray] = field(default_factory=list)

    @property
    def row(self) -> int:
        """Its sequence's row of the table."""
        return self.work.sequence.row


Target = TypeVar("Target", bound=WaitingRequest | RunningRequest)


@dataclass(slots=True, eq=False)
class Chunk:
    """Tokens of one sequence that a step computes, for waiting work or for a branch whose KV was freed by preemption.

    Attributes:
        target: the waiting work or the branch.
        count: tokens computed.
    """

    target: WaitingRequest | RunningRequest
    count: int


class Read(NamedTuple):
    """One position at which a head is read.

    Attributes:
        item: the Score that it belongs to.
        row: of the batch.
        target: the token that the head is asked about; None for a head that takes none.
    """

    item: WaitingRequest
    row: int
    target: int | None


@dataclass(slots=True)
class StepPlan:
    """One step. Its planner gives the tokens, and blocks for all of them; its scheduler adds what is read and drawn.

        batch rows   [ branch 0 | branch 1 | ... | chunk 0 ............. | chunk 1 ... | ... ]
        counts            1          1              count                   count
        ends              1          2              2 + count               ...           T

    Row `ends[i] - 1` is the last token of sequence `i`, position `first[i] + counts[i] - 1`: there it is sampled from.
    A branch with a draft has 1 + its length rows, and is sampled from in each.

    Attributes:
        branches: branches that compute their last token, and their drafts.
        chunks: tokens of other sequences.
        rows: int64 `[S]`, the sequence of each branch, then of each chunk.
        first: int64 `[S]`, the position of each sequence's first token.
        counts: int64 `[S]`, how many tokens of each sequence are computed.
        copies: of each KV group, blocks to copy from, and the blocks to copy them to, before anything is written.
        reads: by the names of heads.
        draft_length: tokens that branches were to draft at most; some may have fewer or none.
        scored: Scores whose last read is in this step.
        opened: for each Generate whose pending tokens end in this step, the branch that it continues as.
        draws: the tokens that it draws, None without any.
    """

    branches: list[RunningRequest]
    chunks: list[Chunk]
    rows: np.ndarray
    first: np.ndarray
    counts: np.ndarray
    copies: list[tuple[list[int], list[int]]]
    reads: dict[str, list[Read]] = field(default_factory=dict)
    scored: list[WaitingRequest] = field(default_factory=list)
    opened: dict[WaitingRequest, RunningRequest] = field(default_factory=dict)
    draws: Draws | None = None
    draft_length: int = 0

    @property
    def owners(self) -> set[Hashable]:
        """Owners of its work."""
        return {target.work.owner for target in (*self.branches, *(chunk.target for chunk in self.chunks))}

    @property
    def copied_blocks(self) -> int:
        """Number of blocks to copy."""
        return sum(len(sources) for sources, _ in self.copies)


class BatchPlanner:
    """Chooses the tokens of each step.

    A batch takes one token of every running branch, then tokens of waiting work in order of arrival; where the budget
    is too small for all, every owner gets a fair share of it. Work that finds no blocks is blocked: before the next
    step, owners that rank behind its owner give up their KV.

    Attributes:
        paused: owners whose work is left out until they resume, for their KV was freed.
        deferred: other work that is left out until there is room, for its sequence's KV was freed.
        throttled: owners whose work is left out of the next step, for their accounts are ahead; see `FairSharing`.
        drafting: whether some branches have drafts.
        blocked: the first piece of work that found no blocks in the last step.
    """

    def __init__(self, table: SequenceTable, make_room: MakeRoom) -> None:
        self.paused: set[Hashable] = set()
        self.deferred: list[WaitingRequest | RunningRequest] = []
        self.throttled: frozenset[Hashable] = frozenset()
        self.drafting = False
        self.blocked: BlockedWork | None = None
        self._table = table
        self._make_room = make_room

    def active(self, targets: list[Target]) -> list[Target]:
        """Those of `targets` whose owners are neither paused nor throttled."""
        if not self.paused and not self.throttled:
            return targets
        left_out = self.paused | self.throttled
        return [target for target in targets if target.work.owner not in left_out]

    def forget_blocked(self, owner: Hashable) -> None:
        """Make no more room for `owner`'s blocked work, if it has any."""
        if self.blocked and self.blocked.owner == owner:
            self.blocked = None

    def defer_one(self, targets: list[WaitingRequest | RunningRequest]) -> KVSequence | None:
        """Defer the shortest of several sequences with work that hold KV; returns it, whose KV is then to be freed.

        The longest is the next to end and to free all that it holds, and would take longest to compute again.
        """
        going_on = [target for target in targets if target not in self.deferred]
        holding = [target for target in going_on if self._table.num_blocks[target.row]]
        if len(holding) < 2:
            return None
        shortest = min(holding, key=lambda target: self._table.lengths[target.row])
        self.deferred.append(shortest)
        return shortest.work.sequence if isinstance(shortest, WaitingRequest) else shortest.sequence

    def plan(
        self, running: list[RunningRequest], waiting: list[WaitingRequest], max_tokens: int, may_preempt: bool
    ) -> StepPlan | None:
        """Choose what to compute and take blocks for it, from the KV of other owners where no other blocks are left.

        Owners whose work finds no blocks even so are left out of the step.

        Args:
            running: branches being sampled.
            waiting: in order of arrival.
            max_tokens: computed in the step at most.
            may_preempt: whether other owners may give up their KV; if not, there is no plan where they would have to.

        Returns:
            The plan, or None when there is none, or all owners with work here were preempted to make room for the
            other model.

        Raises:
            PoolExhaustedError: when nobody's work finds blocks and no owner can give any up; it names the last owner
                without any.
        """
        while self.blocked and not self._table.has_room(self.blocked.blocks):
            if not may_preempt:
                return None
            if not self._make_room({self.blocked.owner}):
                break
        self.blocked = None
        self._resume_deferred(running, waiting)
        self._table.prefixes.begin_step()
        exhausted: PoolExhaustedError | None = None
        while True:
            branches, chunks = self._choose(running, waiting, max_tokens)
            if not branches and not chunks:
                if exhausted is not None:
                    raise exhausted
                return None
            try:
                return self._place(branches, chunks, max_tokens)
            except PoolExhaustedError as error:
                if not may_preempt:
                    return None
                if self._make_room({target.work.owner for target in (*branches, *(c.target for c in chunks))}):
                    self.blocked = None
                    continue
                exhausted = exhausted or error
                without = error.owners if branches else {c.target.work.owner for c in self._without_blocks(chunks)}
                running = [branch for branch in running if branch.work.owner not in without]
                waiting = [item for item in waiting if item.work.owner not in without]

    def _resume_deferred(self, running: list[RunningRequest], waiting: list[WaitingRequest]) -> None:
        """Let the longest sequence whose work is held back go on, if there is room for twice its KV, or none does.

        With room to grow as long again, no more is computed again than is sampled.
        """
        if not self.deferred:
            return
        targets = self.active([*running, *waiting])
        self.deferred = [target for target in self.deferred if target in targets]
        if not self.deferred:
            return
        longest = max(self.deferred, key=lambda target: self._table.lengths[target.row])
        needed = self._table.blocks_needed(np.array([longest.row]), np.array([self._table.missing(longest.row)]))
        if len(self.deferred) == len(targets) or self._table.has_room(2 * needed):
            self.deferred.remove(longest)

    def _place(self, branches: list[RunningRequest], chunks: list[Chunk], budget: int) -> StepPlan:
        """Take blocks for all branches, and for the chunks that find some.

        Drafts get what is left of the `budget` of tokens, if there is room for all.

        Raises:
            PoolExhaustedError: when there are too few for the branches, or without branches for any chunk; it names
                the owner of the last one.
        """
        rows = np.array([b.sequence.row for b in branches], dtype=np.int64)
        counts = np.ones(len(rows), dtype=np.int64)
        if self.drafting:
            counts = self._take_drafts(branches, chunks, rows, budget)
        try:
            copies = self._table.prepare_write(rows, counts)
        except PoolExhaustedError as error:
            error.owners = frozenset({branches[-1].work.owner})
            raise
        if chunks:
            placed = self._place_chunks(chunks, copies)
            if not branches and not placed:
                last = self._without_blocks(chunks)[-1]
                self._table.require(self._blocks_for([last]), frozenset({last.target.work.owner}))
            chunks = placed
            if self._table.states is not None:
                # Last, where recurrent layers leave them out: their states are those behind their last tokens already.
                chunks.sort(key=lambda chunk: self._table.missing(chunk.target.row) == 0)
            rows = np.concatenate((rows, np.array([c.target.row for c in chunks], dtype=np.int64)))
            counts = np.concatenate((counts, np.array([c.count for c in chunks], dtype=np.int64)))
        # A sequence without pending tokens is asked again for its last one, to have logits to sample from.
        first = np.minimum(self._table.computed[rows], self._table.lengths[rows] - 1).astype(np.int64)
        return StepPlan(branches, chunks, rows, first, counts, copies)

    def _take_drafts(
        self, branches: list[RunningRequest], chunks: list[Chunk], rows: np.ndarray, budget: int
    ) -> np.ndarray:
        """Write as much of the branches' drafts behind their tokens as there is room for; returns how many tokens each
        computes, int64 `[branches]`.
        """
        left = budget - len(branches) - sum(chunk.count for chunk in chunks)
        for branch in branches:
            branch.draft = branch.draft[:left]
            left -= len(branch.draft)
        counts = np.array([1 + len(branch.draft) for branch in branches], dtype=np.int64)
        # Nobody gives up KV for a draft.
        if not self._table.has_room(self._table.blocks_needed(rows, counts) + self._blocks_for(chunks)):
            for branch in branches:
                branch.draft = []
            return np.ones_like(counts)
        lengths = self._table.lengths[rows]
        self._table.reserve_columns(int((lengths + counts).max(initial=0)))
        for branch, length in zip(branches, lengths.tolist(), strict=True):
            self._table.tokens[branch.row, length : length + len(branch.draft)] = branch.draft
        return counts

    def _choose(
        self, running: list[RunningRequest], waiting: list[WaitingRequest], budget: int
    ) -> tuple[list[RunningRequest], list[Chunk]]:
        """Branches and chunks of at most `budget` tokens together, before any look at memory."""
        running, waiting = self.active(running), self.active(waiting)
        if self.deferred:
            running = [branch for branch in running if branch not in self.deferred]
            waiting = [item for item in waiting if item not in self.deferred]
        rows = np.array([b.sequence.row for b in running], dtype=np.int64)
        dropped = np.flatnonzero(self._table.lengths[rows] - self._table.computed[rows] != 1).tolist()
        targets: list[WaitingRequest | RunningRequest] = [*(running[i] for i in dropped), *waiting]
        for i in reversed(dropped):
            running = [*running[:i], *running[i + 1 :]]
        chunks = [Chunk(t, max(1, self._table.missing(t.row))) for t in targets]
        if len(running) + sum(chunk.count for chunk in chunks) <= budget:
            return running, chunks
        return self._choose_fairly(running, chunks, budget)

    @staticmethod
    def _choose_fairly(
        running: list[RunningRequest], chunks: list[Chunk], budget: int
    ) -> tuple[list[RunningRequest], list[Chunk]]:
        demands = Counter(branch.work.owner for branch in running)
        for chunk in chunks:
            demands[chunk.target.work.owner] += chunk.count
        left = fair_shares(demands, budget)
        branches, chosen = [], []
        for branch in running:
            if left[branch.work.owner]:
                left[branch.work.owner] -= 1
                branches.append(branch)
        for chunk in chunks:
            if count := min(chunk.count, left[chunk.target.work.owner]):
                left[chunk.target.work.owner] -= count
                chosen.append(Chunk(chunk.target, count))
        return branches, chosen

    def _place_chunks(self, chunks: list[Chunk], copies: list[tuple[list[int], list[int]]]) -> list[Chunk]:
        """Take blocks for the chunks in order, while there are blocks, and return those chunks; adds to `copies`."""
        placed: list[Chunk] = []
        prefixes = self._table.prefixes
        plain = [chunk for chunk in chunks if not prefixes.is_unmatched(chunk.target.row)]
        for chunk in chunks:
            if not prefixes.is_unmatched(row := chunk.target.row):
                continue
            if not prefixes.match(row, _known_tokens(chunk.target, int(self._table.lengths[row]))):
                continue  # it goes on from a state of this step, in the next one
            chunk.count = prefixes.tokens_to_stop(row, min(chunk.count, max(1, self._table.missing(row))))
            if not self._fits([chunk]):
                self._note_blocked(chunk)
                continue
            self._write([chunk], copies)
            prefixes.register(row, int(self._table.computed[row]) + chunk.count)
            placed.append(chunk)
        fitting = plain
        while fitting and not self._fits(fitting):
            fitting = fitting[: len(fitting) // 2]
        if len(fitting) < len(plain):
            self._note_blocked(plain[len(fitting)])
        self._write(fitting, copies)
        return placed + fitting

    def _without_blocks(self, chunks: list[Chunk]) -> list[Chunk]:
        """Those of `chunks` that do not even find blocks alone."""
        return [chunk for chunk in chunks if not self._fits([chunk])]

    def _note_blocked(self, chunk: Chunk) -> None:
        if self.blocked is None:
            self.blocked = BlockedWork(chunk.target.work.owner, self._blocks_for([chunk]))

    def _blocks_for(self, chunks: list[Chunk]) -> np.ndarray:
        return self._table.blocks_needed(*self._spans(chunks))

    def _fits(self, chunks: list[Chunk]) -> bool:
        return self._table.has_room(self._blocks_for(chunks))

    def _write(self, chunks: list[Chunk], copies: list[tuple[list[int], list[int]]]) -> None:
        for total, some in zip(copies, self._table.prepare_write(*self._spans(chunks)), strict=True):
            total[0].extend(some[0])
            total[1].extend(some[1])

    def _spans(self, chunks: list[Chunk]) -> tuple[np.ndarray, np.ndarray]:
        """Rows of chunks, and how many new tokens each writes."""
        rows = np.array([chunk.target.row for chunk in chunks], dtype=np.int64)
        pending = self._table.lengths[rows] - self._table.computed[rows]
        return rows, np.minimum(np.array([chunk.count for chunk in chunks], dtype=np.int64), pending)


def _known_tokens(target: WaitingRequest | RunningRequest, length: int) -> int:
    """Tokens of a sequence of this length that may come from the prefix cache: those before the first that is read."""
    reads = target.work.score_positions if isinstance(target.work, Score) else ()
    return target.base + reads[0] if reads and isinstance(target, WaitingRequest) else length


def fair_shares(demands: Mapping[Hashable, int], budget: int) -> dict[Hashable, int]:
    """Max-min fair shares of `budget`: no owner gets more than its demand, and the rest is split evenly.

    Args:
        demands: tokens that each owner could use.
        budget: tokens to share out.

    Returns:
        Shares that add up to `budget`, or to all demands where these are less.
    """
    shares: dict[Hashable, int] = {}
    for place, (owner, demand) in enumerate(sorted(demands.items(), key=lambda entry: entry[1])):
        shares[owner] = min(demand, budget // (len(demands) - place))
        budget -= shares[owner]
    return shares
