"""One model's side of the engine: its waiting and running work, and how one batch of it is run."""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from espalier.engine.arena import Arena
from espalier.engine.batch import StepBatch, build_batch
from espalier.engine.blocks import BlockPool
from espalier.engine.fairness import fair_shares
from espalier.engine.model import Model
from espalier.engine.sampling import SamplingBatch, sample
from espalier.engine.sequence import Sequence, SequenceTable
from espalier.engine.work import Done, Generate, Generated, Score, Scored, StopCause, Work
from espalier.kernels.cache import copy_blocks
from espalier.kernels.layout import KVLayout

MakeRoom = Callable[[Hashable], bool]
"""Makes somebody give up their KV and says whether anybody did; for an owner's sake only one who comes after them."""


@dataclass(frozen=True, slots=True)
class HeldUp:
    """The first piece of work that found no blocks in a step: whose it is, and how many it needs to go on."""

    owner: Hashable
    blocks: int


@dataclass(slots=True, eq=False)
class _Pending:
    """Work whose sequence still has tokens to compute; `values` gathers what has been read so far."""

    work: Work
    base: int  # position of a Score's first token
    computed_tokens: int = 0
    values: list[np.ndarray] = field(default_factory=list)

    @property
    def row(self) -> int:
        return self.work.sequence.row

    def known_tokens(self, length: int) -> int:
        """Tokens of the sequence that need not be computed where their KV is at hand: those before what is read."""
        read_at = self.work.read_at if isinstance(self.work, Score) else ()
        return self.base + read_at[0] if read_at else length

    def count_computed(self, tokens: int) -> None:
        self.computed_tokens += tokens


@dataclass(slots=True, eq=False)
class _Branch:
    """One child that is being sampled, token by token."""

    work: Generate
    indices: list[int]  # samplings that drew the same tokens so far
    sequence: Sequence
    start: int  # its length before the first sampled token
    shared: int = 0  # sampled tokens that were computed before it parted from another branch
    extra_tokens: int = 0  # computed for it besides: of its parent on its behalf, and again after its KV was dropped

    @property
    def row(self) -> int:
        return self.sequence.row

    def known_tokens(self, length: int) -> int:
        return length

    def count_computed(self, tokens: int) -> None:
        self.extra_tokens += tokens


_Target = TypeVar("_Target", _Pending, _Branch)


@dataclass(slots=True, eq=False)
class _Chunk:
    """Tokens of one sequence that a step computes: of waiting work, or of a branch whose KV was dropped."""

    target: _Pending | _Branch
    row: int
    count: int


@dataclass(slots=True)
class _Plan:
    """What one step computes: a token of each branch, then the chunks; blocks for all of it are in place."""

    branches: list[_Branch]
    chunks: list[_Chunk]
    rows: np.ndarray
    first: np.ndarray  # position of each row's first token
    counts: np.ndarray
    copies: tuple[list[int], list[int]]


class Lane:
    """Waiting and running work of one model.

    A batch takes one token of every running branch, then tokens of waiting work in order of arrival; where the budget
    is too small for all, every owner gets a fair share of it.
    """

    def __init__(
        self,
        role: str,
        model: Model,
        layout: KVLayout,
        arena: Arena,
        prefix_cache: bool = True,
        make_room: MakeRoom = lambda needy: False,
    ) -> None:
        """Make an idle lane; `make_room` is asked when blocks run out."""
        self.role = role
        self.model = model
        self.layout = layout
        self.arena = arena
        self.pool = BlockPool(role, layout, arena, prefix_cache)
        self.table = SequenceTable(self.pool, cache_seed=model.digest.encode())
        self.computed_tokens = 0
        self.copied_blocks = 0
        self.steps = 0
        self.paused: set[Hashable] = set()
        self._make_room = make_room
        self.held_up: HeldUp | None = None
        self._layer_kvs = [layout.layer_view(arena.bytes, i) for i in range(layout.num_layers)]
        self._waiting: list[_Pending] = []
        self._running: list[_Branch] = []
        self._running_arrays: _RunningArrays | None = None
        self._busy_rows: set[int] = set()  # of sequences that waiting work is on
        self._is_eos = np.zeros(max(model.config.vocab_size, model.tokenizer.vocab_size), dtype=bool)
        self._is_eos[list(model.eos_token_ids)] = True
        self._has_newline = np.zeros(len(self._is_eos), dtype=bool)
        self._has_newline[: len(model.tokenizer.has_newline)] = model.tokenizer.has_newline

    @property
    def busy(self) -> bool:
        """Whether there is anything to run."""
        return bool(self._waiting or self._running)

    @property
    def running_branches(self) -> int:
        """Children being sampled, those of paused owners left out."""
        return len(self._active(self._running))

    def waiting_tokens(self) -> int:
        """Tokens that waiting work has to compute, that of paused owners left out."""
        rows = [item.work.sequence.row for item in self._active(self._waiting)]
        return int(np.maximum(self.table.lengths[rows] - self.table.computed[rows], 1).sum())

    def owners(self) -> set[Hashable]:
        """Everyone whose work waits or runs."""
        return {target.work.owner for target in (*self._waiting, *self._running)}

    def submit(self, work: Work) -> None:
        """Queue `work`.

        Raises:
            ValueError: when its sequence already has work, or no tokens to compute.
        """
        generating = {branch.sequence.row for branch in self._running if branch.work.in_place}
        if work.sequence.row in self._busy_rows | generating:
            raise ValueError("a sequence takes one piece of work at a time")
        if not self.table.lengths[work.sequence.row] and not (isinstance(work, Score) and work.token_ids):
            raise ValueError("an empty sequence has nothing to compute")
        self._busy_rows.add(work.sequence.row)
        base = int(self.table.lengths[work.sequence.row])
        if isinstance(work, Score):
            self.table.append(work.sequence, list(work.token_ids))
        self._waiting.append(_Pending(work, base))

    def cancel(self, owner: Hashable) -> None:
        """Drop all work of `owner`; branches being sampled are released."""
        self._forget_held_up(owner)
        self._keep_waiting([item for item in self._waiting if item.work.owner != owner])
        for branch in self._running:
            if branch.work.owner == owner and not branch.work.in_place:
                self.table.release(branch.sequence)
        self._set_running([branch for branch in self._running if branch.work.owner != owner])

    def drop_kv(self, owner: Hashable) -> None:
        """Give up all KV of `owner`, whose work goes on where it was once that is computed again."""
        self.table.drop_kv(owner)
        self._forget_held_up(owner)
        for item in self._waiting:
            if item.work.owner == owner:
                item.values.clear()

    def step(self, max_tokens: int) -> list[Done]:
        """Run one batch of at most `max_tokens` tokens and return what it finished.

        Raises:
            PoolExhaustedError: when blocks run out and nobody can give any up.
        """
        plan = self._plan(max_tokens)
        if plan is None:
            return []
        copy_blocks(self.layout, self.arena.bytes, *plan.copies)
        self.copied_blocks += len(plan.copies[0])
        batch = build_batch(self.table, plan.rows, plan.first, plan.counts, self.model.decoder.device)
        hidden = self.model.decoder.forward(batch.token_ids, batch.positions, self._layer_kvs, batch.attention)
        self.table.computed[plan.rows] = np.maximum(self.table.computed[plan.rows], plan.first + plan.counts)
        self.computed_tokens += int(plan.counts.sum())
        self.steps += 1
        return self._collect(plan, hidden, batch)

    def _forget_held_up(self, owner: Hashable) -> None:
        if self.held_up and self.held_up.owner == owner:
            self.held_up = None

    def _missing(self, row: int) -> int:
        return int(self.table.lengths[row] - self.table.computed[row])

    def _active(self, targets: list[_Target]) -> list[_Target]:
        if not self.paused:
            return targets
        return [target for target in targets if target.work.owner not in self.paused]

    def _keep_waiting(self, items: list[_Pending]) -> None:
        self._waiting = items
        self._busy_rows = {item.work.sequence.row for item in items}

    def _plan(self, max_tokens: int) -> _Plan | None:
        """Choose what to compute and take the blocks for it, making others give up theirs where that must be.

        Returns:
            The plan, or None when those who had work here gave up their KV for the other model's sake.
        """
        while self.held_up and self.held_up.blocks > self.pool.allocatable_blocks:
            if not self._make_room(self.held_up.owner):
                break
        self.held_up = None
        while True:
            branches, chunks = self._choose(max_tokens)
            if not branches and not chunks:
                return None
            rows = np.array([b.sequence.row for b in branches], dtype=np.int64)
            needed = self.table.blocks_needed(rows, np.ones_like(rows))
            if needed.sum() <= self.pool.allocatable_blocks:
                copies = self.table.prepare_write(rows, np.ones_like(rows))
                chunks = self._place(chunks, copies)
                if branches or chunks:
                    break
            if not self._make_room(None):
                self.pool.require(self.pool.allocatable_blocks + 1)
        rows = np.concatenate((rows, np.array([c.row for c in chunks], dtype=np.int64)))
        counts = np.array([1] * len(branches) + [chunk.count for chunk in chunks], dtype=np.int64)
        # A sequence without pending tokens is asked again for its last one, to have logits to sample from.
        first = np.minimum(self.table.computed[rows], self.table.lengths[rows] - 1).astype(np.int64)
        return _Plan(branches, chunks, rows, first, counts, copies)

    def _choose(self, budget: int) -> tuple[list[_Branch], list[_Chunk]]:
        """Branches and chunks to compute, memory permitting, at most `budget` tokens."""
        running, waiting = self._active(self._running), self._active(self._waiting)
        rows = np.array([b.sequence.row for b in running], dtype=np.int64)
        dropped = np.flatnonzero(self.table.lengths[rows] - self.table.computed[rows] != 1).tolist()
        targets: list[_Pending | _Branch] = [*(running[i] for i in dropped), *waiting]
        for i in reversed(dropped):
            running = [*running[:i], *running[i + 1 :]]
        chunks = [_Chunk(t, t.row, max(1, self._missing(t.row))) for t in targets]
        if len(running) + sum(chunk.count for chunk in chunks) <= budget:
            return running, chunks
        return self._choose_fairly(running, chunks, budget)

    @staticmethod
    def _choose_fairly(running: list[_Branch], chunks: list[_Chunk], budget: int) -> tuple[list[_Branch], list[_Chunk]]:
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
                chosen.append(_Chunk(chunk.target, chunk.row, count))
        return branches, chosen

    def _place(self, chunks: list[_Chunk], copies: tuple[list[int], list[int]]) -> list[_Chunk]:
        """Take blocks for those chunks that there is room for, in order; adds to `copies`."""
        placed: list[_Chunk] = []
        plain = [chunk for chunk in chunks if not self.table.has_unknown(chunk.row)]
        for chunk in chunks:
            if not self.table.has_unknown(chunk.row):
                continue
            self.table.recall(chunk.row, chunk.target.known_tokens(int(self.table.lengths[chunk.row])))
            chunk.count = min(chunk.count, max(1, self._missing(chunk.row)))
            if not self._fits([chunk]):
                self._hold_up(chunk)
                continue
            self._write([chunk], copies)
            self.table.register(chunk.row, int(self.table.computed[chunk.row]) + chunk.count)
            placed.append(chunk)
        while plain and not self._fits(plain):
            self._hold_up(plain[len(plain) // 2])
            plain = plain[: len(plain) // 2]
        self._write(plain, copies)
        return placed + plain

    def _hold_up(self, chunk: _Chunk) -> None:
        if self.held_up is None:
            needed = int(self.table.blocks_needed(*self._spans([chunk]))[0])
            self.held_up = HeldUp(chunk.target.work.owner, needed)

    def _fits(self, chunks: list[_Chunk]) -> bool:
        return int(self.table.blocks_needed(*self._spans(chunks)).sum()) <= self.pool.allocatable_blocks

    def _write(self, chunks: list[_Chunk], copies: tuple[list[int], list[int]]) -> None:
        for total, some in zip(copies, self.table.prepare_write(*self._spans(chunks)), strict=True):
            total += some

    def _spans(self, chunks: list[_Chunk]) -> tuple[np.ndarray, np.ndarray]:
        """Rows of chunks, and how many new tokens each writes."""
        rows = np.array([chunk.row for chunk in chunks], dtype=np.int64)
        pending = self.table.lengths[rows] - self.table.computed[rows]
        return rows, np.minimum(np.array([chunk.count for chunk in chunks], dtype=np.int64), pending)

    def _collect(self, plan: _Plan, hidden: torch.Tensor, batch: StepBatch) -> list[Done]:
        done: list[Done] = []
        finished: set[int] = set()
        sampled = list(plan.branches)
        sampled_rows = list(batch.ends[: len(sampled)])
        self._read(plan.chunks, hidden, batch.starts[len(sampled) :])
        for i, chunk in enumerate(plan.chunks, start=len(plan.branches)):
            target = chunk.target
            target.count_computed(chunk.count)
            if self._missing(chunk.row):
                continue
            if isinstance(target, _Branch):
                target.extra_tokens -= 1  # its last token had not been computed before
                sampled.append(target)
            elif isinstance(target.work, Score):
                values = np.concatenate(target.values) if target.values else np.zeros((0, 0), dtype=np.float32)
                done.append(Scored(target.work, values, target.computed_tokens))
                finished.add(id(target))
                continue
            else:
                sampled.append(self._open_branch(target, target.work))
                finished.add(id(target))
            sampled_rows.append(batch.ends[i])
        if finished:
            self._keep_waiting([item for item in self._waiting if id(item) not in finished])
        if sampled:
            chosen = set(map(id, sampled))
            rest = [] if len(plan.branches) == len(self._running) else [b for b in self._running if id(b) not in chosen]
            done += self._sample(sampled, hidden[torch.tensor(sampled_rows, device=hidden.device)], rest)
        return done

    def _read(self, chunks: list[_Chunk], hidden: torch.Tensor, starts: np.ndarray) -> None:
        """Put the head's values at the positions that scores want, of all chunks in one batch, where they belong."""
        wanted: list[_Pending] = []
        rows: list[int] = []
        for chunk, start in zip(chunks, starts.tolist(), strict=True):
            item = chunk.target
            if isinstance(item, _Pending) and isinstance(item.work, Score):
                first = int(self.table.computed[chunk.row]) - chunk.count - item.base
                rows += [start + p - first for p in item.work.read_at if 0 <= p - first < chunk.count]
                wanted += [item] * (len(rows) - len(wanted))
        if rows:
            values = self._head(hidden[torch.tensor(rows, device=hidden.device)]).float().cpu().numpy()
            for i, item in enumerate(wanted):
                item.values.append(values[i : i + 1])

    def _open_branch(self, item: _Pending, work: Generate) -> _Branch:
        sequence = work.sequence if work.in_place else self.table.fork(work.sequence)
        self.table.log_probabilities[sequence.row] = 0.0
        start, indices = int(self.table.lengths[sequence.row]), list(range(len(work.samplings)))
        return _Branch(work, indices, sequence, start, extra_tokens=item.computed_tokens)

    @torch.inference_mode()
    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.head(hidden)

    def _sample(self, branches: list[_Branch], hidden: torch.Tensor, rest: list[_Branch]) -> list[Done]:
        """Draw a token for each sampling of each branch, part those that differ, and take out those that stop."""
        if self._running_arrays is None or self._running_arrays.branches != branches:
            self._running_arrays = _RunningArrays(branches)
        arrays = self._running_arrays
        logits = self._head(hidden)
        if len(arrays.branch_of) != len(branches):
            logits = logits[torch.from_numpy(arrays.branch_of).to(logits.device)]
        starts = np.array([b.start for b in branches])[arrays.branch_of]
        positions = self.table.lengths[arrays.rows][arrays.branch_of] - starts
        drawn, log_probabilities = sample(logits, SamplingBatch(*arrays.parameters, positions))
        token_ids, log_probabilities = drawn.cpu().numpy(), log_probabilities.cpu().numpy()
        parted, firsts = self._part(branches, arrays, token_ids)
        rows, token_ids = np.array([b.sequence.row for b in parted], dtype=np.int64), token_ids[firsts]
        self.table.log_probabilities[rows] += log_probabilities[firsts]
        self.table.append_each(rows, token_ids)
        return self._take_out_stopped(parted, rows, token_ids, rest)

    def _part(
        self, branches: list[_Branch], arrays: "_RunningArrays", token_ids: np.ndarray
    ) -> tuple[list[_Branch], np.ndarray]:
        """Fork branches whose samplings drew different tokens; the lowest index keeps the sequence.

        Returns:
            All branches, and for each which draw is its own.
        """
        first_of = token_ids[arrays.firsts][arrays.branch_of]
        differs = np.unique(arrays.branch_of[token_ids != first_of])
        if len(differs) == 0:
            return branches, arrays.firsts
        self._running_arrays = None
        parted, firsts = list(branches), arrays.firsts.tolist()
        for b in differs.tolist():
            branch, first = branches[b], firsts[b]
            groups: dict[int, list[int]] = {}  # places in `indices`, by token
            for place in range(len(branch.indices)):
                groups.setdefault(int(token_ids[first + place]), []).append(place)
            length = int(self.table.lengths[branch.sequence.row])
            for places in list(groups.values())[1:]:
                sequence = self.table.fork(branch.sequence)
                self.table.log_probabilities[sequence.row] = self.table.log_probabilities[branch.sequence.row]
                indices = [branch.indices[place] for place in places]
                parted.append(_Branch(branch.work, indices, sequence, branch.start, shared=length - branch.start))
                firsts.append(first + places[0])
            branch.indices = [branch.indices[place] for place in next(iter(groups.values()))]
        return parted, np.array(firsts)

    def _take_out_stopped(
        self, branches: list[_Branch], rows: np.ndarray, token_ids: np.ndarray, rest: list[_Branch]
    ) -> list[Done]:
        lengths = self.table.lengths[rows]
        limits = np.array([b.start + b.work.max_tokens for b in branches])
        over = lengths >= np.minimum(limits, self.model.config.max_positions)
        flagged = np.flatnonzero(over | self._is_eos[token_ids] | self._has_newline[token_ids])
        done, stopped = [], set()
        for i in flagged.tolist():
            branch = branches[i]
            if cause := self._stop_cause(branch, int(token_ids[i]), bool(over[i])):
                done.append(self._finish(branch, cause))
                stopped.add(i)
        self._set_running([b for i, b in enumerate(branches) if i not in stopped] + rest)
        return done

    def _set_running(self, branches: list[_Branch]) -> None:
        if branches != self._running:
            self._running_arrays = None
        self._running = branches

    def _stop_cause(self, branch: _Branch, token_id: int, over: bool) -> StopCause | None:
        if self._is_eos[token_id]:
            return StopCause.EOS
        if branch.work.delimiter and self._has_newline[token_id]:
            text = self.model.tokenizer.decode(self._new_tokens(branch))
            # A step of nothing but newlines is no step: the delimiter counts once there is content before it.
            if branch.work.delimiter in text.lstrip():
                return StopCause.DELIMITER
        if over:
            length = int(self.table.lengths[branch.sequence.row])
            at_context = length >= self.model.config.max_positions
            return StopCause.CONTEXT if at_context else StopCause.LENGTH
        return None

    def _new_tokens(self, branch: _Branch) -> list[int]:
        row = branch.sequence.row
        return self.table.tokens[row, branch.start : self.table.lengths[row]].tolist()

    def _finish(self, branch: _Branch, cause: StopCause) -> Generated:
        row = branch.sequence.row
        token_ids = self._new_tokens(branch)
        return Generated(
            work=branch.work,
            indices=tuple(branch.indices),
            sequence=branch.sequence,
            token_ids=token_ids,
            text=self.model.tokenizer.decode(token_ids),
            log_probability=float(self.table.log_probabilities[row]),
            cause=cause,
            own_tokens=len(token_ids) - branch.shared,
            computed_tokens=branch.extra_tokens + int(self.table.computed[row]) - branch.start - branch.shared,
        )


class _RunningArrays:
    """Running branches as arrays, rebuilt only when they change.

    Attributes:
        rows: int64 `[branches]`, of the sequence table.
        branch_of: int64 `[draws]`; each branch has a draw for each of its samplings, side by side.
        firsts: int64 `[branches]`, the first draw of each.
        parameters: of every draw, in the order of `SamplingBatch`.
    """

    def __init__(self, branches: list[_Branch]) -> None:
        self.branches = branches
        self.rows = np.array([b.sequence.row for b in branches], dtype=np.int64)
        counts = np.array([len(b.indices) for b in branches])
        self.branch_of = np.repeat(np.arange(len(branches)), counts)
        self.firsts = counts.cumsum() - counts
        samplings = [b.work.samplings[i] for b in branches for i in b.indices]
        self.parameters = (
            np.array([s.temperature for s in samplings], dtype=np.float32),
            np.array([s.top_k for s in samplings], dtype=np.int64),
            np.array([s.top_p for s in samplings], dtype=np.float32),
            np.array([s.min_p for s in samplings], dtype=np.float32),
            np.array([s.key for s in samplings], dtype=np.uint64),
        )
