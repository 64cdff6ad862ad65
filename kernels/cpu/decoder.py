"""A decoder, from token ids to final hidden states, in one compiled call.

A forward pass is a row of phases (norm, product, attention, …), each cut into items, such as some rows of its result.
The threads share out the items of a phase, and wait for each other at its end.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from espalier.kernels.compilation.ahead import Compilation, compilation
from espalier.kernels.cpu import compiled, phases
from espalier.kernels.cpu.attention.paged import (
    TOKENS_PER_ITEM,
    UNLIMITED,
    FlatTerms,
    attend,
    attend_compilation,
    flat_kv_pool,
    scratch_for,
)
from espalier.kernels.cpu.attention.spans import FlatKV, Geometry, Spans, find_spans, geometry_of, no_spans
from espalier.kernels.cpu.layer_weights import StackedLayers, StackedWeights
from espalier.kernels.cpu.phases import Outer, StoredRows, Tokens
from espalier.kernels.cpu.products.int8_linear import GROUP, int8_rows
from espalier.kernels.cpu.products.linear import (
    FEW_ROWS,
    PACKS,
    PANEL,
    ROWS,
    Shares,
    Weight,
    microkernel,
    multiply_phase,
    output_buffer,
    parts_of,
    phase_compilation,
    product_compilation,
    store_rows,
    stored_rows,
)
from espalier.kernels.cpu.products.tiles import LeftSide, aligned
from espalier.kernels.cpu.simd import flush_denormals, restore_denormals
from espalier.kernels.cpu.threads import num_threads, parallel_run, phase_items
from espalier.kernels.layers import (
    Activation,
    DecoderSpec,
    EmbeddingAndNorm,
    Layers,
    LayerWeights,
)
from espalier.kernels.layout import AttentionBatch, KVLayout, LayerKV, StepBatch
from espalier.kernels.linear import Kept

_PHASES = 9
"""Phases of one layer: norm; qkv; rotary and store; attention; packing its result; out; norm; gate and up; down.

Another norm follows the last layer.
"""
_KEPT_ROWS = 256
"""Rows of the steps whose buffers are kept for the next one, at most."""


class _Buffers(NamedTuple):
    """Buffers between the phases of a step, flat float32; products have room for what `microkernel` writes beyond.

    Attributes:
        hidden: the residual stream, `[T, hidden]`, rows as wide as whole panels.
        branch: the same of what attention and MLP give, where that is normalised; else empty.
        normed: `[T, hidden]`, as `pack_row` stores rows.
        qkv: `[T, (heads + 2 * kv_heads) * head_dim]`, rows as wide as whole panels.
        attn_out: attention's result, `[T, heads * head_dim]`.
        packed_attn_out: the same as `pack_row` stores rows; `attn_out` itself where these are no different.
        gated: `[T, inner]`, as `pack_row` stores rows.
    """

    hidden: np.ndarray
    branch: np.ndarray
    normed: StoredRows
    qkv: np.ndarray
    attn_out: np.ndarray
    packed_attn_out: StoredRows
    gated: StoredRows


class _Group(NamedTuple):
    """A step in one KV group.

    Attributes:
        writes: the block of each row's token, -1 where it is not written, and its position there.
    """

    spans: Spans
    writes: tuple[np.ndarray, np.ndarray]


class _KVPlaces(NamedTuple):
    """Addresses of keys and values, for all steps on one KV pool.

    Attributes:
        layer_kvs: the layers' keys and values.
        flat: the KV pool.
        places: see `_Step`.
        geometries: by KV group, in the order of `places`.
    """

    layer_kvs: Sequence[LayerKV]
    flat: np.ndarray
    places: np.ndarray
    geometries: dict[int, Geometry]


class _Step(NamedTuple):
    """One step, as compiled code reads it.

    Attributes:
        pairs: `[layers, 2]`, the first of `rotary`'s columns that are a layer's, and the first that is not.
        gelu: whether the MLP's activation is GELU, else SiLU.
        places: `[layers, 3]`, where each layer's keys and values begin in a slab, and its KV group.
        groups: the KV groups, which have all but blocks in common.
        inner: the MLP's width, filled up to whole panels.
        refined: panels of qkv that are refined; see `multiply_phase`.
        packs: whether attention's result is stored again for its product.
        parts: into how many parts the panels of qkv, of the residual stream and of the MLP are cut.
        rotary: cosines and sines.
        output: float32 `[T, hidden]`, receives the hidden states.
        taps: `[layers]`, which of `tapped` receives the states that enter a layer, normalised; -1 for none.
        raw_tap: the layer whose entering states the last of `tapped` receives as they are; -1 for none.
        tapped: float32 `[taps and raw tap, T, hidden]`.
    """

    tokens: Tokens
    outer: Outer
    weights: StackedWeights
    windows: np.ndarray
    pairs: np.ndarray
    gelu: bool
    eps: np.float32
    flat: np.ndarray
    places: np.ndarray
    groups: tuple[_Group, ...]
    scale: np.float32
    inner: int
    refined: int
    packs: bool
    parts: tuple[int, ...]
    threads: int
    buffers: _Buffers
    rotary: tuple[np.ndarray, np.ndarray]
    output: np.ndarray
    taps: np.ndarray
    raw_tap: int
    tapped: np.ndarray


class _LastStep(threading.local):
    """A thread's last step, all but whose tokens the next one of as many rows has in common with it."""

    step: _Step | None = None


@compiled(nogil=True)
def _forward(counters: int, step: _Step) -> None:
    """One thread's share of a forward pass; every thread of it runs this with the same arguments.

    `counters` are those of `parallel_run`.
    """
    (
        tokens, outer, weights, windows, pairs, gelu, eps, flat, places, groups, scale, inner, refined, packs, parts,
        threads, buffers, rotary, output, taps, raw_tap, tapped,
    ) = step  # fmt: skip
    norms, head_norms, qkv_bias, out_bias, qkv_panels, out_panels, gate_up_panels, down_panels = weights
    hidden, branch, normed, qkv, attn_out, packed_attn_out, gated = buffers
    qkv_parts, hidden_parts, gated_parts = parts
    rows, width = len(rotary[0]), norms.shape[2]
    wide = groups[0].spans.geometry.heads * groups[0].spans.geometry.head_dim
    stride = (width + PANEL - 1) // PANEL * PANEL
    hidden_count, qkv_count, gated_count = stride // PANEL, qkv_bias.shape[1] // PANEL, inner // PANEL
    few = (rows + FEW_ROWS - 1) // FEW_ROWS
    some, packed = (rows + phases.ROWS_PER_ROTATION - 1) // phases.ROWS_PER_ROTATION, few if packs else 0
    own_scratch = scratch_for(groups[0].spans)
    for group in range(1, len(groups)):
        other = scratch_for(groups[group].spans)
        if len(other) > len(own_scratch):
            own_scratch = other
    scratch, room = microkernel.scratch(), aligned((2 * ROWS + 1) * PANEL)
    sums = room[: ROWS * PANEL], room[ROWS * PANEL : 2 * ROWS * PANEL], room[2 * ROWS * PANEL :]
    nothing, no_softcap = room[:0], np.float32(0.0)
    sums[2][:] = np.float32(0.0)
    # What attention and MLP give is added to the residual stream in place, unless it is normalised first.
    post_norms = norms.shape[1] > 2
    target, no_bias = (branch, np.zeros(stride, np.float32)) if post_norms else (hidden, nothing)
    microkernel.configure()
    denormals = flush_denormals()
    phase: Any = np.int64(0)  # a plain 0 has a type of its own
    none_refined: Any = np.int64(0)
    for layer in range(len(norms)):
        kv = FlatKV(flat, places[layer, 0], places[layer, 1])
        spans, writes = groups[places[layer, 2]]

        for item in phase_items(counters, phase, few):
            if layer == 0:
                phases.embed_rows(item, tokens, outer, stride, hidden, rotary)
            elif post_norms:
                phases.add_normed_rows(item, rows, branch, stride, norms[layer - 1, 3], eps, hidden)
            if taps[layer] >= 0:
                begin = taps[layer] * rows * width
                phases.norm_rows(item, hidden, stride, outer.norm, eps, tapped[begin : begin + rows * width])
            if layer == raw_tap:
                phases.copy_rows(item, hidden, stride, width, tapped[len(tapped) - rows * width :])
            phases.norm_and_store_rows(item, rows, hidden, stride, norms[layer, 0], eps, normed)
        phase += 1

        weight = Weight(qkv_panels, layer * (qkv_count + refined) * PANEL * width, qkv_count, refined)
        shares, left = Shares(counters, phase, qkv_parts, threads), LeftSide(normed, 0, rows, width)
        multiply_phase(shares, left, weight, qkv_bias[layer], qkv, scratch)
        phase += 1

        for item in phase_items(counters, phase, some):
            phases.rotate_and_store(item, qkv, head_norms[layer], eps, rotary, pairs[layer], kv, spans.geometry, writes)
            if not post_norms:  # nothing reads the residual stream until `out` adds to it
                phases.add_rows(item, stride, out_bias[layer], hidden)
        phase += 1

        terms = FlatTerms(scale, windows[layer], no_softcap, nothing)
        for item in phase_items(counters, phase, len(spans.items)):
            attend(item, terms, qkv, kv, spans, own_scratch, attn_out)
        phase += 1

        for item in phase_items(counters, phase, packed):
            store_rows(item, rows, wide, attn_out, packed_attn_out)
        phase += 1

        weight = Weight(out_panels, layer * hidden_count * PANEL * wide, hidden_count, none_refined)
        shares, left = Shares(counters, phase, hidden_parts, threads), LeftSide(packed_attn_out, 0, rows, wide)
        multiply_phase(shares, left, weight, out_bias[layer] if post_norms else nothing, target, scratch)
        phase += 1

        for item in phase_items(counters, phase, few):
            if post_norms:
                phases.add_normed_rows(item, rows, branch, stride, norms[layer, 2], eps, hidden)
            phases.norm_and_store_rows(item, rows, hidden, stride, norms[layer, 1], eps, normed)
        phase += 1

        weight = Weight(gate_up_panels, layer * 2 * gated_count * PANEL * width, gated_count, none_refined)
        shares, left = Shares(counters, phase, gated_parts, threads), LeftSide(normed, 0, rows, width)
        phases.gated_phase(shares, left, weight, gelu, gated, sums, scratch)
        phase += 1

        weight = Weight(down_panels, layer * hidden_count * PANEL * inner, hidden_count, none_refined)
        shares, left = Shares(counters, phase, hidden_parts, threads), LeftSide(gated, 0, rows, inner)
        multiply_phase(shares, left, weight, no_bias, target, scratch)
        phase += 1

    for item in phase_items(counters, phase, few):
        if post_norms:
            phases.add_normed_rows(item, rows, branch, stride, norms[len(norms) - 1, 3], eps, hidden)
        phases.norm_rows(item, hidden, stride, outer.norm, eps, output)
    microkernel.release()
    restore_denormals(denormals)


class CpuLayers(Layers):
    """`Layers` for float32 on CPU, with weights in float32 or int8.

    Attributes:
        stacked: the weights of all layers.
        tokens_per_item: see `paged.TOKENS_PER_ITEM`.
    """

    def __init__(
        self, count: int, load: Callable[[int], LayerWeights] | Kept, spec: DecoderSpec, outer: EmbeddingAndNorm
    ) -> None:
        """Pack the weights of `count` layers, which `load` gives one by one, so that copies replace originals.

        They are packed already where they are what `kept()` gave.
        """
        self.outer = outer
        self.tokens_per_item = TOKENS_PER_ITEM
        self._kv_places: _KVPlaces | None = None  # of the KV pool that the last step was on
        self._last = _LastStep()
        self._spec = spec
        self.stacked = StackedLayers.of_kept(load) if isinstance(load, Kept) else StackedLayers.load(count, load, spec)
        self._windows = np.array([spec.window(index) or UNLIMITED for index in range(count)])
        self._places_of_taps = np.full(count, -1)
        frequencies = [(inverse.numpy(), np.full(len(inverse), f, np.float32)) for inverse, f in spec.frequencies()]
        ends = np.cumsum([0, *(len(inverse) for inverse, _ in frequencies)])
        self._pairs = np.array([ends[spec.rotary(index) :][:2] for index in range(count)])
        self._outer = Outer(
            embedding=outer.embedding.contiguous().view(-1).numpy(),
            norm=outer.norm.numpy(),
            scale=np.float32(spec.embedding_scale),
            frequencies=np.concatenate(frequencies, axis=1),
        )

    def __len__(self) -> int:
        return len(self._windows)

    def kept(self) -> Kept | None:
        """See `Layers`."""
        return self.stacked.kept()

    def _on_taps(self) -> None:
        self._places_of_taps = np.full(len(self), -1)
        self._places_of_taps[list(self.taps)] = range(len(self.taps))
        self._last = _LastStep()

    def forward(self, step: StepBatch, layer_kvs: Sequence[LayerKV]) -> torch.Tensor:
        """See `Layers`."""
        vocabulary, width = self.outer.embedding.shape
        ids = step.known_token_ids(self.outer.embedding.device).numpy()
        if ids.view(np.uint64).max() >= vocabulary:  # read so, one below 0 is larger than any other
            raise IndexError(f"token ids are {ids.min()} to {ids.max()}, the embedding has {vocabulary} rows")
        if (kv_places := self._kv_places) is None or kv_places.layer_kvs is not layer_kvs:
            kv_places = self._kv_places = self._places_of(layer_kvs)
        groups = tuple(
            self._group(step.attention.of(group), len(ids), geometry)
            for group, geometry in kv_places.geometries.items()
        )
        output = torch.empty(len(ids), width)
        tapped = torch.empty(len(self.taps) + (self.raw_tap is not None), len(ids), width)
        outputs = output.view(-1).numpy(), tapped.view(-1).numpy()
        packed = self._step(Tokens(ids, step.positions.numpy()), kv_places, groups, *outputs)
        parallel_run(_forward, _PHASES * len(self) + 1, packed)
        return torch.cat([output, *tapped], dim=1) if len(tapped) else output

    def release(self, layer_kvs: Sequence[LayerKV], states: torch.Tensor | None = None) -> None:
        """See `Layers`."""
        if self._kv_places is not None and self._kv_places.layer_kvs is layer_kvs:
            self._kv_places, self._last = None, _LastStep()

    def _places_of(self, layer_kvs: Sequence[LayerKV]) -> _KVPlaces:
        columns = -(-self.stacked.arrays.qkv_bias.shape[1] // PANEL) * PANEL
        geometries = {kv.group: geometry_of(kv, self._spec.num_heads, columns) for kv in layer_kvs}
        order = list(geometries)
        offsets = [(kv.keys.storage_offset(), kv.values.storage_offset(), order.index(kv.group)) for kv in layer_kvs]
        return _KVPlaces(layer_kvs, flat_kv_pool(layer_kvs[0]), np.array(offsets), geometries)

    def _group(self, batch: AttentionBatch, rows: int, geometry: Geometry) -> _Group:
        return _Group(find_spans(batch, self.tokens_per_item, geometry), _writes(batch, rows, geometry.slots))

    def _step(
        self, tokens: Tokens, kv_places: _KVPlaces, groups: tuple[_Group, ...], output: np.ndarray, tapped: np.ndarray
    ) -> _Step:
        """A step of all but its tokens like this thread's last one, if that had as many rows on the same KV pool."""
        rows, last = len(tokens.ids), self._last.step
        if last and last.flat is kv_places.flat and len(last.tokens.ids) == rows and last.threads == num_threads():
            return last._replace(tokens=tokens, groups=groups, output=output, tapped=tapped)
        step = self._new_step(tokens, kv_places, groups, output, tapped)
        self._last.step = step if rows <= _KEPT_ROWS else None
        return step

    def _new_step(
        self, tokens: Tokens, kv_places: _KVPlaces, groups: tuple[_Group, ...], output: np.ndarray, tapped: np.ndarray
    ) -> _Step:
        s, stacked, rows, width = self._spec, self.stacked, len(tokens.ids), self.outer.embedding.shape[1]
        pairs = self._outer.frequencies.shape[1]
        stride, inner = (-(-n // PANEL) * PANEL for n in (width, stacked.inner))
        wide, query_stride = s.num_heads * s.head_dim, groups[0].spans.geometry.query_stride
        attn_out = np.empty(rows * wide, np.float32)
        rows_of, packs = (int8_rows, True) if stacked.int8 else (stored_rows, PACKS)
        return _Step(
            tokens=tokens,
            outer=self._outer,
            weights=stacked.arrays,
            windows=self._windows,
            pairs=self._pairs,
            gelu=s.activation is Activation.GELU_TANH,
            eps=np.float32(s.norm_eps),
            flat=kv_places.flat,
            places=kv_places.places,
            groups=groups,
            scale=np.float32(s.scale),
            inner=inner,
            refined=stacked.refined,
            packs=packs,
            parts=tuple(parts_of(rows, columns // PANEL) for columns in (query_stride, stride, inner)),
            threads=num_threads(),
            buffers=_Buffers(
                hidden=output_buffer(rows, stride),
                branch=output_buffer(rows if stacked.arrays.norms.shape[1] > 2 else 0, stride),
                normed=rows_of(rows, width),
                qkv=output_buffer(rows, query_stride),
                attn_out=attn_out,
                packed_attn_out=rows_of(rows, wide) if packs else attn_out,
                gated=rows_of(rows, inner),
            ),
            rotary=(np.empty((rows, pairs), np.float32), np.empty((rows, pairs), np.float32)),
            output=output,
            taps=self._places_of_taps,
            raw_tap=-1 if self.raw_tap is None else self.raw_tap,
            tapped=tapped,
        )

    def compilation(self) -> Compilation:
        """The compilation of `forward`: of `_forward`, its largest parts on their own, others within it."""
        s, int64s = self._spec, np.zeros(1, np.int64)
        layout = KVLayout(1, s.num_kv_heads, s.head_dim, 1, torch.float32, 8 * s.num_kv_heads * s.head_dim)
        kv = layout.layer_view(torch.empty(layout.slab_bytes, dtype=torch.uint8), 0)
        kv_places, output = self._places_of([kv]), np.empty(self.outer.embedding.shape[1], np.float32)
        group = _Group(no_spans(kv_places.geometries[kv.group]), (int64s, int64s))
        step = self._new_step(Tokens(int64s, int64s), kv_places, (group,) * len(set(self._windows)), output, output)
        weights, buffers, flat, floats = step.weights, step.buffers, step.flat, step.output
        head_norms, bias, shares = weights.head_norms[0], weights.qkv_bias[0], Shares(0, 0, 0, 0)
        left, weight, geometry = (
            LeftSide(buffers.normed, 0, 0, 0),
            Weight(weights.gate_up, 0, 0, 0),
            group.spans.geometry,
        )
        return compilation(
            _forward,
            0,
            step,
            parts=[
                attend_compilation(geometry),
                phase_compilation(buffers.normed, weights.qkv),
                compilation(
                    phases.gated_phase, shares, left, weight, step.gelu, buffers.gated, (floats, floats, floats), floats
                ),
                compilation(
                    phases.rotate_and_store, 0, buffers.qkv, head_norms, step.eps, step.rotary, step.pairs[0],
                    FlatKV(flat, 0, 0), geometry, group.writes,
                ),
                compilation(phases.embed_rows, 0, step.tokens, step.outer, 0, buffers.hidden, step.rotary),
                compilation(phases.add_normed_rows, 0, 0, buffers.branch, 0, bias, step.eps, buffers.hidden),
                compilation(phases.norm_and_store_rows, 0, 0, buffers.hidden, 0, bias, step.eps, buffers.normed),
            ],
        )  # fmt: skip

    def head_compilations(self) -> list[Compilation]:
        """Compilations of products with heads: in float32, and for a language head in int8 where the layers are."""
        floats = product_compilation(stored_rows(1, 1), PACKS, np.empty(0, np.float32))
        if not self.stacked.int8:
            return [floats]
        return [product_compilation(int8_rows(1, GROUP), True, self.stacked.arrays.qkv), floats]


def _writes(batch: AttentionBatch, rows: int, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Block id of each row's token, -1 where it is not written, and its position there; int64 `[T]`."""
    blocks, offsets = batch.write_slabs.numpy() * slots + batch.write_slots.numpy(), batch.write_offsets.numpy()
    if batch.write_rows is None:
        return blocks, offsets
    of_rows = np.full((2, rows), -1, dtype=np.int64)
    of_rows[:, batch.write_rows.numpy()] = blocks, offsets
    return of_rows[0], of_rows[1]
