"""Tree-aware paged attention on CPU: reads keys and values in place, in their blocks, once for rows that share them.

One work item is some neighbouring tokens and one kv head, or all of them. It goes through the positions of the context
block by block. Tokens whose sequences have the same block there, as siblings do before their fork and a prompt's tokens
everywhere, are multiplied with its keys and values together, while those are in registers. The softmax is taken over
chunks of positions; results are rescaled when a later chunk has a larger logit (Milakov and Gimelshein, 2018). Chunks
begin at fixed positions, so a token's output has the same bits alone and in any batch.

Neighbouring tokens of a sequence may see different parts of one block. They are still multiplied with it together, with
weights of zero for positions after a token: a value there that is not a number spoils the token's output, but it
belongs to the same sequence.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from espalier.kernels.attention import Terms
from espalier.kernels.compilation.ahead import Compilation, compilation
from espalier.kernels.compilation.compiler import INNER, inner
from espalier.kernels.cpu import compiled
from espalier.kernels.cpu.attention.spans import FlatKV, Geometry, Spans, extremes, find_spans, geometry_of, no_spans
from espalier.kernels.cpu.pointwise import exp_in_place, largest, scale_in_place
from espalier.kernels.cpu.products.tiles import (
    NR,
    Blocks,
    multiply_add,
    multiply_add_blocked,
    multiply_pair,
    prefetch,
)
from espalier.kernels.cpu.simd import Strided, flush_denormals, restore_denormals
from espalier.kernels.cpu.threads import parallel_run, phase_items
from espalier.kernels.layout import AttentionBatch, LayerKV

TOKENS_PER_ITEM = 64
"""Tokens of a work item at most.

With one, no token shares what it reads: paged attention without regard to the tree, for comparison.
"""
_NEAR = 2048
"""Elements of values that all queries of an item are multiplied with before the next: they stay in the L1 cache."""
_SPEED = 1e10
"""Multiply-adds a second of one thread, within a factor of two or so."""
UNLIMITED = 2**40
"""The window of a layer without one."""
_NO_SINKS = np.empty(0, np.float32)


class FlatTerms(NamedTuple):
    """`Terms` as compiled code reads them.

    Attributes:
        scale: factor on the logits.
        window: positions that a token sees, its own the last.
        softcap: logits are squeezed between this and its negative; 0 leaves them.
        sinks: float32 `[heads]`, one more logit of each head, of no position; empty without.
    """

    scale: np.float32
    window: int
    softcap: np.float32
    sinks: np.ndarray


class ItemShape(NamedTuple):
    """The shape of one work item.

    Attributes:
        of_head: queries of one kv head: tokens times `groups`.
        width: positions of a chunk.
        groups: query heads of one kv head.
        num_kv_heads: kv heads of the item.
        head_dim: elements of a head of queries and keys.
        value_dim: elements of a head of values.
        block_size: tokens of a block.
    """

    of_head: int
    width: int
    groups: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    block_size: int


class Item(NamedTuple):
    """One work item's memory, flat float32; queries of one token lie side by side, then the next token's, then the next
    kv head's.

    Attributes:
        scaled: `[queries * head_dim]`, the queries times the scale.
        logits: `[queries * width]`, those of a chunk, then their softmax weights.
        attn_out: `[queries * value_dim]`, each query's weighted sum of values so far.
        row_max: `[queries]`, the largest logit of each so far.
        row_sum: `[queries]`, the sum of the weights of each so far, 0 at first.
    """

    scaled: np.ndarray
    logits: np.ndarray
    attn_out: np.ndarray
    row_max: np.ndarray
    row_sum: np.ndarray
    shape: ItemShape


@compiled(**INNER)
def attend(
    index: int, terms: FlatTerms, query: np.ndarray, kv: FlatKV, all_spans: Spans, scratch: np.ndarray, out: np.ndarray
) -> None:
    """Run one work item.

    Args:
        index: which of `all_spans`.
        terms: how logits are made.
        query: flat float32; a token's heads side by side, then what else a row holds.
        kv: the layer's keys and values.
        all_spans: from `find_spans`.
        scratch: float32, from `scratch_for`, the thread's own.
        out: flat float32 `[T * heads * value_dim]`, written.
    """
    geometry, chunk, items, firsts, visible, chunks, chunk_spans, spans, places = all_spans
    _, _, block_size, heads, kv_heads, head_dim, value_dim, query_stride = geometry
    scale, window, softcap, sinks = terms
    groups = heads // kv_heads
    part, kv_head, num_kv_heads = items[index, 0], items[index, 1], items[index, 2]
    first = firsts[part]
    rows = int(firsts[part + 1] - first)
    of_head = rows * groups
    queries, width = num_kv_heads * of_head, chunk * block_size
    least, longest = extremes(visible, first, first + rows)
    if chunks[part + 1] - chunks[part] == 1:
        width = (longest + block_size - 1) // block_size * block_size
    end = head_dim + width + value_dim
    item = Item(
        scratch[: queries * head_dim],
        scratch[queries * head_dim : queries * (head_dim + width)],
        scratch[queries * (head_dim + width) : queries * end],
        scratch[queries * end : queries * (end + 1)],
        scratch[queries * (end + 1) : queries * (end + 2)],
        ItemShape(of_head, width, groups, num_kv_heads, head_dim, value_dim, block_size),
    )
    item.attn_out[:] = np.float32(0.0)
    item.row_sum[:] = np.float32(0.0)
    q, size = 0, groups * head_dim
    for h in range(kv_head, kv_head + num_kv_heads):
        for r in range(first, first + rows):
            at = r * query_stride + h * size
            given, written = query[at : at + size], item.scaled[q : q + size]
            for i in range(size):
                written[i] = given[i] * scale
            q += size
    keys_at = kv.keys_at + kv_head * block_size * head_dim
    values_at = kv.values_at + kv_head * block_size * value_dim
    passed = least - window  # positions before every token's window
    for c in range(chunks[part], chunks[part + 1]):
        before = int(c - chunks[part]) * width
        if before + width <= passed:
            continue
        for i in range(chunk_spans[c], chunk_spans[c + 1]):
            _multiply_keys(item, kv.flat, keys_at, places[0], i * chunk, spans[i])
        seen = visible[first : first + rows] - before
        if softcap > 0:
            _squeeze(item, seen, window, softcap)
        _online_softmax(item, seen, window)
        for i in range(chunk_spans[c], chunk_spans[c + 1]):
            _multiply_values(item, kv.flat, values_at, places[1], i * chunk, spans[i])
    q = 0
    for h in range(kv_head, kv_head + num_kv_heads):
        for r in range(first, first + rows):
            for g in range(groups):
                at = ((r * kv_heads + h) * groups + g) * value_dim
                summed, written = item.attn_out[q * value_dim : (q + 1) * value_dim], out[at : at + value_dim]
                total, factor = item.row_sum[q], np.float32(1.0)
                if len(sinks):
                    sink = sinks[h * groups + g]
                    top = max(item.row_max[q], sink)
                    factor = np.float32(math.exp(item.row_max[q] - top))
                    total = total * factor + np.float32(math.exp(sink - top))
                for i in range(value_dim):
                    written[i] = summed[i] * factor / total
                q += 1


def attend_compilation(geometry: Geometry) -> Compilation:
    """The compilation of `attend`."""
    floats, zero = np.zeros(0, np.float32), np.float32(0)
    terms, kv = FlatTerms(zero, 0, zero, floats), FlatKV(floats, 0, 0)
    return compilation(attend, 0, terms, floats, kv, no_spans(geometry), floats, floats)


@inner
def _multiply_keys(
    item: Item, flat: np.ndarray, keys_at: int, places: np.ndarray, first: int, span: np.ndarray
) -> None:
    """Write the logits of a span's queries with the keys of its blocks, which begin at `places[first]` and so on."""
    of_head, width, groups, num_kv_heads, head_dim, _, block_size = item.shape
    count, a, of_block = span[1] * groups, span[0] * groups * head_dim, block_size * head_dim
    out, logits = span[0] * groups * width + span[2] * block_size, item.logits
    pairs = span[3] // 2 if 2 * block_size == NR else 0
    for k in range(0, 2 * pairs, 2):
        for next_block in range(first + k + 2, min(first + k + 4, first + span[3]) if num_kv_heads == 1 else 0):
            prefetch(flat, keys_at + places[next_block], of_block)
        for h in range(num_kv_heads):
            x = Strided(item.scaled, a + h * of_head * head_dim, head_dim)
            z = Strided(logits, out + h * of_head * width + k * block_size, width)
            left, right = keys_at + places[first + k] + h * of_block, keys_at + places[first + k + 1] + h * of_block
            multiply_pair(count, x, flat, left, flat, right, z, head_dim)
    for k in range(2 * pairs, span[3]):
        for h in range(num_kv_heads):
            x = Strided(item.scaled, a + h * of_head * head_dim, head_dim)
            z = Strided(logits, out + h * of_head * width + k * block_size, width)
            for q in range(count):
                for i in range(z.start + q * width, z.start + q * width + block_size):
                    logits[i] = np.float32(0.0)
            multiply_add(x, flat, keys_at + places[first + k] + h * of_block, z, count, head_dim, block_size)


@inner
def _squeeze(item: Item, seen: np.ndarray, window: int, softcap: np.float32) -> None:
    """Squeeze the logits of the positions that tokens see; arguments as `_online_softmax`."""
    (of_head, width, groups, num_kv_heads, _, _, _), logits = item.shape, item.logits
    for r in range(len(seen)):
        start, end = max(0, seen[r] - window), min(seen[r], width)
        for h in range(num_kv_heads):
            for q in range(h * of_head + r * groups, h * of_head + (r + 1) * groups):
                for i in range(q * width + start, q * width + end):
                    logits[i] = softcap * np.float32(math.tanh(logits[i] / softcap))


@inner
def _online_softmax(item: Item, seen: np.ndarray, window: int) -> None:
    """Turn a chunk's logits into softmax weights: zeros before a token's window, and after it in the same block.

    Args:
        item: see `Item`; sums of values are rescaled where a query's largest logit has changed.
        seen: how many of the positions from the chunk's first on each token sees, int64; perhaps more than it has.
        window: see `FlatTerms`.
    """
    _, logits, attn_out, row_max, row_sum, shape = item
    of_head, width, groups, num_kv_heads, _, value_dim, block_size = shape
    for r in range(len(seen)):
        start, end = max(0, seen[r] - window), min(seen[r], width)
        beyond = (end + block_size - 1) // block_size * block_size
        for h in range(num_kv_heads):
            for q in range(h * of_head + r * groups, h * of_head + (r + 1) * groups):
                for i in range(q * width, q * width + min(start, end)):
                    logits[i] = np.float32(0.0)
                if end <= start:
                    continue
                for i in range(q * width + end, q * width + beyond):
                    logits[i] = np.float32(0.0)
                top = largest(logits, q * width + start, end - start)
                if row_sum[q] > 0:
                    if top > row_max[q]:  # seldom, once some chunks have passed
                        factor = np.float32(math.exp(row_max[q] - top))
                        row_sum[q] *= factor
                        scale_in_place(attn_out, q * value_dim, value_dim, factor)
                    else:
                        top = row_max[q]
                row_max[q] = top
                row_sum[q] += exp_in_place(logits, q * width + start, end - start, top)


@inner
def _multiply_values(
    item: Item, flat: np.ndarray, values_at: int, places: np.ndarray, first: int, span: np.ndarray
) -> None:
    """Add the values of a span's blocks, weighted, to its queries' sums; arguments as `_multiply_keys`."""
    of_head, width, groups, num_kv_heads, _, value_dim, block_size = item.shape
    count, blocks, last = span[1] * groups, span[3], span[4]
    a, out = span[0] * groups * width + span[2] * block_size, span[0] * groups * value_dim
    if num_kv_heads == 1:
        few = max(1, _NEAR // (block_size * value_dim))
        for k in range(0, blocks, few):
            some = min(few, blocks - k)
            read = Blocks(places, first + k, some, block_size, last if k + some == blocks else block_size)
            x, z = Strided(item.logits, a + k * block_size, width), Strided(item.attn_out, out, value_dim)
            multiply_add_blocked(x, flat, values_at, read, z, count, value_dim)
        return
    for k in range(blocks):
        inner = last if k == blocks - 1 else block_size
        for h in range(num_kv_heads):
            x = Strided(item.logits, a + h * of_head * width + k * block_size, width)
            z = Strided(item.attn_out, out + h * of_head * value_dim, value_dim)
            at = values_at + places[first + k] + h * block_size * value_dim
            multiply_add(x, flat, at, z, count, inner, value_dim)


@inner
def scratch_for(all_spans: Spans) -> np.ndarray:
    """Memory for one thread's work items, which use it one after another; float32, large enough for the largest."""
    queries, geometry, items, firsts = 0, all_spans.geometry, all_spans.items, all_spans.firsts
    for i in range(len(items)):
        rows = firsts[items[i, 0] + 1] - firsts[items[i, 0]]
        queries = max(queries, rows * items[i, 2] * geometry.heads // geometry.kv_heads)
    width = all_spans.chunk_blocks * geometry.block_size
    return np.empty(queries * (geometry.head_dim + width + geometry.value_dim + 2), np.float32)


def flat_kv_pool(layer_kv: LayerKV) -> np.ndarray:
    """The KV pool that a layer's keys and values lie in, float32 `[elements]`.

    One dimension with stride 1: numba vectorises nothing over strides it learns at run time.
    """
    keys = layer_kv.keys
    return keys.as_strided((keys.untyped_storage().nbytes() // 4,), (1,), 0).numpy()


@compiled(nogil=True)
def _attend_all(
    counters: int, terms: FlatTerms, query: np.ndarray, kv: FlatKV, all_spans: Spans, out: np.ndarray
) -> None:
    scratch, denormals = scratch_for(all_spans), flush_denormals()
    for index in phase_items(counters, 0, len(all_spans.items)):
        attend(index, terms, query, kv, all_spans, scratch, out)
    restore_denormals(denormals)


class CpuAttention:
    """`GatheredAttention` for float32 on CPU; the blocks that sequences share are found once in a step."""

    def __init__(self, layer_kv: LayerKV, batch: AttentionBatch, num_heads: int) -> None:
        """Prepare a step's attention; `layer_kv` is any of its layers."""
        geometry = geometry_of(layer_kv, num_heads, num_heads * layer_kv.keys.shape[-1])
        self._spans = find_spans(batch, TOKENS_PER_ITEM, geometry)
        self._seconds = 2 * int(self._spans.visible.sum()) * num_heads * layer_kv.keys.shape[-1] / _SPEED

    def __call__(self, query: torch.Tensor, layer_kv: LayerKV, terms: Terms) -> torch.Tensor:
        """See `GatheredAttention`."""
        output = torch.empty((*query.shape[:2], layer_kv.values.shape[-1]), dtype=torch.float32)
        flat_terms = FlatTerms(
            np.float32(terms.scale),
            terms.window or UNLIMITED,
            np.float32(terms.softcap or 0),
            _NO_SINKS if terms.sinks is None else terms.sinks.detach().float().contiguous().numpy(),
        )
        offsets = int(layer_kv.keys.storage_offset()), int(layer_kv.values.storage_offset())
        kv, queries = FlatKV(flat_kv_pool(layer_kv), *offsets), query.contiguous().view(-1).numpy()
        given = flat_terms, queries, kv, self._spans, output.view(-1).numpy()
        parallel_run(_attend_all, 1, *given, seconds=self._seconds)
        return output
