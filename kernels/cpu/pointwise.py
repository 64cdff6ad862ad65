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
from numba.core import types
from numba.extending import intrinsic

_intrinsic: Any = intrinsic  # for a type checker, its result would want the typing context as an argument
_LOG2E = np.float32(math.log2(math.e))


@_intrinsic
def _as_float(_: Any, bits: Any) -> Any:
    """The float32 with these bits, an int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@_intrinsic
def _as_int(_: Any, x: Any) -> Any:
    """The bits of a float32, as int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


@numba.njit
def largest(x: np.ndarray, start: int, count: int) -> np.float32:
    """The largest of `count` elements from `start` on, at least one."""
    part, top = x[start : start + count], np.int32(-(2**31))
    for i in range(count):
        # As integers negative floats fall where they rise: turn them round. (Maxima of floats are not vectorised.)
        bits = _as_int(part[i])
        top = max(top, bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return _as_float(top ^ ((top >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@_intrinsic
def _fma(_: Any, x: Any, y: Any, z: Any) -> Any:
    """Multiply x and y and add z, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


@numba.njit(fastmath=True)
def _sum(x: np.ndarray) -> np.float32:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i]
    return total


@numba.njit(fastmath=True)
def _sum_of_squares(x: np.ndarray) -> np.float32:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * x[i]
    return total


@numba.njit
def exp_in_place(x: np.ndarray, start: int, count: int, shift: np.float32) -> np.float32:
    """Replace `count` elements from `start` on by exp(x - shift), the exponent cut to +-87, and return their sum.

    numba calls a scalar exp without a vector library; a polynomial for 2**f on [-0.5, 0.5] and integer arithmetic on
    the exponent lets LLVM vectorise the loop. Relative error below 3e-7 (Cephes expf coefficients in base 2).
    """
    part = x[start : start + count]
    for i in range(count):
        t = min(max((part[i] - shift) * _LOG2E, np.float32(-126.0)), np.float32(126.0))
        whole = np.floor(t + np.float32(0.5))
        f = t - whole
        p = np.float32(1.535336188e-4)
        p = _fma(p, f, np.float32(1.339887440e-3))
        p = _fma(p, f, np.float32(9.618437357e-3))
        p = _fma(p, f, np.float32(5.550332548e-2))
        p = _fma(p, f, np.float32(2.402264791e-1))
        p = _fma(p, f, np.float32(6.931472028e-1))
        p = _fma(p, f, np.float32(1.0))
        part[i] = _as_float(_as_int(p) + (np.int32(whole) << np.int32(23)))
    return _sum(part)


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
    gate: np.ndarray, up: np.ndarray, start: int, scratch: np.ndarray, out: np.ndarray, out_start: int, count: int
) -> None:
    """Write silu(gate) * up to `out`, `count` elements from `start` on; `scratch` has room for as many."""
    some_gates, some_ups = gate[start : start + count], up[start : start + count]
    written, denominator = out[out_start : out_start + count], scratch[:count]
    for i in range(count):
        denominator[i] = -some_gates[i]
    exp_in_place(denominator, 0, count, np.float32(0.0))
    for i in range(count):
        written[i] = some_gates[i] * some_ups[i] / (np.float32(1.0) + denominator[i])


@numba.njit
def rotate(x: np.ndarray, start: int, cos: np.ndarray, sin: np.ndarray) -> None:
    """Rotate the two halves of one head in place; see `kernels.rotary.apply_rotary`."""
    half = len(cos)
    left, right = x[start : start + half], x[start + half : start + 2 * half]
    for i in range(half):
        first, second = left[i], right[i]
        left[i] = first * cos[i] - second * sin[i]
        right[i] = second * cos[i] + first * sin[i]
