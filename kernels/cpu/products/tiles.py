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
from espalier.kernels.cpu.simd import (
    FLOAT,
    INDEX,
    call_function,
    caller,
    fma,
    intrinsic,
    load,
    loop,
    store,
    to_all_lanes,
)

_LARGE_REGISTERS = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
TALL, WIDE = (8, 32) if _LARGE_REGISTERS else (4, 16)
"""Rows and lanes of the largest tile: as many sums as fit in the machine's registers beside their operands."""

_NEAR = 2048 // 4
"""Elements by which a panel is prefetched before its use, where it is read once."""

TILE_ROWS = 1
"""Rows that `multiply_columns` writes at a time."""

_BYTE = ir.IntType(8)


HEIGHTS = (8, 4, 2, 1) if _LARGE_REGISTERS else (4, 2, 1)
"""Rows of a tile, the most first."""
Move = Callable[[ir.IRBuilder, Any, int], Any]
"""How far one argument of a tile moves on for the next tile: a function of the arguments and the tile's rows."""


def for_rows(
    name: str, heights: tuple[int, ...], write: Callable[..., None], moves: dict[int, Move]
) -> Callable[[ir.IRBuilder, Any], None]:
    """Code for a product of any number of rows, which is its first argument, by tiles of `heights` rows.

    Args:
        name: of the function of a tile, to which its number of rows is appended.
        heights: rows of a tile, the most first, the last one 1.
        write: `write(rows, builder, arguments)` writes a tile's function; its arguments are those after the first.
        moves: of those arguments that move on from tile to tile, how far.
    """

    def write_all(builder: ir.IRBuilder, args: Any) -> None:
        left, *tile = args
        values = [tile[index] for index in moves]
        for height in heights:

            def multiply(_: Any, values: list[Any], height: int = height) -> list[Any]:
                passed = list(tile)
                for index, value in zip(moves, values, strict=True):
                    passed[index] = value
                call_function(builder, f"{name}_{height}", ir.VoidType(), passed, partial(write, height))
                distances = [move(builder, tile, height) for move in moves.values()]
                return [_moved(builder, *pair) for pair in zip(values, distances, strict=True)]

            rows = ir.Constant(INDEX, height)
            values = loop(builder, builder.sdiv(left, rows), values, multiply)
            left = builder.srem(left, rows)

    return write_all


def _moved(builder: ir.IRBuilder, value: Any, distance: Any) -> Any:
    return builder.gep(value, [distance]) if isinstance(value.type, ir.PointerType) else builder.add(value, distance)


def by_row(stride: int) -> Move:
    """The move of a pointer to rows: argument `stride` is the distance from one to the next."""
    return lambda builder, args, rows: builder.mul(args[stride], ir.Constant(INDEX, rows))


def _make_product(lanes: int, heights: tuple[int, ...] = HEIGHTS) -> Callable[..., None]:
    """Returns a compiled-in function that adds a product with `lanes` outputs a row to what is there.

    Its arguments are flat float32 arrays with the place of their first element and the distance between rows:

        product(rows, a, a_start, a_stride, b, b_start, b_stride, out, out_start, out_stride, count)

    For `i < rows` and `l < lanes`, `out[i, l] += sum of a[i, n] * b[n, l] for n < count`, in order of `n`, each a fused
    multiply-add. `b` and `out` are read and written `lanes` elements at a time. Nothing is checked.
    """
    name = f"espalier_tile_{lanes}"
    write = for_rows(name, heights, partial(_write_tile, lanes), {0: by_row(1), 4: by_row(5)})

    @intrinsic
    def multiply_add(
        _: Any, r: Any, a: Any, a0: Any, sa: Any, b: Any, b0: Any, sb: Any, o: Any, o0: Any, so: Any, n: Any
    ) -> Any:
        place = types.intp
        signature = types.void(place, a, place, place, b, place, place, o, place, place, place)
        return signature, caller(f"{name}_all", (1, 4, 7), write)

    return multiply_add


@intrinsic
def _multiply_ahead(
    _: Any, r: Any, a: Any, a0: Any, sa: Any, b: Any, b0: Any, t: Any, t0: Any, st: Any, o: Any, o0: Any, so: Any,
    n: Any, ahead: Any, step: Any,
) -> Any:  # fmt: skip
    """As `_make_product`, for a `b` without gaps, with a prefetch of the part of `b` that is read next.

        multiply(rows, a, a_start, a_stride, b, b_start, terms, terms_start, terms_stride,
                 out, out_start, out_stride, count, ahead, step)

    Sums begin with `terms`, rows of `lanes`, and are written to `out`, which may be the same.
    Each tile prefetches `count * step` elements, of which the first one's lie `ahead` of `b_start`, `step` in each
    turn: many at once would delay the loads of the current turn, which wait in the same queue.
    """

    def prefetched(builder: ir.IRBuilder, args: Any, _: int) -> Any:
        return builder.mul(args[7], args[9])

    moves = {0: by_row(1), 3: by_row(4), 5: by_row(6), 8: prefetched}
    write = for_rows("espalier_ahead_tile", HEIGHTS, partial(_write_ahead_tile, WIDE), moves)
    place = types.intp
    signature = types.void(place, a, place, place, b, place, t, place, place, o, place, place, place, place, place)
    return signature, caller("espalier_ahead_tile_all", (1, 4, 6, 9), write)


@intrinsic
def multiply_pair(
    _: Any, r: Any, a: Any, a0: Any, sa: Any, b: Any, left: Any, right: Any, o: Any, o0: Any, so: Any, n: Any
) -> Any:
    """As `_make_product`, for a `b` whose halves lie apart, each without gaps; writes `out` instead of adding to it.

        multiply_pair(rows, a, a_start, a_stride, b, left_start, right_start, out, out_start, out_stride, count)

    `WIDE` are the lanes of both halves together. The same bits as a product of each half added to zeros.
    """
    moves = {0: by_row(1), 5: by_row(6)}
    write = for_rows("espalier_pair_tile", HEIGHTS, partial(_write_pair_tile, WIDE), moves)
    place = types.intp
    signature = types.void(place, a, place, place, b, place, place, o, place, place, place)
    return signature, caller("espalier_pair_tile_all", (1, 7), write, (4,))


@intrinsic
def _multiply_chain(
    _: Any, r: Any, a: Any, a0: Any, sa: Any, b: Any, b0: Any, p: Any, p0: Any, k: Any, size: Any, last: Any, sb: Any,
    o: Any, o0: Any, so: Any,
) -> Any:  # fmt: skip
    """As `_make_product`, for a `b` whose rows lie in separate blocks; the sums stay in registers throughout.

        multiply(rows, a, a_start, a_stride, b, b_start, places, first, blocks, size, last, b_stride,
                 out, out_start, out_stride)

    `places[first : first + blocks]`, int64, are where each block begins, counted from `b_start`. A block has `size`
    rows, the last one `last` rows.
    """
    moves = {0: by_row(1), 8: by_row(9)}
    write = for_rows("espalier_chain_tile", HEIGHTS, partial(_write_chain_tile, WIDE), moves)
    place = types.intp
    signature = types.void(place, a, place, place, b, place, p, place, place, place, place, place, o, place, place)
    return signature, caller("espalier_chain_tile_all", (1, 4, 6, 12), write)


def _write_tile(lanes: int, rows: int, builder: ir.IRBuilder, args: Any) -> None:
    a, a_stride, b, b_stride, out, out_stride, count = args
    vector = ir.VectorType(FLOAT, lanes)
    out_rows = rows_of(builder, out, out_stride, rows)
    sums = [load(builder, place, vector) for place in out_rows]

    def shared(n: Any) -> Any:
        return load(builder, _row_of(builder, b, b_stride, n), vector)

    store(builder, sum_products(builder, sums, rows_of(builder, a, a_stride, rows), shared, count), out_rows)


def _write_ahead_tile(lanes: int, rows: int, builder: ir.IRBuilder, args: Any) -> None:
    a, a_stride, b, terms, terms_stride, out, out_stride, count, ahead, step = args
    vector = ir.VectorType(FLOAT, lanes)
    out_rows = rows_of(builder, out, out_stride, rows)
    sums = [load(builder, place, vector) for place in rows_of(builder, terms, terms_stride, rows)]
    half = builder.sdiv(step, ir.Constant(INDEX, 2))

    def shared(n: Any) -> Any:
        place = builder.gep(b, [builder.add(ahead, builder.mul(n, step))])
        for line in (place, builder.gep(place, [half])):  # a turn's share is two lines at most
            write_prefetch(builder, line)
        return load(builder, _row_of(builder, b, ir.Constant(INDEX, lanes), n), vector)

    store(builder, sum_products(builder, sums, rows_of(builder, a, a_stride, rows), shared, count), out_rows)


def _write_pair_tile(lanes: int, rows: int, builder: ir.IRBuilder, args: Any) -> None:
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


def _write_chain_tile(lanes: int, rows: int, builder: ir.IRBuilder, args: Any) -> None:
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


_add_wide, _add_16, _add_1 = _make_product(WIDE), _make_product(16), _make_product(1, (4, 1))


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
    while columns - column >= WIDE:
        w, z = b_start + column, out_start + column
        _add_wide(rows, a, a_start, a_stride, b, w, columns, out, z, out_stride, inner)
        column += WIDE
    if columns - column >= 16:
        w, z = b_start + column, out_start + column
        _add_16(rows, a, a_start, a_stride, b, w, columns, out, z, out_stride, inner)
        column += 16
    for rest in range(column, columns):
        w, z = b_start + rest, out_start + rest
        _add_1(rows, a, a_start, a_stride, b, w, columns, out, z, out_stride, inner)


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
    terms: np.ndarray,
    terms_start: int,
    terms_stride: int,
    out: np.ndarray,
    out_start: int,
    out_stride: int,
) -> None:
    """`multiply_columns` of all columns, with a prefetch of the panel that begins at `ahead`.

    What is in `terms` is added to, rows `terms_stride` apart, from `terms_start` on, instead of what is in `out`.
    """
    step = max(1, WIDE // ((rows + TALL - 1) // TALL))
    distance = _NEAR if rows <= TALL else ahead - panel_at
    a, t, z = first * inner, terms_start, out_start
    _multiply_ahead(
        rows, x, a, inner, panels, panel_at, terms, t, terms_stride, out, z, out_stride, inner, distance, step
    )


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
    """As `multiply_add`, the rows of `b` in blocks of `size`, `last` in the last one: see `_multiply_chain`."""
    if columns % WIDE:
        for k in range(blocks):
            inner = last if k == blocks - 1 else size
            at = a_start + k * size
            multiply_add(
                a, at, a_stride, b, b_start + places[first + k], out, out_start, out_stride, rows, inner, columns
            )
        return
    for column in range(0, columns, WIDE):
        z, w = out_start + column, b_start + column
        _multiply_chain(
            rows, a, a_start, a_stride, b, w, places, first, blocks, size, last, columns, out, z, out_stride
        )
