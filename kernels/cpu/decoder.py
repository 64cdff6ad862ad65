"""A decoder, from token ids to final hidden states, in one compiled call.

A forward pass is a row of phases (norm, product, attention, …), each cut into items, such as some rows of its result.
The threads share out the items of a phase, and wait for each other at its end.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from espalier.kernels.batch import AttentionBatch, with_drawn
from espalier.kernels.cpu import compiled
from espalier.kernels.cpu.attention import TOKENS_PER_ITEM, UNLIMITED, attend, flat_kv_pool, scratch_for
from espalier.kernels.cpu.layer_weights import StackedLayers, StackedWeights
from espalier.kernels.cpu.pointwise import rms_norm, rotate, silu_times
from espalier.kernels.cpu.products.amx import aligned
from espalier.kernels.cpu.products.int8_linear import Int8Rows, int8_rows
from espalier.kernels.cpu.products.linear import (
    PACKS,
    PANEL,
    ROWS,
    multiply_panel,
    multiply_part,
    output_buffer,
    panels_of,
    parts_of,
    store_row,
    stored_rows,
    unit,
)
from espalier.kernels.cpu.simd import flush_denormals, restore_denormals
from espalier.kernels.cpu.spans import Geometry, Spans, find_spans, geometry_of
from espalier.kernels.cpu.threads import barrier, complete_and_fetch, fetch_item, num_threads, parallel_run
from espalier.kernels.layers import Layers, LayerShape, LayerWeights, OuterWeights
from espalier.kernels.layout import LayerKV

_PHASES = 9
"""Phases of one layer: norm; qkv; rotary and store; attention; packing its result; out; norm; gate and up; down.

Another norm follows the last layer.
"""
_ROWS_PER_NORM = 8
"""Rows of one work item in phases with little work for each row."""
_ROWS_PER_ROTATION = 32
"""Rows of one work item that writes keys: neighbouring tokens of a sequence write the same cache lines."""
StoredRows = np.ndarray | Int8Rows
"""Rows as `store_row` stores them for a product."""


class _Tokens(NamedTuple):
    """Ids and positions of a step's tokens, int64 `[T]` each."""

    ids: np.ndarray
    positions: np.ndarray


class _Outer(NamedTuple):
    """`OuterWeights` as arrays, the embedding flat."""

    embedding: np.ndarray
    norm: np.ndarray
    inverse_frequencies: np.ndarray
    attention_factor: np.float32


class _Buffers(NamedTuple):
    """What a step's phases hand to one another, flat float32; products have room for what `unit` writes beyond.

    Attributes:
        hidden: the residual stream, `[T, hidden]`, rows as wide as whole panels.
        normed: `[T, hidden]`, as `store_row` stores rows.
        qkv: `[T, (heads + 2 * kv_heads) * head_dim]`, rows as wide as whole panels.
        mixed: attention's result, `[T, heads * head_dim]`.
        attended: the same as `store_row` stores rows; `mixed` itself where these are no different.
        gated: `[T, inner]`, as `store_row` stores rows.
    """

    hidden: np.ndarray
    normed: StoredRows
    qkv: np.ndarray
    mixed: np.ndarray
    attended: StoredRows
    gated: StoredRows


@numba.njit
def _embed_rows(
    item: int, tokens: _Tokens, outer: _Outer, stride: int, hidden: np.ndarray, rotary: tuple[np.ndarray, np.ndarray]
) -> None:
    """Write a few tokens' embeddings to the residual stream, and the cosines and sines of their positions."""
    (token_ids, positions), (embedding, norm, inverse, factor), (cos, sin) = tokens, outer, rotary
    width = len(norm)
    for r in range(item * _ROWS_PER_NORM, min((item + 1) * _ROWS_PER_NORM, len(token_ids))):
        start = token_ids[r] * width
        given, written = embedding[start : start + width], hidden[r * stride : r * stride + width]
        for i in range(width):
            written[i] = given[i]
        position = np.float32(positions[r])
        for i in range(len(inverse)):
            angle = position * inverse[i]
            cos[r, i], sin[r, i] = math.cos(angle) * factor, math.sin(angle) * factor


@numba.njit
def _norm_rows(item: int, x: np.ndarray, x_stride: int, weight: np.ndarray, eps: np.float32, out: np.ndarray) -> None:
    for r in range(item * _ROWS_PER_NORM, min((item + 1) * _ROWS_PER_NORM, len(out) // len(weight))):
        rms_norm(x, r * x_stride, weight, eps, out, r * len(weight))


@numba.njit
def _norm_and_store_rows(
    item: int, rows: int, x: np.ndarray, x_stride: int, weight: np.ndarray, eps: np.float32, out: StoredRows
) -> None:
    """As `_norm_rows`, but stored as the left side of a product."""
    width = len(weight)
    normed = np.empty(width, np.float32)
    for r in range(item * _ROWS_PER_NORM, min((item + 1) * _ROWS_PER_NORM, rows)):
        rms_norm(x, r * x_stride, weight, eps, normed, 0)
        store_row(normed, 0, width, 0, width, out, r)


@numba.njit
def _store_rows(item: int, rows: int, width: int, x: np.ndarray, out: StoredRows) -> None:
    for r in range(item * _ROWS_PER_NORM, min((item + 1) * _ROWS_PER_NORM, rows)):
        store_row(x, r * width, width, 0, width, out, r)


@numba.njit
def _rotate_and_store(
    item: int,
    qkv: np.ndarray,
    head_norms: np.ndarray,
    eps: np.float32,
    rotary: tuple[np.ndarray, np.ndarray],
    flat: np.ndarray,
    keys_at: int,
    values_at: int,
    geometry: Geometry,
    writes: tuple[np.ndarray, np.ndarray],
) -> None:
    """Normalise and rotate a few tokens' queries and keys in place, and put keys and values where `writes` says.

    `head_norms` are the weights `[2, head_dim]` of queries' and keys' own norms, `[0, head_dim]` without.
    """
    slab_stride, slots, block_size, heads, kv_heads, head_dim, stride = geometry
    (cos, sin), (blocks, offsets) = rotary, writes
    for row in range(item * _ROWS_PER_ROTATION, min((item + 1) * _ROWS_PER_ROTATION, len(cos))):
        for head in range(heads + kv_heads):
            if len(head_norms):
                at = row * stride + head * head_dim
                rms_norm(qkv, at, head_norms[int(head >= heads)], eps, qkv, at)
            rotate(qkv, row * stride + head * head_dim, cos[row], sin[row])
        block, offset = blocks[row], offsets[row]
        if block < 0:
            continue
        for head in range(kv_heads):
            at = block // slots * slab_stride + (block % slots * kv_heads + head) * block_size * head_dim
            key = row * stride + (heads + head) * head_dim
            value = key + kv_heads * head_dim
            for i in range(head_dim):
                flat[keys_at + at + i * block_size + offset] = qkv[key + i]
                flat[values_at + at + offset * head_dim + i] = qkv[value + i]


@numba.njit
def _add_rows(item: int, stride: int, bias: np.ndarray, out: np.ndarray) -> None:
    """Add `bias`, which may be empty, to a few rows of `out`."""
    for r in range(item * _ROWS_PER_ROTATION, min((item + 1) * _ROWS_PER_ROTATION, len(out) // stride)):
        for column in range(len(bias)):
            out[r * stride + column] += bias[column]


@numba.njit
def _gated_part(
    item: int,
    parts: int,
    threads: int,
    x: StoredRows,
    rows: int,
    inner: int,
    panels: Any,
    panels_at: int,
    num_panels: int,
    out: StoredRows,
    halves: tuple[np.ndarray, np.ndarray],
    scratch: np.ndarray,
) -> None:
    """Store one work item's share of silu(gate) * up as the left side of the next product.

    Arguments as `multiply_part`, up's panels after gate's; `halves` have room for ROWS rows of a panel's sums.
    """
    first, (start, end) = item // parts * ROWS, panels_of(item, parts, num_panels)
    count, size, (gate, up) = min(ROWS, rows - first), inner * PANEL, halves
    for panel in range(start, end):
        gate[: count * PANEL] = np.float32(0.0)
        up[: count * PANEL] = np.float32(0.0)
        following = panel + 1 if panel + 1 < end else panels_of(item + threads, parts, num_panels)[0]
        gate_at, up_at, next_at = (
            panels_at + panel * size,
            panels_at + (num_panels + panel) * size,
            panels_at + following * size,
        )
        multiply_panel(x, first, count, inner, panels, gate_at, up_at, gate, 0, PANEL, scratch)
        multiply_panel(x, first, count, inner, panels, up_at, next_at, up, 0, PANEL, scratch)
        silu_times(gate, up, count * PANEL)
        for r in range(count):
            store_row(gate, r * PANEL, num_panels * PANEL, panel * PANEL, PANEL, out, first + r)


@compiled(nogil=True)
def _forward(
    counters: np.ndarray,
    tokens: _Tokens,
    outer: _Outer,
    weights: StackedWeights,
    windows: np.ndarray,
    eps: np.float32,
    flat: np.ndarray,
    places: np.ndarray,
    geometry: Geometry,
    spans: Spans,
    writes: tuple[np.ndarray, np.ndarray],
    scale: np.float32,
    inner: int,
    packs: bool,
    parts: tuple[int, int, int],
    threads: int,
    buffers: _Buffers,
    rotary: tuple[np.ndarray, np.ndarray],
    output: np.ndarray,
) -> None:
    """One thread's share of a forward pass; every thread of it runs this with the same arguments.

    `counters` hold the next item of each phase, `places` where each layer's keys and values begin in a slab, `writes`
    the batch rows and addresses of keys and values to store, `parts` into how many parts each kind of product's inner
    dimension is cut, `packs` whether attention's result is stored again for its product, `rotary` cosines and sines;
    `output`, float32 `[T, hidden]`, receives the hidden states.
    """
    norms, head_norms, qkv_bias, out_bias, qkv_panels, out_panels, gate_up_panels, down_panels = weights
    hidden, normed, qkv, mixed, attended, gated = buffers
    qkv_parts, hidden_parts, gated_parts = parts
    rows, width, wide = len(rotary[0]), norms.shape[2], geometry.heads * geometry.head_dim
    stride = (width + PANEL - 1) // PANEL * PANEL
    hidden_count, qkv_count, gated_count = stride // PANEL, qkv_bias.shape[1] // PANEL, inner // PANEL
    tiles, few = (rows + ROWS - 1) // ROWS, (rows + _ROWS_PER_NORM - 1) // _ROWS_PER_NORM
    some, packed = (rows + _ROWS_PER_ROTATION - 1) // _ROWS_PER_ROTATION, few if packs else 0
    attend_items, attend_scratch = len(spans.items), scratch_for(geometry, spans)
    scratch, sums = unit.scratch(), aligned(2 * ROWS * PANEL)
    halves, nothing = (sums[: ROWS * PANEL], sums[ROWS * PANEL :]), sums[:0]
    unit.configure()
    denormals = flush_denormals()
    phase = 0
    for layer in range(len(norms)):
        keys_at, values_at = places[layer, 0], places[layer, 1]

        item = fetch_item(counters, phase)
        while item < few:
            if layer == 0:
                _embed_rows(item, tokens, outer, stride, hidden, rotary)
            _norm_and_store_rows(item, rows, hidden, stride, norms[layer, 0], eps, normed)
            item = complete_and_fetch(counters, phase)
        barrier(counters, phase, few)
        phase += 1

        item = fetch_item(counters, phase)
        while item < tiles * qkv_parts:
            at = layer * qkv_count * PANEL * width
            multiply_part(
                item, qkv_parts, threads, normed, rows, width, qkv_panels, at, qkv_count, qkv_bias[layer], qkv, scratch
            )
            item = complete_and_fetch(counters, phase)
        barrier(counters, phase, tiles * qkv_parts)
        phase += 1

        item = fetch_item(counters, phase)
        while item < some:
            _rotate_and_store(item, qkv, head_norms[layer], eps, rotary, flat, keys_at, values_at, geometry, writes)
            _add_rows(item, stride, out_bias[layer], hidden)  # nothing reads the residual stream until `out` adds to it
            item = complete_and_fetch(counters, phase)
        barrier(counters, phase, some)
        phase += 1

        item = fetch_item(counters, phase)
        while item < attend_items:
            attend(item, scale, windows[layer], qkv, flat, keys_at, values_at, geometry, spans, attend_scratch, mixed)
            item = complete_and_fetch(counters, phase)
        barrier(counters, phase, attend_items)
        phase += 1

        item = fetch_item(counters, phase)
        while item < packed:
            _store_rows(item, rows, wide, mixed, attended)
            item = complete_and_fetch(counters, phase)
        barrier(counters, phase, packed)
        phase += 1

        item = fetch_item(counters, phase)
        while item < tiles * hidden_parts:  # what goes into the residual stream is added to it in place
            at = layer * hidden_count * PANEL * wide
            multiply_part(
                item,
                hidden_parts,
                threads,
                attended,
                rows,
                wide,
                out_panels,
                at,
                hidden_count,
                nothing,
                hidden,
                scratch,
            )
            item = complete_and_fetch(counters, phase)
        barrier(counters, phase, tiles * hidden_parts)
        phase += 1

        item = fetch_item(counters, phase)
        while item < few:
            _norm_and_store_rows(item, rows, hidden, stride, norms[layer, 1], eps, normed)
            item = complete_and_fetch(counters, phase)
        barrier(counters, phase, few)
        phase += 1

        item = fetch_item(counters, phase)
        while item < tiles * gated_parts:
            at = layer * 2 * gated_count * PANEL * width
            _gated_part(
                item, gated_parts, threads, normed, rows, width, gate_up_panels, at, gated_count, gated, halves, scratch
            )
            item = complete_and_fetch(counters, phase)
        barrier(counters, phase, tiles * gated_parts)
        phase += 1

        item = fetch_item(counters, phase)
        while item < tiles * hidden_parts:
            at = layer * hidden_count * PANEL * inner
            multiply_part(
                item, hidden_parts, threads, gated, rows, inner, down_panels, at, hidden_count, nothing, hidden, scratch
            )
            item = complete_and_fetch(counters, phase)
        barrier(counters, phase, tiles * hidden_parts)
        phase += 1

    item = fetch_item(counters, phase)
    while item < few:
        _norm_rows(item, hidden, stride, outer.norm, eps, output)
        item = complete_and_fetch(counters, phase)
    unit.release()
    restore_denormals(denormals)
    barrier(counters, phase, few)


class CpuLayers(Layers):
    """`Layers` for float32 on CPU, with weights in float32 or int8.

    Attributes:
        tokens_per_item: see `attention.TOKENS_PER_ITEM`.
    """

    def __init__(self, count: int, load: Callable[[int], LayerWeights], shape: LayerShape, outer: OuterWeights) -> None:
        """Pack the weights of `count` layers, which `load` gives one by one, so that copies replace originals."""
        self.outer = outer
        self.tokens_per_item = TOKENS_PER_ITEM
        self._shape = shape
        self._stacked = StackedLayers(count, load, shape)
        self._windows = np.array([shape.window(index) or UNLIMITED for index in range(count)])
        self._outer = _Outer(
            embedding=outer.embedding.contiguous().view(-1).numpy(),
            norm=outer.norm.numpy(),
            inverse_frequencies=outer.inverse_frequencies.numpy(),
            attention_factor=np.float32(outer.attention_factor),
        )

    def __len__(self) -> int:
        return len(self._windows)

    def weights(self, index: int) -> LayerWeights:
        """See `Layers`."""
        return self._stacked.weights(index)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        layer_kvs: Sequence[LayerKV],
        batch: AttentionBatch,
        drawn: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Layers`."""
        s, outer, rows, (vocabulary, width) = self._shape, self.outer, len(token_ids), self.outer.embedding.shape
        ids = with_drawn(token_ids, drawn).numpy()
        if ids.view(np.uint64).max() >= vocabulary:  # read so, one below 0 is larger than any other
            raise IndexError(f"token ids are {ids.min()} to {ids.max()}, the embedding has {vocabulary} rows")
        stacked = self._stacked
        widths = (width, stacked.arrays.qkv_bias.shape[1], stacked.inner)
        stride, qkv_stride, inner = (-(-n // PANEL) * PANEL for n in widths)
        wide = s.num_heads * s.head_dim
        mixed = np.empty(rows * wide, np.float32)
        rows_of, packs = (int8_rows, True) if stacked.int8 else (stored_rows, PACKS)
        buffers = _Buffers(
            hidden=output_buffer(rows, stride),
            normed=rows_of(rows, width),
            qkv=output_buffer(rows, qkv_stride),
            mixed=mixed,
            attended=rows_of(rows, wide) if packs else mixed,
            gated=rows_of(rows, inner),
        )
        output = torch.empty(rows, width)
        geometry, half = geometry_of(layer_kvs[0], s.num_heads, qkv_stride), len(outer.inverse_frequencies)
        parallel_run(
            _forward,
            _PHASES * len(self) + 1,
            _Tokens(ids, positions.numpy()),
            self._outer,
            stacked.arrays,
            self._windows,
            np.float32(s.norm_eps),
            flat_kv_pool(layer_kvs[0]),
            np.array([(kv.keys.storage_offset(), kv.values.storage_offset()) for kv in layer_kvs]),
            geometry,
            find_spans(batch, self.tokens_per_item, geometry),
            _writes(batch, rows, layer_kvs[0].keys.shape[1]),
            np.float32(s.head_dim**-0.5),
            inner,
            packs,
            tuple(parts_of(rows, columns // PANEL) for columns in (qkv_stride, stride, inner)),
            num_threads(),
            buffers,
            (np.empty((rows, half), np.float32), np.empty((rows, half), np.float32)),
            output.view(-1).numpy(),
        )
        return output


def _writes(batch: AttentionBatch, rows: int, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Block id of each row's token, -1 where it is not written, and its position there; int64 `[T]`."""
    blocks, offsets = (batch.write_slabs * slots + batch.write_slots).numpy(), batch.write_offsets.numpy()
    if batch.write_rows is None:
        return blocks, offsets
    of_rows = np.full((2, rows), -1, dtype=np.int64)
    of_rows[:, batch.write_rows.numpy()] = blocks, offsets
    return of_rows[0], of_rows[1]
