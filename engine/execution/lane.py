"""One model's side of the engine: its waiting and running work, and how one batch of it is run."""

import logging
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from espalier.engine.errors import DeviceError, MisuseError, NumericalError, name_tokens
from espalier.engine.execution.batch import StepBatch, build_batch
from espalier.engine.execution.sampling import SamplingBatch, sample
from espalier.engine.memory.blocks import BlockPool
from espalier.engine.memory.pool import KVPool
from espalier.engine.memory.sequences import Sequence, SequenceTable
from espalier.engine.models.model import Model
from espalier.engine.scheduling.scheduler import Branch, Chunk, MakeRoom, Pending, Scheduler, SchedulerOutput
from espalier.engine.work import Done, Generate, Generated, Score, Scored, StopCause, Work
from espalier.kernels.cache import copy_blocks
from espalier.kernels.layout import KVLayout

log = logging.getLogger("espalier.engine")


class Lane:
    """Waiting and running work of one model."""

    def __init__(
        self,
        role: str,
        model: Model,
        layout: KVLayout,
        kv_pool: KVPool,
        prefix_cache: bool = True,
        make_room: MakeRoom = lambda needy: False,
    ) -> None:
        """Make an idle lane; `make_room` is asked when blocks run out."""
        self.role = role
        self.model = model
        self.layout = layout
        self.kv_pool = kv_pool
        self.pool = BlockPool(role, layout, kv_pool, prefix_cache)
        self.table = SequenceTable(self.pool, cache_seed=model.digest.encode())
        self.computed_tokens = 0
        self.copied_blocks = 0
        self.steps = 0
        self.scheduler = Scheduler(self.table, make_room)
        self._layer_kvs = [layout.layer_view(kv_pool.bytes, i) for i in range(layout.num_layers)]
        self._waiting: list[Pending] = []
        self._running: list[Branch] = []
        self._running_arrays: _RunningArrays | None = None
        self._flight: _Flight | None = None
        self._busy_rows: set[int] = set()  # of sequences that work waits or runs in place on
        self._is_eos = np.zeros(max(model.config.vocab_size, model.tokenizer.vocab_size), dtype=bool)
        self._is_eos[list(model.eos_token_ids)] = True
        self._has_newline = np.zeros(len(self._is_eos), dtype=bool)
        self._has_newline[: len(model.tokenizer.has_newline)] = model.tokenizer.has_newline
        if beyond := model.without_embedding:
            log.warning(
                "the %s has an embedding for %d tokens and none for %s of its tokenizer; a text that holds one is "
                "refused",
                role,
                model.config.vocab_size,
                name_tokens(beyond),
            )

    @property
    def busy(self) -> bool:
        """Whether there is anything to run."""
        return bool(self._waiting or self._running)

    @property
    def in_flight(self) -> bool:
        """Whether a batch was launched and not collected yet."""
        return self._flight is not None

    @property
    def running_branches(self) -> int:
        """Children being sampled, those of paused owners left out."""
        return len(self.scheduler.active(self._running))

    def waiting_tokens(self) -> int:
        """Tokens that waiting work has to compute, that of paused owners left out."""
        rows = [item.work.sequence.row for item in self.scheduler.active(self._waiting)]
        return int(np.maximum(self.table.lengths[rows] - self.table.computed[rows], 1).sum())

    def owners(self) -> set[Hashable]:
        """Everyone whose work waits or runs."""
        return {target.work.owner for target in (*self._waiting, *self._running)}

    def open(self, token_ids: list[int], salt: bytes, owner: Hashable) -> Sequence:
        """A new sequence; see `Engine.open`.

        Raises:
            NoEmbeddingError: when the model has no embedding for one of the tokens.
            MisuseError: for negative ids, or more tokens than its context.
        """
        self._require_fits(len(token_ids))
        self.model.require_embedded(self.role, token_ids)
        return self.table.open(self.role, token_ids, salt, owner)

    def release(self, sequence: Sequence) -> None:
        """Drop a sequence.

        Raises:
            MisuseError: when it is not a live one of this engine, or work waits or runs on it.
        """
        self.table.require_live(sequence)
        if sequence.row in self._busy_rows:
            raise MisuseError(f"work waits or runs on a {self.role} sequence that is released; cancel its owner first")
        self.table.release(sequence)

    def submit(self, work: Work) -> None:
        """Queue `work`.

        Raises:
            NoEmbeddingError: when the model has no embedding for one of its tokens.
            MisuseError: when its sequence is not a live one of this engine, already has work or has no tokens to
                compute, or would go beyond the model's context.
        """
        self.table.require_live(work.sequence)
        if work.sequence.row in self._busy_rows:
            raise MisuseError("a sequence takes one piece of work at a time")
        length = int(self.table.lengths[work.sequence.row])
        added = len(work.token_ids) if isinstance(work, Score) else 1  # at least
        if not length and not (isinstance(work, Score) and added):
            raise MisuseError("an empty sequence has nothing to compute")
        self._require_fits(length + added)
        if isinstance(work, Score):
            self.model.require_embedded(self.role, work.token_ids)
            self.model.require_embedded(self.role, work.targets)
        self._busy_rows.add(work.sequence.row)
        if isinstance(work, Score):
            self.table.append(work.sequence, list(work.token_ids))
        self._waiting.append(Pending(work, base=length))

    def cancel(self, owner: Hashable) -> None:
        """Drop all work of `owner`, none of which may be in flight; branches being sampled are released."""
        self.scheduler.forget_held_up(owner)
        self._busy_rows -= {item.row for item in self._waiting if item.work.owner == owner}
        self._waiting = [item for item in self._waiting if item.work.owner != owner]
        for branch in self._running:
            if branch.work.owner == owner:
                self._let_go(branch)
                if not branch.work.in_place:
                    self.table.release(branch.sequence)
        self._running = [branch for branch in self._running if branch.work.owner != owner]

    def drop_kv(self, owner: Hashable) -> None:
        """Give up all KV of `owner`, whose work goes on where it was once that is computed again; none in flight."""
        self.table.drop_kv(owner)
        self.scheduler.forget_held_up(owner)
        for item in self._waiting:
            if item.work.owner == owner:
                item.values.clear()

    def launch(self, max_tokens: int) -> bool:
        """Start one batch of at most `max_tokens` tokens; `collect` takes its results in.

        Nothing here needs what was sampled last: that is on the host since the last `collect`. On a GPU kernels are
        only queued, but small copies to it out of ordinary memory (block tables, places to read, sampling parameters)
        may each wait until those queued before are done.

        Returns:
            Whether there was anything to run.

        Raises:
            PoolExhaustedError: when blocks run out and nobody can give any up.
            DeviceError: when the model cannot be run.
        """
        assert self._flight is None, "one batch of a model is in flight at a time"
        plan = self.scheduler.plan(self._running, self._waiting, max_tokens)
        if plan is None:
            return False
        try:
            copy_blocks(self.layout, self.kv_pool.bytes, *plan.copies)
            batch = build_batch(self.table, plan.rows, plan.first, plan.counts, self.model.decoder.device)
            hidden = self.model.decoder.forward(batch.token_ids, batch.positions, self._layer_kvs, batch.attention)
            self.table.computed[plan.rows] = np.maximum(self.table.computed[plan.rows], plan.first + plan.counts)
            self._flight = self._read_and_draw(plan, batch, hidden)
        except BaseException as error:  # an interrupt too: the prefix cache knows blocks before they are written
            self._give_up()
            self._blame_device(error)
            raise
        self.copied_blocks += len(plan.copies[0])
        self.computed_tokens += int(plan.counts.sum())
        self.steps += 1
        return True

    def collect(self) -> list[Done]:
        """Wait for the batch in flight and return what it finished.

        Raises:
            NumericalError: when what was read, or what tokens are drawn from, is not a number.
            DeviceError: when the batch could not be computed.
        """
        flight, self._flight = self._flight, None
        assert flight is not None, "no batch is in flight"
        try:
            values, token_ids, log_probabilities = (
                tensor.cpu().numpy() for tensor in (flight.values, flight.token_ids, flight.log_probabilities)
            )
            if owners := flight.owners_without_numbers(values, log_probabilities):
                raise NumericalError(self.role, owners)
        except BaseException as error:
            self._give_up()
            self._blame_device(error)
            raise
        for i, item in enumerate(flight.read):
            item.values.append(values[i : i + 1])
        done: list[Done] = [_scored(item) for item in flight.scored]
        if left := {id(item) for item in (*flight.scored, *flight.opened)}:
            self._waiting = [item for item in self._waiting if id(item) not in left]
            self._busy_rows -= {item.row for item in flight.scored}
            self._busy_rows -= {item.row for item, branch in flight.opened.items() if not branch.work.in_place}
        for branch in flight.opened.values():
            if not branch.work.in_place:
                branch.sequence = self.table.fork(branch.sequence)
            self.table.log_probabilities[branch.row] = 0.0
        if flight.arrays:
            if flight.opened:
                flight.arrays.find_rows()
            done += self._take_in(flight.arrays, token_ids, log_probabilities)
        return done

    def _give_up(self) -> None:
        """What the blocks of this model hold is not certain: all of it is computed again."""
        self._flight = None
        self.table.drop_all()
        for item in self._waiting:
            item.values.clear()

    def _blame_device(self, error: BaseException) -> None:
        """Raise DeviceError for what torch says of a device that fails or has no memory left."""
        if isinstance(error, RuntimeError | MemoryError):
            raise DeviceError(self.role, str(self.model.decoder.device), error) from error

    def _let_go(self, branch: Branch) -> None:
        """A branch runs no longer: what was generated in place takes other work."""
        if branch.work.in_place:
            self._busy_rows.discard(branch.row)

    def _require_fits(self, tokens: int) -> None:
        if tokens > (context := self.model.config.max_positions):
            raise MisuseError(f"a sequence of {tokens} tokens is longer than the {self.role}'s context of {context}")

    def _read_and_draw(self, plan: SchedulerOutput, batch: StepBatch, hidden: torch.Tensor) -> "_Flight":
        """Queue what is wanted of the hidden states: head values of scores, a token for each sampling."""
        scored: list[Pending] = []
        opened: dict[Pending, Branch] = {}
        sampled, places = list(plan.branches), list(range(len(plan.branches)))
        for i, chunk in enumerate(plan.chunks, start=len(plan.branches)):
            target = chunk.target
            target.count_computed(chunk.count)
            if self.table.missing(chunk.row):
                continue
            if isinstance(target, Branch):
                target.extra_tokens -= 1  # its last token had not been computed before
                sampled.append(target)
            elif isinstance(target.work, Score):
                scored.append(target)
                continue
            else:
                opened[target] = self._open_branch(target, target.work)
                sampled.append(opened[target])
            places.append(i)
        read, values = self._read(plan.chunks, hidden, batch.starts[len(plan.branches) :])
        if not sampled:
            return _Flight(read, values, scored, opened)
        if self._running_arrays is None or self._running_arrays.branches != sampled:
            self._running_arrays = _RunningArrays(sampled, hidden.device)
        arrays = self._running_arrays
        if len(places) < len(hidden):  # else it is a token of each, in this order
            hidden = hidden[torch.from_numpy(batch.ends[places]).to(hidden.device, non_blocking=True)]
        return _Flight(read, values, scored, opened, arrays, *self._draw(arrays, hidden))

    def _read(
        self, chunks: list[Chunk], hidden: torch.Tensor, starts: np.ndarray
    ) -> tuple[list[Pending], torch.Tensor]:
        """The head's values at the positions that scores want, of all chunks in one batch, and whose each is."""
        wanted: list[Pending] = []
        rows: list[int] = []
        targets: list[int] = []
        for chunk, start in zip(chunks, starts.tolist(), strict=True):
            item = chunk.target
            if isinstance(item, Pending) and isinstance(item.work, Score):
                first = int(self.table.computed[chunk.row]) - chunk.count - item.base
                reads = [i for i, p in enumerate(item.work.read_at) if 0 <= p - first < chunk.count]
                rows += [start + item.work.read_at[i] - first for i in reads]
                targets += [item.work.targets[i] for i in reads if item.work.targets]
                wanted += [item] * len(reads)
        if not rows:
            return wanted, _NOTHING
        read = hidden[torch.tensor(rows, device=hidden.device)]
        if not targets:
            return wanted, self._head(read).float()
        return wanted, self._head(read, torch.tensor(targets, device=hidden.device)).float()

    def _open_branch(self, item: Pending, work: Generate) -> Branch:
        """The branch that all samplings of `work` begin as; its sequence is forked once it has a token of its own."""
        start, indices = int(self.table.lengths[item.row]), list(range(len(work.samplings)))
        return Branch(work, indices, work.sequence, start, extra_tokens=item.computed_tokens)

    @torch.inference_mode()
    def _head(self, hidden: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        return self.model.head(hidden, *targets)

    def _draw(self, arrays: "_RunningArrays", hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a token for each sampling of each branch, from the last hidden state of each."""
        logits = self._head(hidden)
        if len(arrays.branch_of) != len(arrays.branches):
            logits = logits[torch.from_numpy(arrays.branch_of).to(logits.device)]
        return sample(logits, arrays.samplings, (self.table.lengths[arrays.rows] - arrays.starts)[arrays.branch_of])

    def _take_in(self, arrays: "_RunningArrays", token_ids: np.ndarray, log_probabilities: np.ndarray) -> list[Done]:
        """Append what was drawn, part branches whose samplings differ, and take out those that stop."""
        chosen = set(map(id, arrays.branches))
        rest = [branch for branch in self._running if id(branch) not in chosen]
        arrays, firsts = self._part(arrays, token_ids)
        token_ids = token_ids[firsts]
        self.table.log_probabilities[arrays.rows] += log_probabilities[firsts]
        self.table.append_each(arrays.rows, token_ids)
        return self._take_out_stopped(arrays, token_ids, rest)

    def _part(self, arrays: "_RunningArrays", token_ids: np.ndarray) -> tuple["_RunningArrays", np.ndarray]:
        """Fork branches whose samplings drew different tokens, or are to part anyway; the lowest index keeps its own.

        Returns:
            All branches, and for each which of `token_ids` is its own.
        """
        branches = arrays.branches
        differs = (token_ids != token_ids[arrays.firsts][arrays.branch_of]) | arrays.apart
        if not differs.any():
            return arrays, arrays.firsts
        parted, firsts = list(branches), arrays.firsts.tolist()
        for b in np.unique(arrays.branch_of[differs]).tolist():
            branch, first = branches[b], firsts[b]
            groups: dict[int, list[int]] = {}  # places in `indices`, by token
            for place in range(len(branch.indices)):
                groups.setdefault(int(token_ids[first + place]) if branch.work.merge_equal else place, []).append(place)
            length = int(self.table.lengths[branch.sequence.row])
            for places in list(groups.values())[1:]:
                sequence = self.table.fork(branch.sequence)
                self.table.log_probabilities[sequence.row] = self.table.log_probabilities[branch.sequence.row]
                indices = [branch.indices[place] for place in places]
                parted.append(Branch(branch.work, indices, sequence, branch.start, shared=length - branch.start))
                firsts.append(first + places[0])
            branch.indices = [branch.indices[place] for place in next(iter(groups.values()))]
        self._running_arrays = _RunningArrays(parted, arrays.device)
        return self._running_arrays, np.array(firsts)

    def _take_out_stopped(self, arrays: "_RunningArrays", token_ids: np.ndarray, rest: list[Branch]) -> list[Done]:
        over = self.table.lengths[arrays.rows] >= np.minimum(arrays.limits, self.model.config.max_positions)
        flagged = np.flatnonzero(over | self._is_eos[token_ids] | self._has_newline[token_ids])
        done, stopped = [], set()
        for i in flagged.tolist():
            branch = arrays.branches[i]
            if cause := self._stop_cause(branch, int(token_ids[i]), bool(over[i])):
                done.append(self._finish(branch, cause))
                self._let_go(branch)
                stopped.add(i)
        self._running = [b for i, b in enumerate(arrays.branches) if i not in stopped] + rest
        return done

    def _stop_cause(self, branch: Branch, token_id: int, over: bool) -> StopCause | None:
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

    def _new_tokens(self, branch: Branch) -> list[int]:
        row = branch.sequence.row
        return self.table.tokens[row, branch.start : self.table.lengths[row]].tolist()

    def _finish(self, branch: Branch, cause: StopCause) -> Generated:
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


_NOTHING = torch.empty(0)


@dataclass(slots=True)
class _Flight:
    """A batch whose results are on their way.

    Attributes:
        read: whose each of `values` is, float32 `[len(read), k]`.
        scored: scores that have been read to their end.
        opened: the branch that each Generate whose pending tokens are computed goes on as.
        arrays: the branches that a token was drawn for, None without any.
        token_ids: int64 `[draws]`.
        log_probabilities: float32 `[draws]`.
    """

    read: list[Pending]
    values: torch.Tensor
    scored: list[Pending]
    opened: dict[Pending, Branch]
    arrays: "_RunningArrays | None" = None
    token_ids: torch.Tensor = _NOTHING
    log_probabilities: torch.Tensor = _NOTHING

    def owners_without_numbers(self, values: np.ndarray, log_probabilities: np.ndarray) -> frozenset[Hashable]:
        """Whose results are not numbers."""
        owners: set[Hashable] = set()
        if np.isnan(values).any():
            owners |= {self.read[i].work.owner for i in np.flatnonzero(np.isnan(values).any(axis=1))}
        if self.arrays and not (finite := np.isfinite(log_probabilities)).all():
            branches = self.arrays.branches
            owners |= {branches[b].work.owner for b in self.arrays.branch_of[~finite]}
        return frozenset(owners)


def _scored(item: Pending) -> Scored:
    assert isinstance(item.work, Score)
    values = np.concatenate(item.values) if item.values else np.zeros((0, 0), dtype=np.float32)
    return Scored(item.work, values, item.computed_tokens)


class _RunningArrays:
    """Running branches as arrays, rebuilt only when they change.

    Attributes:
        branches: whose they are.
        device: where tokens are drawn.
        branch_of: int64 `[draws]`; each branch has a draw for each of its samplings, side by side.
        firsts: int64 `[branches]`, the first draw of each.
        rows: int64 `[branches]`, of each one's sequence.
        starts: int64 `[branches]`, that sequence's length before the first sampled token.
        limits: int64 `[branches]`, the length that it stops at.
        apart: bool `[draws]`, draws that must part from the others of their branch, alike or not.
    """

    def __init__(self, branches: list[Branch], device: torch.device) -> None:
        self.branches = branches
        self.device = device
        self.find_rows()
        self.starts = np.array([b.start for b in branches])
        self.limits = np.array([b.start + b.work.max_tokens for b in branches])
        counts = np.array([len(b.indices) for b in branches])
        self.branch_of = np.repeat(np.arange(len(branches)), counts)
        self.firsts = counts.cumsum() - counts
        self.apart = np.array([not b.work.merge_equal and len(b.indices) > 1 for b in branches])[self.branch_of]

    @cached_property
    def samplings(self) -> SamplingBatch:
        """Of every draw."""
        return SamplingBatch([b.work.samplings[i] for b in self.branches for i in b.indices], self.device)

    def find_rows(self) -> None:
        """Find `rows` anew: a branch gets a sequence of its own once it has a token of its own."""
        self.rows = np.array([b.row for b in self.branches])
