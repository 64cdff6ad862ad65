"""Products whose rows have the same bits in any batch: every output is summed in one fixed order."""

# pyright: reportArgumentType=false
# (within kernels, numbers and tensors have Triton's types, which are not those of Python)

import torch
import triton
import triton.language as tl

from espalier.kernels.linear import Linear
from espalier.kernels.triton.attention import precision

TILE_ROWS, TILE_OUT, TILE_IN = 64, 64, 64
OPTIONS = {"num_warps": 4, "num_stages": 4}


class FixedLinear(Linear):
    """`Linear` whose rows have the same bits whatever other rows there are."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, in]` to `[rows, out]`."""
        output = torch.empty((len(x), self.out_features), dtype=x.dtype, device=x.device)
        grid = (triton.cdiv(len(x), TILE_ROWS), triton.cdiv(self.out_features, TILE_OUT))
        if len(x):
            fixed_product[grid](
                x.contiguous(),
                self.weight,
                x if self.bias is None else self.bias,
                output,
                len(x),
                OUT=self.out_features,
                IN=self.in_features,
                TILE_ROWS=TILE_ROWS,
                TILE_OUT=TILE_OUT,
                TILE_IN=TILE_IN,
                BIASED=self.bias is not None,
                PRECISION=precision(x.dtype),
                **OPTIONS,
            )
        return output


@triton.jit
def fixed_product(
    x,
    weight,
    bias,
    output,
    rows,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`x @ weight.T + bias`, tile by tile; the grid is `[tiles of rows, tiles of OUT]`.

    The tile's size, and so the order of sums, is the same for any number of rows.

    Args:
        x: `[rows, IN]`.
        weight: `[OUT, IN]`.
        bias: `[OUT]`, read where `BIASED`.
        output: `[rows, OUT]`, written.
        rows: their number.
    """
    m = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    n = tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)
    is_row, is_out = m < rows, n < OUT
    wide_m, wide_n = m.to(tl.int64), n.to(tl.int64)
    total = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    for begin in range(0, IN, TILE_IN):
        k = begin + tl.arange(0, TILE_IN)
        is_in = k < IN
        a = tl.load(x + wide_m[:, None] * IN + k[None, :], mask=is_row[:, None] & is_in[None, :], other=0.0)
        b = tl.load(weight + wide_n[:, None] * IN + k[None, :], mask=is_out[:, None] & is_in[None, :], other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    if BIASED:
        total += tl.load(bias + n, mask=is_out, other=0.0).to(tl.float32)[None, :]
    at = wide_m[:, None] * OUT + n[None, :]
    tl.store(output + at, total.to(output.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])
