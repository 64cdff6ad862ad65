"""A decoder's layers on a GPU: steps of many rows multiply by torch, all else is kernels of this folder.

In steps of few rows a layer is five launches and attention's: q, k and v with the norm before them; rotation and write;
attention; out, added to the residual stream; gate and up with norm and activation; down, added.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from espalier.kernels.attention import Terms
from espalier.kernels.layers import (
    RECORDED_WITHOUT,
    Activation,
    DecoderSpec,
    EmbeddingAndNorm,
    LayerWeights,
    TorchLayers,
    embedded,
)
from espalier.kernels.layout import LayerKV, StepBatch
from espalier.kernels.linear import Linear
from espalier.kernels.rotary import rotary_table
from espalier.kernels.triton import recording
from espalier.kernels.triton.attention import attend, rows_of_tiles, tiles_of
from espalier.kernels.triton.cache import norm_rotate_write
from espalier.kernels.triton.plan import Costs, Planner
from espalier.kernels.triton.pointwise import add_norm, gated
from espalier.kernels.triton.recording import RecordedStep, RecordedSteps, Recorder, fitted, pool_of, room_of
from espalier.kernels.triton.row_linear import FEW_ROWS, LEAST_ROWS, Norm, RowLinear
from espalier.kernels.triton.steps import DeviceStep, Room, StepMemory, StepTokens, places_of, second_stream

PrepareLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]
"""Makes a product of a weight, `[out, in]`, and a bias, `[out]`."""

_Fused = tuple[RowLinear, RowLinear, RowLinear, RowLinear]
"""The products of a layer: q, k and v, normed; out, added; gate and up, normed and gated; down, added."""


class TritonLayers(TorchLayers):
    """See `kernels.layers.Layers`. What a step says of its tokens goes to the device in one copy."""

    def __init__(
        self,
        count: int,
        load: Callable[[int], LayerWeights],
        spec: DecoderSpec,
        outer: EmbeddingAndNorm,
        prepare_linear: PrepareLinear,
        costs: Costs,
        chunk: int | None,
        recorder: Recorder | None,
    ) -> None:
        """Keep `count` layers, which `load` gives one by one.

        `chunk` is for `plan_attention`; with one, tiles of attention are of one size too. After `warm_up`, steps of one
        token to a sequence are replayed as `recorder` recorded them; all others are launched kernel by kernel.

        Raises:
            UnsupportedShapeError: when a multiprocessor has no room for heads of this size, or more query heads share a
                kv head than a tile of attention has rows.
        """
        self.outer = outer
        tiles = tiles_of(spec.head_dim, spec.head_dim, outer.embedding.element_size(), costs.shared_memory)
        self._tiles = rows_of_tiles(spec.num_heads // spec.num_kv_heads, tiles, fixed=chunk is not None)
        self._layers = [load(index) for index in range(count)]
        self._fixed = chunk is not None
        self._fused = self._fused_products(spec.activation, costs.dependent)
        self._products = [
            (
                prepare_linear(layer.qkv, layer.qkv_bias),
                prepare_linear(layer.out, layer.out_bias),
                prepare_linear(layer.gate_up, None),
                prepare_linear(layer.down, None),
            )
            for layer in self._layers
            if not (self._fused and self._fixed)  # which need no others
        ]
        self._spec = spec
        self._frequencies = spec.frequencies(outer.embedding.device)
        self._costs = costs
        self._chunk = chunk
        self._recorded = RecordedSteps(recorder)
        self._windows = list(dict.fromkeys(spec.window(index) for index in range(count)))
        self._device = outer.embedding.device
        self._planner: Planner | None = None  # once it is known how blocks are cut

    def _fused_products(self, activation: Activation, dependent: bool) -> list[_Fused]:
        """Products that norm, gate and add, of each layer; none where a layer's weights or norms do not allow it."""
        for layer in self._layers:
            post_norms = layer.attention_post_norm is not None or layer.mlp_post_norm is not None
            weights = (layer.qkv, layer.out, layer.gate_up, layer.down)
            if post_norms or any(hasattr(weight, "__tensor_flatten__") for weight in weights):  # quantised
                return []
        product = partial(RowLinear, fixed=self._fixed, dependent=dependent)
        return [
            (
                product(layer.qkv, layer.qkv_bias),
                product(layer.out, layer.out_bias),
                product(layer.gate_up, gate=activation),
                product(layer.down),
            )
            for layer in self._layers
        ]

    def _checked(self, layer: int, first: int) -> int:
        if self._recorded and layer not in (*self.taps, self.raw_tap):
            raise RuntimeError(RECORDED_WITHOUT)
        return super()._checked(layer, first)

    def recorded(self, step: StepBatch, layer_kvs: Sequence[LayerKV]) -> RecordedStep | None:
        """The recorded step that would be replayed for a step of one token to a sequence; None if it is launched."""
        return self._recorded.find(self._describe(step, layer_kvs), pool_of(layer_kvs))

    def forward(self, step: StepBatch, layer_kvs: Sequence[LayerKV]) -> torch.Tensor:
        """See `Layers`. What it returns for a step of one token to a sequence holds until the next such step."""
        tokens = self._describe(step, layer_kvs)
        decodes = len(step.token_ids) == len(step.attention.context_lengths)
        if decodes and (recorded := self._recorded.find(tokens, pool_of(layer_kvs))):
            return recorded.run(tokens)
        on_device = self._device_step(tokens.room, layer_kvs)
        on_device.load(tokens)
        return self._compute(on_device, layer_kvs)

    def warm_up(self, layer_kvs: Sequence[LayerKV], decodes: bool, states: torch.Tensor | None = None) -> None:
        """Record the steps of every number of tokens that are replayed.

        Where none are, compute one that is written nowhere, so that kernels are compiled.
        """

        def empty_step(room: Room, *on: Any) -> DeviceStep:
            return self._device_step(fitted(room, [self._tiles]), layer_kvs, *on)

        def compute(step: DeviceStep, output: torch.Tensor | None = None) -> torch.Tensor:
            return self._compute(step, layer_kvs, output)

        if self._recorded.recorder is None or not decodes:
            for tokens in (1, LEAST_ROWS + 1, FEW_ROWS + 1):  # with items, and products, of each kind
                compute(empty_step(room_of(tokens)))
            return
        embedding, parts = self.outer.embedding, 1 + len(self.taps) + (self.raw_tap is not None)
        size = recording.LADDER[-1], parts * embedding.shape[1]
        output = torch.empty(size, dtype=embedding.dtype, device=self._device)
        beside = second_stream(self._device)

        def recorded_step(room: Room, memory: StepMemory | None) -> DeviceStep:
            # Kernels that begin before the last one has ended stand behind one launch, not behind two streams.
            return empty_step(room, memory, beside if room.tokens > FEW_ROWS else None)

        self._recorded.record(pool_of(layer_kvs), recorded_step, compute, output)

    def release(self, layer_kvs: Sequence[LayerKV], states: torch.Tensor | None = None) -> None:
        """See `Layers`: another KV pool may come to lie where this one was, with its blocks cut in another way."""
        self._recorded.release(pool_of(layer_kvs))

    def _device_step(self, room: Room, layer_kvs: Sequence[LayerKV], *on: Any) -> DeviceStep:
        kv_heads = layer_kvs[0].keys.shape[3:4]
        return DeviceStep(room, len(self._windows), kv_heads, self._costs, self._device, *on)

    def _compute(
        self, step: DeviceStep, layer_kvs: Sequence[LayerKV], output: torch.Tensor | None = None
    ) -> torch.Tensor:
        """States of a step's tokens, as `forward` returns them; waits for nothing and asks nothing of the host.

        They are written to `output`, if there is one.
        """
        s, outer = self._spec, self.outer
        fused = self._fused if self._fixed or len(step.token_ids) <= FEW_ROWS else []
        attention = self._prepared_attention(step, layer_kvs, dependent=bool(fused) and self._costs.dependent)
        hidden = embedded(step.token_ids, outer.embedding, s.embedding_scale)  # [T, hidden]
        added = added_norm = squares = None
        tapped: list[torch.Tensor] = []
        raw: list[torch.Tensor] = []
        for index, layer in enumerate(self._layers):
            if squares is None:
                normed = add_norm(hidden, added, layer.attention_norm, s.norm_eps, added_norm)
                qkv = (fused or self._products)[index][0](normed)
            else:
                qkv = fused[index][0](hidden, Norm(layer.attention_norm, squares, s.norm_eps))
            if index in self.taps:
                tapped.append(add_norm(hidden, None, outer.norm, s.norm_eps))
            if index == self.raw_tap:
                raw.append(hidden.clone())
            mixed = attention(index, qkv)
            if fused:
                _, out, gate_up, down = fused[index]
                squares = out.add_to(hidden, mixed)
                squares = down.add_to(hidden, gate_up(hidden, Norm(layer.mlp_norm, squares, s.norm_eps)))
            else:
                _, out, gate_up, down = self._products[index]
                normed = add_norm(hidden, out(mixed), layer.mlp_norm, s.norm_eps, layer.attention_post_norm)
                added, added_norm = down(gated(gate_up(normed), s.activation)), layer.mlp_post_norm
        if tapped or raw:
            last = add_norm(hidden, added, outer.norm, s.norm_eps, added_norm)
            return torch.cat([last, *tapped, *raw], dim=1, out=output)
        return add_norm(hidden, added, outer.norm, s.norm_eps, added_norm, output)

    def _prepared_attention(
        self, step: DeviceStep, layer_kvs: Sequence[LayerKV], dependent: bool
    ) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """A step's attention: of a layer and its queries, keys and values `[T, any]`, gives `[T, heads * head_dim]`."""
        s = self._spec
        of_window = dict(zip(self._windows, zip(step.plans, step.places, step.tables, strict=True), strict=True))
        rotaries = [rotary_table(inverse, step.positions, factor) for inverse, factor in self._frequencies]

        def attention(index: int, qkv: torch.Tensor) -> torch.Tensor:
            layer, layer_kv = self._layers[index], layer_kvs[index]
            heads = qkv.view(len(qkv), -1, s.head_dim)  # [T, heads + 2 * kv_heads, head_dim]
            norms = None if layer.query_norm is None or layer.key_norm is None else (layer.query_norm, layer.key_norm)
            plan, places, tables = of_window[window := s.window(index)]
            rotary = rotaries[s.rotary(index)]
            query = norm_rotate_write(heads, *rotary, norms, s.norm_eps, places, layer_kv, dependent)
            return attend(query, layer_kv, plan, step.positions, tables, Terms(s.scale, window)).flatten(1)

        return attention

    def _describe(self, step: StepBatch, layer_kvs: Sequence[LayerKV]) -> StepTokens:
        """Plan a step's attention, and say where its keys and values go."""
        if self._planner is None:
            _, _, block_size, kv_heads, _ = layer_kvs[0].keys.shape
            self._planner = Planner(block_size, kv_heads, self._tiles, self._costs, self._windows, self._chunk)
        of_window = {self._spec.window(index): layer_kvs[index] for index in reversed(range(len(layer_kvs)))}
        batch = step.attention
        groups = [(kv := of_window[window], batch.of(kv.group)) for window in self._windows]
        tables = [its.block_tables.numpy() for _, its in groups]
        plans = self._planner.plan(batch.query_starts.numpy(), batch.context_lengths.numpy(), tables)
        places = [places_of(its, layer_kv, len(step.token_ids)) for layer_kv, its in groups]
        return StepTokens(step.token_ids.numpy(), step.positions.numpy(), places, tables, plans, drawn=step.drawn)
