"""Float32 matrix products on AMX, the tile unit of recent x86 servers, which multiplies bfloat16 alone.

A float32 has 24 significant bits, a bfloat16 eight, so each number is the exact sum of three bfloat16 terms: those of x
are rounded to nearest, those of weights cut, which is quicker. Of the nine products of two numbers' terms the six
largest are summed in float32; the three that are left out are below 2**-24 of the whole, what one rounding of a float32
sum may lose. (Henry, Tang and Heinecke, 2019, "Leveraging the bfloat16 artificial intelligence datatype for
higher-precision computations".)

Layouts, T = 16 rows of a tile, K = 32 elements of the inner dimension, which is padded with zeros to a multiple of K:

    terms of x       [rows / T, inner / K, term, T, K] bfloat16: a tile is 1 KiB without gaps
    terms of a panel [inner / K, term, half, K / 2, 16 columns, 2] bfloat16: neighbours of the inner dimension in pairs

An output adds the products of each K elements to what is there, in order, so it depends on nothing but its own row.
"""

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir

from espalier.kernels.compilation.compiler import inner
from espalier.kernels.cpu.products.tiles import LeftSide, aligned, fill_rows
from espalier.kernels.cpu.simd import (
    BYTE,
    FLOAT,
    FLOATS,
    INDEX,
    LANES,
    WORDS,
    Builder,
    Strided,
    call_llvm,
    constant,
    instructions,
    vector_function,
)

TILE_ROWS: int = 16
TILE_INNER = 32
_TILE_BYTES = 1024
_TERMS = 3
X_TILE = _TERMS * _TILE_BYTES // 4
"""Float32 elements that the terms of 16 rows and 32 inner elements take."""
PANEL_TILE = 2 * X_TILE
"""The same of 32 columns."""
_PREFETCH_DISTANCE = 4224 // 4
"""Elements by which a panel is prefetched before its use; with 4096 or 8192 bytes some products took 4/3 as long."""
_PAIRS = ((2, 0), (1, 0), (1, 1), (0, 1), (0, 0), (0, 2))
"""Terms of x and of the panel whose products are summed, in an order in which each shares one with the next."""
CHUNK = 256
"""Of the inner dimension, whose terms of a panel are made at a time: they stay in a core's nearer caches."""
_ALL_STEPS, _TWO_STEPS = CHUNK // TILE_INNER - 1, 1
"""Masks of the steps whose terms of a panel have a place of their own."""
_BYTES = BYTE.as_pointer()


def _call(builder: Builder, name: str, *operands: Any) -> None:
    """Call LLVM's instruction `name`; numbers are tiles."""
    operands = tuple(ir.Constant(BYTE, operand) if isinstance(operand, int) else operand for operand in operands)
    call_llvm(builder, f"llvm.x86.{name}", ir.VoidType(), *operands)


def _split(builder: Builder, value: Any, rounded: bool) -> list[Any]:
    """The three terms of each element, as the upper halves of words; the last is exact, and its lower half is zeros."""
    upper = constant(WORDS, 0xFFFF0000)
    terms = []
    for _ in range(_TERMS - 1):
        bits = builder.bitcast(value, WORDS)
        if rounded:
            bits = builder.add(bits, constant(WORDS, 0x8000))
        terms.append(builder.and_(bits, upper))
        value = builder.fsub(value, builder.bitcast(terms[-1], FLOATS))
    return [*terms, builder.bitcast(value, WORDS)]


def _down(builder: Builder, words: Any) -> Any:
    return builder.lshr(words, constant(WORDS, 16))


def _split_columns(builder: Builder, panel: Any, count: Any, terms: Any, step: Any, mask: Any) -> None:
    """Store the terms of a step's K rows of a panel: those 2 p and 2 p + 1 become row p of each tile.

    What lies `_PREFETCH_DISTANCE` behind them is prefetched. The panel has `count` rows; those after them are zeros.
    """
    pairs, nothing = constant(INDEX, TILE_INNER // 2), constant(INDEX, 0)
    tile = builder.offset(terms, builder.and_(step, mask), PANEL_TILE)
    left = builder.sub(count, builder.mul(step, constant(INDEX, TILE_INNER)))
    panel = builder.offset(panel, step, TILE_INNER * 2 * LANES)

    def load_row(k: Any, half: int, whole: bool) -> Any:
        inside = builder.icmp_signed("<", k, left)
        row = k if whole else builder.select(inside, k, nothing)
        at = builder.offset(builder.offset(panel, row, 2 * LANES), half * LANES)
        builder.prefetch(builder.offset(at, _PREFETCH_DISTANCE))
        value = builder.read(at)
        return value if whole else builder.select(inside, value, constant(FLOATS, 0.0))

    def split_pair(p: Any, whole: bool) -> None:
        place = builder.offset(tile, p, LANES)
        k = builder.shl(p, constant(INDEX, 1))
        for half in range(2):
            both = (load_row(builder.add(k, constant(INDEX, i)), half, whole) for i in range(2))
            parts = [_split(builder, value, rounded=False) for value in both]
            for term, (even, odd) in enumerate(zip(*parts, strict=True)):
                at = builder.offset(place, (2 * term + half) * _TILE_BYTES // 4)
                builder.write(builder.or_(_down(builder, even), odd), at)

    def split_pairs(start: Any, end: Any, whole: bool) -> None:
        def split(p: Any, values: list[Any]) -> list[Any]:
            split_pair(builder.add(start, p), whole)
            return values

        builder.loop(builder.sub(end, start), [], split)

    some = builder.icmp_signed(">", left, nothing)  # else it is the step after the last
    wholes = builder.select(some, builder.least(builder.ashr(left, constant(INDEX, 1)), pairs), nothing)
    split_pairs(nothing, wholes, whole=True)
    split_pairs(wholes, builder.select(some, pairs, wholes), whole=False)


def _write_product(row_tiles: int, splits: bool, builder: Builder, args: Any) -> None:
    """Sums in tiles 0 to 3 (row, half), terms of x in 4 and 5, of the panel in 6 and 7.

    Where it `splits`, it makes the panel's terms too, those of the next step while the tile unit is busy with one.
    """
    x, x_stride, terms, out, out_stride, steps, *rest = args
    line = constant(INDEX, 64)
    x, terms_at, out = (builder.bitcast(place, _BYTES) for place in (x, terms, out))
    x_stride, out_stride = (builder.shl(stride, constant(INDEX, 2)) for stride in (x_stride, out_stride))
    panel, count, mask = rest or (None, None, None)
    if splits:
        _split_columns(builder, panel, count, terms, constant(INDEX, 0), mask)
    sums = []
    for row in range(row_tiles):
        first = builder.offset(out, builder.mul(out_stride, constant(INDEX, row * TILE_ROWS)))
        for half in range(2):
            sums.append((2 * row + half, builder.offset(first, half * 64)))
    for tile, place in sums:
        _call(builder, "tileloadd64", tile, place, out_stride)

    def step(n: Any, values: list[Any]) -> list[Any]:
        if splits:
            _split_columns(builder, panel, count, terms, builder.add(n, constant(INDEX, 1)), mask)
        x_at = builder.offset(x, builder.mul(n, constant(INDEX, _TERMS * _TILE_BYTES)))
        place = builder.and_(n, mask) if splits else n
        panel_at = builder.offset(terms_at, builder.mul(place, constant(INDEX, 2 * _TERMS * _TILE_BYTES)))
        before = None, None
        for x_term, panel_term in _PAIRS:
            if panel_term != before[1]:
                for half in range(2):
                    place = builder.offset(panel_at, (2 * panel_term + half) * _TILE_BYTES)
                    _call(builder, "tileloadd64", 6 + half, place, line)
            if x_term != before[0]:
                for row in range(row_tiles):
                    place = builder.offset(x_at, x_term * _TILE_BYTES)
                    if row:
                        place = builder.offset(place, x_stride)
                    _call(builder, "tileloadd64", 4 + row, place, line)
            for row in range(row_tiles):
                for half in range(2):
                    _call(builder, "tdpbf16ps", 2 * row + half, 4 + row, 6 + half)
            before = x_term, panel_term
        return values

    builder.loop(steps, [], step)
    for tile, place in sums:
        _call(builder, "tilestored64", tile, place, out_stride)


def _write_few(rows: int, builder: Builder, args: Any) -> None:
    """The product of so few rows that a tile would be almost empty, with the same bits as the tile unit's.

    A tile's product sums even and odd elements apart, from zero on, each a fused multiply-add, and then adds both to
    what is there (Intel's manual, TDPBF16PS). The terms of the panel stay in registers.
    """
    x, panel, out, out_stride, count = args
    parity = [constant(WORDS, 16), constant(WORDS, 0xFFFF0000)]
    room = builder.alloca(FLOATS, size=rows * _TERMS * 2)
    lanes = builder.bitcast(room, FLOAT.as_pointer())
    outputs = [builder.offset(row, half * LANES) for row in builder.rows_of(out, out_stride, rows) for half in range(2)]
    steps = builder.sdiv(builder.add(count, constant(INDEX, TILE_INNER - 1)), constant(INDEX, TILE_INNER))

    def spread(n: Any) -> None:
        """The terms of x as float32, the even elements of a step side by side, then the odd ones."""
        for r in range(rows):
            for term in range(_TERMS):
                at = builder.offset(builder.offset(x, n, X_TILE), term * 256 + r * LANES)
                words = builder.read(at, WORDS)
                halves = builder.shl(words, parity[0]), builder.and_(words, parity[1])
                for odd, half in enumerate(halves):
                    at = builder.offset(room, (r * _TERMS + term) * 2 + odd)
                    builder.store(builder.bitcast(half, FLOATS), at)

    def step(n: Any, totals: list[Any]) -> list[Any]:
        spread(n)
        k0 = builder.mul(n, constant(INDEX, TILE_INNER))
        left = builder.least(builder.sub(count, k0), constant(INDEX, TILE_INNER))
        zeros = [constant(FLOATS, 0.0)] * (rows * len(_PAIRS) * 2)
        new = list(totals)
        whole = builder.ashr(left, constant(INDEX, 1))
        for half in range(2):

            def add(p: Any, odd: int, sums: list[Any], half: int = half) -> list[Any]:
                k = builder.add(builder.add(k0, builder.shl(p, constant(INDEX, 1))), constant(INDEX, odd))
                at = builder.offset(builder.offset(panel, k, 2 * LANES), half * LANES)
                builder.prefetch(builder.offset(at, _PREFETCH_DISTANCE))
                weights = [builder.bitcast(t, FLOATS) for t in _split(builder, builder.read(at), False)]
                sums = list(sums)
                for r in range(rows):
                    for i, (x_term, panel_term) in enumerate(_PAIRS):
                        of_x = builder.offset(lanes, ((r * _TERMS + x_term) * 2 + odd) * LANES)
                        factor = builder.to_all_lanes(builder.load(builder.gep(of_x, [p])))
                        place = (r * len(_PAIRS) + i) * 2 + odd
                        sums[place] = builder.fma(factor, weights[panel_term], sums[place])
                return sums

            sums = builder.loop(whole, zeros, lambda p, sums: add(p, 1, add(p, 0, sums)))
            sums = builder.loop(builder.and_(left, constant(INDEX, 1)), sums, lambda _, s: add(whole, 0, s))
            for r in range(rows):
                for i in range(len(_PAIRS)):
                    even, odd = sums[(r * len(_PAIRS) + i) * 2 :][:2]
                    new[2 * r + half] = builder.fadd(new[2 * r + half], builder.fadd(even, odd))
        return new

    totals = builder.loop(steps, [builder.read(place) for place in outputs], step)
    for total, place in zip(totals, outputs, strict=True):
        builder.write(total, place)


_row, _rows = (vector_function(f"espalier_amx_few_{rows}", partial(_write_few, rows)) for rows in (1, 2))
"""product(x, start, panel, start, out: Strided, rows of the panel) adds to 1 or 2 rows of `out`."""
_one, _two = (vector_function(f"espalier_amx_{n}", partial(_write_product, n, False)) for n in (1, 2))
"""product(x: Strided, terms, start, out: Strided, steps) adds to 16 or 32 rows of `out`."""
_splitting_one, _splitting_two = (
    vector_function(f"espalier_amx_splitting_{n}", partial(_write_product, n, True)) for n in (1, 2)
)
"""The same with (panel, start, rows of it, mask) at the end, whose terms it leaves in `terms`.

Those of step n lie where step `n & mask` would: they stay in the nearest cache where the mask is small.
"""


def _write_row_terms(builder: Builder, args: Any) -> None:
    row, terms, steps = args
    shorts = ir.VectorType(ir.IntType(16), LANES)

    def step(n: Any, values: list[Any]) -> list[Any]:
        at = builder.offset(row, n, TILE_INNER)
        parts = [_split(builder, builder.read(builder.offset(at, i * LANES)), rounded=True) for i in range(2)]
        for term, pieces in enumerate(zip(*parts, strict=True)):
            halves = [builder.trunc(_down(builder, piece), shorts) for piece in pieces]
            place = builder.offset(builder.offset(terms, n, X_TILE), term * _TILE_BYTES // 4)
            builder.write(builder.joined(*halves), place)
        return values

    builder.loop(steps, [], step)


_row_terms = vector_function("espalier_amx_row_terms", _write_row_terms)
"""row_terms(row, start, terms, start, steps) stores the terms of `steps` times TILE_INNER elements."""

_CONFIGURATION = bytes(
    [1, 0, *[0] * 14, *[64, 0] * 8, *[0] * 16, *[TILE_ROWS] * 8, *[0] * 8]
)  # palette 1; 8 tiles of 64 bytes a row, 16 rows


@instructions()
def configure(builder: Builder, _: list[Any]) -> None:
    """Give all eight tiles of this thread their full size."""
    kind = ir.ArrayType(BYTE, len(_CONFIGURATION))
    place = builder.alloca(kind)
    builder.store(ir.Constant(kind, bytearray(_CONFIGURATION)), place)
    _call(builder, "ldtilecfg", builder.bitcast(place, _BYTES))


@instructions()
def release(builder: Builder, _: list[Any]) -> None:
    """Release the tiles, so that the system need not save them when it switches threads."""
    _call(builder, "tilerelease")


def x_size(rows: int, inner: int) -> int:
    """See `tiles`."""
    return -(-rows // TILE_ROWS) * -(-inner // TILE_INNER) * X_TILE


@inner
def pack_row(row: np.ndarray, start: int, inner: int, first: int, count: int, x: np.ndarray, r: int) -> None:
    """See `tiles`: `first` is a multiple of TILE_INNER, and `count` too but at the end of the row."""
    steps, whole = (inner + TILE_INNER - 1) // TILE_INNER, count // TILE_INNER
    at = (r // TILE_ROWS * steps + first // TILE_INNER) * X_TILE + r % TILE_ROWS * TILE_INNER // 2
    _row_terms(row, start, x, at, whole)
    if count % TILE_INNER:
        rest = np.zeros(TILE_INNER, np.float32)
        for i in range(whole * TILE_INNER, count):
            rest[i - whole * TILE_INNER] = row[start + i]
        _row_terms(rest, 0, x, at + whole * X_TILE, 1)


@inner
def scratch() -> np.ndarray:
    """Scratch memory for `multiply_columns`, one for each thread."""
    return aligned(CHUNK // TILE_INNER * PANEL_TILE)


@inner
def multiply_columns(
    left: LeftSide, column: int, count: int, panel: np.ndarray, panel_at: int, out: Strided, terms: np.ndarray
) -> None:
    """See `tiles`: `left.first` is a multiple of TILE_ROWS, `column` of TILE_INNER; `count` is at most CHUNK."""
    (x, first, rows, inner), steps = left, (count + TILE_INNER - 1) // TILE_INNER
    stride = (inner + TILE_INNER - 1) // TILE_INNER * X_TILE
    begin = first // TILE_ROWS * stride + column // TILE_INNER * X_TILE
    if rows == 1:
        _row(x, begin, panel, panel_at, out, count)
        return
    if rows == 2:
        _rows(x, begin, panel, panel_at, out, count)
        return
    mask = _ALL_STEPS if rows > 2 * TILE_ROWS else _TWO_STEPS  # they are not read again
    for row in range(0, rows, 2 * TILE_ROWS):
        given = Strided(x, begin + row // TILE_ROWS * stride, stride)
        sums, both = Strided(out.array, out.start + row * out.stride, out.stride), rows - row > TILE_ROWS
        if row and both:
            _two(given, terms, 0, sums, steps)
        elif row:
            _one(given, terms, 0, sums, steps)
        elif both:
            _splitting_two(given, terms, 0, sums, steps, panel, panel_at, count, mask)
        else:
            _splitting_one(given, terms, 0, sums, steps, panel, panel_at, count, mask)


@inner
def multiply_panel(
    left: LeftSide, panels: np.ndarray, at: int, _prefetch_at: int, terms: Strided, out: Strided, scratch: np.ndarray
) -> None:
    """See `tiles`; the elements behind the panel, which are read next, are prefetched with it."""
    if terms.stride == 0:  # tiles add to what is in `out`
        fill_rows(terms.array, terms.start, 2 * LANES, out, left.rows)
    for column in range(0, left.inner, CHUNK):
        multiply_columns(left, column, min(CHUNK, left.inner - column), panels, at + column * 2 * LANES, out, scratch)
