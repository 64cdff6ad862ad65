"""Tree-aware paged attention on CPU: reads keys and values in place, in their blocks, once for rows that share them.

One work item is some neighbouring tokens and one kv head. It goes through the positions of the context block by block;
tokens whose sequences have the same block there, as siblings do below their fork and a prompt's tokens everywhere, meet
its keys and values together, while those are in registers. A token's output is summed in the order of its own
positions, whoever shares the work, so it has the same bits alone and in any company.
"""

import math
from typing import Any

import numba
import numpy as np
import torch

from espalier.kernels.batch import AttentionBatch
from espalier.kernels.cpu.launch import launch
from espalier.kernels.cpu.tiles import multiply_add
from espalier.kernels.layout import LayerKV

_LOG2E = np.float32(math.log2(math.e))
TOKENS_PER_ITEM = 16
"""Tokens of a work item at most: enough to fill every tile, few enough to share the work among cores.

With one, no token shares what it reads: paged attention without regard to the tree, for comparison.
"""
_MAX_LOGITS = 1 << 16
"""Logits a work item holds at most, unless a single token needs more: 256 KiB, what a core's cache has room for."""


@numba.njit(inline="always", fastmath=True)
def _exp_in_place(x: np.ndarray, bits: np.ndarray, n: Any, shift: Any) -> Any:
    """Replace x[:n] by exp(x[:n] - shift) and return the sum; `bits` is x viewed as int32.

    numba calls a scalar exp without a vector library; a polynomial for 2**f on [-0.5, 0.5] and integer arithmetic on
    the exponent lets LLVM vectorise the loop. Relative error below 3e-7 (Cephes expf coefficients in base 2).
    """
    total = np.float32(0.0)
    for i in range(n):
        t = max((x[i] - shift) * _LOG2E, np.float32(-126.0))
        whole = np.floor(t + np.float32(0.5))
        f = t - whole
        p = np.float32(1.535336188e-4)
        p = p * f + np.float32(1.339887440e-3)
        p = p * f + np.float32(9.618437357e-3)
        p = p * f + np.float32(5.550332548e-2)
        p = p * f + np.float32(2.402264791e-1)
        p = p * f + np.float32(6.931472028e-1)
        p = p * f + np.float32(1.0)
        x[i] = p
        bits[i] += np.int32(whole) << 23
        total += x[i]
    return total


@numba.njit(parallel=True, fastmath=True, cache=True)
def _attend(
    query: np.ndarray,
    flat: np.ndarray,
    key_offset: int,
    value_offset: int,
    sector_stride: int,
    slots: int,
    block_size: int,
    kv_heads: int,
    block_tables: np.ndarray,
    query_starts: np.ndarray,
    context_lengths: np.ndarray,
    row_sequences: np.ndarray,
    tile: int,
    scale: np.float32,
    output: np.ndarray,
) -> None:
    tokens, heads, head_dim = query.shape
    groups = heads // kv_heads
    head_stride = block_size * head_dim
    slot_stride = kv_heads * head_stride
    for item in numba.prange((tokens + tile - 1) // tile * kv_heads):
        first, kv_head = item // kv_heads * tile, item % kv_heads
        rows = min(tile, tokens - first)
        visible = np.empty(rows, np.int64)
        for r in range(rows):
            s = row_sequences[first + r]
            visible[r] = context_lengths[s] - (query_starts[s + 1] - 1 - first - r)
        blocks = (visible.max() + block_size - 1) // block_size
        width = blocks * block_size
        # A query is a row of these three: groups of one token, then the next token's.
        scaled = np.empty(rows * groups * head_dim, np.float32)
        logits = np.zeros(rows * groups * width, np.float32)
        mixed = np.zeros(rows * groups * head_dim, np.float32)
        for r in range(rows):
            for g in range(groups):
                for d in range(head_dim):
                    scaled[(r * groups + g) * head_dim + d] = query[first + r, kv_head * groups + g, d] * scale
        for b in range(blocks):
            r = 0
            while r < rows:
                start = r
                r += 1
                if visible[start] <= b * block_size:
                    continue
                block = block_tables[row_sequences[first + start], b]
                while r < rows and visible[r] > b * block_size and block_tables[row_sequences[first + r], b] == block:
                    r += 1
                at = block // slots * sector_stride + block % slots * slot_stride + kv_head * head_stride
                multiply_add(
                    scaled,
                    start * groups * head_dim,
                    head_dim,
                    flat,
                    key_offset + at,
                    logits,
                    start * groups * width + b * block_size,
                    width,
                    (r - start) * groups,
                    head_dim,
                    block_size,
                )
        totals = np.empty(rows * groups, np.float32)
        for q in range(rows * groups):
            seen = visible[q // groups]
            weights = logits[q * width : q * width + seen]
            totals[q] = _exp_in_place(weights, weights.view(np.int32), seen, weights.max())
        for b in range(blocks):
            r = 0
            while r < rows:
                start = r
                r += 1
                if visible[start] <= b * block_size:
                    continue
                block = block_tables[row_sequences[first + start], b]
                end = (b + 1) * block_size
                seen = min(visible[start], end)  # of a prompt's last block, each token sees another part
                while r < rows and min(visible[r], end) == seen and block_tables[row_sequences[first + r], b] == block:
                    r += 1
                at = block // slots * sector_stride + block % slots * slot_stride + kv_head * head_stride
                multiply_add(
                    logits,
                    start * groups * width + b * block_size,
                    width,
                    flat,
                    value_offset + at,
                    mixed,
                    start * groups * head_dim,
                    head_dim,
                    (r - start) * groups,
                    seen - b * block_size,
                    head_dim,
                )
        for r in range(rows):
            for g in range(groups):
                q = r * groups + g
                for d in range(head_dim):
                    output[first + r, kv_head * groups + g, d] = mixed[q * head_dim + d] / totals[q]


def paged_attention_cpu(query: torch.Tensor, layer_kv: LayerKV, batch: AttentionBatch, scale: float) -> torch.Tensor:
    """`paged_attention_reference` for float32 on CPU; same arguments and result."""
    output = torch.empty(query.shape, dtype=torch.float32)
    keys = layer_kv.keys
    _, slots, block_size, kv_heads, _ = keys.shape
    # One dimension with stride 1: numba vectorises nothing over strides it learns at run time.
    flat = keys.as_strided((keys.untyped_storage().nbytes() // 4,), (1,), 0)
    width = batch.block_tables.shape[1] * block_size * (query.shape[1] // kv_heads)
    launch(
        _attend,
        query.contiguous().numpy(),
        flat.numpy(),
        int(keys.storage_offset()),
        int(layer_kv.values.storage_offset()),
        keys.stride(0),
        slots,
        block_size,
        kv_heads,
        batch.block_tables.numpy(),
        batch.query_starts.numpy(),
        batch.context_lengths.numpy(),
        batch.row_sequences.numpy(),
        max(1, min(TOKENS_PER_ITEM, _MAX_LOGITS // width)),
        np.float32(scale),
        output.numpy(),
    )
    return output
