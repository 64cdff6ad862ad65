"""Small matrix products with a fixed order of summation.

An output depends on its own row of `a` alone: it has the same bits in a tile of one row and in one of eight.

The functions from `configure` on are those of any unit that multiplies rows with panels of a weight: another one has
the same, as `amx`. Compiled code calls them, and they check nothing.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.extending import register_jitable

from espalier.kernels.compilation.compiler import inner
from espalier.kernels.cpu.simd import FLOAT, INDEX, LARGE_REGISTERS, Builder, Strided, constant, vector_function

MR, NR = (8, 32) if LARGE_REGISTERS else (4, 16)
"""Rows and lanes of the largest tile: as many sums as fit in the machine's registers beside their operands."""

_NEAR = 2048 // 4
"""Elements by which a panel is prefetched before its use, where it is read once."""

TILE_ROWS: int = 1
"""Rows that products write at a time, perhaps beyond the last."""

HEIGHTS = (8, 4, 2, 1) if LARGE_REGISTERS else (4, 2, 1)
"""Rows of a tile, the most first."""


class LeftSide(NamedTuple):
    """Rows of a product's left side.

    Attributes:
        stored: rows of `inner` elements, as `pack_row` stores them.
        first: the first of those that are multiplied.
        rows: how many these are.
        inner: elements summed over.
    """

    stored: Any
    first: int
    rows: int
    inner: int


class Blocks(NamedTuple):
    """Blocks of rows that lie apart.

    Attributes:
        places: int64, where blocks begin; those of the product from `first` on.
        first: see `places`.
        num_blocks: how many they are.
        size: rows of a block.
        last: rows of the last one.
    """

    places: np.ndarray
    first: int
    num_blocks: int
    size: int
    last: int


def tile_product(
    name: str, write: Callable[..., None], strides: dict[int, int], heights: tuple[int, ...] = HEIGHTS
) -> Callable[..., None]:
    """A function for compiled code that multiplies any number of rows, its first argument, by tiles of `heights` rows.

    Args:
        name: of a tile's function, to which its number of rows is appended.
        write: `write(rows, builder, arguments)` writes a tile's function; its arguments are those after the first.
        strides: for each of those arguments that moves on from tile to tile, the argument that says how far for a row.
        heights: rows of a tile, the most first, the last one 1.
    """

    def write_all(builder: Builder, args: Any) -> None:
        left, *tile = args
        values = [tile[index] for index in strides]
        for height in heights:
            rows = constant(INDEX, height)

            def multiply(_: Any, values: list[Any], height: int = height, rows: Any = rows) -> list[Any]:
                passed = list(tile)
                for index, value in zip(strides, values, strict=True):
                    passed[index] = value
                builder.call_function(f"{name}_{height}", passed, partial(write, height))
                distances = [builder.mul(tile[stride], rows) for stride in strides.values()]
                return [_moved(builder, *pair) for pair in zip(values, distances, strict=True)]

            values = builder.loop(builder.sdiv(left, rows), values, multiply)
            left = builder.srem(left, rows)

    return vector_function(f"{name}_all", write_all)


def _moved(builder: Builder, value: Any, distance: Any) -> Any:
    return builder.gep(value, [distance]) if isinstance(value.type, ir.PointerType) else builder.add(value, distance)


def _write_tile(lanes: int, rows: int, builder: Builder, args: Any) -> None:
    a, a_stride, b, b_stride, out, out_stride, count = args
    vector = ir.VectorType(FLOAT, lanes)
    out_rows = builder.rows_of(out, out_stride, rows)
    sums = [builder.read(place, vector) for place in out_rows]

    def shared(n: Any) -> Any:
        return builder.read(builder.offset(b, b_stride, n), vector)

    _store(builder, sum_products(builder, sums, builder.rows_of(a, a_stride, rows), shared, count), out_rows)


def _write_prefetching_tile(lanes: int, rows: int, builder: Builder, args: Any) -> None:
    a, a_stride, b, terms, terms_stride, out, out_stride, count, distance, _, step = args
    vector = ir.VectorType(FLOAT, lanes)
    out_rows = builder.rows_of(out, out_stride, rows)
    sums = [builder.read(place, vector) for place in builder.rows_of(terms, terms_stride, rows)]
    half = builder.sdiv(step, constant(INDEX, 2))

    def shared(n: Any) -> Any:
        place = builder.gep(b, [builder.add(distance, builder.mul(n, step))])
        for line in (place, builder.gep(place, [half])):  # a turn's share is two lines at most
            builder.prefetch(line)
        return builder.read(builder.offset(b, lanes, n), vector)

    _store(builder, sum_products(builder, sums, builder.rows_of(a, a_stride, rows), shared, count), out_rows)


def _write_pair_tile(lanes: int, rows: int, builder: Builder, args: Any) -> None:
    a, a_stride, left, right, out, out_stride, count = args
    half = ir.VectorType(FLOAT, lanes // 2)

    def shared(n: Any) -> Any:
        one, other = (builder.read(builder.offset(start, lanes // 2, n), half) for start in (left, right))
        return builder.joined(one, other)

    zeros = [constant(ir.VectorType(FLOAT, lanes), 0.0)] * rows
    sums = sum_products(builder, zeros, builder.rows_of(a, a_stride, rows), shared, count)
    _store(builder, sums, builder.rows_of(out, out_stride, rows))


def _write_blocked_tile(lanes: int, rows: int, builder: Builder, args: Any) -> None:
    a, a_stride, b, places, blocks, size, last, b_stride, out, out_stride = args
    vector = ir.VectorType(FLOAT, lanes)
    out_rows = builder.rows_of(out, out_stride, rows)
    sums = [builder.read(place, vector) for place in out_rows]
    a_rows = builder.rows_of(a, a_stride, rows)
    final = builder.sub(blocks, constant(INDEX, 1))

    def add_block(k: Any, sums: list[Any]) -> list[Any]:
        block = builder.gep(b, [builder.load(builder.gep(places, [k]))])
        count = builder.select(builder.icmp_signed("==", k, final), last, size)
        a_parts = [builder.offset(row, k, size) for row in a_rows]

        def shared(n: Any) -> Any:
            return builder.read(builder.offset(block, b_stride, n), vector)

        return sum_products(builder, sums, a_parts, shared, count)

    _store(builder, builder.loop(blocks, sums, add_block), out_rows)


def _store(builder: Builder, vectors: list[Any], places: list[Any]) -> None:
    for vector, place in zip(vectors, places, strict=True):
        builder.write(vector, place)


def sum_products(
    builder: Builder, sums: list[Any], a_rows: list[Any], load_shared: Callable[[Any], Any], count: Any
) -> list[Any]:
    """Add to each row's vector, for `n < count`, element n of its row of `a` times the vector `load_shared(n)`."""

    def add(n: Any, sums: list[Any]) -> list[Any]:
        shared = load_shared(n)
        factors = [builder.to_all_lanes(builder.load(builder.gep(row, [n])), shared.type.count) for row in a_rows]
        return [builder.fma(factor, shared, total) for factor, total in zip(factors, sums, strict=True)]

    return builder.loop(count, sums, add)


def _write_prefetch_all(builder: Builder, args: Any) -> None:
    x, count = args

    def touch(n: Any, values: list[Any]) -> list[Any]:
        builder.prefetch(builder.offset(x, 16, n))
        return values

    builder.loop(builder.sdiv(count, constant(INDEX, 16)), [], touch)


prefetch = vector_function("espalier_prefetch", _write_prefetch_all)
"""`prefetch(x, start, count)` prefetches `count` elements from `start` on; nothing waits for them."""


def _product_of(lanes: int, heights: tuple[int, ...] = HEIGHTS) -> Callable[..., None]:
    return tile_product(f"espalier_tile_{lanes}", partial(_write_tile, lanes), {0: 1, 4: 5}, heights)


_add_wide, _add_16, _add_1 = _product_of(NR), _product_of(16), _product_of(1, (4, 1))
"""Products of `lanes` outputs a row, added to what is there:

    product(rows, a: Strided, b: Strided, out: Strided, count)

For `i < rows` and `l < lanes`, `out[i, l] += sum of a[i, n] * b[n, l] for n < count`, in order of `n`, each a fused
multiply-add. `b` and `out` are read and written `lanes` elements at a time. Nothing is checked.
"""
_multiply_prefetching = tile_product(
    "espalier_prefetching_tile", partial(_write_prefetching_tile, NR), {0: 1, 3: 4, 5: 6, 8: 9}
)
"""As `_add_wide`, for a `b` without gaps, with a prefetch of the part of `b` that is read next:

    multiply(rows, a: Strided, b, b_start, terms: Strided, out: Strided, count, distance, prefetched_a_row, step)

Sums begin with `terms`, rows of NR, and are written to `out`, which may be the same. A tile prefetches
`prefetched_a_row` elements for each of its rows, `step` in each turn, the first `distance` behind `b_start`: many at
once would delay the loads of the current turn, which wait in the same queue.
"""
multiply_pair = tile_product("espalier_pair_tile", partial(_write_pair_tile, NR), {0: 1, 4: 5})
"""As `_add_wide`, for a `b` whose halves lie apart, each without gaps; writes `out` instead of adding to it:

    multiply(rows, a: Strided, b, left_start, b, right_start, out: Strided, count)

The same bits as a product of each half added to zeros.
"""
_add_blocked = tile_product("espalier_blocked_tile", partial(_write_blocked_tile, NR), {0: 1, 8: 9})
"""As `_add_wide`, for a `b` whose rows lie in separate blocks; the sums stay in registers throughout:

    multiply(rows, a: Strided, b, b_start, blocks: Blocks, b_stride, out: Strided)

Places of blocks are counted from `b_start`.
"""


@inner
def multiply_add(a: Strided, b: np.ndarray, b_start: int, out: Strided, rows: int, inner: int, columns: int) -> None:
    """Add `a @ b` to `out`.

    `a` is [rows, inner], `b` [inner, columns] without gaps, and `out` [rows, columns]. Each output adds its products in
    order of the inner dimension.
    """
    column = 0
    while columns - column >= NR:
        to = Strided(out.array, out.start + column, out.stride)
        _add_wide(rows, a, Strided(b, b_start + column, columns), to, inner)
        column += NR
    if columns - column >= 16:
        to = Strided(out.array, out.start + column, out.stride)
        _add_16(rows, a, Strided(b, b_start + column, columns), to, inner)
        column += 16
    for rest in range(column, columns):
        to = Strided(out.array, out.start + rest, out.stride)
        _add_1(rows, a, Strided(b, b_start + rest, columns), to, inner)


@inner
def multiply_add_blocked(
    a: Strided, b: np.ndarray, b_start: int, blocks: Blocks, out: Strided, rows: int, columns: int
) -> None:
    """As `multiply_add`, the rows of `b` in blocks: see `_add_blocked`."""
    if columns % NR == 0:
        for column in range(0, columns, NR):
            to = Strided(out.array, out.start + column, out.stride)
            _add_blocked(rows, a, b, b_start + column, blocks, columns, to)
        return
    for k in range(blocks.num_blocks):
        part, at = Strided(a.array, a.start + k * blocks.size, a.stride), b_start + blocks.places[blocks.first + k]
        multiply_add(part, b, at, out, rows, blocks.last if k == blocks.num_blocks - 1 else blocks.size, columns)


@inner
def fill_rows(terms: np.ndarray, start: int, count: int, out: Strided, rows: int) -> None:
    """Write `count` elements of `terms` to each of some rows of `out`, where a product only adds to what is there."""
    for r in range(rows):
        at = out.start + r * out.stride
        given, row = terms[start : start + count], out.array[at : at + count]
        for i in range(count):
            row[i] = given[i]


@inner
def configure() -> None:
    """Prepare this thread's unit: vector units need nothing."""


@inner
def release() -> None:
    """Let go of this thread's unit: nothing to do."""


@register_jitable
def aligned(size: int) -> np.ndarray:
    """A new float32 array whose first element begins four cache lines, as pairs of rows of AMX's panels then do."""
    room = np.empty(size + 64, np.float32)
    start = -room.ctypes.data % 256 // 4
    return room[start : start + size]


def x_size(rows: int, inner: int) -> int:
    """Float32 elements that `pack_row` needs for `rows` rows of `inner` elements."""
    return rows * inner


@inner
def pack_row(row: np.ndarray, start: int, inner: int, first: int, count: int, x: np.ndarray, r: int) -> None:
    """Store `count` elements of a flat array, from `start` on, as row `r` of `x`, from column `first` on.

    `x` has rows of `inner` elements.
    """
    given, written = row[start : start + count], x[r * inner + first : r * inner + first + count]
    for i in range(count):
        written[i] = given[i]


@inner
def scratch() -> np.ndarray:
    """Scratch memory for products, one for each thread: none here."""
    return np.empty(0, np.float32)


@inner
def multiply_columns(
    left: LeftSide, column: int, count: int, panel: np.ndarray, panel_at: int, out: Strided, _scratch: np.ndarray
) -> None:
    """Add the product of `count` columns of the left side, from `column` on, and a panel of a weight to `out`.

    The panel is flat float32 `[count, PANEL]`, from `panel_at` on. Rows may be written beyond the last, up to a
    multiple of `TILE_ROWS`.
    """
    a = Strided(left.stored, left.first * left.inner + column, left.inner)
    multiply_add(a, panel, panel_at, out, left.rows, count, NR)


@inner
def multiply_panel(
    left: LeftSide, panels: np.ndarray, at: int, prefetch_at: int, terms: Strided, out: Strided, _scratch: np.ndarray
) -> None:
    """Write the product of all columns with the panel that begins at `at`.

    Sums begin with `terms`, rows of PANEL: either what is in `out`, or one row, with a stride of 0. The panel that is
    read next begins at `prefetch_at`.
    """
    rows, inner = left.rows, left.inner
    a, step = Strided(left.stored, left.first * inner, inner), max(1, NR // ((rows + MR - 1) // MR))
    distance = _NEAR if rows <= MR else prefetch_at - at
    _multiply_prefetching(rows, a, panels, at, terms, out, inner, distance, inner * step // MR, step)
