"""The scheduler of one model: its waiting and running work, the plan of each step, and what becomes of its results."""

from collections.abc import Hashable, Sequence
from itertools import pairwise

import numpy as np

from espalier.engine.errors import MisuseError, NumericalError
from espalier.engine.memory.sequences import KVSequence, SequenceTable
from espalier.engine.models.model import Model
from espalier.engine.scheduling.planner import BatchPlanner, MakeRoom, Read, StepPlan, WaitingRequest
from espalier.engine.scheduling.running_samples import DecodeRows, Draws, RunningRequest, RunningSamples, StepResults
from espalier.engine.speculation.speculation import Speculation
from espalier.engine.work import Done, Generate, Score, Scored, Work


class Scheduler:
    """Queues one model's work, plans its steps and finishes its requests; plain Python on plain data.

    Attributes:
        planner: chooses the tokens of each step.
        speculation: what drafts tokens for the branches; None for nobody.
    """

    def __init__(
        self, role: str, model: Model, table: SequenceTable, make_room: MakeRoom = lambda requesters: False
    ) -> None:
        """Make an idle scheduler; `make_room` is asked when blocks run out."""
        self.role = role
        self.table, self.pools = table, table.pools
        self.planner = BatchPlanner(table, make_room)
        self.speculation: Speculation | None = None
        self._model = model
        self._waiting: list[WaitingRequest] = []
        self._branches = RunningSamples(table, model)
        self._in_flight: list[StepPlan] = []  # launched, and not taken in yet; the oldest first
        self._busy_rows: set[int] = set()  # of sequences that work waits or runs in place on

    @property
    def busy(self) -> bool:
        """True if there is anything to run."""
        return bool(self._waiting or self._branches.running)

    @property
    def running_branches(self) -> int:
        """Number of children being sampled, without those of paused and throttled owners."""
        return len(self.planner.active(self._ready()[0]))

    def waiting_tokens(self) -> int:
        """Number of tokens that waiting work has to compute, without that of paused and throttled owners."""
        rows = [item.work.sequence.row for item in self.planner.active(self._ready()[1])]
        return int(np.maximum(self.table.lengths[rows] - self.table.computed[rows], 1).sum())

    def owners(self) -> set[Hashable]:
        """Owners with waiting or running work, paused or not."""
        return {target.work.owner for target in (*self._waiting, *self._branches.running)}

    def open(self, token_ids: list[int], salt: bytes, owner: Hashable) -> KVSequence:
        """A new sequence; see `Engine.open`.

        Raises:
            NoEmbeddingError: when the model has no embedding for one of the tokens.
            MisuseError: for negative ids, or more tokens than the model's context.
        """
        self._require_fits(len(token_ids))
        self._model.require_embedded(self.role, token_ids)
        return self.table.open(self.role, token_ids, salt, owner)

    def release(self, sequence: KVSequence) -> None:
        """Drop a sequence.

        Raises:
            MisuseError: when the sequence is not a live one of this engine, or work waits or runs on it.
        """
        self.table.require_live(sequence)
        if sequence.row in self._busy_rows:
            raise MisuseError(f"work waits or runs on a {self.role} sequence that is released; cancel its owner first")
        self.table.release(sequence)

    def append(self, sequence: KVSequence, token_ids: Sequence[int], instead_of: int = 0) -> None:
        """Write tokens at the end of a sequence; see `Engine.append`.

        Raises:
            NoEmbeddingError: when the model has no embedding for one of the tokens.
            MisuseError: when the sequence takes no tokens now, or not as many.
        """
        self._require_free(sequence)
        length = int(self.table.lengths[sequence.row]) - instead_of
        self._require_fits(length + len(token_ids))
        self._model.require_embedded(self.role, token_ids)
        if instead_of:
            self.table.truncate(sequence.row, length)
        self.table.append(sequence, list(token_ids))

    def works_on(self, sequence: KVSequence) -> bool:
        """True if work waits on a sequence, or runs in place on it."""
        return sequence.row in self._busy_rows

    def submit(self, work: Work) -> None:
        """Queue `work`.

        Raises:
            NoEmbeddingError: when the model has no embedding for one of its tokens.
            MisuseError: for work that could not be run; see `Engine.submit`.
        """
        new, known = (), ()
        if isinstance(work, Score):
            _require_reads_in_order(work)
            new, known = work.token_ids, (*work.token_ids, *work.targets)
        elif not work.samplings or (work.in_place and len(work.samplings) != 1) or work.max_tokens < 1:
            raise MisuseError("Generate needs a sampling for each child, exactly one in place, and max_tokens >= 1")
        self._require_free(work.sequence)
        length = int(self.table.lengths[work.sequence.row])
        if not length and not new:
            raise MisuseError("an empty sequence has nothing to compute")
        self._require_fits(length + len(new) if isinstance(work, Score) else length + 1)  # a child has one at least
        if work.head:
            self._model.head_named(work.head)
        self._model.require_embedded(self.role, known)
        self._busy_rows.add(work.sequence.row)
        if new:
            self.table.append(work.sequence, list(new))
        self._waiting.append(WaitingRequest(work, base=length))

    def cancel(self, owner: Hashable) -> None:
        """Drop all work of `owner` and release its branches; none of its work may be in flight."""
        self.planner.forget_blocked(owner)
        self._waiting = [item for item in self._waiting if item.work.owner != owner]
        for branch in self._branches.running:
            if branch.work.owner == owner and not branch.work.in_place:
                self.table.release(branch.sequence)
        running = self._branches.running = [each for each in self._branches.running if each.work.owner != owner]
        # Made anew, as a step that failed may have lost track of its rows.
        self._busy_rows = {item.row for item in self._waiting} | {each.row for each in running if each.work.in_place}

    def drop_kv(self, owner: Hashable) -> None:
        """Free all KV of `owner`; its work continues from the same point once that KV is computed again.

        None of its work may be in flight.
        """
        self._drop_kv_of(self.table.of_owner(owner))
        self.planner.forget_blocked(owner)

    def drop_some_kv(self, owner: Hashable, working: bool) -> bool:
        """Free the KV of an owner's sequences without work, or of the shortest of several that are `working`.

        None of its work may be in flight.

        Returns:
            Whether there was any.
        """
        targets = [t for t in (*self._waiting, *self._branches.running) if t.work.owner == owner]
        if working:
            shortest = self.planner.defer_one(targets)
            dropped = [shortest] if shortest else []
        else:
            rows = {target.row for target in targets}
            idle = [sequence for sequence in self.table.of_owner(owner) if sequence.row not in rows]
            dropped = [sequence for sequence in idle if self.table.num_blocks[sequence.row]]
        self._drop_kv_of(dropped)
        return bool(dropped)

    def drop_all_kv(self, cached: bool = False) -> None:
        """Free all KV of this model, for what its blocks hold is not certain; all of it is computed again.

        Steps in flight are forgotten: what they draw is drawn again. `cached` is as of `SequenceTable.drop_all`.
        """
        self._in_flight.clear()
        self.table.drop_all(cached)
        for item in self._waiting:
            item.values.clear()

    def replace_model(self, model: Model) -> None:
        """Go on with other weights, by which all KV is computed again; no step may be in flight.

        Args:
            model: of the same shape, with the same tokenizer and tokens that end a generation.
        """
        self.drop_all_kv(cached=True)
        self._model = model

    def schedule(self, max_tokens: int) -> StepPlan | None:
        """The next step, of at most `max_tokens` tokens; None when there is nothing to run.

        After this call comes `launched` once the model computes the step, or `drop_all_kv` if it cannot.

        Raises:
            PoolExhaustedError: when blocks run out and no owner can give any up.
        """
        # Nobody gives up KV for those who are only ahead of others: without them throttled there may be room.
        may_preempt = not self._in_flight and not self.planner.throttled
        running, waiting = self._ready()
        if self.speculation:
            self.planner.drafting = self.speculation.draft(self.planner.active(running))
        plan = self.planner.plan(running, waiting, max_tokens, may_preempt)
        if plan is None:
            return None
        plan.draft_length = self.speculation.length if self.speculation else 0
        ends = plan.counts.cumsum()
        whole = np.maximum(self.table.computed[plan.rows], plan.first + plan.counts) >= self.table.lengths[plan.rows]
        sampled, places = list(plan.branches), list(range(len(plan.branches)))
        for i, chunk in enumerate(plan.chunks, start=len(plan.branches)):
            target = chunk.target
            if isinstance(target, WaitingRequest) and isinstance(target.work, Score):
                if reads := _reads(target, target.work, int(plan.first[i]), chunk.count, int(ends[i])):
                    plan.reads.setdefault(target.work.head, []).extend(reads)
                if whole[i]:
                    plan.scored.append(target)
            elif whole[i]:
                if isinstance(target, WaitingRequest):  # it is forked once it has a token of its own
                    work = target.work
                    assert isinstance(work, Generate)
                    count = chunk.count + target.computed_tokens
                    matcher, indices = work.matcher and work.matcher.copy(), list(range(len(work.samplings)))
                    length = int(self.table.lengths[target.row])
                    branch = RunningRequest(work, indices, work.sequence, length, 0, count, matcher)
                    target = plan.opened.setdefault(target, branch)
                sampled.append(target)
                places.append(i)
        if sampled:
            # Without chunks the batch is a token of each, in this order.
            batch_rows = ends[places] - 1 if len(places) < ends[-1] else None
            plan.draws = self._branches.draws(sampled, list(plan.opened.values()), batch_rows)
        return plan

    def _ready(self) -> tuple[list[RunningRequest], list[WaitingRequest]]:
        """Running and waiting work that another step can go on with."""
        return self._branches.running, self._waiting

    def launched(self, plan: StepPlan) -> None:
        """Count a step's tokens as computed, since the next step builds on them."""
        self._in_flight.append(plan)
        known = np.minimum(plan.first + plan.counts, self.table.lengths[plan.rows])  # without drafts
        self.table.computed[plan.rows] = np.maximum(self.table.computed[plan.rows], known)
        self.table.free_passed(plan.rows)  # on a GPU what the blocks are used for next is queued behind this step
        for chunk in plan.chunks:
            chunk.target.computed_tokens += chunk.count
            if isinstance(chunk.target, RunningRequest) and not self.table.missing(chunk.target.row):
                chunk.target.computed_tokens -= 1  # its last token had not been computed before
        self.table.counters.copied_blocks += plan.copied_blocks
        self.table.counters.batch_rows.add(len(plan.rows))
        self.table.counters.batch_tokens.add(int(plan.counts.sum()))

    def update(self, plan: StepPlan, results: StepResults) -> list[Done]:
        """Process the results of a step, the oldest of those in flight, and return the work that it finished.

        Raises:
            NumericalError: when what was read, or what tokens are drawn from, is not a number.
        """
        self._in_flight.remove(plan)
        if owners := _owners_without_numbers(plan, results):
            raise NumericalError(self.role, owners)
        for reads, rows in zip(plan.reads.values(), results.values, strict=True):
            for read, row in zip(reads, rows, strict=True):
                read.item.values.append(row[None])
        done: list[Done] = [_scored(item) for item in plan.scored]
        if left := {id(item) for item in (*plan.scored, *plan.opened)}:
            self._waiting = [item for item in self._waiting if id(item) not in left]
            self._busy_rows -= {item.row for item in plan.scored}
            self._busy_rows -= {item.row for item, branch in plan.opened.items() if not branch.work.in_place}
        if plan.draws:
            finished = self._branches.process_outputs(plan.draws, results)
            if self.speculation:
                self.speculation.update(plan.draws, finished)
            self._busy_rows -= {one.sequence.row for one in finished if one.work.in_place}
            done += finished
        return done

    def _drop_kv_of(self, sequences: list[KVSequence]) -> None:
        self.table.drop_kv_of(sequences)
        for item in self._waiting:
            if item.work.sequence in sequences:
                item.values.clear()

    def _require_free(self, sequence: KVSequence) -> None:
        self.table.require_live(sequence)
        if sequence.row in self._busy_rows:
            raise MisuseError("a sequence takes one piece of work at a time")

    def _require_fits(self, tokens: int) -> None:
        if tokens > (context := self._model.config.max_positions):
            raise MisuseError(f"a sequence of {tokens} tokens is longer than the {self.role}'s context of {context}")


def _require_reads_in_order(work: Score) -> None:
    reads = work.score_positions
    if reads and (reads[0] < 0 or reads[-1] >= len(work.token_ids)):
        raise MisuseError("Score reads outside its own tokens")
    if any(one >= next_ for one, next_ in pairwise(reads)):
        raise MisuseError("Score reads at places that do not ascend")
    if work.targets and len(work.targets) != len(reads):
        raise MisuseError("Score has a target for each of its reads, or none")


def _reads(item: WaitingRequest, work: Score, first: int, count: int, end: int) -> list[Read]:
    """Reads of `count` tokens from position `first` on, whose rows of the batch are those before `end`."""
    targets, first = work.targets or (None,) * len(work.score_positions), first - item.base
    reads = zip(work.score_positions, targets, strict=True)
    return [Read(item, end - count + i - first, target) for i, target in reads if 0 <= i - first < count]


def _owners_without_numbers(plan: StepPlan, results: StepResults) -> frozenset[Hashable]:
    """Owners whose results are not numbers."""
    owners: set[Hashable] = set()
    for reads, rows in zip(plan.reads.values(), results.values, strict=True):
        owners |= {reads[i].item.work.owner for i in np.flatnonzero(np.isnan(rows).any(axis=1))}
    if plan.draws:
        decode = plan.draws.decode
        finite = np.isfinite(results.log_probabilities)
        for name, values in results.drawn_from.items():
            reads_it = np.array([branch.work.head == name for branch in decode.branches], dtype=bool)[decode.branch_of]
            finite &= np.isfinite(values).all(axis=1) | ~reads_it
        if plan.draws.depths is not None and not finite.all():
            finite |= ~plan.draws.reached(results.token_ids)[decode.branch_of]
        owners |= {decode.branches[b].work.owner for b in decode.branch_of[~finite]}
    return frozenset(owners)


def _scored(item: WaitingRequest) -> Scored:
    assert isinstance(item.work, Score)
    values = np.concatenate(item.values) if item.values else np.zeros((0, 0), dtype=np.float32)
    return Scored(item.work, values, item.computed_tokens)


class LaunchAheadScheduler(Scheduler):
    """A `Scheduler` whose steps are launched before the results of the step before are known, for GPUs.

        step k       scheduled, launched | ............................ | results
        step k + 1                       | scheduled, launched | ...... |         | results
                                           its tokens: -1 - i for draw i of step k

    The draws of the step in flight are tokens of the next one, though only the device knows them: a branch goes on as
    if its sampling of the lowest index drew what all of them drew, and nothing that stops it. What turns out otherwise
    is dropped. A guided branch waits for its token instead: what it may draw next depends on it.

    Drafts are verified behind tokens that are known, so while branches are to have any, those in flight are left out
    until their results are there.
    """

    def schedule(self, max_tokens: int) -> StepPlan | None:
        """See `Scheduler`."""
        if self._in_flight and (draws := self._in_flight[-1].draws) and not self._waits_for(draws):
            self._append_placeholders(draws)
        return super().schedule(max_tokens)

    def update(self, plan: StepPlan, results: StepResults) -> list[Done]:
        """See `Scheduler`; drops from the next step what it draws for branches that have stopped or diverged."""
        if plan.draws and (live := plan.draws.live) is not None:
            results = results.of(live)
        running = len(self._branches.running)
        done = super().update(plan, results)
        if done or len(self._branches.running) != running:
            for step in self._in_flight:
                step.draws = step.draws and self._select_live(step.draws)
        return done

    def drop_all_kv(self, cached: bool = False) -> None:
        """See `Scheduler`; takes the tokens that stand for draws away again."""
        for branch in self._branches.running:
            while self.table.tokens[branch.row, self.table.lengths[branch.row] - 1] < 0:
                self.table.lengths[branch.row] -= 1
        super().drop_all_kv(cached)

    def _ready(self) -> tuple[list[RunningRequest], list[WaitingRequest]]:
        running, waiting = super()._ready()
        for step in self._in_flight[-1:]:
            leaving = {id(item) for item in (*step.scored, *step.opened)}
            if (draws := step.draws) and self._waits_for(draws):
                leaving |= set(map(id, draws.decode.branches))
            elif draws:  # its last token, whatever it is
                full = np.flatnonzero(self._branches.are_full(draws.decode, draws.positions))
                leaving |= {id(draws.decode.branches[i]) for i in (*full, *draws.decode.matchers)}
            running = [branch for branch in running if id(branch) not in leaving]
            waiting = [item for item in waiting if id(item) not in leaving]
        return running, waiting

    def _waits_for(self, draws: Draws) -> bool:
        """True if branches of a step in flight go on only when its results are there."""
        return draws.depths is not None or (self.speculation is not None and self.speculation.length > 0)

    def _append_placeholders(self, draws: Draws) -> None:
        """Give each branch of a step in flight that can go on a token that stands for the one being drawn."""
        decode, positions = draws.decode, draws.positions
        goes_on = (self.table.lengths[decode.rows] == positions) & ~self._branches.are_full(decode, positions)
        goes_on &= np.array([not (b.matcher or b in draws.opened) for b in decode.branches], dtype=bool)
        if goes_on.any():
            firsts = decode.firsts if draws.live is None else draws.live[decode.firsts]
            self.table.write_tokens(decode.rows[goes_on], positions[goes_on], -1 - firsts[goes_on])

    def _select_live(self, draws: Draws) -> Draws | None:
        """The draws of a step in flight, without those for branches that have stopped and samplings that diverged."""
        decode, alive = draws.decode, set(map(id, (*self._branches.running, *draws.opened)))
        live = [
            draw
            for draw, (b, index) in enumerate(zip(decode.branch_of.tolist(), decode.indices, strict=True))
            if id(branch := decode.branches[b]) in alive and index in branch.indices
        ]
        if live and len(live) < len(decode.indices):
            draws.live = np.array(live, dtype=np.int64)
            draws.decode = DecodeRows([branch for branch in decode.branches if id(branch) in alive])
            draws.step_positions = draws.step_positions[draws.live]
        return draws if live else None
