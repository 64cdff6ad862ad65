"""Small matrix products with a fixed order of summation.

An output depends on its own row of `a` alone: it has the same bits in a tile of one row and in one of eight.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba.extending import register_jitable

from espalier.kernels.compilation.compiler import inner
from espalier.kernels.cpu.simd import (
    FLOAT,
    INDEX,
    INT,
    call_function,
    call_llvm,
    fma,
    load,
    loop,
    store,
    to_all_lanes,
    vector_function,
)

_LARGE_REGISTERS = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
MR, NR = (8, 32) if _LARGE_REGISTERS else (4, 16)
"""Rows and lanes of the largest tile: as many sums as fit in the machine's registers beside their operands."""

_NEAR = 2048 // 4
"""Elements by which a panel is prefetched before its use, where it is read once."""

TILE_ROWS: int = 1
"""Rows that `multiply_columns` writes at a time."""

HEIGHTS = (8, 4, 2, 1) if _LARGE_REGISTERS else (4, 2, 1)
"""Rows of a tile, the most first."""


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

    def write_all(builder: ir.IRBuilder, args: Any) -> None:
        left, *tile = args
        values = [tile[index] for index in strides]
        for height in heights:
            rows = ir.Constant(INDEX, height)

            def multiply(_: Any, values: list[Any], height: int = height, rows: Any = rows) -> list[Any]:
                passed = list(tile)
                for index, value in zip(strides, values, strict=True):
                    passed[index] = value
                call_function(builder, f"{name}_{height}", ir.VoidType(), passed, partial(write, height))
                distances = [builder.mul(tile[stride], rows) for stride in strides.values()]
                return [_moved(builder, *pair) for pair in zip(values, distances, strict=True)]

            values = loop(builder, builder.sdiv(left, rows), values, multiply)
            left = builder.srem(left, rows)

    return vector_function(f"{name}_all", write_all)


def _moved(builder: ir.IRBuilder, value: Any, distance: Any) -> Any:
    return builder.gep(value, [distance]) if isinstance(value.type, ir.PointerType) else builder.add(value, distance)


def _write_tile(lanes: int, rows: int, builder: ir.IRBuilder, args: Any) -> None:
    a, a_stride, b, b_stride, out, out_stride, count = args
    vector = ir.VectorType(FLOAT, lanes)
    out_rows = rows_of(builder, out, out_stride, rows)
    sums = [load(builder, place, vector) for place in out_rows]

    def shared(n: Any) -> Any:
        return load(builder, _row_of(builder, b, b_stride, n), vector)

    store(builder, sum_products(builder, sums, rows_of(builder, a, a_stride, rows), shared, count), out_rows)


def _write_prefetching_tile(lanes: int, rows: int, builder: ir.IRBuilder, args: Any) -> None:
    a, a_stride, b, terms, terms_stride, out, out_stride, count, distance, _, step = args
    vector = ir.VectorType(FLOAT, lanes)
    out_rows = rows_of(builder, out, out_stride, rows)
    sums = [load(builder, place, vector) for place in rows_of(builder, terms, terms_stride, rows)]
    half = builder.sdiv(step, ir.Constant(INDEX, 2))

    def shared(n: Any) -> Any:
        place = builder.gep(b, [builder.add(distance, builder.mul(n, step))])
        for line in (place, builder.gep(place, [half])):  # a turn's share is two lines at most
            write_prefetch(builder, line)
        return load(builder, _row_of(builder, b, ir.Constant(INDEX, lanes), n), vector)

    store(builder, sum_products(builder, sums, rows_of(builder, a, a_stride, rows), shared, count), out_rows)


def _write_pair_tile(lanes: int, rows: int, builder: ir.IRBuilder, args: Any) -> None:
    a, a_stride, left, right, out, out_stride, count = args
    vector, half = ir.VectorType(FLOAT, lanes), ir.VectorType(FLOAT, lanes // 2)
    both, stride = ir.Constant(ir.VectorType(INT, lanes), list(range(lanes))), ir.Constant(INDEX, lanes // 2)

    def shared(n: Any) -> Any:
        one, other = (load(builder, _row_of(builder, start, stride, n), half) for start in (left, right))
        return builder.shuffle_vector(one, other, both)

    zeros = [ir.Constant(vector, [0.0] * lanes)] * rows
    sums = sum_products(builder, zeros, rows_of(builder, a, a_stride, rows), shared, count)
    store(builder, sums, rows_of(builder, out, out_stride, rows))


def _write_blocked_tile(lanes: int, rows: int, builder: ir.IRBuilder, args: Any) -> None:
    a, a_stride, b, places, blocks, size, last, b_stride, out, out_stride = args
    vector = ir.VectorType(FLOAT, lanes)
    out_rows = rows_of(builder, out, out_stride, rows)
    sums = [load(builder, place, vector) for place in out_rows]
    a_rows = rows_of(builder, a, a_stride, rows)
    final = builder.sub(blocks, ir.Constant(INDEX, 1))

    def add_block(k: Any, sums: list[Any]) -> list[Any]:
        block = builder.gep(b, [builder.load(builder.gep(places, [k]))])
        count = builder.select(builder.icmp_signed("==", k, final), last, size)
        a_parts = [builder.gep(row, [builder.mul(k, size)]) for row in a_rows]

        def shared(n: Any) -> Any:
            return load(builder, _row_of(builder, block, b_stride, n), vector)

        return sum_products(builder, sums, a_parts, shared, count)

    store(builder, loop(builder, blocks, sums, add_block), out_rows)


def _row_of(builder: ir.IRBuilder, base: Any, stride: Any, row: Any) -> Any:
    return builder.gep(base, [builder.mul(stride, row)])


def rows_of(builder: ir.IRBuilder, base: Any, stride: Any, rows: int) -> list[Any]:
    """The places where the first `rows` rows begin, `stride` elements apart."""
    return [_row_of(builder, base, stride, ir.Constant(INDEX, row)) for row in range(rows)]


def sum_products(
    builder: ir.IRBuilder, sums: list[Any], a_rows: list[Any], load_shared: Callable[[Any], Any], count: Any
) -> list[Any]:
    """Add to each row's vector, for `n < count`, element n of its row of `a` times the vector `load_shared(n)`."""

    def add(n: Any, sums: list[Any]) -> list[Any]:
        shared = load_shared(n)
        lanes = shared.type.count
        factors = [to_all_lanes(builder, builder.load(builder.gep(row, [n])), lanes) for row in a_rows]
        return [fma(builder, factor, shared, total) for factor, total in zip(factors, sums, strict=True)]

    return loop(builder, count, sums, add)


def write_prefetch(builder: ir.IRBuilder, place: Any) -> None:
    """Prefetch the cache line at `place`."""
    flags = (ir.Constant(INT, flag) for flag in (0, 3, 1))
    call_llvm(builder, "llvm.prefetch.p0i8", ir.VoidType(), builder.bitcast(place, ir.IntType(8).as_pointer()), *flags)


def _write_prefetch_all(builder: ir.IRBuilder, args: Any) -> None:
    x, count = args
    line = ir.Constant(INDEX, 16)

    def touch(n: Any, values: list[Any]) -> list[Any]:
        write_prefetch(builder, _row_of(builder, x, line, n))
        return values

    loop(builder, builder.sdiv(count, line), [], touch)


prefetch = vector_function("espalier_prefetch", _write_prefetch_all)
"""`prefetch(x, start, count)` prefetches `count` elements from `start` on; nothing waits for them."""


def _product_of(lanes: int, heights: tuple[int, ...] = HEIGHTS) -> Callable[..., None]:
    return tile_product(f"espalier_tile_{lanes}", partial(_write_tile, lanes), {0: 1, 4: 5}, heights)


_add_wide, _add_16, _add_1 = _product_of(NR), _product_of(16), _product_of(1, (4, 1))
"""Products of `lanes` outputs a row, added to what is there:

    product(rows, a, a_start, a_stride, b, b_start, b_stride, out, out_start, out_stride, count)

For `i < rows` and `l < lanes`, `out[i, l] += sum of a[i, n] * b[n, l] for n < count`, in order of `n`, each a fused
multiply-add. `b` and `out` are read and written `lanes` elements at a time. Nothing is checked.
"""
_multiply_prefetching = tile_product(
    "espalier_prefetching_tile", partial(_write_prefetching_tile, NR), {0: 1, 3: 4, 5: 6, 8: 9}
)
"""As `_add_wide`, for a `b` without gaps, with a prefetch of the part of `b` that is read next:

    multiply(rows, a, a_start, a_stride, b, b_start, terms, terms_start, terms_stride,
             out, out_start, out_stride, count, distance, prefetched_a_row, step)

Sums begin with `terms`, rows of NR, and are written to `out`, which may be the same. A tile prefetches
`prefetched_a_row` elements for each of its rows, `step` in each turn, the first `distance` behind `b_start`: many at
once would delay the loads of the current turn, which wait in the same queue.
"""
multiply_pair = tile_product("espalier_pair_tile", partial(_write_pair_tile, NR), {0: 1, 4: 5})
"""As `_add_wide`, for a `b` whose halves lie apart, each without gaps; writes `out` instead of adding to it:

    multiply(rows, a, a_start, a_stride, b, left_start, b, right_start, out, out_start, out_stride, count)

The same bits as a product of each half added to zeros.
"""
_add_blocked = tile_product("espalier_blocked_tile", partial(_write_blocked_tile, NR), {0: 1, 8: 9})
"""As `_add_wide`, for a `b` whose rows lie in separate blocks; the sums stay in registers throughout:

    multiply(rows, a, a_start, a_stride, b, b_start, places, first, blocks, size, last, b_stride,
             out, out_start, out_stride)

`places[first : first + blocks]`, int64, are where each block begins, counted from `b_start`. A block has `size` rows,
the last one `last` rows.
"""


@inner
def multiply_add(
    a: np.ndarray,
    a_start: int,
    a_stride: int,
    b: np.ndarray,
    b_start: int,
    out: np.ndarray,
    out_start: int,
    out_stride: int,
    rows: int,
    inner: int,
    columns: int,
) -> None:
    """Add `a @ b` to `out`; all three lie in flat float32 arrays.

    `a` is [rows, inner] with `a_stride` elements between rows, `b` [inner, columns] without gaps, and `out` [rows,
    columns] with `out_stride` between rows. Each output adds its products in order of the inner dimension.
    """
    column = 0
    while columns - column >= NR:
        w, z = b_start + column, out_start + column
        _add_wide(rows, a, a_start, a_stride, b, w, columns, out, z, out_stride, inner)
        column += NR
    if columns - column >= 16:
        w, z = b_start + column, out_start + column
        _add_16(rows, a, a_start, a_stride, b, w, columns, out, z, out_stride, inner)
        column += 16
    for rest in range(column, columns):
        w, z = b_start + rest, out_start + rest
        _add_1(rows, a, a_start, a_stride, b, w, columns, out, z, out_stride, inner)


@inner
def fill_rows(
    terms: np.ndarray, start: int, count: int, out: np.ndarray, out_start: int, out_stride: int, rows: int
) -> None:
    """Write `count` elements of `terms` to each of some rows of `out`, where a product only adds to what is there."""
    for r in range(rows):
        given, row = terms[start : start + count], out[out_start + r * out_stride : out_start + r * out_stride + count]
        for i in range(count):
            row[i] = given[i]


@inner
def configure() -> None:
    """Do nothing: vector units need no preparation."""


@inner
def release() -> None:
    """Do nothing."""


@register_jitable
def aligned(size: int) -> np.ndarray:
    """A new float32 array whose first element begins four cache lines, as pairs of rows of AMX's panels then do."""
    room = np.empty(size + 64, np.float32)
    start = -room.ctypes.data % 256 // 4
    return room[start : start + size]


def x_size(rows: int, inner: int) -> int:
    """See `Microkernel`."""
    return rows * inner


@inner
def pack_row(row: np.ndarray, start: int, inner: int, first: int, count: int, x: np.ndarray, r: int) -> None:
    """See `Microkernel`."""
    given, written = row[start : start + count], x[r * inner + first : r * inner + first + count]
    for i in range(count):
        written[i] = given[i]


@inner
def scratch() -> np.ndarray:
    """Scratch memory for `multiply_columns`: none."""
    return np.empty(0, np.float32)


@inner
def multiply_columns(
    x: np.ndarray,
    first: int,
    rows: int,
    inner: int,
    column: int,
    count: int,
    panel: np.ndarray,
    panel_at: int,
    out: np.ndarray,
    out_start: int,
    out_stride: int,
    _terms: np.ndarray,
) -> None:
    """See `Microkernel`."""
    multiply_add(x, first * inner + column, inner, panel, panel_at, out, out_start, out_stride, rows, count, NR)


@inner
def multiply_panel(
    x: np.ndarray,
    first: int,
    rows: int,
    inner: int,
    panels: np.ndarray,
    panel_at: int,
    prefetch_at: int,
    terms: np.ndarray,
    terms_start: int,
    terms_stride: int,
    out: np.ndarray,
    out_start: int,
    out_stride: int,
    _scratch: np.ndarray,
) -> None:
    """See `Microkernel`."""
    step = max(1, NR // ((rows + MR - 1) // MR))
    distance = _NEAR if rows <= MR else prefetch_at - panel_at
    _multiply_prefetching(
        rows, x, first * inner, inner, panels, panel_at, terms, terms_start, terms_stride,
        out, out_start, out_stride, inner, distance, inner * step // MR, step,
    )  # fmt: skip


@inner
def multiply_add_blocked(
    a: np.ndarray,
    a_start: int,
    a_stride: int,
    b: np.ndarray,
    b_start: int,
    places: np.ndarray,
    first: int,
    blocks: int,
    size: int,
    last: int,
    out: np.ndarray,
    out_start: int,
    out_stride: int,
    rows: int,
    columns: int,
) -> None:
    """As `multiply_add`, the rows of `b` in blocks of `size`, `last` in the last one: see `_add_blocked`."""
    if columns % NR == 0:
        for column in range(0, columns, NR):
            z, w = out_start + column, b_start + column
            _add_blocked(
                rows, a, a_start, a_stride, b, w, places, first, blocks, size, last, columns, out, z, out_stride
            )
        return
    for k in range(blocks):
        at, w, count = a_start + k * size, b_start + places[first + k], last if k == blocks - 1 else size
        multiply_add(a, at, a_stride, b, w, out, out_start, out_stride, rows, count, columns)
