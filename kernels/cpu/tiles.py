"""Small matrix products with a fixed order of summation, written in LLVM's own vector instructions.

numba leaves it to LLVM whether and how a loop is vectorised, and LLVM gives up where it cannot rule out that arrays
overlap (measured on the loops of attention: 2 to 3 billion multiply-adds a second, against 13 to 34 here). It also
means that an output depends on nothing but its own row of `a`: the same bits in a tile of one row and of four.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_LARGE_REGISTERS = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
TALL, WIDE = (8, 32) if _LARGE_REGISTERS else (4, 16)
"""Rows and lanes of the largest tile: as many sums as the machine's registers hold beside what goes into them."""

_intrinsic: Any = intrinsic  # for a type checker, its result would want the typing context as an argument
_INDEX = ir.IntType(64)
_FLOAT = ir.FloatType()
_BYTE = ir.IntType(8)


def make_tile(rows: int, lanes: int) -> Callable[..., None]:
    """Returns a compiled-in function that adds a product of `rows` by `lanes` outputs to what is there.

    Its arguments are flat float32 arrays with the place of their first element and the distance between rows:

        tile(a, a_start, a_stride, b, b_start, b_stride, out, out_start, out_stride, count)

    For `i < rows` and `l < lanes`, `out[i, l] += sum of a[i, n] * b[n, l] for n < count`, in order of `n`, each a fused
    multiply-add. `b` and `out` are read and written `lanes` elements at a time. Nothing is checked.
    """

    @_intrinsic
    def multiply_add(
        _: Any, a: Any, a0: Any, sa: Any, b: Any, b0: Any, sb: Any, o: Any, o0: Any, so: Any, n: Any
    ) -> Any:
        place = types.intp
        signature = types.void(a, place, place, b, place, place, o, place, place, place)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            arrays = [context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 3, 6)]
            a, b, out = (builder.gep(data, [args[i]]) for data, i in zip(arrays, (1, 4, 7), strict=True))
            builder.call(_tile_function(builder.module, rows, lanes), [a, args[2], b, args[5], out, args[8], args[9]])
            return context.get_dummy_value()

        return signature, generate

    return multiply_add


def _tile_function(module: ir.Module, rows: int, lanes: int) -> ir.Function:
    """The tile as a function of `module`: one that is never inlined, or each of its many uses would be compiled anew.

    Its arguments: a, distance between its rows, b, the same, out, the same, count.
    """
    pointer = _FLOAT.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _INDEX, pointer, _INDEX, pointer, _INDEX, _INDEX])
    function = cgutils.get_or_insert_function(module, kind, f"espalier_tile_{rows}x{lanes}")
    if function.is_declaration:
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        _write_body(ir.IRBuilder(function.append_basic_block()), function, rows, lanes)
    return function


def _write_body(builder: ir.IRBuilder, function: ir.Function, rows: int, lanes: int) -> None:
    a, a_stride, b, b_stride, out, out_stride, count = function.args
    vector = ir.VectorType(_FLOAT, lanes)
    undefined = ir.Constant(vector, ir.Undefined)
    to_all_lanes = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    fma = cgutils.get_or_insert_function(
        function.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{lanes}f32"
    )

    def row_of(base: Any, stride: Any, row: Any) -> Any:
        return builder.gep(base, [builder.mul(stride, row)])

    def as_vector(place: Any) -> Any:
        return builder.bitcast(place, vector.as_pointer())

    def load(place: Any) -> Any:
        return builder.load(as_vector(place), align=4)

    indices = [ir.Constant(_INDEX, row) for row in range(rows)]
    a_rows = [row_of(a, a_stride, row) for row in indices]
    out_rows = [row_of(out, out_stride, row) for row in indices]
    initial = [load(place) for place in out_rows]
    before = builder.block
    condition, body, after = (builder.append_basic_block(name) for name in ("condition", "body", "end"))
    builder.branch(condition)

    builder.position_at_end(condition)
    n = builder.phi(_INDEX)
    n.add_incoming(ir.Constant(_INDEX, 0), before)
    sums = [builder.phi(vector) for _ in range(rows)]
    for total, start in zip(sums, initial, strict=True):
        total.add_incoming(start, before)
    builder.cbranch(builder.icmp_signed("<", n, count), body, after)

    builder.position_at_end(body)
    shared = load(row_of(b, b_stride, n))
    for total, a_row in zip(sums, a_rows, strict=True):
        factor = builder.insert_element(undefined, builder.load(builder.gep(a_row, [n])), ir.Constant(_INDEX, 0))
        factors = builder.shuffle_vector(factor, undefined, to_all_lanes)
        total.add_incoming(builder.call(fma, [factors, shared, total]), body)
    n.add_incoming(builder.add(n, ir.Constant(_INDEX, 1)), body)
    builder.branch(condition)

    builder.position_at_end(after)
    for total, place in zip(sums, out_rows, strict=True):
        builder.store(total, as_vector(place), align=4)
    builder.ret_void()


@_intrinsic
def _prefetch_line(_: Any, x: Any, place: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), _BYTE.as_pointer())
        flag = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), flag, flag, flag])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [address, ir.Constant(flag, 0), ir.Constant(flag, 3), ir.Constant(flag, 1)])
        return context.get_dummy_value()

    return types.void(x, types.intp), generate


@numba.njit
def prefetch(x: np.ndarray, start: int, count: int) -> None:
    """Have the `count` elements of a flat float32 array from `start` on brought near; nothing waits for them."""
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


@numba.njit
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
