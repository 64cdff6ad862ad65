"""Rotation of heads, and norms of parts of rows, in Triton's interpreter, against torch's."""

import pytest
import torch

from espalier.kernels import rotary
from espalier.kernels.layers import rms_norm
from espalier.kernels.triton import pointwise
from espalier.kernels.triton.rotation import rotate_halves


@pytest.mark.parametrize(("heads", "tokens", "dim"), [(1, 1, 2), (3, 7, 24), (8, 5, 64), (5, 0, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_halves_are_turned_as_in_torch_whatever_the_strides(heads: int, tokens: int, dim: int, dtype: torch.dtype):
    torch.manual_seed(0)
    mixed = torch.randn(tokens, (heads + 2) * dim).to(
        dtype
    )  # queries beside keys and values, as one product gives them
    x = mixed[:, dim : (heads + 1) * dim].view(tokens, heads, dim).transpose(0, 1)
    cos, sin = (torch.randn(tokens, dim).to(dtype) for _ in range(2))
    found = rotate_halves(x, cos, sin)
    assert found.shape == x.shape
    assert found.transpose(0, 1).is_contiguous(), "attention reads it as it is"
    exact = rotary.rotate_halves(*(each.double() for each in (x, cos, sin)))
    tolerance = 2e-3 if dtype == torch.float16 else 1e-6
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)


def test_norms_of_a_part_of_each_row_are_those_of_the_part():
    """As of keys that come out of one product with their positions: rows are further apart than they are long."""
    torch.manual_seed(0)
    mixed, weight = torch.randn(1, 5, 40), torch.randn(24)
    for part in (mixed[..., :24], mixed.view(1, 5, 40)[:, :, 8:32]):
        torch.testing.assert_close(pointwise.rms_norm(part, weight, 1e-6), rms_norm(part, weight, 1e-6))
