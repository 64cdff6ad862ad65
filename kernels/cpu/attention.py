"""Paged attention on CPU: reads keys and values in place, in their blocks.

One work item is one (token, kv head). Its result depends on that token's own context alone, in a fixed order of
summation, so a token's output has the same bits whatever else is in the batch.
"""

import math
import threading
from typing import Any

import numba
import numpy as np
import torch

from espalier.kernels.batch import AttentionBatch

# numba's fallback threading layer aborts when two Python threads launch at once; launches are short.
_launch = threading.Lock()

_LOG2E = np.float32(math.log2(math.e))


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
    offset: int,
    sector_stride: int,
    slots: int,
    block_size: int,
    kv_heads: int,
    block_tables: np.ndarray,
    query_starts: np.ndarray,
    context_lengths: np.ndarray,
    row_sequences: np.ndarray,
    scale: np.float32,
    output: np.ndarray,
) -> None:
    # Blocks are sliced out of `flat` before the inner loops: numba checks every index it cannot prove non-negative, and
    # such a check keeps a loop from being vectorised (measured: 7x slower).
    tokens, heads, head_dim = query.shape
    groups = heads // kv_heads
    token_stride = kv_heads * head_dim
    slot_stride = block_size * token_stride
    for item in numba.prange(tokens * kv_heads):
        row, kv_head = item // kv_heads, item % kv_heads
        s = row_sequences[row]
        visible = context_lengths[s] - (query_starts[s + 1] - 1 - row)
        scaled = np.empty((groups, head_dim), np.float32)
        for g in range(groups):
            for d in range(head_dim):
                scaled[g, d] = query[row, kv_head * groups + g, d] * scale
        logits = np.empty((groups, visible), np.float32)
        for b in range((visible + block_size - 1) // block_size):
            sector = block_tables[s, b] // slots
            slot = block_tables[s, b] - sector * slots
            filled = min(block_size, visible - b * block_size)
            first = offset + sector * sector_stride + slot * slot_stride + kv_head * head_dim
            keys = flat[first : first + slot_stride]
            for g in range(groups):
                for t in range(filled):
                    key = keys[t * token_stride : t * token_stride + head_dim]
                    dot = np.float32(0.0)
                    for d in range(head_dim):
                        dot += scaled[g, d] * key[d]
                    logits[g, b * block_size + t] = dot
        totals = np.empty(groups, np.float32)
        for g in range(groups):
            weights = logits[g]
            totals[g] = _exp_in_place(weights, weights.view(np.int32), visible, weights.max())
        mixed = np.zeros((groups, head_dim), np.float32)
        for b in range((visible + block_size - 1) // block_size):
            sector = block_tables[s, b] // slots
            slot = block_tables[s, b] - sector * slots
            filled = min(block_size, visible - b * block_size)
            first = offset + sector * sector_stride + (slots + slot) * slot_stride + kv_head * head_dim
            values = flat[first : first + slot_stride]
            for t in range(filled):
                value = values[t * token_stride : t * token_stride + head_dim]
                for g in range(groups):
                    weight = logits[g, b * block_size + t]
                    for d in range(head_dim):
                        mixed[g, d] += weight * value[d]
        for g in range(groups):
            for d in range(head_dim):
                output[row, kv_head * groups + g, d] = mixed[g, d] / totals[g]


def paged_attention_cpu(
    query: torch.Tensor, layer_kv: torch.Tensor, batch: AttentionBatch, scale: float
) -> torch.Tensor:
    """`paged_attention_reference` for float32 on CPU; same arguments and result."""
    output = torch.empty(query.shape, dtype=torch.float32)
    _, _, slots, block_size, kv_heads, _ = layer_kv.shape
    # One dimension with stride 1: numba vectorises nothing over strides it learns at run time.
    flat = layer_kv.as_strided((layer_kv.untyped_storage().nbytes() // 4,), (1,), 0)
    with _launch:
        _attend(
            query.contiguous().numpy(),
            flat.numpy(),
            int(layer_kv.storage_offset()),
            layer_kv.stride(0),
            slots,
            block_size,
            kv_heads,
            batch.block_tables.numpy(),
            batch.query_starts.numpy(),
            batch.context_lengths.numpy(),
            batch.row_sequences.numpy(),
            np.float32(scale),
            output.numpy(),
        )
    return output
