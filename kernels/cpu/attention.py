"""Tree-aware paged attention on CPU: reads keys and values in place, in their blocks, once for rows that share them.

One work item is some neighbouring tokens and one kv head. It goes through the positions of the context block by block;
tokens whose sequences have the same block there, as siblings do below their fork and a prompt's tokens everywhere, meet
its keys and values together, while those are in registers. The softmax is taken over chunks of positions, each result
rescaled when a later chunk has a larger logit (Milakov and Gimelshein, 2018). Chunks begin at fixed positions, so a
token's output has the same bits alone and in any company.
"""

import math

import numba
import numpy as np
import torch

from espalier.kernels.batch import AttentionBatch
from espalier.kernels.cpu.pointwise import exp_in_place, largest, scale_in_place
from espalier.kernels.cpu.tiles import multiply_add, prefetch
from espalier.kernels.cpu.workers import claim, claim_next, run_together, wait_for
from espalier.kernels.layout import LayerKV

TOKENS_PER_ITEM = 16
"""Tokens of a work item at most: enough to fill every tile, few enough to share the work among cores.

With one, no token shares what it reads: paged attention without regard to the tree, for comparison.
"""
_CHUNK = 256
"""Positions whose logits a work item holds at a time, unless one block has more: they stay in a core's cache."""


@numba.njit
def attend(
    item: int,
    tile: int,
    scale: np.float32,
    query: np.ndarray,
    flat: np.ndarray,
    keys_at: int,
    values_at: int,
    geometry: tuple[int, int, int, int, int, int, int],
    tables: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    output: np.ndarray,
) -> None:
    """Run one work item: `tile` tokens from `item // kv_heads * tile` on, kv head `item % kv_heads`.

    Args:
        item: which of `num_items`.
        tile: tokens of an item at most.
        scale: factor on the logits.
        query: flat float32; a token's heads side by side, then what else a row holds.
        flat: float32, the whole arena.
        keys_at: where the layer's keys begin in the first sector, in elements.
        values_at: the same of its values.
        geometry: from `geometry_of`.
        tables: from `tables_of`.
        output: flat float32 `[T * heads * head_dim]`, written.
    """
    sector_stride, slots, block_size, heads, kv_heads, head_dim, query_stride = geometry
    block_tables, query_starts, context_lengths, row_sequences = tables
    output_stride = heads * head_dim
    groups, head_stride = heads // kv_heads, block_size * head_dim
    first, kv_head = item // kv_heads * tile, item % kv_heads
    rows = min(tile, len(row_sequences) - first)
    queries = rows * groups
    visible = np.empty(rows, np.int64)
    longest = 0
    for r in range(rows):
        s = row_sequences[first + r]
        visible[r] = context_lengths[s] - (query_starts[s + 1] - 1 - first - r)
        longest = max(longest, visible[r])
    chunk = max(1, _CHUNK // block_size)
    width = min(chunk, (longest + block_size - 1) // block_size) * block_size
    # A query is a row of these three: groups of one token, then the next token's.
    scaled = np.empty(queries * head_dim, np.float32)
    logits = np.empty(queries * width, np.float32)
    mixed = np.zeros(queries * head_dim, np.float32)
    tops, totals = np.zeros(queries, np.float32), np.zeros(queries, np.float32)
    for r in range(rows):
        at = (first + r) * query_stride + kv_head * groups * head_dim
        for i in range(groups * head_dim):
            scaled[r * groups * head_dim + i] = query[at + i] * scale
    # Runs of rows that see the same positions of the same block: first row, rows, positions, column, address.
    runs = np.empty((rows * chunk, 5), np.int64)
    for begin in range(0, (longest + block_size - 1) // block_size, chunk):
        logits[:] = np.float32(0.0)
        found = 0
        for b in range(begin, min(begin + chunk, (longest + block_size - 1) // block_size)):
            r = 0
            while r < rows:
                start, seen = r, min(visible[r] - b * block_size, block_size)
                r += 1
                if seen <= 0:
                    continue
                block = block_tables[row_sequences[first + start], b]
                while (
                    r < rows
                    and min(visible[r] - b * block_size, block_size) == seen
                    and block_tables[row_sequences[first + r], b] == block
                ):
                    r += 1
                at = block // slots * sector_stride + (block % slots * kv_heads + kv_head) * head_stride
                column, count = (b - begin) * block_size, (r - start) * groups
                runs[found, 0], runs[found, 1], runs[found, 2] = start * groups, count, seen
                runs[found, 3], runs[found, 4] = column, at
                found += 1
        for i in range(found):
            start, count, _, column, at = runs[i]
            if i + 1 < found:
                prefetch(flat, keys_at + runs[i + 1, 4], head_stride)
            a, out = start * head_dim, start * width + column
            multiply_add(scaled, a, head_dim, flat, keys_at + at, logits, out, width, count, head_dim, block_size)
        for q in range(queries):
            seen = min(visible[q // groups] - begin * block_size, width)
            if seen <= 0:
                continue
            top = largest(logits, q * width, seen)
            if begin:
                top = max(top, tops[q])
                factor = np.float32(math.exp(tops[q] - top))
                totals[q] *= factor
                scale_in_place(mixed, q * head_dim, head_dim, factor)
            tops[q] = top
            totals[q] += exp_in_place(logits, q * width, seen, top)
        for i in range(found):
            start, count, seen, column, at = runs[i]
            if i + 1 < found:
                prefetch(flat, values_at + runs[i + 1, 4], head_stride)
            a, out = start * width + column, start * head_dim
            multiply_add(logits, a, width, flat, values_at + at, mixed, out, head_dim, count, seen, head_dim)
    for r in range(rows):
        at = (first + r) * output_stride + kv_head * groups * head_dim
        for i in range(groups * head_dim):
            output[at + i] = mixed[r * groups * head_dim + i] / totals[r * groups + i // head_dim]


def geometry_of(layer_kv: LayerKV, heads: int, query_stride: int) -> tuple[int, int, int, int, int, int, int]:
    """What `attend` needs to find its way: see where it takes this apart; `query_stride` elements are a token's row."""
    _, slots, block_size, kv_heads, head_dim = layer_kv.keys.shape
    return layer_kv.keys.stride(0), slots, block_size, heads, kv_heads, head_dim, query_stride


def tables_of(batch: AttentionBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The parts of a batch that `attend` reads."""
    tensors = batch.block_tables, batch.query_starts, batch.context_lengths, batch.row_sequences
    tables, starts, contexts, sequences = (tensor.numpy() for tensor in tensors)
    return tables, starts, contexts, sequences


def num_items(tokens: int, tile: int, kv_heads: int) -> int:
    """Work items of `tokens` tokens."""
    return -(-tokens // tile) * kv_heads


def flat_arena(layer_kv: LayerKV) -> np.ndarray:
    """The arena that a layer's keys and values lie in, float32 `[elements]`.

    One dimension with stride 1: numba vectorises nothing over strides it learns at run time.
    """
    keys = layer_kv.keys
    return keys.as_strided((keys.untyped_storage().nbytes() // 4,), (1,), 0).numpy()


@numba.njit(nogil=True, cache=True)
def _attend_all(
    counters: np.ndarray,
    items: int,
    tile: int,
    scale: np.float32,
    query: np.ndarray,
    flat: np.ndarray,
    keys_at: int,
    values_at: int,
    geometry: tuple[int, int, int, int, int, int, int],
    tables: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    output: np.ndarray,
) -> None:
    item = claim(counters, 0)
    while item < items:
        attend(item, tile, scale, query, flat, keys_at, values_at, geometry, tables, output)
        item = claim_next(counters, 0)
    wait_for(counters, 0, items)


def paged_attention_cpu(query: torch.Tensor, layer_kv: LayerKV, batch: AttentionBatch, scale: float) -> torch.Tensor:
    """`paged_attention_reference` for float32 on CPU; same arguments and result."""
    output = torch.empty(query.shape, dtype=torch.float32)
    heads, head_dim = query.shape[1:]
    geometry = geometry_of(layer_kv, heads, heads * head_dim)
    run_together(
        _attend_all,
        1,
        num_items(len(query), TOKENS_PER_ITEM, layer_kv.keys.shape[3]),
        TOKENS_PER_ITEM,
        np.float32(scale),
        query.contiguous().view(-1).numpy(),
        flat_arena(layer_kv),
        int(layer_kv.keys.storage_offset()),
        int(layer_kv.values.storage_offset()),
        geometry,
        tables_of(batch),
        output.view(-1).numpy(),
    )
    return output
