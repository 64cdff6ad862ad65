"""One model on its device: it computes scheduled steps, the only code that runs tensors through a model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from espalier.engine.errors import DeviceError, MisuseError
from espalier.engine.execution.sampling import Sampler
from espalier.engine.guidance.matcher import MaskThread
from espalier.engine.memory.blocks import KVPool
from espalier.engine.memory.sequences import SequenceTable
from espalier.engine.models.model import Model
from espalier.engine.roles import VERIFIER
from espalier.engine.scheduling.planner import StepPlan
from espalier.engine.scheduling.running_samples import DecodeRows, Draws, StepResults
from espalier.kernels.layout import AttentionBatch, KVLayout, Layout, StateBatch, StateLayout, StepBatch, kv_groups
from espalier.kernels.recurrent import StateRows

_NOTHING = torch.empty(0)


WaitForResults = Callable[[], StepResults]
"""Waits for a step that may still be computing; raises `DeviceError` when it could not be computed."""


class ModelRunner:
    """Computes the steps of one model."""

    def __init__(self, role: str, model: Model, layouts: Sequence[Layout], kv_pool: KVPool) -> None:
        """Run `model` on its blocks of `kv_pool`, which lie there as `layouts` of its KV groups and states say."""
        self.role = role
        self.model = model
        self._layouts = [layout for layout in layouts if isinstance(layout, KVLayout)]
        self._states = next((layout for layout in layouts if isinstance(layout, StateLayout)), None)
        self._kv_pool = kv_pool
        self._state_memory = kv_pool.bytes.view(StateLayout.dtype) if self._states else None
        self._backend = model.decoder.backend
        self._device = model.decoder.device
        views = [
            (layer, layout.layer_view(kv_pool.bytes, place))
            for layout, layers in zip(self._layouts, kv_groups(model.config.kv_layers).values(), strict=True)
            for place, layer in enumerate(layers)
        ]
        self._layer_kvs = [layer_kv for _, layer_kv in sorted(views, key=lambda view: view[0])]
        self._closed = False
        self._sampler: tuple[DecodeRows, Sampler] | None = None
        self._masks = MaskThread()
        self._drawn = _NOTHING  # by the step that was launched last
        self._warm_up(draws=role != VERIFIER)

    @torch.inference_mode()
    def launch(self, table: SequenceTable, plan: StepPlan) -> WaitForResults:
        """Start a step; returns what waits for its results.

        On a GPU kernels are only queued. A negative token id, -1 - i, is the i-th that the step launched before draws.

        Raises:
            DeviceError: when the model cannot be run.
            MisuseError: when it was closed.
        """
        if self._closed:
            raise MisuseError("the engine was closed")
        try:
            self._backend.use_device(self._device)  # whatever thread this is
            if plan.draws is not None and not self._draws_are_warm:
                self._warm_up(draws=True)
            for layout, (sources, destinations) in zip(self._layouts, plan.copies, strict=False):
                if sources:
                    self._backend.copy_blocks(layout, self._kv_pool.bytes, sources, destinations)
            batch = build_batch(table, plan.rows, plan.first, plan.counts, self._drawn)
            if self._states:
                batch = replace(batch, states=self._begin_states(self._states, table, plan))
            hidden = self.model.decoder.layers.forward(batch, self._layer_kvs)
            self._drawn, log_probabilities, *drawn_from = self._draw(table, plan, hidden)
            fetched = self._backend.fetch([self._drawn, log_probabilities, *drawn_from, *self._read(plan, hidden)])
            return partial(self.wait, fetched, plan.draws.decode.heads if plan.draws else [])
        except (RuntimeError, MemoryError) as error:
            raise DeviceError(self.role, str(self._device), error) from error

    def wait(self, fetched: Callable[[], list[np.ndarray]], heads: list[str]) -> StepResults:
        """Wait for a step's results; `heads` are those that say something of the states drawn from."""
        try:
            token_ids, log_probabilities, *values = fetched()
            drawn_from = dict(zip(heads, values, strict=False))
            return StepResults(token_ids, log_probabilities, drawn_from, values[len(drawn_from) :])
        except (RuntimeError, MemoryError) as error:
            raise DeviceError(self.role, str(self._device), error) from error

    def close(self) -> None:
        """Let go of the KV pool, and of what steps on it were recorded as; nothing can be launched afterwards."""
        self.model.decoder.layers.release(self._layer_kvs, self._state_memory)
        self._masks.close()
        self._layer_kvs, self._state_memory, self._sampler = [], None, None
        self._drawn, self._closed = _NOTHING, True

    def _begin_states(self, layout: StateLayout, table: SequenceTable, plan: StepPlan) -> StateBatch:
        """Describe a step's states; of those to be copied, most are read in one place and written in the other.

        Only what the step also writes to is copied before, in order: a state that was kept for its prefix may have
        become another sequence's in the same step.
        """
        assert table.states is not None
        again = table.computed[plan.rows] > plan.first
        assert (again[:-1] <= again[1:]).all(), "sequences without new tokens come last"
        states = table.blocks[table.states, plan.rows, table.num_blocks[plan.rows] - 1]
        going_on = states[~again]
        written, begun = set(going_on.tolist()), dict[int, int]()
        for source, to in zip(*plan.copies[table.states], strict=True):
            if source in written:
                self._backend.copy_blocks(layout, self._kv_pool.bytes, [source], [to])
            else:
                begun[to] = source
        targets = layout.starts(going_on)
        sources = layout.starts(np.array([begun.get(state, state) for state in going_on.tolist()], dtype=np.int64))
        sources[plan.first[~again] == 0] = -1
        spans = np.concatenate(([0], plan.counts[~again].cumsum()))
        assert self._state_memory is not None
        rows = StateRows(self._state_memory, *map(torch.from_numpy, (spans, sources, targets)))
        return StateBatch(rows, torch.from_numpy(layout.starts(states[again])))

    @torch.inference_mode()
    def _warm_up(self, draws: bool) -> None:
        """Have the backend prepare steps: of a model that draws, and most verifiers do not, recorded ones too."""
        self.model.decoder.layers.warm_up(self._layer_kvs, draws, self._state_memory)
        for layout in self._layouts:
            self._backend.warm_up(layout, self._kv_pool.bytes, self.model.config.vocab_size if draws else 0)
        self._draws_are_warm = draws

    def _read(self, plan: StepPlan, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Values that Scores read, float32 `[reads of the head, k]` for each head."""
        values: list[torch.Tensor] = []
        for name, reads in plan.reads.items():
            _, rows, asked = zip(*reads, strict=True)
            read = self._states_for(name, hidden[self._to_device(np.array(rows))])  # [reads of the head, hidden]
            targets = () if asked[0] is None else (self._to_device(np.array(asked)),)
            values.append(self.model.head_named(name)(read, *targets).float())
        return values

    def _states_for(self, head: str, states: torch.Tensor) -> torch.Tensor:
        """The states that a head reads of some rows: all, or those after the last layer alone."""
        return states if head in self.model.wide_heads else self.model.decoder.layers.last_states(states)

    def _draw(self, table: SequenceTable, plan: StepPlan, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Token ids and log-probabilities `[draws]`: one draw for each sampling of each branch.

        After them what each of `decode.heads` says of the states drawn from, float32 `[draws, k]`.
        """
        if (draws := plan.draws) is None:
            return [_NOTHING, _NOTHING]
        decode = draws.decode
        if self._sampler is None or self._sampler[0] is not decode:
            self._sampler = decode, Sampler(decode.samplings, decode.branch_of, hidden.device, self._backend)
        if draws.batch_rows is not None:
            hidden = hidden[self._to_device(draws.batch_rows)]
        # Masks are made while a GPU still computes the hidden states.
        allowed = decode.allowed_tokens(self.model.config.vocab_size, self._masks)
        before = partial(self._tokens_before, table, draws)
        states = self._states_for("", hidden)
        drawn = self._sampler[1].draw(self.model.head, states, draws.step_positions, allowed, before)
        if not decode.heads:
            return [*drawn]
        branch_of = self._to_device(decode.branch_of)
        states = ((name, self._states_for(name, hidden)) for name in decode.heads)
        head_outputs = [self.model.head_named(name)(its) for name, its in states]  # [branches, k] each
        return [*drawn, *(values[branch_of].float() for values in head_outputs)]

    def _tokens_before(
        self, table: SequenceTable, draws: Draws, branches: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens before the draws of some branches; see `TokensBefore`."""
        rows, ends = draws.decode.rows[branches], draws.positions[branches]
        host = table.tokens[rows, : ends.max()]
        tokens = self._to_device(host)
        if (host[np.arange(len(rows)), ends - 1] < 0).any():  # of the step in flight
            ids = self._drawn.to(tokens.dtype)
            tokens = torch.where(tokens < 0, ids[(-1 - tokens).clamp(0, len(ids) - 1)], tokens)
        return tokens, self._to_device(ends)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return self._backend.to_device(array, self._device)


def build_batch(
    table: SequenceTable, rows: np.ndarray, first: np.ndarray, counts: np.ndarray, drawn: torch.Tensor
) -> StepBatch:
    """Describe the computation of `counts` tokens of each row, from position `first` on.

    A token below the row's `computed` count is computed again for its hidden state and not written: its block may be
    shared by now.

    Args:
        table: the model's sequences; blocks for the tokens are in place.
        rows: int64 `[S]`, distinct.
        first: int64 `[S]`, position of each row's first token.
        counts: int64 `[S]`, at least 1 each.
        drawn: int64, on the device: what the step before drew. A negative token id, -1 - i, stands for its i-th.
    """
    ends = counts.cumsum()
    starts = ends - counts
    sequence_of, row_of, positions = np.arange(len(rows)), rows, first
    if ends[-1] > len(rows):  # otherwise the batch is one token of each sequence
        sequence_of = sequence_of.repeat(counts)
        row_of = rows[sequence_of]
        positions = np.arange(ends[-1]) + (first - starts)[sequence_of]
    contexts = (first + counts).astype(np.int32)
    size, groups = table.block_size, len(table.pools) - (table.states is not None)
    written = positions >= table.computed[row_of]
    whole = bool(written.all())
    write_rows = None if whole else np.flatnonzero(written)
    write_row_of, write_positions = (row_of, positions) if whole else (row_of[written], positions[written])
    columns, offsets = np.divmod(write_positions, size)
    tensor, width = torch.from_numpy, -(-int(contexts.max()) // size)

    def places(group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Block tables of a KV group, and slabs and slots that are written to."""
        blocks, slots = table.blocks[group], table.pools[group].layout.blocks_per_slab
        slabs, block_slots = np.divmod(blocks[write_row_of, columns].astype(np.int64), slots)
        return tensor(blocks[rows, :width]), tensor(slabs), tensor(block_slots)

    nowhere = torch.zeros(len(rows), 1, dtype=torch.int32), torch.zeros(0), torch.zeros(0)
    block_tables, write_slabs, write_slots = places(0) if groups else nowhere
    attention = AttentionBatch(
        query_starts=tensor(np.concatenate(([0], ends)).astype(np.int32)),
        row_sequences=tensor(sequence_of.astype(np.int32)),
        context_lengths=tensor(contexts),
        block_tables=block_tables,
        write_slabs=write_slabs,
        write_slots=write_slots,
        write_offsets=tensor(offsets),
        write_rows=None if write_rows is None else tensor(write_rows),
    )
    if groups > 1:
        others = tuple(attention.in_other_group(*places(group)) for group in range(1, groups))
        attention = replace(attention, others=others)
    token_ids = table.tokens[row_of, positions].astype(np.int64)
    return StepBatch(tensor(token_ids), tensor(positions), attention, drawn if token_ids.min() < 0 else None)
