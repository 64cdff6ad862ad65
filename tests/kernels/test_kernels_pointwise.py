import platform
from collections.abc import Callable
from functools import partial

import numba
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from espalier.kernels.cpu import pointwise
from espalier.kernels.cpu.pointwise import LANES
from espalier.kernels.cpu.simd import flush_denormals, restore_denormals


@numba.njit
def exp_in_place(x: np.ndarray, start: int, count: int, shift: np.float32) -> np.float32:
    return pointwise.exp_in_place(x, start, count, shift)


@numba.njit
def largest(x: np.ndarray, start: int, count: int) -> np.float32:
    return pointwise.largest(x, start, count)


@numba.njit
def silu_times(gate: np.ndarray, gate_start: int, up: np.ndarray, up_start: int, vectors: int) -> None:
    pointwise.silu_times(gate, gate_start, up, up_start, vectors)


@numba.njit
def gelu_times(gate: np.ndarray, gate_start: int, up: np.ndarray, up_start: int, vectors: int) -> None:
    pointwise.gelu_times(gate, gate_start, up, up_start, vectors)


COUNTS = [1, LANES - 1, LANES, LANES + 1, 3 * LANES + 5, 256]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("start", [0, 3])
def test_exp_is_that_of_float64_to_three_in_ten_million_and_touches_nothing_else(start: int, count: int):
    x = np.random.default_rng(count).uniform(-80, 5, start + count + 4).astype(np.float32)
    shift = np.float32(1.5)
    ours = x.copy()
    total = exp_in_place(ours, start, count, shift)
    middle = slice(start, start + count)
    np.testing.assert_allclose(ours[middle], np.exp((x[middle] - shift).astype(np.float64)), rtol=3e-7 * 87)
    near_zero = np.abs(x - shift) < 1
    np.testing.assert_allclose(
        ours[middle][near_zero[middle]], np.exp((x - shift).astype(np.float64))[middle][near_zero[middle]], rtol=3e-7
    )
    np.testing.assert_allclose(total, ours[middle].astype(np.float64).sum(), rtol=1e-6)
    assert (ours[:start] == x[:start]).all()
    assert (ours[start + count :] == x[start + count :]).all()


@pytest.mark.parametrize(("ours", "theirs"), [(silu_times, F.silu), (gelu_times, partial(F.gelu, approximate="tanh"))])
def test_gated_products_are_those_of_float64(ours: Callable[..., None], theirs: Callable[..., torch.Tensor]):
    random = np.random.default_rng(0)
    gate, up = (random.normal(0, 4, 5 * LANES).astype(np.float32) for _ in range(2))
    gate[:4] = -80, 80, 0, -30
    found = gate.copy()
    ours(found, LANES, up, 0, 3)
    expected = theirs(torch.from_numpy(gate).double()).numpy()[LANES : 4 * LANES] * up[: 3 * LANES]
    np.testing.assert_allclose(found[LANES : 4 * LANES], expected, rtol=1e-5, atol=1e-6)
    assert (found[:LANES] == gate[:LANES]).all()
    assert (found[4 * LANES :] == gate[4 * LANES :]).all()


def test_exp_of_an_element_has_the_same_bits_wherever_it_stands():
    x = np.random.default_rng(0).uniform(-100, 100, 5 * LANES).astype(np.float32)
    whole = x.copy()
    exp_in_place(whole, 0, len(x), np.float32(0.3))
    for i, value in enumerate(x):
        alone = np.array([value], np.float32)
        exp_in_place(alone, 0, 1, np.float32(0.3))
        assert alone[0].tobytes() == whole[i].tobytes()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("low", [-9.0, -2.0])
def test_largest_finds_it_at_any_place(low: float, count: int):
    x = np.random.default_rng(count).uniform(low, -1, count + 2).astype(np.float32)
    x[0] = x[-1] = 7.0
    for place in range(1, count + 1):
        marked = x.copy()
        marked[place] = -0.5
        assert largest(marked, 1, count) == np.float32(-0.5)


@numba.njit
def _flush() -> int:
    return flush_denormals()


@numba.njit
def _restore(given: int) -> None:
    restore_denormals(np.int32(given))


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="a setting of x86")
def test_numbers_below_the_least_normal_one_are_zeros_while_asked_for_and_not_after():
    small, smaller = np.full(16, 1e-30, np.float32), np.full(16, 1e-10, np.float32)
    before = _flush()
    flushed = small * smaller
    _restore(before)
    assert (flushed == 0).all()
    assert (small * smaller > 0).all()
