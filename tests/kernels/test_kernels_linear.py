import pytest
import torch
import torch.nn.functional as F

from espalier.kernels.linear import ROW_TILE, linear_rows, pad_rows


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("width", "out"), [(32, 48), (48, 338), (256, 768), (768, 256), (1000, 50)])
def test_a_row_has_the_same_bits_in_any_company(width: int, out: int, bias: bool):
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(67, width, generator=generator)
    weight = torch.randn(out, width, generator=generator)
    offset = torch.randn(out, generator=generator) if bias else None
    together = linear_rows(x, weight, offset)
    for rows in (1, 2, 3, 5, 8, 13, 31, 64):
        assert torch.equal(linear_rows(x[:rows], weight, offset), together[:rows]), f"the first {rows} rows"
    for row in (0, 17, 66):
        assert torch.equal(linear_rows(x[row : row + 1], weight, offset)[0], together[row]), f"row {row}"


@pytest.mark.parametrize("rows", [1, 3, 4, 7])
def test_linear_rows_equals_torchs_linear(rows: int):
    x, weight, bias = torch.randn(rows, 40), torch.randn(24, 40), torch.randn(24)
    torch.testing.assert_close(linear_rows(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8])
def test_padding_appends_zero_rows_up_to_a_whole_tile(rows: int):
    x = torch.randn(rows, 3)
    padded = pad_rows(x)
    assert padded.shape[0] % ROW_TILE == 0
    assert padded.shape[0] - rows < ROW_TILE
    assert torch.equal(padded[:rows], x)
    assert not padded[rows:].any()
