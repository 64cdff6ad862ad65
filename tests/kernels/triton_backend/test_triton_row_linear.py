"""Products of few rows with what is fused into them, under Triton's interpreter: numbers, bits, order of programs."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from espalier.kernels.layers import Activation, rms_norm
from espalier.kernels.linear import Linear
from espalier.kernels.triton import row_linear
from espalier.kernels.triton.row_linear import FEW_ROWS, Norm, RowLinear, parts_of

HIDDEN, INNER = 200, 150
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3}[found.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def squares_of(x: torch.Tensor) -> torch.Tensor:
    """What `add_to` gives of rows: `[tiles, rows]`."""
    return torch.stack([part.float().square().sum(1) for part in x.split(64, dim=1)])


class Mlp:
    """The products of an MLP and the norm before it."""

    def __init__(self, dtype: torch.dtype = torch.float32, gate: Activation = Activation.SILU, fixed: bool = False):
        scale = HIDDEN**-0.5
        self.gate_weight = scale * rand(2 * INNER, HIDDEN, dtype=dtype, seed=1)
        self.down_weight = scale * rand(HIDDEN, INNER, dtype=dtype, seed=2)
        self.factors = 1 + 0.3 * rand(HIDDEN, seed=3).to(dtype)
        self.gate_up = RowLinear(self.gate_weight, gate=gate, fixed=fixed)
        self.down = RowLinear(self.down_weight, fixed=fixed)

    def run(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream behind it, and sums of its squares."""
        hidden = hidden.clone()
        inner = self.gate_up(hidden, Norm(self.factors, squares_of(hidden), 1e-6))
        return hidden, self.down.add_to(hidden, inner)


@DTYPES
@pytest.mark.usefixtures("any_order")
@pytest.mark.parametrize(("rows", "gate"), [(1, Activation.SILU), (17, Activation.GELU_TANH)], ids=str)
def test_an_mlp_with_its_norm_and_the_residual_stream_equals_torchs(rows: int, gate: Activation, dtype: torch.dtype):
    mlp, hidden = Mlp(dtype, gate), 2 * rand(rows, HIDDEN, dtype=dtype)
    found, squares = mlp.run(hidden)
    gates, up = F.linear(rms_norm(hidden, mlp.factors, 1e-6), mlp.gate_weight).chunk(2, dim=1)
    gated = (F.silu(gates) if gate is Activation.SILU else F.gelu(gates, approximate="tanh")) * up
    close(found, hidden + F.linear(gated, mlp.down_weight))
    torch.testing.assert_close(squares, squares_of(found), rtol=1e-5, atol=1e-3)


@DTYPES
@pytest.mark.usefixtures("any_order")
@pytest.mark.parametrize(("rows", "fixed"), [(FEW_ROWS, False), (FEW_ROWS, True), (FEW_ROWS + 6, True)])
@pytest.mark.parametrize("biased", [True, False])
def test_plain_products_equal_torchs(rows: int, fixed: bool, biased: bool, dtype: torch.dtype):
    x, weight = rand(rows, 130, dtype=dtype), rand(70, 130, dtype=dtype, seed=1)
    bias = rand(70, dtype=dtype, seed=2) if biased else None
    product = RowLinear(weight, bias, fixed=fixed)
    torch.testing.assert_close(
        product(x), Linear(weight, bias)(x), rtol=1e-3, atol=1e-4 if dtype == torch.float32 else 3e-2
    )
    assert product(x[:0]).shape == (0, 70)


@pytest.mark.usefixtures("products_row_by_row", "any_order")
def test_a_row_has_the_same_bits_in_any_batch_whichever_program_ends_last():
    """With partial results of several programs and, for many rows, of one, and after launches before."""
    mlp, hidden = Mlp(fixed=True), rand(FEW_ROWS + 3, HIDDEN)
    assert parts_of(mlp.down_weight.shape, 4, gated=False) > 1
    expected, squares = mlp.run(hidden)
    for first, end in ((0, FEW_ROWS), (FEW_ROWS - 1, FEW_ROWS + 2), (FEW_ROWS - 1, FEW_ROWS + 2)):
        found, its = mlp.run(hidden[first:end])
        assert torch.equal(found, expected[first:end])
        assert torch.equal(its, squares[:, first:end])


def test_the_last_program_is_found_by_a_count_that_is_zero_again(monkeypatch: pytest.MonkeyPatch):
    product, x = RowLinear(rand(70, 130)), rand(2, 130)
    ended = product._ended
    assert len(ended) == 2, "one of each tile of outputs"
    product(x)
    assert not ended.any()
    ended[0] = 1  # as if one had ended before
    assert not torch.equal(product(x)[:, :64], F.linear(x, product.weight)[:, :64])


@pytest.mark.parametrize(
    ("outputs", "inputs", "parts"),
    [(2048, 1536, 4), (1536, 1536, 5), (1536, 8960, 5), (3584, 18944, 2), (17920, 1536, 1), (64, 64, 1), (64, 9999, 8)],
)
def test_columns_are_cut_by_the_shape_alone_into_parts_of_which_none_is_empty(outputs: int, inputs: int, parts: int):
    assert parts_of((outputs, inputs), 2, gated=False) == parts
    assert parts_of((outputs, inputs), 2, gated=True) == 1
    steps = -(-inputs // 64)
    assert (parts - 1) * -(-steps // parts) < steps


def test_a_kernel_triggers_the_next_one_by_the_helper_that_waits_alone():
    folder = Path(row_linear.__file__).parent
    users = {
        path.name for path in folder.glob("*.py") if "gdc_" in path.read_text() or "launch_pdl" in path.read_text()
    }
    assert users == {"launches.py"}
