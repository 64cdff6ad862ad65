"""Attention over paged keys and values, in which blocks that siblings share are read once.

The work items come from `plan.py`. One program computes one item and one kv head: it goes through the item's positions
`TILE` at a time and keeps a running softmax (Milakov and Gimelshein, 2018; Dao et al., 2022). Its matrix tile holds the
queries of all rows of the item and of all query heads that share the kv head. A second kernel merges the partial
results of rows with several items, in a fixed order.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
# (within kernels, numbers and tensors have Triton's types, which are not those of Python)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from espalier.kernels.layers import UnsupportedShapeError
from espalier.kernels.layout import LayerKV
from espalier.kernels.triton.plan import FIELDS, TILE

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tile:
    """The matrix tile of a work item.

    Attributes:
        rows: its height: queries of all rows of the item and of all heads that share a kv head.
        options: of the compiler.
    """

    rows: int
    options: dict[str, int]


NARROW = Tile(16, {"num_warps": 4, "num_stages": 3})
WIDE = Tile(64, {"num_warps": 8, "num_stages": 3})


def precision(dtype: torch.dtype) -> str:
    """Precision of `tl.dot` for a dtype: float32 as float32."""
    return "ieee" if dtype == torch.float32 else "tf32"


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """An `AttentionPlan` on the device, in room that may be larger than it.

    Attributes:
        sizes: int32 `[4]`: narrow items, entries of a block table, wide items, entries of a block table.
        partials: room for partial results.
        programs: of each kv head, which share the items.
    """

    narrow: torch.Tensor
    wide: torch.Tensor
    sizes: torch.Tensor
    rows: torch.Tensor
    merge_starts: torch.Tensor
    merges: torch.Tensor
    partials: int
    programs: int


def attend(
    query: torch.Tensor,
    layer_kv: LayerKV,
    plan: DevicePlan,
    positions: torch.Tensor,
    tables: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of a step's tokens in one layer.

    Args:
        query: `[T, heads, head_dim]`.
        layer_kv: the layer's keys and values in `TokenMajorLayout`; those of this step are written already.
        plan: of this window.
        positions: int32 `[T]`.
        tables: int32, block tables, one after the other.
        scale: factor on the logits, usually `head_dim ** -0.5`.
        window: how many positions a token sees, its own the last; None for all before it.

    Returns:
        `[T, heads, head_dim]` in the query's dtype.
    """
    _, slots, block_size, kv_heads, head_dim = layer_kv.keys.shape
    tokens, heads, _ = query.shape
    output = torch.empty_like(query)
    partial = query.new_empty((plan.partials, heads, head_dim), dtype=torch.float32)
    weights = query.new_empty((plan.partials, heads), dtype=torch.float32)
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    for kind, (items, tile) in enumerate(((plan.narrow, NARROW), (plan.wide, WIDE))):
        if len(items):
            attend_items[min(len(items), plan.programs), kv_heads](
                query,
                layer_kv.keys,
                layer_kv.values,
                output,
                partial,
                weights,
                items,
                plan.sizes[2 * kind :],
                plan.rows,
                positions,
                tables,
                layer_kv.keys.stride(0),
                scale * LOG2_E,
                window or 0,
                SLOTS=slots,
                BLOCK_SIZE=block_size,
                KV_HEADS=kv_heads,
                GROUPS=heads // kv_heads,
                HEAD_DIM=head_dim,
                PADDED_DIM=padded_dim,
                FIELDS=FIELDS,
                TILE_ROWS=tile.rows,
                TILE=TILE,
                WINDOWED=window is not None,
                PRECISION=precision(query.dtype),
                **tile.options,
            )
    if plan.partials:
        merge_partials[tokens, heads](
            partial,
            weights,
            plan.merge_starts,
            plan.merges,
            output,
            HEADS=heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
        )
    return output


def rows_of_tiles(groups: int, *, fixed: bool = False) -> tuple[int, int]:
    """Rows of a narrow and of a wide work item, for so many query heads to a kv head; `fixed` tiles are all wide.

    Raises:
        UnsupportedShapeError: when not even one row fits.
    """
    if groups > WIDE.rows:
        raise UnsupportedShapeError(
            f"{groups} query heads share each key and value head, and attention on a GPU takes {WIDE.rows} at most"
        )
    return 0 if fixed else NARROW.rows // groups, WIDE.rows // groups


@triton.jit
def attend_items(
    query,
    keys,
    values,
    output,
    partial,
    partial_weights,
    items,
    sizes,
    rows,
    positions,
    tables,
    slab_stride,
    scale,
    window,
    SLOTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Work items of one kv head, one after the other; the grid is `[programs that share the items, kv heads]`.

    Args:
        query: `[T, heads, HEAD_DIM]`.
        keys: where the layer's keys begin in the pool.
        values: where its values begin.
        output: `[T, heads, HEAD_DIM]`, written for items without partial results.
        partial: float32 `[partials, heads, HEAD_DIM]`, softmax-weighted means.
        partial_weights: float32 `[partials, heads]`, logarithms to base 2 of the sums of weights.
        items: int32 `[items, FIELDS]`.
        sizes: int32 `[2]`, the number of items and of entries of a block table.
        rows: int32, the rows of all items.
        positions: int32 `[T]`, the position of each row in its sequence.
        tables: int32, block tables, one after the other.
        slab_stride: elements from slab to slab.
        scale: factor on the logits, times `LOG2_E`.
        window: positions that a token sees, where `WINDOWED`.
    """
    kv_head = tl.program_id(1)
    num_items, table_size = tl.load(sizes), tl.load(sizes + 1)
    m = tl.arange(0, TILE_ROWS)
    place, head = m // GROUPS, kv_head * GROUPS + m % GROUPS
    d = tl.arange(0, PADDED_DIM)
    is_dim = d < HEAD_DIM
    heads: tl.constexpr = KV_HEADS * GROUPS
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        item_at = items + item * FIELDS
        first, count, table = tl.load(item_at), tl.load(item_at + 1), tl.load(item_at + 2)
        start, stop, partial_at = tl.load(item_at + 3), tl.load(item_at + 4), tl.load(item_at + 5)
        table_at = tables + table.to(tl.int64) * table_size

        is_row = place < count
        row = tl.load(rows + first + place, mask=is_row, other=0)
        position = tl.load(positions + row, mask=is_row, other=-1)
        end = tl.minimum(stop, tl.max(position, 0) + 1)
        # [TILE_ROWS, PADDED_DIM]
        query_at = (row.to(tl.int64) * heads + head)[:, None] * HEAD_DIM + d[None, :]
        q = tl.load(query + query_at, mask=is_row[:, None] & is_dim[None, :], other=0.0)

        largest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        mixed = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
        for begin in range(start, end, TILE):
            n = begin + tl.arange(0, TILE)
            inside = n < end
            block = tl.load(table_at + n // BLOCK_SIZE, mask=inside, other=0)
            slot_at = (block // SLOTS).to(tl.int64) * slab_stride + block % SLOTS * (KV_HEADS * BLOCK_SIZE * HEAD_DIM)
            token_at = slot_at + (kv_head * BLOCK_SIZE + n % BLOCK_SIZE) * HEAD_DIM
            kv_at = token_at[:, None] + d[None, :]  # [TILE, PADDED_DIM]
            held = inside & (block >= 0)  # others are behind all windows
            kv_mask = held[:, None] & is_dim[None, :]
            key = tl.load(keys + kv_at, mask=kv_mask, other=0.0)
            logits = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale  # [TILE_ROWS, TILE]
            behind = position[:, None] - n[None, :]
            visible = inside[None, :] & (behind >= 0)
            if WINDOWED:
                visible &= behind < window
            logits = tl.where(visible, logits, float("-inf"))
            now = tl.maximum(largest, tl.max(logits, 1))
            # A row that has seen nothing yet has no largest logit: any number will do for it.
            base = tl.where(now == float("-inf"), 0.0, now)
            kept = tl.exp2(largest - base)
            weights = tl.exp2(logits - base[:, None])
            value = tl.load(values + kv_at, mask=kv_mask, other=0.0)
            total = total * kept + tl.sum(weights, 1)
            mixed = mixed * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
            largest = now
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]

        mask = is_row[:, None] & is_dim[None, :]
        if partial_at < 0:
            tl.store(output + query_at, mixed.to(output.dtype.element_ty), mask=mask)
        else:
            at = (partial_at + place).to(tl.int64) * heads + head
            tl.store(partial + at[:, None] * HEAD_DIM + d[None, :], mixed, mask=mask)
            tl.store(partial_weights + at, largest + tl.log2(tl.where(total == 0.0, 1.0, total)), mask=is_row)


@triton.jit
def merge_partials(
    partial,
    partial_weights,
    merge_starts,
    merges,
    output,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """One row and one head; the grid is `[T, heads]`. Partial results are added in the order of `merges`.

    Args:
        partial: float32 `[partials, HEADS, HEAD_DIM]`.
        partial_weights: float32 `[partials, HEADS]`, logarithms to base 2.
        merge_starts: int32 `[T + 1]`.
        merges: int32, places of partial results by row; a row that has none is left as it is.
        output: `[T, HEADS, HEAD_DIM]`.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(merge_starts + row), tl.load(merge_starts + row + 1)
    if first == end:
        return
    d = tl.arange(0, PADDED_DIM)
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([PADDED_DIM], tl.float32)
    for index in range(first, end):
        at = tl.load(merges + index).to(tl.int64) * HEADS + head
        weight = tl.load(partial_weights + at)
        now = tl.maximum(largest, weight)
        base = tl.where(now == float("-inf"), 0.0, now)
        kept, share = tl.exp2(largest - base), tl.exp2(weight - base)
        part = tl.load(partial + at * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
        mixed = mixed * kept + part * share
        total = total * kept + share
        largest = now
    output_at = (row.to(tl.int64) * HEADS + head) * HEAD_DIM + d
    tl.store(output + output_at, (mixed / total).to(output.dtype.element_ty), mask=d < HEAD_DIM)
