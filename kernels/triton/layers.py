"""A decoder's layers on a GPU: products by torch, all else by the kernels of this folder."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from espalier.kernels.batch import AttentionBatch
from espalier.kernels.layers import LayerShape, LayerWeights, OuterWeights
from espalier.kernels.layout import LayerKV
from espalier.kernels.linear import Linear
from espalier.kernels.rotary import rotary_table
from espalier.kernels.triton.attention import DevicePlan, attend, rows_of_tiles
from espalier.kernels.triton.cache import norm_rotate_write
from espalier.kernels.triton.plan import Costs, plan_attention
from espalier.kernels.triton.pointwise import add_norm, gated

PrepareLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]
"""Makes a product of a weight, `[out, in]`, and a bias, `[out]`."""


class TritonLayers:
    """See `kernels.layers.Layers`. What a step says of its tokens goes to the device in one copy."""

    def __init__(
        self,
        count: int,
        load: Callable[[int], LayerWeights],
        shape: LayerShape,
        outer: OuterWeights,
        prepare_linear: PrepareLinear,
        costs: Costs,
        chunk: int | None,
    ) -> None:
        """Keep `count` layers, which `load` gives one by one.

        `chunk` is for `plan_attention`; with one, tiles of attention are of one size too.
        """
        self.outer = outer
        self._layers = [load(index) for index in range(count)]
        self._products = [
            (
                prepare_linear(layer.qkv, layer.qkv_bias),
                prepare_linear(layer.out, layer.out_bias),
                prepare_linear(layer.gate_up, None),
                prepare_linear(layer.down, None),
            )
            for layer in self._layers
        ]
        self._shape = shape
        self._costs = costs
        self._chunk = chunk

    def __len__(self) -> int:
        return len(self._layers)

    def weights(self, index: int) -> LayerWeights:
        """See `Layers`."""
        return self._layers[index]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        layer_kvs: Sequence[LayerKV],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """See `Layers`."""
        s, outer = self._shape, self.outer
        step = self._upload(token_ids, positions, layer_kvs[0], batch)
        cos, sin = rotary_table(outer.inverse_frequencies, step.positions, outer.attention_factor)
        hidden = F.embedding(step.token_ids, outer.embedding)  # [T, hidden]
        added = None
        for index, (layer, products) in enumerate(zip(self._layers, self._products, strict=True)):
            qkv_product, out, gate_up, down = products
            normed = add_norm(hidden, added, layer.attention_norm, s.norm_eps)
            qkv = qkv_product(normed).view(len(hidden), -1, s.head_dim)  # [T, heads + 2 * kv_heads, head_dim]
            norms = None if layer.query_norm is None or layer.key_norm is None else (layer.query_norm, layer.key_norm)
            query = norm_rotate_write(qkv, cos, sin, norms, s.norm_eps, step.places, layer_kvs[index])
            window = s.window(index)
            mixed = attend(
                query, layer_kvs[index], step.plans[window], step.positions, step.tables, s.head_dim**-0.5, window
            )
            normed = add_norm(hidden, out(mixed.flatten(1)), layer.mlp_norm, s.norm_eps)
            added = down(gated(gate_up(normed)))
        return add_norm(hidden, added, outer.norm, s.norm_eps)

    def _upload(
        self, token_ids: torch.Tensor, positions: torch.Tensor, layer_kv: LayerKV, batch: AttentionBatch
    ) -> "_Step":
        """Plan a step's attention, and copy everything that kernels read of the step to the device."""
        s, device = self._shape, self.outer.embedding.device
        _, _, block_size, kv_heads, _ = layer_kv.keys.shape
        starts, contexts, tables = (
            tensor.numpy() for tensor in (batch.query_starts, batch.context_lengths, batch.block_tables)
        )
        windows = dict.fromkeys(s.window(index) for index in range(len(self)))
        narrow, wide = rows_of_tiles(s.num_heads // kv_heads, fixed=self._chunk is not None)
        plans = {
            window: plan_attention(
                starts,
                contexts,
                tables,
                block_size,
                kv_heads,
                narrow,
                wide,
                self._costs,
                window=window,
                chunk=self._chunk,
            )
            for window in windows
        }
        arrays = [
            places_of(batch, layer_kv, len(token_ids)).view(np.int32),
            token_ids.numpy(),
            positions.numpy(),
            tables,
        ]
        for plan in plans.values():
            counts = np.array([len(plan.narrow), len(plan.wide)], np.int32)
            arrays += [plan.narrow, plan.wide, counts, plan.rows, plan.merge_starts, plan.merges]
        places, ids, where, on_device, *of_plans = _copy_together(arrays, device)
        each = len(of_plans) // len(plans)
        return _Step(
            places.view(torch.int64),
            ids,
            where,
            on_device,
            {
                window: DevicePlan(*of_plans[each * index : each * (index + 1)], partials=plan.partials)
                for index, (window, plan) in enumerate(plans.items())
            },
        )


class _Step:
    """What the kernels of a step read, on the device; see `AttentionBatch` and `DevicePlan`."""

    def __init__(
        self,
        places: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        plans: dict[int | None, DevicePlan],
    ) -> None:
        self.places, self.token_ids, self.positions, self.tables, self.plans = (
            places,
            token_ids,
            positions,
            tables,
            plans,
        )


def places_of(batch: AttentionBatch, layer_kv: LayerKV, tokens: int) -> np.ndarray:
    """Int64 `[T]`: where each token's first head lies in its layer's keys, in elements; -1 if it is not written."""
    slab_stride, slot_stride, token_stride = layer_kv.keys.stride()[:3]
    written = (
        batch.write_slabs.numpy() * slab_stride
        + batch.write_slots.numpy() * slot_stride
        + batch.write_offsets.numpy() * token_stride
    )
    if batch.write_rows is None:
        return written
    places = np.full(tokens, -1, np.int64)
    places[batch.write_rows.numpy()] = written
    return places


def _copy_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Arrays as int32 on the device, by one copy; each begins at a multiple of 16 bytes."""
    sizes = [-(-array.size // 4) * 4 for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    begin, view = 0, host.numpy()
    for array, size in zip(arrays, sizes, strict=True):
        view[begin : begin + array.size] = array.reshape(-1)
        begin += size
    copied = host.to(device, non_blocking=True)
    return [part[: array.size].view(array.shape) for part, array in zip(copied.split(sizes), arrays, strict=True)]
