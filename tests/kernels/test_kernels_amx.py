"""Products on AMX, where the processor has it; `test_kernels_linear` holds whichever unit is used to torch's."""

import os
import subprocess
import sys

import numba
import numpy as np
import pytest

from espalier.kernels.cpu import HAS_AMX

if HAS_AMX:
    from espalier.kernels.cpu.products import amx
    from espalier.kernels.cpu.products.tiles import LeftSide
    from espalier.kernels.cpu.simd import Strided

needs_amx = pytest.mark.skipif(not HAS_AMX, reason="this processor has no AMX, or ESPALIER_AMX=0")


def product(x: np.ndarray, weight: np.ndarray, given: np.ndarray | None = None) -> np.ndarray:
    """`given + x @ weight`, 32 columns."""
    (rows, inner), padded = x.shape, -(-len(x) // amx.TILE_ROWS) * amx.TILE_ROWS
    out = amx.aligned(padded * 32).reshape(padded, 32)
    out[:] = 0
    if given is not None:
        out[:rows] = given
    stored = amx.aligned(amx.x_size(rows, inner))
    _multiply(x.ravel(), rows, inner, weight.ravel(), stored, out.ravel())
    return out[:rows]


@numba.njit
def _multiply(x: np.ndarray, rows: int, inner: int, panel: np.ndarray, stored: np.ndarray, out: np.ndarray) -> None:
    for r in range(rows):
        amx.pack_row(x, r * inner, inner, 0, inner, stored, r)
    amx.configure()
    sums = Strided(out, 0, 32)
    amx.multiply_panel(LeftSide(stored, 0, rows, inner), panel, 0, 0, sums, sums, amx.scratch())
    amx.release()


@needs_amx
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 33, 70])
@pytest.mark.parametrize("inner", [1, 7, 32, 50, 256, 257, 700])
def test_a_product_is_as_exact_as_one_in_float32(rows: int, inner: int):
    random = np.random.default_rng(inner)
    x, weight = (random.standard_normal(shape).astype(np.float32) for shape in ((rows, inner), (inner, 32)))
    given = random.standard_normal((rows, 32)).astype(np.float32)
    exact = given + x.astype(np.float64) @ weight.astype(np.float64)
    size = np.abs(given) + np.abs(x).astype(np.float64) @ np.abs(weight).astype(np.float64)
    assert (np.abs(product(x, weight, given) - exact) <= 2**-22 * np.sqrt(inner) * size).all()


@needs_amx
def test_every_bit_of_a_float32_counts():
    x = np.zeros((1, 32), np.float32)
    weight = np.zeros((32, 32), np.float32)
    weight[0, 0] = 1
    for value in np.float32([1 + 2**-23, 1 - 2**-24, 3.1415927, -2.7182817e-20, 1.2345678e30]):
        x[0, 0] = value
        assert product(x, weight)[0, 0] == value
        assert product(weight[:1].copy(), np.pad(x.T, ((0, 0), (0, 31))))[0, 0] == value


@needs_amx
def test_what_is_no_number_stays_in_its_own_row():
    random = np.random.default_rng(0)
    x, weight = (random.standard_normal(shape).astype(np.float32) for shape in ((20, 64), (64, 32)))
    clean = product(x, weight).copy()
    x[3, 5], x[17, 0] = np.nan, np.inf
    spoilt = product(x, weight)
    others = [row for row in range(20) if row not in (3, 17)]
    assert not np.isfinite(spoilt[[3, 17]]).any()
    assert (spoilt[others] == clean[others]).all()


def test_it_can_be_left_out():
    code = """
import torch
from espalier.kernels.cpu import HAS_AMX
from espalier.kernels.cpu.products.linear import CpuLinear
x, weight = torch.randn(19, 70), torch.randn(40, 70)
torch.testing.assert_close(CpuLinear(weight)(x), torch.nn.functional.linear(x, weight), rtol=1e-5, atol=1e-4)
print(HAS_AMX)
"""
    environment = os.environ | {"ESPALIER_AMX": "0"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.stdout.split() == ["False"], ran.stderr
