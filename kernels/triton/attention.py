"""Attention over paged keys and values, in which blocks that siblings share are read once.

The work items come from `plan.py`. One program computes one item and one kv head: it goes through the item's positions
`TILE` at a time and keeps a running softmax (Milakov and Gimelshein, 2018; Dao et al., 2022). Its matrix tile holds the
queries of all rows of the item and of all query heads that share the kv head. The partial results of a row with several
items are merged in a fixed order, by the program that ends last.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
# (within kernels, numbers and tensors have Triton's types, which are not those of Python)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from espalier.kernels.attention import Terms
from espalier.kernels.layers import UnsupportedShapeError
from espalier.kernels.layout import LayerKV
from espalier.kernels.triton.plan import FIELDS, TILE

LOG2_E = tl.constexpr(1.4426950408889634)
_FIELDS, _TILE = tl.constexpr(FIELDS), tl.constexpr(TILE)


@dataclass(frozen=True, slots=True)
class Tile:
    """The matrix tile of a work item.

    Attributes:
        rows: its height: queries of all rows of the item and of all heads that share a kv head.
        options: of the compiler.
    """

    rows: int
    options: dict[str, int]


def _tile(rows: int, warps: int, stages: int) -> Tile:
    return Tile(rows, {"num_warps": warps, "num_stages": stages})


NARROW, WIDE = _tile(16, 4, 3), _tile(64, 8, 3)
_TILES = {
    512: (NARROW, WIDE),
    1024: (_tile(16, 8, 2), _tile(32, 8, 2)),
    2048: (_tile(16, 8, 2), _tile(16, 8, 2)),
}
"""Narrow and wide tiles by the most bytes of a key and a value head, filled up, that leave threads enough registers.

Three stages hold the keys and values of two tiles, the one that is multiplied and the next one; two hold one's.
"""


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """An `AttentionPlan` on the device, in room that may be larger than it.

    Attributes:
        sizes: int32 `[4]`: narrow items, entries of a block table, wide items, entries of a block table.
        counters: int32, at least `[T * kv_heads]`, zeros between launches: partial results that are there.
        partials: room for partial results.
        programs: of each kv head, which share the items.
        beside: a stream on which wide items are computed while narrow ones are; None for one after the other.
    """

    narrow: torch.Tensor
    wide: torch.Tensor
    sizes: torch.Tensor
    rows: torch.Tensor
    merge_starts: torch.Tensor
    merges: torch.Tensor
    counters: torch.Tensor
    partials: int
    programs: int
    beside: torch.cuda.Stream | None = None


def attend(
    query: torch.Tensor,
    layer_kv: LayerKV,
    plan: DevicePlan,
    positions: torch.Tensor,
    tables: torch.Tensor,
    terms: Terms,
) -> torch.Tensor:
    """Attention of a step's tokens in one layer.

    Args:
        query: `[T, heads, head_dim]`.
        layer_kv: the layer's keys and values in `TokenMajorLayout`; those of this step are written already.
        plan: of this window.
        positions: int32 `[T]`.
        tables: int32, block tables, one after the other.
        terms: how its logits are made.

    Returns:
        `[T, heads, value_dim]` in the query's dtype.
    """
    scale, window, softcap, sinks = terms
    tiles = tiles_of(query.shape[2], layer_kv.values.shape[-1], query.element_size())
    _, slots, block_size, kv_heads, head_dim = layer_kv.keys.shape
    (tokens, heads, _), value_dim = query.shape, layer_kv.values.shape[-1]
    output = query.new_empty((tokens, heads, value_dim))
    partial = query.new_empty((plan.partials, heads, value_dim), dtype=torch.float32)
    weights = query.new_empty((plan.partials, heads), dtype=torch.float32)

    def launch(kind: int) -> None:
        items, tile = (plan.narrow, plan.wide)[kind], tiles[kind]
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
                plan.merge_starts,
                plan.merges,
                plan.counters,
                positions,
                tables,
                layer_kv.keys.stride(0),
                sinks,
                scale * LOG2_E.value if softcap is None else scale,
                window,
                softcap,
                SLOTS=slots,
                BLOCK_SIZE=block_size,
                KV_HEADS=kv_heads,
                GROUPS=heads // kv_heads,
                HEAD_DIM=head_dim,
                VALUE_DIM=value_dim,
                TILE_ROWS=tile.rows,
                **tile.options,
            )

    if plan.beside is None or not len(plan.narrow) or not len(plan.wide):
        launch(0)
        launch(1)
        return output
    here = torch.cuda.current_stream(query.device)
    plan.beside.wait_stream(here)
    with torch.cuda.stream(plan.beside):
        launch(1)
    launch(0)
    here.wait_stream(plan.beside)
    return output


def padded(dim: int) -> int:
    """Elements of a head as matrix tiles hold them."""
    return max(16, triton.next_power_of_2(dim))


def rows_of_tiles(groups: int, tiles: tuple[Tile, Tile] = (NARROW, WIDE), *, fixed: bool = False) -> tuple[int, int]:
    """Rows of a narrow and of a wide work item, for so many query heads to a kv head; `fixed` tiles are all wide.

    Raises:
        UnsupportedShapeError: when not even one row fits.
    """
    narrow, wide = tiles
    if groups > wide.rows:
        raise UnsupportedShapeError(
            f"{groups} query heads share each key and value head, and attention on a GPU takes {wide.rows} at most"
        )
    return 0 if fixed else narrow.rows // groups, wide.rows // groups


def tiles_of(key_dim: int, value_dim: int, itemsize: int, shared_memory: int | None = None) -> tuple[Tile, Tile]:
    """The tiles of narrow and of wide items, for heads of so many elements of `itemsize` bytes.

    Args:
        key_dim: elements of a head of keys.
        value_dim: of one of values.
        itemsize: bytes of an element.
        shared_memory: bytes that a program may have; None for enough.

    Raises:
        UnsupportedShapeError: registers or shared memory do not suffice.
    """
    size = (padded(key_dim) + padded(value_dim)) * itemsize
    if tiles := next((tiles for most, tiles in _TILES.items() if size <= most), None):
        held = tiles[1].options["num_stages"] - 1  # tiles of keys and values
        needed = held * TILE * size + tiles[1].rows * (padded(key_dim) + TILE) * itemsize
        if shared_memory is None or needed <= shared_memory:
            return tiles
    raise UnsupportedShapeError(
        f"keys of {key_dim} and values of {value_dim} elements a head, {itemsize} bytes each, are more than attention "
        f"on this GPU has room for"
    )


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
    merge_starts,
    merges,
    counters,
    positions,
    tables,
    slab_stride,
    sinks,
    scale,
    window,
    softcap,
    SLOTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Work items of one kv head, one after the other; the grid is `[programs that share the items, kv heads]`.

    The partial results of a row are merged by the program that is there last, of whichever launch.

    Args:
        query: `[T, heads, HEAD_DIM]`.
        keys: where the layer's keys begin in the pool.
        values: where its values begin.
        output: `[T, heads, VALUE_DIM]`, written.
        partial: float32 `[partials, heads, VALUE_DIM]`, softmax-weighted means, without sinks.
        partial_weights: float32 `[partials, heads]`, logarithms to base 2 of the sums of weights.
        items: int32 `[items, FIELDS]`.
        sizes: int32 `[2]`, the number of items and of entries of a block table.
        rows: int32, the rows of all items.
        merge_starts: int32 `[T + 1]`.
        merges: int32, places of partial results by row.
        counters: int32 `[T, KV_HEADS]`, zeros, and zeros again afterwards.
        positions: int32 `[T]`, the position of each row in its sequence.
        tables: int32, block tables, one after the other.
        slab_stride: elements from slab to slab.
        sinks: `[heads]`, one more logit of each head; None without.
        scale: factor on the logits, times `LOG2_E` unless they are capped.
        window: positions that a token sees; None for all before it.
        softcap: bound of the logits; None without.
    """
    kv_head = tl.program_id(1)
    num_items, table_size = tl.load(sizes), tl.load(sizes + 1)
    m = tl.arange(0, TILE_ROWS)
    place, head = m // GROUPS, kv_head * GROUPS + m % GROUPS
    padded_dim: tl.constexpr = max(16, triton.next_power_of_2(HEAD_DIM))
    padded_value: tl.constexpr = max(16, triton.next_power_of_2(VALUE_DIM))
    precision: tl.constexpr = "ieee" if query.dtype.element_ty == tl.float32 else "tf32"
    d = tl.arange(0, padded_dim)
    is_dim = d < HEAD_DIM
    e = tl.arange(0, padded_value)
    is_value = e < VALUE_DIM
    heads: tl.constexpr = KV_HEADS * GROUPS
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        item_at = items + item * _FIELDS
        first, count, table = tl.load(item_at), tl.load(item_at + 1), tl.load(item_at + 2)
        start, stop, partial_at = tl.load(item_at + 3), tl.load(item_at + 4), tl.load(item_at + 5)
        table_at = tables + table.to(tl.int64) * table_size

        is_row = place < count
        # As far as its table reaches: where the rows end is not known so soon.
        n = start + tl.arange(0, _TILE)
        following = tl.load(table_at + n // BLOCK_SIZE, mask=(n < stop) & (n // BLOCK_SIZE < table_size), other=0)
        listed = place < tl.where(count > 1, count, 0)
        row = tl.load(rows + first + place, mask=listed, other=0)
        row = tl.where(listed, row, tl.where(is_row, first, 0))
        position = tl.load(positions + row, mask=is_row, other=-1)
        end = tl.minimum(stop, tl.max(position, 0) + 1)
        # [TILE_ROWS, padded_dim]
        query_at = (row.to(tl.int64) * heads + head)[:, None] * HEAD_DIM + d[None, :]
        q = tl.load(query + query_at, mask=is_row[:, None] & is_dim[None, :], other=0.0)

        largest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        mixed = tl.zeros([TILE_ROWS, padded_value], tl.float32)
        for begin in range(start, end, _TILE):
            n = begin + tl.arange(0, _TILE)
            inside, block = n < end, following
            # A tile ahead, so that keys and values need not wait for the table.
            following = tl.load(table_at + (n + _TILE) // BLOCK_SIZE, mask=n + _TILE < end, other=0)
            slab_at = (block // SLOTS).to(tl.int64) * slab_stride
            token = (block % SLOTS * KV_HEADS + kv_head) * BLOCK_SIZE + n % BLOCK_SIZE  # of the slab, this head's
            held = inside & (block >= 0)  # others are behind all windows
            key_at = (slab_at + token * HEAD_DIM)[:, None] + d[None, :]  # [TILE, padded_dim]
            key = tl.load(keys + key_at, mask=held[:, None] & is_dim[None, :], other=0.0)
            logits = tl.dot(q, tl.trans(key), input_precision=precision) * scale  # [TILE_ROWS, TILE]
            if softcap is not None:  # tanh(x) is 1 - 2 / (1 + exp(2 x))
                logits = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * logits / softcap))) * LOG2_E
            behind = position[:, None] - n[None, :]
            visible = inside[None, :] & (behind >= 0)
            if window is not None:
                visible &= behind < window
            logits = tl.where(visible, logits, float("-inf"))
            now = tl.maximum(largest, tl.max(logits, 1))
            # A row that has seen nothing yet has no largest logit: any number will do for it.
            base = tl.where(now == float("-inf"), 0.0, now)
            kept = tl.exp2(largest - base)
            weights = tl.exp2(logits - base[:, None])
            value_at = (slab_at + token * VALUE_DIM)[:, None] + e[None, :]  # [TILE, padded_value]
            value = tl.load(values + value_at, mask=held[:, None] & is_value[None, :], other=0.0)
            total = total * kept + tl.sum(weights, 1)
            mixed = mixed * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=precision)
            largest = now
        mask = is_row[:, None] & is_value[None, :]
        if partial_at < 0:
            if sinks is not None:  # with partial results, when these are merged
                sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
                now = tl.maximum(largest, sink)
                kept = tl.exp2(largest - now)
                total = total * kept + tl.exp2(sink - now)
                mixed = mixed * kept[:, None]
            mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
            output_at = (row.to(tl.int64) * heads + head)[:, None] * VALUE_DIM + e[None, :]
            tl.store(output + output_at, mixed.to(output.dtype.element_ty), mask=mask)
        else:
            mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
            at = (partial_at + place).to(tl.int64) * heads + head
            tl.store(partial + at[:, None] * VALUE_DIM + e[None, :], mixed, mask=mask)
            tl.store(partial_weights + at, largest + tl.log2(tl.where(total == 0.0, 1.0, total)), mask=is_row)
            tl.debug_barrier()  # all of the program's threads have written before one of them says so
            counter = counters + row * KV_HEADS + kv_head
            counts = is_row & (m % GROUPS == 0)
            earlier = tl.atomic_add(counter, 1, mask=counts, sem="acq_rel")
            tl.debug_barrier()  # and none reads before that
            begins = tl.load(merge_starts + row, mask=counts, other=0)
            last = counts & (earlier + 1 == tl.load(merge_starts + row + 1, mask=counts, other=0) - begins)
            tl.store(counter, 0, mask=last)
            merged = partial, partial_weights, merge_starts, merges, sinks, output
            for index in range(count):
                found = tl.max(tl.where(last & (place == index), row, -1), 0)
                if found >= 0:
                    merge_partials(*merged, found, kv_head, KV_HEADS, GROUPS, VALUE_DIM)


@triton.jit
def merge_partials(
    partial, partial_weights, merge_starts, merges, sinks, output, row, kv_head, KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one row and the heads of one kv head, in the order of `merges`.

    Arguments are those of `attend_items`.
    """
    heads: tl.constexpr = KV_HEADS * GROUPS
    g, d = tl.arange(0, triton.next_power_of_2(GROUPS)), tl.arange(0, max(16, triton.next_power_of_2(VALUE_DIM)))
    head, is_head = kv_head * GROUPS + g, g < GROUPS
    mask = is_head[:, None] & (d < VALUE_DIM)[None, :]
    largest = tl.full([triton.next_power_of_2(GROUPS)], float("-inf"), tl.float32)
    total = tl.zeros([triton.next_power_of_2(GROUPS)], tl.float32)
    if sinks is not None:
        largest = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    mixed = tl.zeros([triton.next_power_of_2(GROUPS), max(16, triton.next_power_of_2(VALUE_DIM))], tl.float32)
    for index in range(tl.load(merge_starts + row), tl.load(merge_starts + row + 1)):
        at = tl.load(merges + index).to(tl.int64) * heads + head
        # From where all multiprocessors see it.
        weight = tl.load(partial_weights + at, mask=is_head, other=0.0, cache_modifier=".cg")
        part = tl.load(partial + at[:, None] * VALUE_DIM + d[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        now = tl.maximum(largest, weight)
        base = tl.where(now == float("-inf"), 0.0, now)
        kept, share = tl.exp2(largest - base), tl.exp2(weight - base)
        mixed = mixed * kept[:, None] + part * share[:, None]
        total = total * kept + share
        largest = now
    output_at = (row.to(tl.int64) * heads + head)[:, None] * VALUE_DIM + d[None, :]
    tl.store(output + output_at, (mixed / total[:, None]).to(output.dtype.element_ty), mask=mask)
