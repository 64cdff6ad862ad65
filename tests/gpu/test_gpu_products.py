"""Products of few rows at real sizes beside the CPU's float32; imports nothing above `kernels`."""

import pytest
import torch
from on_gpu import DEVICE, error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("hidden", "inner"), [(1536, 8960), (3584, 18_944), (896, 4864)])
@pytest.mark.parametrize("fixed", [False, True])
def test_products_of_few_rows_at_real_sizes(hidden: int, inner: int, dtype: torch.dtype, fixed: bool):
    """An MLP with its norm and the residual stream, twice: the counts of programs that ended are zero again."""
    from espalier.kernels.layers import Activation, rms_norm
    from espalier.kernels.triton.row_linear import Norm, RowLinear

    generator = torch.Generator().manual_seed(hidden)
    gate_up, down = (
        torch.randn(*shape, generator=generator).div(shape[1] ** 0.5).to(dtype)
        for shape in ((2 * inner, hidden), (hidden, inner))
    )
    stream = torch.randn(70, hidden, generator=generator).to(dtype)
    factors = (1 + 0.1 * torch.randn(hidden, generator=generator)).to(dtype)
    gate, up = (rms_norm(stream.float(), factors.float(), 1e-6) @ gate_up.float().T).chunk(2, dim=1)
    expected = stream.float() + (torch.nn.functional.silu(gate) * up) @ down.float().T
    dependent = torch.cuda.get_device_properties(0).major >= 9
    first = RowLinear(gate_up.to(DEVICE), gate=Activation.SILU, fixed=fixed, dependent=dependent)
    second = RowLinear(down.to(DEVICE), fixed=fixed, dependent=dependent)
    squares = torch.stack([part.float().square().sum(1) for part in stream.split(64, dim=1)])
    bits = None
    for rows in (1, 16, 17, 64, 64, *((70,) if fixed else ())):
        found = stream[:rows].to(DEVICE, copy=True)
        inside = first(found, Norm(factors.to(DEVICE), squares[:, :rows].contiguous().to(DEVICE), 1e-6))
        sums = second.add_to(found, inside)
        assert error(found, expected[:rows]) < {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
        assert error(sums.sum(0), found.double().square().sum(1)) < 1e-5
        assert not second._ended.any()
        if fixed:
            bits = found[:1].clone() if bits is None else bits
            assert torch.equal(found[:1], bits), "a row has the same bits in any batch"
