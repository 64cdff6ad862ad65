"""Loops over the elements of flat float32 arrays, written so that LLVM vectorises them.

LLVM may compile a loop that writes one array and reads another twice, with and without vectors, and choose at run time
by whether their addresses could overlap. Results must not depend on that choice: such loops do without fast-math, so
that each element is rounded the same way in both. Only sums have it, which read and write nothing: without it they
could not be vectorised, and with it their order is fixed when they are compiled.

Loops run over slices: of `x[start + i]` LLVM cannot tell that the index is not a negative one, and gives up.
"""

import math
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from espalier.kernels.cpu.emit import FLOAT, INT, caller, intrinsic, load, loop, reduce, store

LANES = 16
"""Elements of the vectors that `exp_in_place` and `largest` work with."""
_LOG2E = np.float32(math.log2(math.e))


@intrinsic
def _as_float(_: Any, bits: Any) -> Any:
    """The float32 with these bits, an int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def _as_int(_: Any, x: Any) -> Any:
    """The bits of a float32, as int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], INT)

    return types.int32(types.float32), generate


@intrinsic
def _largest_of_vectors(_: Any, x: Any, start: Any, vectors: Any) -> Any:
    """The largest of `vectors` times LANES elements from `start` on; minus infinity of none."""
    vector = ir.VectorType(FLOAT, LANES)

    def write(builder: ir.IRBuilder, args: Any) -> Any:
        x, vectors = args

        def larger(one: Any, other: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", one, other), one, other)

        def compare(n: Any, tops: list[Any]) -> list[Any]:
            return [larger(load(builder, _vector_of(builder, x, n), vector), tops[0])]

        lowest = ir.Constant(vector, [float("-inf")] * LANES)
        return reduce(builder, loop(builder, vectors, [lowest], compare)[0], larger)

    return types.float32(x, types.intp, types.intp), caller("espalier_largest", (0,), write)


def _vector_of(builder: ir.IRBuilder, x: Any, n: Any) -> Any:
    return builder.gep(x, [builder.mul(n, ir.Constant(n.type, LANES))])


@numba.njit
def largest(x: np.ndarray, start: int, count: int) -> np.float32:
    """The largest of `count` elements from `start` on."""
    vectors = count // LANES
    top = _largest_of_vectors(x, start, vectors)
    for i in range(start + vectors * LANES, start + count):
        top = max(top, x[i])
    return top


@intrinsic
def _fma(_: Any, x: Any, y: Any, z: Any) -> Any:
    """Multiply x and y and add z, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


@numba.njit(fastmath=True)
def _sum_of_squares(x: np.ndarray) -> np.float32:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * x[i]
    return total


_COEFFICIENTS = (
    1.535336188e-4, 1.339887440e-3, 9.618437357e-3, 5.550332548e-2, 2.402264791e-1, 6.931472028e-1, 1.0,
)  # fmt: skip
"""Of a polynomial for 2**f on [-0.5, 0.5], the highest power first (Cephes expf in base 2)."""
_C = tuple(np.float32(c) for c in _COEFFICIENTS)


@intrinsic
def _exp_vectors(_: Any, x: Any, start: Any, vectors: Any, shift: Any) -> Any:
    """`_exp` of `vectors` times LANES elements from `start` on, in place, and their sum."""
    vector, whole = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)

    def write(builder: ir.IRBuilder, args: Any) -> Any:
        x, vectors, shift = args

        def constant(value: float) -> Any:
            return ir.Constant(vector, [float(np.float32(value))] * LANES)

        def call(name: str, *operands: Any) -> Any:
            kind = ir.FunctionType(vector, [vector] * len(operands))
            return builder.call(
                cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32"), operands
            )

        undefined = ir.Constant(vector, ir.Undefined)
        first = builder.insert_element(undefined, shift, ir.Constant(INT, 0))
        shifts = builder.shuffle_vector(first, undefined, ir.Constant(whole, [0] * LANES))

        def exp(n: Any, sums: list[Any]) -> list[Any]:
            place = _vector_of(builder, x, n)
            t = builder.fmul(builder.fsub(load(builder, place, vector), shifts), constant(float(_LOG2E)))
            for limit, side in ((-126.0, "<"), (126.0, ">")):
                t = builder.select(builder.fcmp_ordered(side, t, constant(limit)), constant(limit), t)
            rounded = call("floor", builder.fadd(t, constant(0.5)))
            f = builder.fsub(t, rounded)
            p = constant(_COEFFICIENTS[0])
            for c in _COEFFICIENTS[1:]:
                p = call("fma", p, f, constant(c))
            exponent = builder.shl(builder.fptosi(rounded, whole), ir.Constant(whole, [23] * LANES))
            value = builder.bitcast(builder.add(builder.bitcast(p, whole), exponent), vector)
            store(builder, [value], [place])
            return [builder.fadd(sums[0], value)]

        return reduce(builder, loop(builder, vectors, [constant(0.0)], exp)[0], builder.fadd)

    return types.float32(x, types.intp, types.intp, types.float32), caller("espalier_exp", (0,), write)


@numba.njit
def _exp(x: np.float32) -> np.float32:
    t = min(max(x * _LOG2E, np.float32(-126.0)), np.float32(126.0))
    whole = np.floor(t + np.float32(0.5))
    f = t - whole
    p = _C[0]
    for i in range(1, 7):
        p = _fma(p, f, _C[i])
    return _as_float(_as_int(p) + (np.int32(whole) << np.int32(23)))


@numba.njit
def exp_in_place(x: np.ndarray, start: int, count: int, shift: np.float32) -> np.float32:
    """Replace `count` elements from `start` on by exp(x - shift), the exponent cut to +-87, and return their sum.

    A polynomial and integer arithmetic on the exponent: numba would call a scalar exp. Relative error below 3e-7. Each
    element has the same bits wherever it stands.
    """
    vectors = count // LANES
    total = _exp_vectors(x, start, vectors, shift)
    for i in range(start + vectors * LANES, start + count):
        x[i] = _exp(x[i] - shift)
        total += x[i]
    return total


@numba.njit
def scale_in_place(x: np.ndarray, start: int, count: int, factor: np.float32) -> None:
    """Multiply `count` elements from `start` on by `factor`."""
    part = x[start : start + count]
    for i in range(count):
        part[i] *= factor


@numba.njit
def rms_norm(x: np.ndarray, x_start: int, weight: np.ndarray, eps: np.float32, out: np.ndarray, out_start: int) -> None:
    """Write `len(weight)` elements of `x`, over their root mean square, times `weight` (Zhang and Sennrich, 2019)."""
    count = len(weight)
    row, normed = x[x_start : x_start + count], out[out_start : out_start + count]
    factor = np.float32(1.0) / np.sqrt(_sum_of_squares(row) / np.float32(count) + eps)
    for i in range(count):
        normed[i] = row[i] * factor * weight[i]


@numba.njit
def silu_times(
    gate: np.ndarray, up: np.ndarray, scratch: np.ndarray, out: np.ndarray, start: int, stride: int, columns: int
) -> None:
    """Write silu(gate) * up to `out`, rows of `columns` elements, from `start` on with `stride` between rows.

    The others have no gaps, and are as long as each other.
    """
    for i in range(len(gate)):
        scratch[i] = -gate[i]
    exp_in_place(scratch, 0, len(gate), np.float32(0.0))
    for row in range(len(gate) // columns):
        part = slice(row * columns, (row + 1) * columns)
        some_gates, some_ups, denominators = gate[part], up[part], scratch[part]
        written = out[start + row * stride : start + row * stride + columns]
        for i in range(columns):
            written[i] = some_gates[i] * some_ups[i] / (np.float32(1.0) + denominators[i])


@numba.njit
def rotate(x: np.ndarray, start: int, cos: np.ndarray, sin: np.ndarray) -> None:
    """Rotate the two halves of one head in place; see `kernels.rotary.apply_rotary`."""
    half = len(cos)
    left, right = x[start : start + half], x[start + half : start + 2 * half]
    for i in range(half):
        first, second = left[i], right[i]
        left[i] = first * cos[i] - second * sin[i]
        right[i] = second * cos[i] + first * sin[i]
