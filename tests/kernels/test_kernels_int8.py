"""Products of bytes: equal to the same arithmetic in torch, and the same whatever the batch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from espalier.kernels.cpu import HAS_VNNI
from espalier.kernels.cpu.products.int8_linear import GROUP, Int8Weight, pack_int8

pytestmark = pytest.mark.skipif(not HAS_VNNI, reason="this processor has no AVX-512 VNNI")

SHAPES = [(32, 64), (48, 338), (256, 768), (1000, 50), (320, 2), (896, 4864)]
"""Inputs and outputs."""


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight as bytes, their scales, and both packed."""
    scales = weight.abs().amax(1) / 127
    values = torch.round(weight / scales[:, None]).to(torch.int8)
    return values, scales, pack_int8(values, scales[:, None])


def in_torch(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The same product group by group; float64 holds a fused multiply-add of float32 almost exactly."""
    rows, filled = len(x), (0, -x.shape[1] % GROUP)
    groups = F.pad(x, filled).view(rows, -1, GROUP)
    factors = F.pad(values, filled).view(len(values), -1, GROUP).double()
    most = groups.abs().amax(-1, keepdim=True)
    enough = most >= 2.0**-100
    inverse = torch.where(enough, torch.tensor(127.0) / most, 0.0)
    steps = torch.where(enough, most / 127, 0.0).double()
    rounded = torch.round(groups * inverse).double()
    total = torch.zeros(rows, len(values))
    for group in range(groups.shape[1]):
        total = (total.double() + rounded[:, group] @ factors[:, group].T * steps[:, group]).float()
    return (total.double() * scales.double() + bias.double()).float()


def some_rows(count: int, width: int) -> torch.Tensor:
    """Rows with groups of zeros, of large and of tiny numbers among them."""
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(count))
    for row, factor in ((1, 0.0), (2, 1e30), (3, 1e-30), (4, 1e-38)):
        x[row : row + 1, : GROUP + 3] *= factor
    x[5:6, 0] = 1e4
    return x


@pytest.mark.parametrize("rows", [1, 2, 6, 7, 13, 64, 300])
@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_a_product_equals_the_same_arithmetic_in_torch(width: int, out: int, rows: int):
    generator = torch.Generator().manual_seed(width)
    values, scales, weight = quantized(torch.randn(out, width, generator=generator))
    x, bias = some_rows(rows, width), torch.randn(out, generator=generator)
    given, expected = F.linear(x, weight, bias), in_torch(x, values, scales, bias)
    torch.testing.assert_close(given, expected, rtol=1e-6, atol=1e-6)
    assert (given != expected).sum() <= 2  # where float64's own rounding decides between two float32


@pytest.mark.parametrize("rows", [1, 7, 64, 300])
@pytest.mark.parametrize(("width", "out", "refined"), [(64, 320, 64), (338, 48, 20), (96, 90, 1), (96, 90, 90)])
def test_the_last_outputs_may_have_a_second_byte_of_each_weight(width: int, out: int, refined: int, rows: int):
    generator = torch.Generator().manual_seed(width)
    exact, x = torch.randn(out, width, generator=generator), some_rows(rows, width)
    values, scales, once = quantized(exact)
    rest, rest_scales, _ = quantized((exact - values * scales[:, None])[-refined:])
    weight: Any = pack_int8(values, scales[:, None], (rest, rest_scales[:, None]))
    bias = torch.randn(out, generator=generator)
    first = F.linear(x, once, bias)
    expected = torch.cat([first[:, :-refined], in_torch(x, rest, rest_scales, first[:, -refined:])], dim=1)
    given = F.linear(x, weight, bias)
    torch.testing.assert_close(given, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(F.linear(x[-1:], weight, bias), given[-1:])
    a_row = width + -width % GROUP + 4
    assert weight.shape == (out, width)
    assert 0 <= weight.nbytes - once.nbytes - refined * a_row < 2 * 32 * a_row  # in whole panels


def test_no_rows_give_no_rows():
    *_, weight = quantized(torch.randn(48, 64))
    assert F.linear(torch.zeros(0, 64), weight).shape == (0, 48)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_not_hidden(number: float):
    *_, weight = quantized(torch.randn(48, 64))
    x = torch.randn(3, 64)
    x[1, 40] = number
    given = F.linear(x, weight)
    assert not given[1].isfinite().any()
    assert given[[0, 2]].isfinite().all()


def test_one_large_element_costs_its_neighbours_alone_their_precision():
    torch.manual_seed(0)
    weight, x = torch.randn(64, 256), torch.randn(8, 256)
    *_, packed = quantized(weight)
    x[:, 7] = 1000.0
    shared = F.linear(x, packed) - x @ weight.T
    x[:, 7] = 0.0
    alone = F.linear(x, packed) - x @ weight.T
    assert alone.norm() / (x @ weight.T).norm() < 0.015
    assert shared.norm() < 100 * alone.norm()  # with one scale a row, all 255 others would be rounded to zeros
    assert F.cosine_similarity(shared.flatten(), alone.flatten(), dim=0) < 0.9


def test_what_is_kept_is_a_byte_a_weight_and_a_scale_an_output():
    *_, weight = quantized(torch.randn(64, 256))
    assert isinstance(weight, Int8Weight)
    assert weight.shape == (64, 256)
    assert weight.nbytes == 64 * 256 + 64 * 4
    with pytest.raises(TypeError):
        torch.matmul(torch.randn(2, 64), weight)
