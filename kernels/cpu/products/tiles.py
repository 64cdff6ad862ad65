"""Small matrix products with a fixed order of summation.

An output depends on its own row of `a` alone: it has the same bits in a tile of one row and in one of eight.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from espalier.kernels.compilation.compiler import inner
from espalier.kernels.cpu.simd import FLOAT, INDEX, caller, fma, intrinsic, load, loop, store, to_all_lanes

_LARGE_REGISTERS = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
TALL, WIDE = (8, 32) if _LARGE_REGISTERS else (4, 16)
"""Rows and lanes of the largest tile: as many sums as fit in the machine's registers beside their operands."""

_NEAR = 2048 // 4
"""Elements by which a panel is prefetched before its use, where it is read once."""

TILE_ROWS = 1
"""Rows that `multiply_columns` writes at a time."""

_BYTE = ir.IntType(8)


def make_tile(rows: int, lanes: int) -> Callable[..., None]:
    """Returns a compiled-in function that adds a product of `rows` by `lanes` outputs to what is there.

    Its arguments are flat float32 arrays with the place of their first element and the distance between rows:

        tile(a, a_start, a_stride, b, b_start, b_stride, out, out_start, out_stride, count)

    For `i < rows` and `l < lanes`, `out[i, l] += sum of a[i, n] * b[n, l] for n < count`, in order of `n`, each a fused
    multiply-add. `b` and `out` are read and written `lanes` elements at a time. Nothing is checked.
    """

    @intrinsic
    def multiply_add(
        _: Any, a: Any, a0: Any, sa: Any, b: Any, b0: Any, sb: Any, o: Any, o0: Any, so: Any, n: Any
    ) -> Any:
        place = types.intp
        signature = types.void(a, place, place, b, place, place, o, place, place, place)
        return signature, caller(f"espalier_tile_{rows}x{lanes}", (0, 3, 6), partial(_write_tile, rows, lanes))

    return multiply_add


def make_ahead_tile(rows: int, lanes: int) -> Callable[..., None]:
    """As `make_tile`, for a `b` without gaps, with a prefetch of the part of `b` that is read next.

        tile(a, a_start, a_stride, b, b_start, out, out_start, out_stride, count, ahead, step)

    It prefetches `count * step` elements that lie `ahead` of `b_start`, `step` in each turn: many at once would delay
    the loads of the current turn, which wait in the same queue.
    """

    @intrinsic
    def multiply_add(
        _: Any, a: Any, a0: Any, sa: Any, b: Any, b0: Any, o: Any, o0: Any, so: Any, n: Any, ahead: Any, step: Any
    ) -> Any:
        place = types.intp
        signature = types.void(a, place, place, b, place, o, place, place, place, place, place)
        name = f"espalier_ahead_tile_{rows}x{lanes}"
        return signature, caller(name, (0, 3, 5), partial(_write_ahead_tile, rows, lanes))

    return multiply_add


def make_pair_tile(rows: int, lanes: int) -> Callable[..., None]:
    """As `make_tile`, for a `b` whose halves lie apart, each without gaps; writes `out` instead of adding to it.

        tile(a, a_start, a_stride, b, left_start, right_start, out, out_start, out_stride, count)

    `lanes` are those of both halves together.
    """

    @intrinsic
    def multiply(
        _: Any, a: Any, a0: Any, sa: Any, b: Any, left: Any, right: Any, o: Any, o0: Any, so: Any, n: Any
    ) -> Any:
        place = types.intp
        signature = types.void(a, place, place, b, place, place, o, place, place, place)
        return signature, caller(
            f"espalier_pair_tile_{rows}x{lanes}", (0, 6), partial(_write_pair_tile, rows, lanes), (3,)
        )

    return multiply


def make_chain_tile(rows: int, lanes: int) -> Callable[..., None]:
    """As `make_tile`, for a `b` whose rows lie in separate blocks; the sums stay in registers throughout.

        tile(a, a_start, a_stride, b, b_start, places, first, blocks, size, last, b_stride, out, out_start, out_stride)

    `places[first : first + blocks]`, int64, are where each block begins, counted from `b_start`. A block has `size`
    rows, the last one `last` rows.
    """

    @intrinsic
    def multiply_add(
        _: Any, a: Any, a0: Any, sa: Any, b: Any, b0: Any, p: Any, p0: Any, k: Any, size: Any, last: Any, sb: Any,
        o: Any, o0: Any, so: Any,
    ) -> Any:  # fmt: skip
        place = types.intp
        signature = types.void(a, place, place, b, place, p, place, place, place, place, place, o, place, place)
        name = f"espalier_chain_tile_{rows}x{lanes}"
        return signature, caller(name, (0, 3, 5, 11), partial(_write_chain_tile, rows, lanes))

    return multiply_add


def _write_tile(rows: int, lanes: int, builder: ir.IRBuilder, args: Any) -> None:
    a, a_stride, b, b_stride, out, out_stride, count = args
    vector = ir.VectorType(FLOAT, lanes)
    out_rows = rows_of(builder, out, out_stride, rows)
    sums = [load(builder, place, vector) for place in out_rows]

    def shared(n: Any) -> Any:
        return load(builder, _row_of(builder, b, b_stride, n), vector)

    store(builder, sum_products(builder, sums, rows_of(builder, a, a_stride, rows), shared, count), out_rows)


def _write_ahead_tile(rows: int, lanes: int, builder: ir.IRBuilder, args: Any) -> None:
    a, a_stride, b, out, out_stride, count, ahead, step = args
    vector = ir.VectorType(FLOAT, lanes)
    out_rows = rows_of(builder, out, out_stride, rows)
    sums = [load(builder, place, vector) for place in out_rows]
    half = builder.sdiv(step, ir.Constant(INDEX, 2))

    def shared(n: Any) -> Any:
        place = builder.gep(b, [builder.add(ahead, builder.mul(n, step))])
        for line in (place, builder.gep(place, [half])):  # a turn's share is two lines at most
            write_prefetch(builder, line)
        return load(builder, _row_of(builder, b, ir.Constant(INDEX, lanes), n), vector)

    store(builder, sum_products(builder, sums, rows_of(builder, a, a_stride, rows), shared, count), out_rows)


def _write_pair_tile(rows: int, lanes: int, builder: ir.IRBuilder, args: Any) -> None:
    a, a_stride, b, left, right, out, out_stride, count = args
    vector, half = ir.VectorType(FLOAT, lanes), ir.VectorType(FLOAT, lanes // 2)
    both = ir.Constant(ir.VectorType(ir.IntType(32), lanes), list(range(lanes)))
    halves = [builder.gep(b, [start]) for start in (left, right)]

    def shared(n: Any) -> Any:
        row = [load(builder, _row_of(builder, start, ir.Constant(INDEX, lanes // 2), n), half) for start in halves]
        return builder.shuffle_vector(row[0], row[1], both)

    zeros = [ir.Constant(vector, [0.0] * lanes)] * rows
    sums = sum_products(builder, zeros, rows_of(builder, a, a_stride, rows), shared, count)
    store(builder, sums, rows_of(builder, out, out_stride, rows))


def _write_chain_tile(rows: int, lanes: int, builder: ir.IRBuilder, args: Any) -> None:
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
    flag = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), flag, flag, flag])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    address = builder.bitcast(place, _BYTE.as_pointer())
    builder.call(function, [address, ir.Constant(flag, 0), ir.Constant(flag, 3), ir.Constant(flag, 1)])


@intrinsic
def _prefetch_line(_: Any, x: Any, place: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        write_prefetch(builder, builder.gep(data, [args[1]]))
        return context.get_dummy_value()

    return types.void(x, types.intp), generate


@inner
def prefetch(x: np.ndarray, start: int, count: int) -> None:
    """Prefetch the `count` elements of a flat float32 array from `start` on; nothing waits for them."""
    for i in range(start, start + count, 16):
        _prefetch_line(x, i)


_tall_wide, _4_wide, _2_wide, _1_wide = (
    make_tile(TALL, WIDE),
    make_tile(4, WIDE),
    make_tile(2, WIDE),
    make_tile(1, WIDE),
)
_tall_16, _4_16, _2_16, _1_16 = make_tile(TALL, 16), make_tile(4, 16), make_tile(2, 16), make_tile(1, 16)
_4_1, _1_1 = make_tile(4, 1), make_tile(1, 1)
_tall_pair, _4_pair, _2_pair, _1_pair = (
    make_pair_tile(TALL, WIDE),
    make_pair_tile(4, WIDE),
    make_pair_tile(2, WIDE),
    make_pair_tile(1, WIDE),
)
_tall_ahead, _4_ahead, _2_ahead, _1_ahead = (
    make_ahead_tile(TALL, WIDE),
    make_ahead_tile(4, WIDE),
    make_ahead_tile(2, WIDE),
    make_ahead_tile(1, WIDE),
)
_tall_chain, _4_chain, _2_chain, _1_chain = (
    make_chain_tile(TALL, WIDE),
    make_chain_tile(4, WIDE),
    make_chain_tile(2, WIDE),
    make_chain_tile(1, WIDE),
)


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
    row = 0
    while row < rows:
        left = rows - row
        x, y, column = a_start + row * a_stride, out_start + row * out_stride, 0
        height = TALL if left >= TALL else (4 if left >= 4 else (2 if left >= 2 else 1))
        while column < columns:
            w, z, room = b_start + column, y + column, columns - column
            if room >= WIDE:
                if height > 4:
                    _tall_wide(a, x, a_stride, b, w, columns, out, z, out_stride, inner)
                elif height == 4:
                    _4_wide(a, x, a_stride, b, w, columns, out, z, out_stride, inner)
                elif height == 2:
                    _2_wide(a, x, a_stride, b, w, columns, out, z, out_stride, inner)
                else:
                    _1_wide(a, x, a_stride, b, w, columns, out, z, out_stride, inner)
                column += WIDE
            elif room >= 16:
                if height > 4:
                    _tall_16(a, x, a_stride, b, w, columns, out, z, out_stride, inner)
                elif height == 4:
                    _4_16(a, x, a_stride, b, w, columns, out, z, out_stride, inner)
                elif height == 2:
                    _2_16(a, x, a_stride, b, w, columns, out, z, out_stride, inner)
                else:
                    _1_16(a, x, a_stride, b, w, columns, out, z, out_stride, inner)
                column += 16
            else:
                for r in range(0, height - height % 4, 4):
                    _4_1(a, x + r * a_stride, a_stride, b, w, columns, out, z + r * out_stride, out_stride, inner)
                for r in range(height - height % 4, height):
                    _1_1(a, x + r * a_stride, a_stride, b, w, columns, out, z + r * out_stride, out_stride, inner)
                column += 1
        row += height


@inner
def configure() -> None:
    """Do nothing: this unit needs no preparation. `amx` has functions of the names from here on, too."""


@inner
def release() -> None:
    """Do nothing."""


def x_size(rows: int, inner: int) -> int:
    """Float32 elements that `store_row` needs for `rows` rows of `inner` elements."""
    return rows * inner


@inner
def store_row(row: np.ndarray, start: int, inner: int, first: int, count: int, x: np.ndarray, r: int) -> None:
    """Store `count` elements of a flat array, from `start` on, as row `r` of `x`, from column `first` on."""
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
    """Add the product of some columns of `x` and `WIDE` columns of a weight to `out`.

    Args:
        x: flat float32 `[rows, inner]`.
        first: of its rows.
        rows: how many.
        inner: columns of `x`.
        column: the first that is multiplied.
        count: of these columns.
        panel: flat float32 `[count, WIDE]` from `panel_at` on.
        panel_at: see `panel`.
        out: flat float32, rows `out_stride` apart, from `out_start` on.
        out_start: see `out`.
        out_stride: see `out`.
    """
    multiply_add(x, first * inner + column, inner, panel, panel_at, out, out_start, out_stride, rows, count, WIDE)


@inner
def multiply_panel(
    x: np.ndarray,
    first: int,
    rows: int,
    inner: int,
    panels: np.ndarray,
    panel_at: int,
    ahead: int,
    out: np.ndarray,
    out_start: int,
    out_stride: int,
    _terms: np.ndarray,
) -> None:
    """`multiply_columns` of all columns, with a prefetch of the panel that begins at `ahead`."""
    step = max(1, WIDE // ((rows + TALL - 1) // TALL))
    row, distance = 0, _NEAR if rows <= TALL else ahead - panel_at
    while row < rows:
        room = rows - row
        a, z = (first + row) * inner, out_start + row * out_stride
        if room >= TALL:
            _tall_ahead(x, a, inner, panels, panel_at, out, z, out_stride, inner, distance, step)
            row += TALL
        elif room >= 4:
            _4_ahead(x, a, inner, panels, panel_at, out, z, out_stride, inner, distance, step)
            row += 4
        elif room >= 2:
            _2_ahead(x, a, inner, panels, panel_at, out, z, out_stride, inner, distance, step)
            row += 2
        else:
            _1_ahead(x, a, inner, panels, panel_at, out, z, out_stride, inner, distance, step)
            row += 1
        distance += inner * step


@inner
def multiply_pair(
    a: np.ndarray,
    a_start: int,
    a_stride: int,
    b: np.ndarray,
    left: int,
    right: int,
    out: np.ndarray,
    out_start: int,
    out_stride: int,
    rows: int,
    inner: int,
) -> None:
    """Write `a @ b` to `out`, `WIDE` columns; the halves of `b`, [inner, WIDE / 2] each, lie at `left` and `right`.

    Otherwise as `multiply_add`: the same bits as a product of each half added to zeros.
    """
    row = 0
    while row < rows:
        room = rows - row
        x, z = a_start + row * a_stride, out_start + row * out_stride
        if room >= TALL:
            _tall_pair(a, x, a_stride, b, left, right, out, z, out_stride, inner)
            row += TALL
        elif room >= 4:
            _4_pair(a, x, a_stride, b, left, right, out, z, out_stride, inner)
            row += 4
        elif room >= 2:
            _2_pair(a, x, a_stride, b, left, right, out, z, out_stride, inner)
            row += 2
        else:
            _1_pair(a, x, a_stride, b, left, right, out, z, out_stride, inner)
            row += 1


@inner
def multiply_add_chain(
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
    """As `multiply_add`, the rows of `b` in blocks of `size`, `last` in the last one: see `make_chain_tile`."""
    if columns % WIDE:
        for k in range(blocks):
            inner = last if k == blocks - 1 else size
            at = a_start + k * size
            multiply_add(
                a, at, a_stride, b, b_start + places[first + k], out, out_start, out_stride, rows, inner, columns
            )
        return
    row = 0
    while row < rows:
        room = rows - row
        height = TALL if room >= TALL else (4 if room >= 4 else (2 if room >= 2 else 1))
        x = a_start + row * a_stride
        for column in range(0, columns, WIDE):
            z, w = out_start + row * out_stride + column, b_start + column
            if height > 4:
                _tall_chain(a, x, a_stride, b, w, places, first, blocks, size, last, columns, out, z, out_stride)
            elif height == 4:
                _4_chain(a, x, a_stride, b, w, places, first, blocks, size, last, columns, out, z, out_stride)
            elif height == 2:
                _2_chain(a, x, a_stride, b, w, places, first, blocks, size, last, columns, out, z, out_stride)
            else:
                _1_chain(a, x, a_stride, b, w, places, first, blocks, size, last, columns, out, z, out_stride)
        row += height
