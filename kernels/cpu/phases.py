"""Work items of the phases of a decoder's forward pass: some rows of a result, or a part of a product."""

import math
from typing import NamedTuple

import numpy as np

from espalier.kernels.compilation.compiler import INNER, inner
from espalier.kernels.cpu import compiled
from espalier.kernels.cpu.attention.spans import FlatKV, Geometry
from espalier.kernels.cpu.pointwise import gelu_times, rms_norm, rotate, silu_times
from espalier.kernels.cpu.products.int8_linear import Int8Rows
from espalier.kernels.cpu.products.linear import (
    FEW_ROWS,
    PANEL,
    ROWS,
    Shares,
    Weight,
    multiply_panel,
    pack_row,
    panels_of,
)
from espalier.kernels.cpu.products.tiles import LeftSide
from espalier.kernels.cpu.simd import LANES, Strided
from espalier.kernels.cpu.threads import phase_items

ROWS_PER_ROTATION = 32
"""Rows of one work item that writes keys: neighbouring tokens of a sequence write the same cache lines."""
StoredRows = np.ndarray | Int8Rows
"""Rows as `pack_row` stores them for a product."""


class Tokens(NamedTuple):
    """Ids and positions of a step's tokens, int64 `[T]` each."""

    ids: np.ndarray
    positions: np.ndarray


class Outer(NamedTuple):
    """`EmbeddingAndNorm` as arrays, the embedding flat, and what else is done to tokens before the first layer.

    Attributes:
        scale: factor on embeddings.
        frequencies: float32 `[2, pairs of all kinds of rotary positions]`, inverse frequencies and factors on cosines
            and sines.
    """

    embedding: np.ndarray
    norm: np.ndarray
    scale: np.float32
    frequencies: np.ndarray


@compiled(**INNER)
def embed_rows(
    item: int, tokens: Tokens, outer: Outer, stride: int, hidden: np.ndarray, rotary: tuple[np.ndarray, np.ndarray]
) -> None:
    """Write a few tokens' embeddings to the residual stream, and the cosines and sines of their positions."""
    (token_ids, positions), (embedding, norm, scale, (inverse, factors)), (cos, sin) = tokens, outer, rotary
    width = len(norm)
    for r in range(item * FEW_ROWS, min((item + 1) * FEW_ROWS, len(token_ids))):
        start = token_ids[r] * width
        given, written = embedding[start : start + width], hidden[r * stride : r * stride + width]
        for i in range(width):
            written[i] = given[i] * scale
        position = np.float32(positions[r])
        for i in range(len(inverse)):
            angle = position * inverse[i]
            cos[r, i], sin[r, i] = math.cos(angle) * factors[i], math.sin(angle) * factors[i]


@inner
def norm_rows(item: int, x: np.ndarray, x_stride: int, weight: np.ndarray, eps: np.float32, out: np.ndarray) -> None:
    """Normalise a few rows of `x`, `x_stride` apart, into `out`, `[T, len(weight)]`."""
    for r in range(item * FEW_ROWS, min((item + 1) * FEW_ROWS, len(out) // len(weight))):
        rms_norm(x, r * x_stride, weight, eps, out, r * len(weight))


@compiled(**INNER)
def copy_rows(item: int, x: np.ndarray, x_stride: int, width: int, out: np.ndarray) -> None:
    """Copy a few rows of `x`, `x_stride` apart, into `out`, `[T, width]`."""
    for r in range(item * FEW_ROWS, min((item + 1) * FEW_ROWS, len(out) // width)):
        out[r * width : (r + 1) * width] = x[r * x_stride : r * x_stride + width]


@compiled(**INNER)
def add_normed_rows(
    item: int, rows: int, x: np.ndarray, stride: int, weight: np.ndarray, eps: np.float32, hidden: np.ndarray
) -> None:
    """Normalise a few rows of `x` and add them to `hidden`; rows of both are `stride` apart."""
    width = len(weight)
    normed = np.empty(width, np.float32)
    for r in range(item * FEW_ROWS, min((item + 1) * FEW_ROWS, rows)):
        rms_norm(x, r * stride, weight, eps, normed, 0)
        written = hidden[r * stride : r * stride + width]
        for i in range(width):
            written[i] += normed[i]


@compiled(**INNER)
def norm_and_store_rows(
    item: int, rows: int, x: np.ndarray, x_stride: int, weight: np.ndarray, eps: np.float32, out: StoredRows
) -> None:
    """As `norm_rows`, but stored as the left side of a product."""
    width = len(weight)
    normed = np.empty(width, np.float32)
    for r in range(item * FEW_ROWS, min((item + 1) * FEW_ROWS, rows)):
        rms_norm(x, r * x_stride, weight, eps, normed, 0)
        pack_row(normed, 0, width, 0, width, out, r)


@compiled(**INNER)
def rotate_and_store(
    item: int,
    qkv: np.ndarray,
    head_norms: np.ndarray,
    eps: np.float32,
    rotary: tuple[np.ndarray, np.ndarray],
    pairs: np.ndarray,
    kv: FlatKV,
    geometry: Geometry,
    writes: tuple[np.ndarray, np.ndarray],
) -> None:
    """Normalise and rotate a few tokens' queries and keys in place, and put keys and values where `writes` says.

    `head_norms` are the weights `[2, head_dim]` of queries' and keys' own norms, `[0, head_dim]` without; `pairs`
    say which columns of `rotary` are the layer's: the first, and the first that is not.
    """
    slab_stride, slots, block_size, heads, kv_heads, head_dim, _, stride = geometry
    (cos, sin), (blocks, offsets), (start, end) = rotary, writes, (pairs[0], pairs[1])
    flat, keys_at, values_at = kv
    for row in range(item * ROWS_PER_ROTATION, min((item + 1) * ROWS_PER_ROTATION, len(cos))):
        turns = cos[row, start:end], sin[row, start:end]
        for head in range(heads + kv_heads):
            if len(head_norms):
                at = row * stride + head * head_dim
                rms_norm(qkv, at, head_norms[int(head >= heads)], eps, qkv, at)
            rotate(qkv, row * stride + head * head_dim, turns[0], turns[1])
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


@inner
def add_rows(item: int, stride: int, bias: np.ndarray, out: np.ndarray) -> None:
    """Add `bias`, which may be empty, to a few rows of `out`."""
    for r in range(item * ROWS_PER_ROTATION, min((item + 1) * ROWS_PER_ROTATION, len(out) // stride)):
        for column in range(len(bias)):
            out[r * stride + column] += bias[column]


@compiled(**INNER)
def gated_phase(
    shares: Shares,
    left: LeftSide,
    weight: Weight,
    gelu: bool,
    out: StoredRows,
    sums: tuple[np.ndarray, np.ndarray, np.ndarray],
    scratch: np.ndarray,
) -> None:
    """One thread's share of a phase that stores activation(gate) * up as the left side of the next product.

    Arguments as `multiply_phase`, `weight` being gate's and up's panels after it; `gelu` is the activation, else silu;
    `sums` have room for ROWS rows of a panel's sums, twice, and PANEL zeros.
    """
    (counters, phase, parts, threads), (x, _, rows, inner), (panels, begin, num_panels, _) = shares, left, weight
    items, size, (gate, up, zeros) = (rows + ROWS - 1) // ROWS * parts, inner * PANEL, sums
    terms, gates, ups = Strided(zeros, 0, 0), Strided(gate, 0, PANEL), Strided(up, 0, PANEL)
    for item in phase_items(counters, phase, items):
        first, (start, end) = item // parts * ROWS, panels_of(item, parts, num_panels)
        count = min(ROWS, rows - first)
        some = LeftSide(x, first, count, inner)
        for panel in range(start, end):
            following = panel + 1 if panel + 1 < end else panels_of(item + threads, parts, num_panels)[0]
            gate_at, next_at = begin + panel * size, begin + following * size
            up_at = gate_at + num_panels * size
            multiply_panel(some, panels, gate_at, up_at, terms, gates, scratch)
            multiply_panel(some, panels, up_at, next_at, terms, ups, scratch)
            if gelu:
                gelu_times(gate, 0, up, 0, count * PANEL // LANES)
            else:
                silu_times(gate, 0, up, 0, count * PANEL // LANES)
            for r in range(count):
                pack_row(gate, r * PANEL, num_panels * PANEL, panel * PANEL, PANEL, out, first + r)
