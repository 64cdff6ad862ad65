"""Norms, rotation and writes between the product of q, k and v and attention, in one pass; copies of whole blocks."""

# pyright: reportArgumentType=false, reportAssignmentType=false
# (within kernels, numbers and tensors have Triton's types, which are not those of Python)

from typing import ClassVar

import numpy as np
import torch
import triton
import triton.language as tl

from espalier.kernels.layout import KVLayout, LayerKV, Layout
from espalier.kernels.triton.launches import launch_options, wait_and_trigger
from espalier.kernels.triton.steps import to_device

PORTION = tl.constexpr(1024)


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
    dependent: bool = False,
) -> torch.Tensor:
    """Norm and rotate a step's queries and keys, and write its keys and values to their blocks.

    Args:
        qkv: `[T, heads + 2 * kv_heads, head_dim]`.
        cosines: float32 `[T, 1, pairs]`; see `kernels.rotary`. Elements of a head beyond two times that do not turn.
        sines: the same.
        norms: factors of RMSNorm over each query head and each key head, `[head_dim]`; None without.
        eps: of the norms.
        places: int64 `[T]`, where each token's first head lies in the layer's keys; -1 where it must not be written.
        layer_kv: in `TokenMajorLayout`; written.
        dependent: whether to use programmatic dependent launch.

    Returns:
        Queries, `[T, heads, head_dim]`.
    """
    _, _, block_size, kv_heads, head_dim = layer_kv.keys.shape
    tokens, heads = len(qkv), qkv.shape[1] - 2 * kv_heads
    pairs, query = cosines.shape[-1], qkv.new_empty((tokens, heads, head_dim))
    if tokens:
        rotate_and_write[(tokens,)](
            qkv,
            cosines,
            sines,
            *(norms or (None, None)),
            places,
            query,
            layer_kv.keys,
            layer_kv.values,
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            PAIRS=pairs,
            BLOCK_SIZE=block_size,
            **launch_options(dependent),
        )
    return query


def write_heads(key: torch.Tensor, value: torch.Tensor, places: torch.Tensor, layer_kv: LayerKV) -> None:
    """Write a step's keys and values to their blocks, as they are.

    Args:
        key: `[T, kv_heads, head_dim]`, in any order in memory whose heads are whole; there may be fewer places.
        value: `[T, kv_heads, value_dim]`, likewise.
        places: see `norm_rotate_write`.
        layer_kv: in `TokenMajorLayout`; written.
    """
    _, _, block_size, kv_heads, head_dim = layer_kv.keys.shape
    value_dim = layer_kv.values.shape[-1]
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    if len(places):
        write_tokens[(len(places),)](
            key,
            value,
            places,
            layer_kv.keys,
            layer_kv.values,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            layer_kv.keys.stride(0),
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            BLOCK_SIZE=block_size,
        )


def copy_blocks(layout: Layout, kv_pool: torch.Tensor, sources: list[int], destinations: list[int]) -> None:
    """See `kernels.layout.copy_blocks`."""
    ids = to_device(np.array([sources, destinations], np.int64), kv_pool.device)
    for blocks in layout.block_views(kv_pool) if sources else ():
        _, parts, slots, elements = blocks.shape
        copy_whole_blocks[len(sources), parts, triton.cdiv(elements, PORTION.value)](
            blocks,
            ids[0],
            ids[1],
            blocks.stride(0),
            blocks.stride(1),
            SLOTS=slots,
            SLOT_ELEMENTS=elements,
        )


@triton.jit
def _rotated(at, d, rest, weight, cos, sin, mask, rest_mask, eps, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr):
    """Heads `[heads, ...]`, normed by a weight if there is one: both elements of each pair, rotated, and all others.

    They are float32, rounded as torch rounds.
    """
    loaded, upper_loaded = tl.load(at + d, mask=mask, other=0.0), tl.load(at + PAIRS + d, mask=mask, other=0.0)
    lower, upper = loaded.to(tl.float32), upper_loaded.to(tl.float32)
    unturned = tl.load(at + rest, mask=rest_mask, other=0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(lower * lower, 1) + tl.sum(upper * upper, 1)
        if 2 * PAIRS < HEAD_DIM:
            squares += tl.sum(unturned * unturned, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        inside = d < PAIRS
        lower *= scale * tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
        upper *= scale * tl.load(weight + PAIRS + d, mask=inside, other=0.0).to(tl.float32)
        unturned *= scale * tl.load(weight + rest, mask=rest < HEAD_DIM, other=0.0).to(tl.float32)
        lower = lower.to(loaded.dtype).to(tl.float32)
        upper = upper.to(loaded.dtype).to(tl.float32)
    return lower * cos - upper * sin, upper * cos + lower * sin, unturned


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
    PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Norm and rotate queries and keys, and write keys and values to their blocks; the grid is `[T]`.

    Args:
        qkv: `[T, HEADS + 2 * KV_HEADS, HEAD_DIM]`; the first `2 * PAIRS` elements of a head turn.
        cosines: float32 `[T, PAIRS]`.
        sines: the same.
        query_norm: `[HEAD_DIM]`, factors of RMSNorm; None without.
        key_norm: the same for keys.
        places: int64 `[T]`, where the first head of each token lies in its layer's keys, in elements; -1 where it must
            not be written.
        query: `[T, HEADS, HEAD_DIM]`, written.
        keys: where the layer's keys begin in the pool.
        values: where its values begin.
        eps: of the norms.
    """
    wait_and_trigger(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    padded_rest: tl.constexpr = triton.next_power_of_2(max(1, HEAD_DIM - 2 * PAIRS))
    d, rest = tl.arange(0, triton.next_power_of_2(PAIRS))[None, :], 2 * PAIRS + tl.arange(0, padded_rest)[None, :]
    head = tl.arange(0, triton.next_power_of_2(HEADS))[:, None]
    inside, in_rest = d < PAIRS, rest < HEAD_DIM
    cos = tl.load(cosines + token * PAIRS + d, mask=inside, other=0.0)
    sin = tl.load(sines + token * PAIRS + d, mask=inside, other=0.0)
    row = qkv + token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)

    mask, rest_mask = (head < HEADS) & inside, (head < HEADS) & in_rest
    at = row + head * HEAD_DIM
    lower, upper, unturned = _rotated(at, d, rest, query_norm, cos, sin, mask, rest_mask, eps, HEAD_DIM, PAIRS)
    query_at = query + token * (HEADS * HEAD_DIM) + head * HEAD_DIM
    tl.store(query_at + d, lower.to(query.dtype.element_ty), mask=mask)
    tl.store(query_at + PAIRS + d, upper.to(query.dtype.element_ty), mask=mask)
    tl.store(query_at + rest, unturned.to(query.dtype.element_ty), mask=rest_mask)

    place = tl.load(places + token)
    if place >= 0:
        mask, rest_mask = (head < KV_HEADS) & inside, (head < KV_HEADS) & in_rest
        key_at = at + HEADS * HEAD_DIM
        lower, upper, unturned = _rotated(key_at, d, rest, key_norm, cos, sin, mask, rest_mask, eps, HEAD_DIM, PAIRS)
        written_at = place + head * (BLOCK_SIZE * HEAD_DIM)
        tl.store(keys + written_at + d, lower.to(keys.dtype.element_ty), mask=mask)
        tl.store(keys + written_at + PAIRS + d, upper.to(keys.dtype.element_ty), mask=mask)
        tl.store(keys + written_at + rest, unturned.to(keys.dtype.element_ty), mask=rest_mask)
        value_at = key_at + KV_HEADS * HEAD_DIM
        tl.store(values + written_at + d, tl.load(value_at + d, mask=mask), mask=mask)
        tl.store(values + written_at + PAIRS + d, tl.load(value_at + PAIRS + d, mask=mask), mask=mask)
        tl.store(values + written_at + rest, tl.load(value_at + rest, mask=rest_mask), mask=rest_mask)


@triton.jit
def write_tokens(
    key,
    value,
    places,
    keys,
    values,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    slab_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Write keys and values to their blocks; the grid is `[T]`.

    Args:
        key: elements of a head side by side, with the strides that are given.
        value: the same.
        places: int64 `[T]`, where the first head of each token lies in its layer's keys, in elements; -1 where it must
            not be written.
        keys: where the layer's keys begin in the pool.
        values: where its values begin.
        slab_stride: elements from slab to slab.
    """
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places + token)
    if place >= 0:
        d = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
        e = tl.arange(0, triton.next_power_of_2(VALUE_DIM))[None, :]
        head = tl.arange(0, triton.next_power_of_2(KV_HEADS))[:, None]
        mask = (head < KV_HEADS) & (d < HEAD_DIM)
        x = tl.load(key + token * key_token_stride + head * key_head_stride + d, mask=mask)
        tl.store(keys + place + head * (BLOCK_SIZE * HEAD_DIM) + d, x, mask=mask)
        slab_at = place // slab_stride * slab_stride
        value_place = slab_at + (place - slab_at) // HEAD_DIM * VALUE_DIM
        mask = (head < KV_HEADS) & (e < VALUE_DIM)
        x = tl.load(value + token * value_token_stride + head * value_head_stride + e, mask=mask)
        tl.store(values + value_place + head * (BLOCK_SIZE * VALUE_DIM) + e, x, mask=mask)


@triton.jit
def copy_whole_blocks(
    pool, sources, destinations, slab_stride, part_stride, SLOTS: tl.constexpr, SLOT_ELEMENTS: tl.constexpr
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
