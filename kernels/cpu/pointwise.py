"""Loops over the elements of flat float32 arrays, written so that LLVM vectorises them.

Fast-math is what allows a sum to be vectorised; its order is still fixed when it is compiled, and the same for every
call of the same length.
"""

import math

import numba
import numpy as np

_LOG2E = np.float32(math.log2(math.e))


@numba.njit(fastmath=True)
def largest(x: np.ndarray, start: int, count: int) -> np.float32:
    """The largest of `count` elements from `start` on, at least one."""
    bits = x[start : start + count].view(np.int32)
    top = np.int32(-(2**31))
    for i in range(count):
        # As integers negative floats fall where they rise: turn them round. (Maxima of floats are not vectorised.)
        top = max(top, bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    ordered = np.full(1, top ^ ((top >> np.int32(31)) & np.int32(0x7FFFFFFF)), np.int32)
    return ordered.view(np.float32)[0]


@numba.njit(fastmath=True)
def exp_in_place(x: np.ndarray, start: int, count: int, shift: np.float32) -> np.float32:
    """Replace `count` elements from `start` on by exp(x - shift), the exponent cut to +-87, and return their sum.

    numba calls a scalar exp without a vector library; a polynomial for 2**f on [-0.5, 0.5] and integer arithmetic on
    the exponent lets LLVM vectorise the loop. Relative error below 3e-7 (Cephes expf coefficients in base 2).
    """
    part = x[start : start + count]
    bits = part.view(np.int32)
    total = np.float32(0.0)
    for i in range(count):
        t = min(max((part[i] - shift) * _LOG2E, np.float32(-126.0)), np.float32(126.0))
        whole = np.floor(t + np.float32(0.5))
        f = t - whole
        p = np.float32(1.535336188e-4)
        p = p * f + np.float32(1.339887440e-3)
        p = p * f + np.float32(9.618437357e-3)
        p = p * f + np.float32(5.550332548e-2)
        p = p * f + np.float32(2.402264791e-1)
        p = p * f + np.float32(6.931472028e-1)
        p = p * f + np.float32(1.0)
        part[i] = p
        bits[i] += np.int32(whole) << 23
        total += part[i]
    return total


@numba.njit(fastmath=True)
def scale_in_place(x: np.ndarray, start: int, count: int, factor: np.float32) -> None:
    """Multiply `count` elements from `start` on by `factor`."""
    for i in range(start, start + count):
        x[i] *= factor


@numba.njit(fastmath=True)
def rms_norm(x: np.ndarray, x_start: int, weight: np.ndarray, eps: np.float32, out: np.ndarray, out_start: int) -> None:
    """Write `len(weight)` elements of `x`, over their root mean square, times `weight` (Zhang and Sennrich, 2019)."""
    count = len(weight)
    total = np.float32(0.0)
    for i in range(count):
        total += x[x_start + i] * x[x_start + i]
    factor = np.float32(1.0) / np.sqrt(total / np.float32(count) + eps)
    for i in range(count):
        out[out_start + i] = x[x_start + i] * factor * weight[i]


@numba.njit(fastmath=True)
def silu_times(
    gate: np.ndarray, up: np.ndarray, start: int, scratch: np.ndarray, out: np.ndarray, out_start: int, count: int
) -> None:
    """Write silu(gate) * up to `out`, `count` elements from `start` on; `scratch` has room for as many."""
    for i in range(count):
        scratch[i] = -gate[start + i]
    exp_in_place(scratch, 0, count, np.float32(0.0))
    for i in range(count):
        out[out_start + i] = gate[start + i] * up[start + i] / (np.float32(1.0) + scratch[i])


@numba.njit(fastmath=True)
def rotate(x: np.ndarray, start: int, cos: np.ndarray, sin: np.ndarray) -> None:
    """Rotate the two halves of one head in place; see `kernels.rotary.apply_rotary`."""
    half = len(cos)
    for i in range(half):
        first, second = x[start + i], x[start + half + i]
        x[start + i] = first * cos[i] - second * sin[i]
        x[start + half + i] = second * cos[i] + first * sin[i]
