"""Elementwise loops over flat float32 arrays, written so that LLVM vectorises them.

Of a loop that reads one array and writes another, LLVM may compile two versions, with and without vectors, and choose
at run time by whether the arrays could overlap. Results must not depend on that choice, so such loops do without
fast-math: both versions round each element alike. Only sums have fast-math, for they write no array: without it they
could not be vectorised, and with it their order is fixed at compilation.

Loops run over slices, for LLVM does not vectorise `x[start + i]`, whose index might be negative.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from espalier.kernels.compilation.compiler import inner
from espalier.kernels.cpu.simd import FLOATS, LANES, WORDS, Builder, constant, vector_function


def _write_largest(builder: Builder, args: Any) -> Any:
    x, count = args

    def larger(one: Any, other: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", one, other), one, other)

    def compare(start: Any, mask: Any, tops: list[Any]) -> list[Any]:
        return [larger(builder.read(builder.offset(x, start), FLOATS, mask, float("-inf")), tops[0])]

    (top,) = builder.each_vector(count, [constant(FLOATS, float("-inf"))], compare)
    return builder.reduce(top, larger)


largest = vector_function("espalier_largest", _write_largest, types.float32)
"""`largest(x, start, count)`: the largest of `count` elements from `start` on; minus infinity of none."""


@inner(fastmath=True)
def _sum_of_squares(x: np.ndarray) -> np.float32:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * x[i]
    return total


_COEFFICIENTS = (1.326472731e-3, 9.671512991e-3, 5.550733581e-2, 2.402224243e-1, 6.931470037e-1, 1.0)
"""Coefficients of the minimax polynomial for 2**f on [-0.5, 0.5], highest power first; relative error below 9e-8."""
_ROUNDER = 1.5 * 2.0**23
"""Added to a float32 of less than 2**22 it leaves the nearest integer in the lowest bits."""


def write_exp(builder: Builder, x: Any) -> Any:
    """The exponential of a vector's elements, cut to +-87: a polynomial, and integer arithmetic on the exponent."""
    t = builder.fmul(x, _float(math.log2(math.e)))
    for limit, side in ((-126.0, "<"), (126.0, ">")):
        t = builder.select(builder.fcmp_ordered(side, t, _float(limit)), _float(limit), t)
    rounded = builder.fadd(t, _float(_ROUNDER))
    f = builder.fsub(t, builder.fsub(rounded, _float(_ROUNDER)))
    p = _float(_COEFFICIENTS[0])
    for c in _COEFFICIENTS[1:]:
        p = builder.fma(p, f, _float(c))
    exponent = builder.shl(builder.bitcast(rounded, WORDS), constant(WORDS, 23))
    return builder.bitcast(builder.add(builder.bitcast(p, WORDS), exponent), FLOATS)


def _float(value: float) -> ir.Constant:
    return constant(FLOATS, float(np.float32(value)))


def _write_exp_in_place(builder: Builder, args: Any) -> Any:
    x, count, shift = args
    shifts, zeros = builder.to_all_lanes(shift), constant(FLOATS, 0.0)

    def exp(start: Any, mask: Any, totals: list[Any]) -> list[Any]:
        place = builder.offset(x, start)
        value = write_exp(builder, builder.fsub(builder.read(place, FLOATS, mask), shifts))
        builder.write(value, place, mask)
        return [builder.fadd(totals[0], value if mask is None else builder.select(mask, value, zeros))]

    (total,) = builder.each_vector(count, [zeros], exp)
    return builder.reduce(total, builder.fadd)


exp_in_place = vector_function("espalier_exp", _write_exp_in_place, types.float32)
"""`exp_in_place(x, start, count, shift)` replaces `count` elements from `start` on by exp(x - shift), the exponent cut
to +-87, and returns their sum.

Relative error below 3e-7 near zero, and below that times the exponent far from it; numba would call a scalar exp. Each
element has the same bits wherever it stands.
"""


@inner
def scale_in_place(x: np.ndarray, start: int, count: int, factor: np.float32) -> None:
    """Multiply `count` elements from `start` on by `factor`."""
    part = x[start : start + count]
    for i in range(count):
        part[i] *= factor


@inner
def rms_norm(x: np.ndarray, x_start: int, weight: np.ndarray, eps: np.float32, out: np.ndarray, out_start: int) -> None:
    """Write `len(weight)` elements of `x`, over their root mean square, times `weight` (Zhang and Sennrich, 2019)."""
    count = len(weight)
    row, normed = x[x_start : x_start + count], out[out_start : out_start + count]
    factor = np.float32(1.0) / np.sqrt(_sum_of_squares(row) / np.float32(count) + eps)
    for i in range(count):
        normed[i] = row[i] * factor * weight[i]


def _write_gated(exponent: Callable[[Builder, Any], Any], builder: Builder, args: Any) -> None:
    """Write gate * up / (1 + exp(exponent(gate)))."""
    gate, up, vectors = args

    def multiply(n: Any, nothing: list[Any]) -> list[Any]:
        place = builder.offset(gate, n, LANES)
        g, u = builder.read(place), builder.read(builder.offset(up, n, LANES))
        e = write_exp(builder, exponent(builder, g))
        builder.write(builder.fdiv(builder.fmul(g, u), builder.fadd(_float(1.0), e)), place)
        return nothing

    builder.loop(vectors, [], multiply)


def _write_gelu_exponent(builder: Builder, gate: Any) -> Any:
    """-2 z, where 0.5 (1 + tanh(z)) is 1 / (1 + exp(-2 z)) and z = sqrt(2 / pi) (gate + 0.044715 gate**3)."""
    slope = -2 * math.sqrt(2 / math.pi)
    return builder.fmul(gate, builder.fma(builder.fmul(gate, gate), _float(0.044715 * slope), _float(slope)))


silu_times = vector_function("espalier_silu_times", partial(_write_gated, Builder.fneg))
"""`silu_times(gate, start, up, start, vectors)` replaces vectors of LANES elements of `gate` by silu(gate) * up."""
gelu_times = vector_function("espalier_gelu_times", partial(_write_gated, _write_gelu_exponent))
"""As `silu_times`, with the approximation of GELU by tanh."""


@inner
def rotate(x: np.ndarray, start: int, cos: np.ndarray, sin: np.ndarray) -> None:
    """Rotate the two halves of a head's first elements in place; see `kernels.rotary.apply_rotary`."""
    half = len(cos)
    left, right = x[start : start + half], x[start + half : start + 2 * half]
    for i in range(half):
        first, second = left[i], right[i]
        left[i] = first * cos[i] - second * sin[i]
        right[i] = second * cos[i] + first * sin[i]
