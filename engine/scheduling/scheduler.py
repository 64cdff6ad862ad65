"""One model's waiting and running work: it plans each step, and takes in the step's results."""

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from espalier.engine.errors import MisuseError, NumericalError
from espalier.engine.memory.sequences import Sequence, SequenceTable
from espalier.engine.models.model import Model
from espalier.engine.scheduling.planner import BatchPlanner, MakeRoom, StepPlan
from espalier.engine.scheduling.requests import DecodeRows, RunningRequest, WaitingRequest
from espalier.engine.work import Done, Generate, Generated, Score, Scored, StopCause, Work


@dataclass(slots=True)
class SchedulerOutput:
    """One step: the tokens to compute, the positions whose head values are read, the draws to make.

    Attributes:
        plan: the tokens and the blocks for them.
        reads: the Score that each read belongs to.
        read_rows: int64 `[reads]`, the row of the batch that each read is of.
        reads_of_head: indices of the reads of each head, by its name.
        read_targets: for each read, the token that its head is asked about; None for a head that takes none.
        scored: Scores whose last read is in this step.
        opened: for each Generate whose pending tokens end in this step, the branch that it continues as.
        decode: the branches that a token is drawn for, None without any.
        decode_rows: int64 `[branches]`, the row of the batch of each branch; None where the batch is one token of each
            branch, in order.
        draw_positions: int64 `[draws]`, the position of each draw within its step.
    """

    plan: StepPlan
    reads: list[WaitingRequest]
    read_rows: np.ndarray
    reads_of_head: dict[str, list[int]]
    read_targets: list[int | None]
    scored: list[WaitingRequest]
    opened: dict[WaitingRequest, RunningRequest]
    decode: DecodeRows | None = None
    decode_rows: np.ndarray | None = None
    draw_positions: np.ndarray | None = None


class Scheduler:
    """Queues one model's work, plans its steps and finishes its requests; plain Python on plain data.

    Attributes:
        planner: chooses the tokens of each step.
        computed_tokens: tokens computed since the scheduler was made; `steps` and `copied_blocks` count likewise.
    """

    def __init__(
        self, role: str, model: Model, table: SequenceTable, make_room: MakeRoom = lambda needy: False
    ) -> None:
        """Make an idle scheduler; `make_room` is asked when blocks run out."""
        self.role = role
        self.table, self.pool = table, table.pool
        self.planner = BatchPlanner(table, make_room)
        self.computed_tokens = self.copied_blocks = self.steps = 0
        self._model = model
        self._waiting: list[WaitingRequest] = []
        self._running: list[RunningRequest] = []
        self._decode: DecodeRows | None = None
        self._busy_rows: set[int] = set()  # of sequences that work waits or runs in place on
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
        """How many children are being sampled, without those of paused owners."""
        return len(self.planner.active(self._running))

    def waiting_tokens(self) -> int:
        """How many tokens waiting work has to compute, without that of paused owners."""
        rows = [item.work.sequence.row for item in self.planner.active(self._waiting)]
        return int(np.maximum(self.table.lengths[rows] - self.table.computed[rows], 1).sum())

    def owners(self) -> set[Hashable]:
        """Owners with waiting or running work."""
        return {target.work.owner for target in (*self._waiting, *self._running)}

    def open(self, token_ids: list[int], salt: bytes, owner: Hashable) -> Sequence:
        """A new sequence; see `Engine.open`.

        Raises:
            NoEmbeddingError: when the model has no embedding for one of the tokens.
            MisuseError: for negative ids, or more tokens than the model's context.
        """
        self._require_fits(len(token_ids))
        self._model.require_embedded(self.role, token_ids)
        return self.table.open(self.role, token_ids, salt, owner)

    def release(self, sequence: Sequence) -> None:
        """Drop a sequence.

        Raises:
            MisuseError: when the sequence is not a live one of this engine, or work waits or runs on it.
        """
        self.table.require_live(sequence)
        if sequence.row in self._busy_rows:
            raise MisuseError(f"work waits or runs on a {self.role} sequence that is released; cancel its owner first")
        self.table.release(sequence)

    def submit(self, work: Work) -> None:
        """Queue `work`.

        Raises:
            NoEmbeddingError: when the model has no embedding for one of its tokens.
            MisuseError: when the work's sequence is not a live one of this engine, already has work, has no tokens to
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
            self._model.head_named(work.head)
            self._model.require_embedded(self.role, work.token_ids)
            self._model.require_embedded(self.role, work.targets)
        self._busy_rows.add(work.sequence.row)
        if isinstance(work, Score):
            self.table.append(work.sequence, list(work.token_ids))
        self._waiting.append(WaitingRequest(work, base=length))

    def cancel(self, owner: Hashable) -> None:
        """Drop all work of `owner` and release its branches; none of its work may be in flight."""
        self.planner.forget_blocked(owner)
        self._busy_rows -= {item.row for item in self._waiting if item.work.owner == owner}
        self._waiting = [item for item in self._waiting if item.work.owner != owner]
        for branch in self._running:
            if branch.work.owner == owner:
                self._let_go(branch)
                if not branch.work.in_place:
                    self.table.release(branch.sequence)
        self._running = [branch for branch in self._running if branch.work.owner != owner]

    def drop_kv(self, owner: Hashable) -> None:
        """Free all KV of `owner`; its work continues from the same point once that KV is computed again.

        None of its work may be in flight.
        """
        self.table.drop_kv(owner)
        self.planner.forget_blocked(owner)
        for item in self._waiting:
            if item.work.owner == owner:
                item.values.clear()

    def drop_all_kv(self) -> None:
        """Free all KV of this model, for what its blocks hold is not certain; all of it is computed again."""
        self.table.drop_all()
        for item in self._waiting:
            item.values.clear()

    def schedule(self, max_tokens: int) -> SchedulerOutput | None:
        """The next step, of at most `max_tokens` tokens; None when there is nothing to run.

        The tokens that the step before drew are in the table since `update`. After this call comes `launched` once the
        model computes the step, or `drop_all_kv` if it cannot.

        Raises:
            PoolExhaustedError: when blocks run out and no owner can give any up.
        """
        plan = self.planner.plan(self._running, self._waiting, max_tokens)
        if plan is None:
            return None
        ends = plan.counts.cumsum()
        lengths = self.table.lengths[plan.rows]
        whole = np.maximum(self.table.computed[plan.rows], plan.first + plan.counts) >= lengths
        output = SchedulerOutput(plan, [], np.empty(0, np.int64), {}, [], [], {})
        sampled, places = list(plan.branches), list(range(len(plan.branches)))
        read_rows: list[int] = []
        for i, chunk in enumerate(plan.chunks, start=len(plan.branches)):
            target = chunk.target
            if isinstance(target, WaitingRequest) and isinstance(target.work, Score):
                read_rows += self._reads(output, target, target.work, int(plan.first[i]), chunk.count, int(ends[i]))
                if whole[i]:
                    output.scored.append(target)
                continue
            if not whole[i]:
                continue
            if isinstance(target, WaitingRequest):
                assert isinstance(target.work, Generate)
                output.opened[target] = self._open_branch(target, target.work, chunk.count)
                target = output.opened[target]
            sampled.append(target)
            places.append(i)
        output.read_rows = np.array(read_rows, dtype=np.int64)
        if sampled:
            if self._decode is None or self._decode.branches != sampled:
                self._decode = DecodeRows(sampled)
            decode = output.decode = self._decode
            output.draw_positions = (self.table.lengths[decode.rows] - decode.starts)[decode.branch_of]
            if len(places) < ends[-1]:  # else it is a token of each, in this order
                output.decode_rows = ends[places] - 1
        return output

    @staticmethod
    def _reads(
        output: SchedulerOutput, item: WaitingRequest, work: Score, first: int, count: int, end: int
    ) -> list[int]:
        """Add the reads of `count` tokens from position `first` on; returns their rows of the batch, before `end`."""
        first -= item.base
        reads = [i for i, place in enumerate(work.score_positions) if 0 <= place - first < count]
        if reads:
            known = len(output.reads)
            output.reads_of_head.setdefault(work.head, []).extend(range(known, known + len(reads)))
        output.reads += [item] * len(reads)
        output.read_targets += [work.targets[i] if work.targets else None for i in reads]
        return [end - count + work.score_positions[i] - first for i in reads]

    def launched(self, output: SchedulerOutput) -> None:
        """Count a step's tokens as computed, since the next step builds on them."""
        plan = output.plan
        self.table.computed[plan.rows] = np.maximum(self.table.computed[plan.rows], plan.first + plan.counts)
        for chunk in plan.chunks:
            chunk.target.count_computed(chunk.count)
            if isinstance(chunk.target, RunningRequest) and not self.table.missing(chunk.row):
                chunk.target.extra_tokens -= 1  # its last token had not been computed before
        self.copied_blocks += len(plan.copies[0])
        self.computed_tokens += int(plan.counts.sum())
        self.steps += 1

    def update(
        self,
        output: SchedulerOutput,
        values: list[np.ndarray],
        token_ids: np.ndarray,
        log_probabilities: np.ndarray,
    ) -> list[Done]:
        """Take in a step's results and return the work that it finished.

        Args:
            output: the step.
            values: float32 `[reads of the head, k]`, for each of `output.reads_of_head`.
            token_ids: int64 `[draws]`.
            log_probabilities: float32 `[draws]`.

        Raises:
            NumericalError: when what was read, or what tokens are drawn from, is not a number.
        """
        if owners := _owners_without_numbers(output, values, log_probabilities):
            raise NumericalError(self.role, owners)
        for places, rows in zip(output.reads_of_head.values(), values, strict=True):
            for place, row in zip(places, rows, strict=True):
                output.reads[place].values.append(row[None])
        done: list[Done] = [_scored(item) for item in output.scored]
        if left := {id(item) for item in (*output.scored, *output.opened)}:
            self._waiting = [item for item in self._waiting if id(item) not in left]
            self._busy_rows -= {item.row for item in output.scored}
            self._busy_rows -= {item.row for item, branch in output.opened.items() if not branch.work.in_place}
        for branch in output.opened.values():
            if not branch.work.in_place:
                branch.sequence = self.table.fork(branch.sequence)
            self.table.log_probabilities[branch.row] = 0.0
        if output.decode:
            if output.opened:
                output.decode.find_rows()
            done += self._take_in(output.decode, token_ids, log_probabilities)
        return done

    def _let_go(self, branch: RunningRequest) -> None:
        """Note that a branch has ended: a sequence generated in place takes other work again."""
        if branch.work.in_place:
            self._busy_rows.discard(branch.row)

    def _require_fits(self, tokens: int) -> None:
        if tokens > (context := self._model.config.max_positions):
            raise MisuseError(f"a sequence of {tokens} tokens is longer than the {self.role}'s context of {context}")

    def _open_branch(self, item: WaitingRequest, work: Generate, computed: int) -> RunningRequest:
        """The one branch of all samplings of `work`; its sequence is forked once it has a token of its own."""
        start, indices = int(self.table.lengths[item.row]), list(range(len(work.samplings)))
        return RunningRequest(work, indices, work.sequence, start, extra_tokens=item.computed_tokens + computed)

    def _take_in(self, decode: DecodeRows, token_ids: np.ndarray, log_probabilities: np.ndarray) -> list[Done]:
        """Append the drawn tokens, fork branches whose samplings differ, and take out branches that stop."""
        chosen = set(map(id, decode.branches))
        rest = [branch for branch in self._running if id(branch) not in chosen]
        decode, firsts = self._diverge(decode, token_ids)
        token_ids = token_ids[firsts]
        self.table.log_probabilities[decode.rows] += log_probabilities[firsts]
        self.table.append_each(decode.rows, token_ids)
        return self._take_out_stopped(decode, token_ids, rest)

    def _diverge(self, decode: DecodeRows, token_ids: np.ndarray) -> tuple[DecodeRows, np.ndarray]:
        """Fork branches whose samplings drew different tokens, or are not to be merged.

        The sampling of the lowest index keeps the branch's sequence.

        Returns:
            All branches, and for each branch the index of its token in `token_ids`.
        """
        branches = decode.branches
        differs = (token_ids != token_ids[decode.firsts][decode.branch_of]) | decode.apart
        if not differs.any():
            return decode, decode.firsts
        diverged, firsts = list(branches), decode.firsts.tolist()
        for b in np.unique(decode.branch_of[differs]).tolist():
            branch, first = branches[b], firsts[b]
            groups: dict[int, list[int]] = {}  # places in `indices`, by token
            for place in range(len(branch.indices)):
                groups.setdefault(int(token_ids[first + place]) if branch.work.merge_equal else place, []).append(place)
            length = int(self.table.lengths[branch.sequence.row])
            for places in list(groups.values())[1:]:
                sequence = self.table.fork(branch.sequence)
                self.table.log_probabilities[sequence.row] = self.table.log_probabilities[branch.sequence.row]
                indices = [branch.indices[place] for place in places]
                diverged.append(
                    RunningRequest(branch.work, indices, sequence, branch.start, shared=length - branch.start)
                )
                firsts.append(first + places[0])
            branch.indices = [branch.indices[place] for place in next(iter(groups.values()))]
        self._decode = DecodeRows(diverged)
        return self._decode, np.array(firsts)

    def _take_out_stopped(self, decode: DecodeRows, token_ids: np.ndarray, rest: list[RunningRequest]) -> list[Done]:
        over = self.table.lengths[decode.rows] >= np.minimum(decode.limits, self._model.config.max_positions)
        flagged = np.flatnonzero(over | self._is_eos[token_ids] | self._has_newline[token_ids])
        done, stopped = [], set()
        for i in flagged.tolist():
            branch = decode.branches[i]
            if cause := self._stop_cause(branch, int(token_ids[i]), bool(over[i])):
                done.append(self._finish(branch, cause))
                self._let_go(branch)
                stopped.add(i)
        self._running = [b for i, b in enumerate(decode.branches) if i not in stopped] + rest
        return done

    def _stop_cause(self, branch: RunningRequest, token_id: int, over: bool) -> StopCause | None:
        if self._is_eos[token_id]:
            return StopCause.EOS
        if branch.work.delimiter and self._has_newline[token_id]:
            text = self._model.tokenizer.decode(self._new_tokens(branch))
            # A step of nothing but newlines is no step: the delimiter counts once there is content before it.
            if branch.work.delimiter in text.lstrip():
                return StopCause.DELIMITER
        if over:
            length = int(self.table.lengths[branch.sequence.row])
            at_context = length >= self._model.config.max_positions
            return StopCause.CONTEXT if at_context else StopCause.LENGTH
        return None

    def _new_tokens(self, branch: RunningRequest) -> list[int]:
        row = branch.sequence.row
        return self.table.tokens[row, branch.start : self.table.lengths[row]].tolist()

    def _finish(self, branch: RunningRequest, cause: StopCause) -> Generated:
        row = branch.sequence.row
        token_ids = self._new_tokens(branch)
        return Generated(
            work=branch.work,
            indices=tuple(branch.indices),
            sequence=branch.sequence,
            token_ids=token_ids,
            text=self._model.tokenizer.decode(token_ids),
            log_probability=float(self.table.log_probabilities[row]),
            cause=cause,
            own_tokens=len(token_ids) - branch.shared,
            computed_tokens=branch.extra_tokens + int(self.table.computed[row]) - branch.start - branch.shared,
        )


def _owners_without_numbers(
    output: SchedulerOutput, values: list[np.ndarray], log_probabilities: np.ndarray
) -> frozenset[Hashable]:
    """Owners whose results are not numbers."""
    owners: set[Hashable] = set()
    for places, rows in zip(output.reads_of_head.values(), values, strict=True):
        if np.isnan(rows).any():
            owners |= {output.reads[places[i]].work.owner for i in np.flatnonzero(np.isnan(rows).any(axis=1))}
    if output.decode and not (finite := np.isfinite(log_probabilities)).all():
        owners |= {output.decode.branches[b].work.owner for b in output.decode.branch_of[~finite]}
    return frozenset(owners)


def _scored(item: WaitingRequest) -> Scored:
    assert isinstance(item.work, Score)
    values = np.concatenate(item.values) if item.values else np.zeros((0, 0), dtype=np.float32)
    return Scored(item.work, values, item.computed_tokens)
