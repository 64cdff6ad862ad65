"""Attention calls of a step on a GPU: planned on the host, sent in one copy, and computed without waiting."""

import logging
import operator
from collections.abc import Sequence
from dataclasses import replace

import torch

from espalier.kernels.attention import Call, CallSteps, ComputeStep, Terms
from espalier.kernels.layout import AttentionBatch, LayerKV, StateBatch, StepBatch
from espalier.kernels.recurrent import StateRows
from espalier.kernels.triton import recording
from espalier.kernels.triton.attention import attend, rows_of_tiles, tiles_of
from espalier.kernels.triton.cache import write_heads
from espalier.kernels.triton.plan import AttentionPlan, Costs, Planner
from espalier.kernels.triton.recording import RecordedSteps, Recorder, fitted, pool_of
from espalier.kernels.triton.recurrent import keep_last
from espalier.kernels.triton.steps import DeviceStep, Room, StepMemory, StepTokens, places_of

log = logging.getLogger(__name__)
_Kind = tuple[int, int, int | None]
"""KV group, query heads and window: calls that agree in these have one plan."""
_ROWS, _STEPS = 3, 3
"""Sequences and steps of a trial; its recorded step has room for a sequence more."""
_TOLERANCE = 1e-2
"""Norm of the difference of states that were replayed and launched, as a share of their norm."""


class CallPlanner(CallSteps):
    """Runs the steps of one decoder; see `CallSteps`. Those of one token to a sequence are replayed as recorded."""

    def __init__(
        self,
        calls: Sequence[Call],
        costs: Costs,
        chunk: int | None,
        dtype: torch.dtype,
        device: torch.device,
        recorder: Recorder | None = None,
    ) -> None:
        """Run steps that make `calls`; `chunk` is for `plan_attention`.

        Raises:
            UnsupportedShapeError: the kernel has no room for a call's heads.
        """
        for call in calls:
            tiles = tiles_of(call.key_dim, call.value_dim, dtype.itemsize, costs.shared_memory)
            rows_of_tiles(call.heads // call.kv_heads, tiles)
        self._calls = calls
        self._costs = costs
        self._chunk = chunk
        self._device = device
        self._planners: dict[_Kind, Planner] = {}
        self._plans: list[AttentionPlan] = []
        self._recorded = RecordedSteps(recorder)

    @property
    def recorded(self) -> bool:
        """See `CallSteps`."""
        return bool(self._recorded)

    def run(self, step: StepBatch, layer_kvs: Sequence[LayerKV], compute: ComputeStep) -> torch.Tensor:
        """See `CallSteps`; a step goes to the device in one copy."""
        tokens = self._describe(step, layer_kvs)
        memory = None if step.states is None else step.states.rows.memory
        decodes = len(step.token_ids) == len(step.attention.context_lengths)
        if decodes and (recorded := self._recorded.find(tokens, pool_of(layer_kvs, memory))):
            return recorded.run(tokens)
        on_device = self._make_step(layer_kvs, tokens.room)
        on_device.load(tokens)
        return compute(self._calls_of(on_device, layer_kvs, memory), layer_kvs)

    def warm_up(
        self, layer_kvs: Sequence[LayerKV], states: torch.Tensor | None, state_size: int, compute: ComputeStep
    ) -> None:
        """Record steps, if a trial shows that their replays give the same; see `CallSteps`."""
        if self._recorded.recorder is None:
            return
        reason, like = self._trial(layer_kvs, states, state_size, compute)
        if reason:
            log.info("decode steps are launched kernel by kernel: %s", reason)
            return
        output = like.new_empty((recording.LADDER[-1], like.shape[1]))
        self._record(self._recorded, layer_kvs, states, compute, output, recording.LADDER)

    def release(self, layer_kvs: Sequence[LayerKV], states: torch.Tensor | None) -> None:
        """See `CallSteps`."""
        self._recorded.release(pool_of(layer_kvs, states))

    def _record(
        self,
        recorded: RecordedSteps,
        layer_kvs: Sequence[LayerKV],
        states: torch.Tensor | None,
        compute: ComputeStep,
        output: torch.Tensor,
        ladder: Sequence[int],
    ) -> None:
        """Record the steps of `ladder` over a KV pool; see `RecordedSteps.record`."""
        kinds = self._kinds(layer_kvs)
        tiles = [self._tiles(layer_kvs[slot], heads) for (_, heads, _), slot in kinds.items()]

        def make_step(room: Room, memory: StepMemory | None) -> DeviceStep:
            room = fitted(room, tiles)._replace(state_rows=0 if states is None else room.tokens)
            return self._make_step(layer_kvs, room, memory)

        def compute_into(step: DeviceStep, part: torch.Tensor) -> torch.Tensor:
            return part.copy_(compute(self._calls_of(step, layer_kvs, states), layer_kvs))

        recorded.record(pool_of(layer_kvs, states), make_step, compute_into, output, ladder)

    def _trial(
        self, layer_kvs: Sequence[LayerKV], states: torch.Tensor | None, state_size: int, compute: ComputeStep
    ) -> tuple[str, torch.Tensor]:
        """Why steps cannot be replayed, if so, and hidden states: of a few sequences over KV of their own.

        Code that waits for the device cannot be recorded. Code that counts its calls, or keeps what depends on them,
        gives other states when it is replayed.
        """
        recorded, found = RecordedSteps(self._recorded.recorder), torch.empty((0, 0))
        own, other = ([_of_its_own(layer_kv) for layer_kv in layer_kvs] for _ in range(2))
        own_states, other_states = (None if states is None else states.new_zeros(_ROWS * state_size) for _ in range(2))
        for position in range(_STEPS):
            step, again = (_trial_step(position, layer_kvs, kept, state_size) for kept in (own_states, other_states))
            found = self.run(step, own, compute)
            try:
                if not recorded:
                    output = found.new_empty((_ROWS + 1, found.shape[1]))
                    self._record(recorded, other, other_states, compute, output, [_ROWS + 1])
            except RuntimeError as error:
                return str(error).partition("\n")[0], found
            tokens = self._describe(again, other)
            if (replayed := recorded.find(tokens, pool_of(other, other_states))) is None:
                return "a step has no room", found
            difference = (replayed.run(tokens) - found).float().norm() - _TOLERANCE * found.float().norm()
            if not bool(difference <= 0):
                return "replayed steps differ from launched ones", found
        return "", found

    def _kinds(self, layer_kvs: Sequence[LayerKV]) -> dict[_Kind, int]:
        """The kinds of calls, each with one of the KV layers that it reads."""
        return {(layer_kvs[call.slot].group, call.heads, call.window): call.slot for call in reversed(self._calls)}

    def _tiles(self, layer_kv: LayerKV, heads: int) -> tuple[int, int]:
        kv_heads, key_dim = layer_kv.keys.shape[3:]
        tiles = tiles_of(key_dim, layer_kv.values.shape[-1], layer_kv.keys.element_size())
        return rows_of_tiles(heads // kv_heads, tiles, fixed=self._chunk is not None)

    def _describe(self, step: StepBatch, layer_kvs: Sequence[LayerKV]) -> StepTokens:
        """Plan a step's attention, and say where its keys, values and states go."""
        places, tables, plans, batch = [], [], [], step.attention
        for kind, slot in self._kinds(layer_kvs).items():
            layer_kv, (group, heads, window) = layer_kvs[slot], kind
            its = batch.of(group)
            if (planner := self._planners.get(kind)) is None:
                block_size, kv_heads = layer_kv.keys.shape[2:4]
                tiles = self._tiles(layer_kv, heads)
                planner = Planner(block_size, kv_heads, tiles, self._costs, [window], self._chunk)
                self._planners[kind] = planner
            tables.append(its.block_tables.numpy())
            plans += planner.plan(batch.query_starts.numpy(), batch.context_lengths.numpy(), tables[-1:])
            places.append(places_of(its, layer_kv, len(step.token_ids)))
        if len(plans) != len(self._plans) or any(map(operator.is_not, plans, self._plans)):
            self._plans = plans  # else the list stays the one that the device knows
        states = [each.numpy() for each in step.states.places] if step.states else []
        ids, positions = step.token_ids.numpy(), step.positions.numpy()
        return StepTokens(ids, positions, places, tables, self._plans, states, step.drawn)

    def _make_step(self, layer_kvs: Sequence[LayerKV], room: Room, memory: StepMemory | None = None) -> DeviceStep:
        kv_heads = [call.kv_heads for call in self._calls]
        return DeviceStep(room, len(self._kinds(layer_kvs)), kv_heads, self._costs, self._device, memory)

    def _calls_of(
        self, step: DeviceStep, layer_kvs: Sequence[LayerKV], memory: torch.Tensor | None
    ) -> "TritonStepCalls":
        *rows, again = step.states
        states = None if memory is None else StateBatch(StateRows(memory, *rows), again)
        return TritonStepCalls([*self._kinds(layer_kvs)], step, states)


class TritonStepCalls:
    """See `kernels.attention.StepCalls`."""

    def __init__(self, kinds: Sequence[_Kind], step: DeviceStep, states: StateBatch | None) -> None:
        self.token_ids, self.positions, self.states = step.token_ids, step.positions, states
        self._step = step
        self._index = {kind: index for index, kind in enumerate(kinds)}
        self._of_group = {group: index for index, (group, _, _) in enumerate(kinds)}

    def write(self, layer_kv: LayerKV, key: torch.Tensor, value: torch.Tensor) -> None:
        """See `kernels.attention.StepCalls`."""
        write_heads(key, value, self._step.places[self._of_group[layer_kv.group]], layer_kv)

    def attend(self, call: Call, query: torch.Tensor, layer_kv: LayerKV, terms: Terms) -> torch.Tensor:
        """See `kernels.attention.StepCalls`."""
        index = self._index[layer_kv.group, call.heads, call.window]
        step = self._step.plans[index], self.positions, self._step.tables[index]
        return attend(query.contiguous(), layer_kv, *step, terms)

    def keep_last(self, hidden: torch.Tensor, offset: int) -> None:
        """See `kernels.attention.StepCalls`."""
        assert self.states is not None
        keep_last(hidden, self.states.rows.part(offset))


def _of_its_own(layer_kv: LayerKV) -> LayerKV:
    """Memory for the KV of a trial, cut as a layer's is: a block for each position of each sequence."""
    blocks = _ROWS * _STEPS

    def empty(like: torch.Tensor) -> torch.Tensor:
        _, of_block, *strides = like.stride()
        memory = like.new_zeros(blocks * of_block)
        return memory.as_strided((1, blocks, *like.shape[2:]), (len(memory), of_block, *strides))

    return LayerKV(empty(layer_kv.keys), empty(layer_kv.values), layer_kv.group)


def _trial_step(position: int, layer_kvs: Sequence[LayerKV], states: torch.Tensor | None, state_size: int) -> StepBatch:
    """A token of each sequence of a trial, at one position."""
    rows, position_of = torch.arange(_ROWS), torch.full((_ROWS,), position)
    block_size = layer_kvs[0].keys.shape[2] if layer_kvs else 1
    blocks = rows[:, None] * _STEPS + torch.arange(_STEPS)
    batch = AttentionBatch(
        query_starts=torch.arange(_ROWS + 1, dtype=torch.int32),
        row_sequences=rows.int(),
        context_lengths=position_of.int() + 1,
        block_tables=blocks.int(),
        write_slabs=torch.zeros_like(rows),
        write_slots=blocks[:, position // block_size].contiguous(),
        write_offsets=position_of % block_size,
        write_rows=None,
    )
    batch = replace(batch, others=(batch,) * max((layer_kv.group for layer_kv in layer_kvs), default=0))
    if states is None:
        return StepBatch(rows + position, position_of, batch)
    targets = rows * state_size
    sources = targets if position else torch.full_like(targets, -1)
    kept = StateBatch(StateRows(states, torch.arange(_ROWS + 1), sources, targets), targets[:0])
    return StepBatch(rows + position, position_of, batch, states=kept)
