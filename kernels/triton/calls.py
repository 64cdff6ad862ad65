"""Attention calls of a step on a GPU: planned on the host, sent in one copy, and computed without waiting."""

from collections.abc import Sequence

import torch

from espalier.kernels.attention import Call, Terms
from espalier.kernels.layout import LayerKV, StateBatch, StepBatch
from espalier.kernels.triton.attention import attend, rows_of_tiles, tiles_of
from espalier.kernels.triton.cache import write_heads
from espalier.kernels.triton.plan import Costs, Planner
from espalier.kernels.triton.steps import DeviceStep, StepTokens, places_of

_Kind = tuple[int, int, int | None]
"""KV group, query heads and window: calls that agree in these have one plan."""


class CallPlanner:
    """Prepares the steps of one decoder; see `kernels.attention.PrepareStep`."""

    def __init__(
        self, calls: Sequence[Call], costs: Costs, chunk: int | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Prepare steps that make `calls`; `chunk` is for `plan_attention`.

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

    def __call__(self, step: StepBatch, layer_kvs: Sequence[LayerKV]) -> "TritonStepCalls":
        """Plan a step, and send it to the device in one copy."""
        read = {(layer_kvs[call.slot].group, call.heads, call.window): call.slot for call in reversed(self._calls)}
        places, tables, plans, batch = [], [], [], step.attention
        for kind, slot in read.items():
            layer_kv, (group, heads, window) = layer_kvs[slot], kind
            its = batch.of(group)
            if (planner := self._planners.get(kind)) is None:
                _, _, block_size, kv_heads, key_dim = layer_kv.keys.shape
                tiles = tiles_of(key_dim, layer_kv.values.shape[-1], layer_kv.keys.element_size())
                rows = rows_of_tiles(heads // kv_heads, tiles, fixed=self._chunk is not None)
                planner = Planner(block_size, kv_heads, rows, self._costs, [window], self._chunk)
                self._planners[kind] = planner
            tables.append(its.block_tables.numpy())
            plans += planner.plan(batch.query_starts.numpy(), batch.context_lengths.numpy(), tables[-1:])
            places.append(places_of(its, layer_kv, len(step.token_ids)))
        addresses = [each.numpy() for each in step.states.places] if step.states else []
        tokens = StepTokens(
            step.token_ids.numpy(), step.positions.numpy(), places, tables, plans, addresses, step.drawn
        )
        kv_heads = [call.kv_heads for call in self._calls]
        on_device = DeviceStep(tokens.room, len(read), kv_heads, self._costs, self._device)
        on_device.load(tokens)
        sizes = [len(each) for each in addresses]
        states = step.states and step.states.placed(*on_device.addresses.split(sizes))
        return TritonStepCalls(list(read), on_device, states)


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
