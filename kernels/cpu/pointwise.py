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
from espalier.kernels.cpu.simd import (
    FLOAT,
    INDEX,
    INT,
    first_lanes,
    fma,
    load,
    loop,
    masked_load,
    masked_store,
    reduce,
    store,
    to_all_lanes,
    vector_function,
)

LANES = 16
"""Elements of a vector in this file's code."""
_VECTOR = ir.VectorType(FLOAT, LANES)


def _write_largest(builder: ir.IRBuilder, args: Any) -> Any:
    x, count = args

    def larger(one: Any, other: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", one, other), one, other)

    def compare(place: Any, top: Any) -> Any:
        return larger(load(builder, place, _VECTOR), top)

    def compare_rest(place: Any, mask: Any, top: Any) -> Any:
        return larger(masked_load(builder, place, mask, _constant(float("-inf"))), top)

    top = _each_vector(builder, x, count, _constant(float("-inf")), compare, compare_rest)
    return reduce(builder, top, larger)


largest = vector_function("espalier_largest", _write_largest, types.float32)
"""`largest(x, start, count)`: the largest of `count` elements from `start` on; minus infinity of none."""


def _constant(value: float) -> ir.Constant:
    return ir.Constant(_VECTOR, [float(np.float32(value))] * LANES)


def _vector_of(builder: ir.IRBuilder, x: Any, n: Any) -> Any:
    return builder.gep(x, [builder.mul(n, ir.Constant(n.type, LANES))])


def _each_vector(
    builder: ir.IRBuilder,
    x: Any,
    count: Any,
    value: Any,
    whole: Callable[[Any, Any], Any],
    rest: Callable[[Any, Any, Any], Any],
) -> Any:
    """Fold `whole(place, value)` over the whole vectors of `count` elements, then `rest(place, mask, value)`.

    `rest` takes the last elements, which fill no vector, and is left out where there are none: an exponential of no
    elements would take as long as one of sixteen.
    """
    vectors = builder.sdiv(count, ir.Constant(INDEX, LANES))
    left = builder.srem(count, ir.Constant(INDEX, LANES))
    (value,) = loop(builder, vectors, [value], lambda n, v: [whole(_vector_of(builder, x, n), v[0])])
    place, mask = _vector_of(builder, x, vectors), first_lanes(builder, left, LANES)
    some = builder.zext(builder.icmp_signed(">", left, ir.Constant(INDEX, 0)), INDEX)
    return loop(builder, some, [value], lambda _, v: [rest(place, mask, v[0])])[0]


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


def write_exp(builder: ir.IRBuilder, x: Any) -> Any:
    """The exponential of a vector's elements, cut to +-87: a polynomial, and integer arithmetic on the exponent."""
    whole = ir.VectorType(INT, LANES)
    t = builder.fmul(x, _constant(math.log2(math.e)))
    for limit, side in ((-126.0, "<"), (126.0, ">")):
        t = builder.select(builder.fcmp_ordered(side, t, _constant(limit)), _constant(limit), t)
    rounded = builder.fadd(t, _constant(_ROUNDER))
    f = builder.fsub(t, builder.fsub(rounded, _constant(_ROUNDER)))
    p = _constant(_COEFFICIENTS[0])
    for c in _COEFFICIENTS[1:]:
        p = fma(builder, p, f, _constant(c))
    exponent = builder.shl(builder.bitcast(rounded, whole), ir.Constant(whole, [23] * LANES))
    return builder.bitcast(builder.add(builder.bitcast(p, whole), exponent), _VECTOR)


def _write_exp_in_place(builder: ir.IRBuilder, args: Any) -> Any:
    x, count, shift = args
    shifts = to_all_lanes(builder, shift, LANES)

    def exp(place: Any, total: Any) -> Any:
        value = write_exp(builder, builder.fsub(load(builder, place, _VECTOR), shifts))
        store(builder, [value], [place])
        return builder.fadd(total, value)

    def exp_rest(place: Any, mask: Any, total: Any) -> Any:
        value = write_exp(builder, builder.fsub(masked_load(builder, place, mask, _constant(0.0)), shifts))
        masked_store(builder, value, place, mask)
        return builder.fadd(total, builder.select(mask, value, _constant(0.0)))

    return reduce(builder, _each_vector(builder, x, count, _constant(0.0), exp, exp_rest), builder.fadd)


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


def _write_gated(exponent: Callable[[ir.IRBuilder, Any], Any], builder: ir.IRBuilder, args: Any) -> None:
    """Write gate * up / (1 + exp(exponent(gate)))."""
    gate, up, vectors = args

    def multiply(n: Any, nothing: list[Any]) -> list[Any]:
        g, u = (load(builder, _vector_of(builder, x, n), _VECTOR) for x in (gate, up))
        e = write_exp(builder, exponent(builder, g))
        value = builder.fdiv(builder.fmul(g, u), builder.fadd(_constant(1.0), e))
        store(builder, [value], [_vector_of(builder, gate, n)])
        return nothing

    loop(builder, vectors, [], multiply)


def _write_gelu_exponent(builder: ir.IRBuilder, gate: Any) -> Any:
    """-2 z, where 0.5 (1 + tanh(z)) is 1 / (1 + exp(-2 z)) and z = sqrt(2 / pi) (gate + 0.044715 gate**3)."""
    slope = -2 * math.sqrt(2 / math.pi)
    inner = fma(builder, builder.fmul(gate, gate), _constant(0.044715 * slope), _constant(slope))
    return builder.fmul(gate, inner)


silu_times = vector_function("espalier_silu_times", partial(_write_gated, ir.IRBuilder.fneg))
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
