import pytest
import torch
import torch.nn.functional as F

from espalier.kernels.norm import rms_norm


def rows_and_weight(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + width)
    return 3 * torch.randn(rows, width, generator=generator), torch.randn(width, generator=generator)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 48), (64, 256), (3, 257)])
def test_rows_are_normalised_as_torch_does(rows: int, width: int):
    x, weight = rows_and_weight(rows, width)
    before = x.clone()
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), F.rms_norm(x, weight.shape, weight, 1e-6))
    assert torch.equal(x, before)


def test_a_row_has_the_same_bits_alone_and_between_others():
    x, weight = rows_and_weight(9, 100)
    together = rms_norm(x, weight, 1e-5)
    assert torch.equal(torch.cat([rms_norm(row[None], weight, 1e-5) for row in x]), together)


def test_rows_may_lie_apart():
    x, weight = rows_and_weight(4, 96)
    assert torch.equal(rms_norm(x[:, :64], weight[:64], 1e-6), rms_norm(x[:, :64].clone(), weight[:64].clone(), 1e-6))


def test_half_precision_stays_what_it_is():
    x, weight = (t.bfloat16() for t in rows_and_weight(4, 64))
    normed = rms_norm(x, weight, 1e-6)
    assert normed.dtype == torch.bfloat16
    assert torch.equal(normed, F.rms_norm(x, weight.shape, weight, 1e-6))
