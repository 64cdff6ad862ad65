"""Norms, rotation and writes between the product of q, k and v and attention, in one pass; copies of whole blocks."""

# pyright: reportArgumentType=false
# (within kernels, numbers and tensors have Triton's types, which are not those of Python)

from typing import ClassVar

import numpy as np
import torch
import triton
import triton.language as tl

from espalier.kernels.layout import KVLayout, LayerKV
from espalier.kernels.triton.steps import to_device

PORTION = 1024


class TokenMajorLayout(KVLayout):
    """`KVLayout` with keys `[kv head][token][head dim]` like values, so that rows of both are loaded whole."""

    keys_by_token: ClassVar[bool] = True


def norm_rotate_write(
    qkv: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    places: torch.Tensor,
    layer_kv: LayerKV,
) -> torch.Tensor:
    """Norm and rotate a step's queries and keys, and write its keys and values to their blocks.

    Args:
        qkv: `[T, heads + 2 * kv_heads, head_dim]`.
        cosines: float32 `[T, 1, head_dim / 2]`; see `kernels.rotary`.
        sines: the same.
        norms: factors of RMSNorm over each query head and each key head, `[head_dim]`; None without.
        eps: of the norms.
        places: int64 `[T]`, where each token's first head lies in the layer's keys; -1 where it must not be written.
        layer_kv: in `TokenMajorLayout`; written.

    Returns:
        Queries, `[T, heads, head_dim]`.
    """
    _, _, block_size, kv_heads, head_dim = layer_kv.keys.shape
    tokens, heads = len(qkv), qkv.shape[1] - 2 * kv_heads
    query = qkv.new_empty((tokens, heads, head_dim))
    if tokens:
        rotate_and_write[(tokens,)](
            qkv,
            cosines,
            sines,
            *(norms or (qkv, qkv)),
            places,
            query,
            layer_kv.keys,
            layer_kv.values,
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            PADDED_HALF=triton.next_power_of_2(head_dim // 2),
            PADDED_HEADS=triton.next_power_of_2(heads),
            BLOCK_SIZE=block_size,
            NORMED=norms is not None,
        )
    return query


def copy_blocks(layout: KVLayout, kv_pool: torch.Tensor, sources: list[int], destinations: list[int]) -> None:
    """See `kernels.cache.copy_blocks`."""
    ids = to_device(np.array([sources, destinations], np.int64), kv_pool.device)
    for blocks in layout.block_views(kv_pool) if sources else ():
        _, parts, slots, elements = blocks.shape
        copy_whole_blocks[len(sources), parts, triton.cdiv(elements, PORTION)](
            blocks,
            ids[0],
            ids[1],
            blocks.stride(0),
            blocks.stride(1),
            SLOTS=slots,
            SLOT_ELEMENTS=elements,
            PORTION=PORTION,
        )


@triton.jit
def _rotated(at, d, weight, cos, sin, mask, eps, NORMED: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Both halves of heads `[heads, half]`, normed where `NORMED`, then rotated; float32, rounded as torch rounds."""
    half: tl.constexpr = HEAD_DIM // 2
    loaded, upper_loaded = tl.load(at, mask=mask, other=0.0), tl.load(at + half, mask=mask, other=0.0)
    lower, upper = loaded.to(tl.float32), upper_loaded.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(lower * lower, 1) + tl.sum(upper * upper, 1)) / HEAD_DIM + eps)[:, None]
        inside = d < half
        lower *= scale * tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        upper *= scale * tl.load(weight + half + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        lower = lower.to(loaded.dtype).to(tl.float32)
        upper = upper.to(loaded.dtype).to(tl.float32)
    return lower * cos - upper * sin, upper * cos + lower * sin


@triton.jit
def rotate_and_write(
    qkv,
    cosines,
    sines,
    query_norm,
    key_norm,
    places,
    query,
    keys,
    values,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Norm and rotate queries and keys, and write keys and values to their blocks; the grid is `[T]`.

    Args:
        qkv: `[T, HEADS + 2 * KV_HEADS, HEAD_DIM]`.
        cosines: float32 `[T, HEAD_DIM / 2]`.
        sines: the same.
        query_norm: `[HEAD_DIM]`, factors of RMSNorm, read where `NORMED`.
        key_norm: the same for keys.
        places: int64 `[T]`, where the first head of each token lies in its layer's keys, in elements; -1 where it must
            not be written.
        query: `[T, HEADS, HEAD_DIM]`, written.
        keys: where the layer's keys begin in the pool.
        values: where its values begin.
        eps: of the norms.
    """
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = HEAD_DIM // 2
    d, head = tl.arange(0, PADDED_HALF), tl.arange(0, PADDED_HEADS)
    inside = d < half
    cos = tl.load(cosines + token * half + d, mask=inside, other=0.0)[None, :]
    sin = tl.load(sines + token * half + d, mask=inside, other=0.0)[None, :]
    row = qkv + token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)

    mask = (head < HEADS)[:, None] & inside[None, :]
    at = head[:, None] * HEAD_DIM + d[None, :]
    lower, upper = _rotated(row + at, d, query_norm, cos, sin, mask, eps, NORMED, HEAD_DIM)
    query_at = query + token * (HEADS * HEAD_DIM) + at
    tl.store(query_at, lower.to(query.dtype.element_ty), mask=mask)
    tl.store(query_at + half, upper.to(query.dtype.element_ty), mask=mask)

    place = tl.load(places + token)
    if place >= 0:
        mask = (head < KV_HEADS)[:, None] & inside[None, :]
        key_at = row + HEADS * HEAD_DIM + at
        lower, upper = _rotated(key_at, d, key_norm, cos, sin, mask, eps, NORMED, HEAD_DIM)
        written_at = place + head[:, None] * (BLOCK_SIZE * HEAD_DIM) + d[None, :]
        tl.store(keys + written_at, lower.to(keys.dtype.element_ty), mask=mask)
        tl.store(keys + written_at + half, upper.to(keys.dtype.element_ty), mask=mask)
        value_at = key_at + KV_HEADS * HEAD_DIM
        tl.store(values + written_at, tl.load(value_at, mask=mask), mask=mask)
        tl.store(values + written_at + half, tl.load(value_at + half, mask=mask), mask=mask)


@triton.jit
def copy_whole_blocks(
    pool,
    sources,
    destinations,
    slab_stride,
    part_stride,
    SLOTS: tl.constexpr,
    SLOT_ELEMENTS: tl.constexpr,
    PORTION: tl.constexpr,
):
    """Copy blocks, all layers; the grid is `[copies, parts, portions of a slot]`; see `KVLayout.block_views`.

    Args:
        pool: the KV pool as elements.
        sources: int64 `[copies]`, block ids.
        destinations: the same; none is also a source.
        slab_stride: elements from slab to slab.
        part_stride: elements from part to part.
    """
    copy, part = tl.program_id(0), tl.program_id(1).to(tl.int64)
    source, target = tl.load(sources + copy), tl.load(destinations + copy)
    e = tl.program_id(2) * PORTION + tl.arange(0, PORTION)
    mask = e < SLOT_ELEMENTS
    from_at = source // SLOTS * slab_stride + part * part_stride + source % SLOTS * SLOT_ELEMENTS
    to_at = target // SLOTS * slab_stride + part * part_stride + target % SLOTS * SLOT_ELEMENTS
    tl.store(pool + to_at + e, tl.load(pool + from_at + e, mask=mask), mask=mask)
