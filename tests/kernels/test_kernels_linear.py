import numpy as np
import pytest
import torch
import torch.nn.functional as F

from espalier.kernels.cpu import threads
from espalier.kernels.cpu.products.linear import ROWS, CpuLinear
from espalier.kernels.linear import Linear

SHAPES = [(32, 48), (48, 338), (256, 768), (768, 256), (1000, 50), (7, 1), (320, 2)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_a_row_has_the_same_bits_in_any_company(width: int, out: int, bias: bool):
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(2 * ROWS + 3, width, generator=generator)
    linear = CpuLinear(
        torch.randn(out, width, generator=generator), torch.randn(out, generator=generator) if bias else None
    )
    together = linear(x)
    for rows in (1, 2, 3, 5, 8, 13, 31, 64, 65, ROWS, ROWS + 1):
        assert torch.equal(linear(x[:rows]), together[:rows]), f"the first {rows} rows"
    for row in (0, 17, 66, ROWS, 2 * ROWS + 2):
        assert torch.equal(linear(x[row : row + 1])[0], together[row]), f"row {row}"


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 7, 64, 65, ROWS + 1])
@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_the_product_equals_torchs(width: int, out: int, rows: int):
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((rows, width), (out, width), (out,)))
    torch.testing.assert_close(CpuLinear(weight, bias)(x), F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", [CpuLinear, Linear])
def test_the_weight_can_be_had_back(kind: type[Linear]):
    weight = torch.randn(50, 20)
    assert torch.equal(kind(weight).weight, weight)


def test_inputs_need_not_be_contiguous():
    x, linear = torch.randn(20, 6).T, CpuLinear(torch.randn(40, 20))
    assert torch.equal(linear(x), linear(x.contiguous()))


def test_a_product_leaves_numbers_below_the_least_normal_one_to_its_caller():
    CpuLinear(torch.randn(40, 20))(torch.randn(3, 20))
    assert (np.full(16, 1e-30, np.float32) * np.float32(1e-10) > 0).all()


def test_the_memory_of_a_large_result_is_used_again_once_nobody_holds_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threads._helpers, "wanted", 0)  # a helper thread may hold a result a moment longer
    linear, x = CpuLinear(torch.randn(40_000, 32)), torch.randn(64, 32)
    held = linear(x)
    row, place, expected = held[3], held.data_ptr(), held.clone()
    assert linear(2 * x).data_ptr() != place
    del held
    assert torch.equal(row, expected[3])
    assert linear(3 * x).data_ptr() != place  # a part of it is held
    assert torch.equal(row, expected[3])
    del row
    places, others = list[int](), list[torch.Tensor]()
    for _ in range(20):
        places.append(linear(x).data_ptr())
        others.append(torch.empty(64 * 40_000))  # takes the place of memory that was given back
    assert len(set(places)) == 1
