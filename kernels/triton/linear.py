"""Products of neighbouring rows with a weight each: the experts of a layer, in one launch."""

# pyright: reportArgumentType=false, reportAssignmentType=false
# (within kernels, numbers and tensors have Triton's types, which are not those of Python)

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from espalier.kernels.linear import GroupedLinear, Linear

TILE_ROWS = 64
TILE_OUT, TILE_IN = tl.constexpr(64), tl.constexpr(64)
_FEW_ROWS = 16
"""Rows of a tile where products have fewer than so many each."""
OPTIONS = {"num_warps": 4, "num_stages": 4}


class StackedLinear(GroupedLinear):
    """`GroupedLinear` of unquantised weights, in one launch that asks nothing of the host."""

    def __init__(self, products: Sequence[Linear], *, fixed: bool) -> None:
        """Stack the weights of `products`; if `fixed`, tiles have one size, so a row has the same bits in any batch."""
        self.out_features, self.in_features = products[0].out_features, products[0].in_features
        self._count = len(products)
        self._fixed = fixed
        self._weights = torch.stack([product.weight for product in products])
        biases = [product.bias for product in products if product.bias is not None]
        self._biases = torch.stack(biases) if biases else None

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """See `GroupedLinear`."""
        return self._weights.nbytes + (0 if self._biases is None else self._biases.nbytes)

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """See `GroupedLinear`."""
        output = x.new_zeros(len(x), self.out_features)
        tile_rows = _FEW_ROWS if not self._fixed and len(x) < _FEW_ROWS * self._count else TILE_ROWS
        most_tiles = len(x) // tile_rows + min(self._count, len(x))
        if len(x):
            grouped_product[most_tiles, triton.cdiv(self.out_features, TILE_OUT.value)](
                x.contiguous(),
                self._weights,
                self._biases,
                ends,
                output,
                COUNT=self._count,
                OUT=self.out_features,
                IN=self.in_features,
                TILE_ROWS=tile_rows,
                **OPTIONS,
            )
        return output


@triton.jit
def grouped_product(
    x, weights, biases, ends, output, COUNT: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, TILE_ROWS: tl.constexpr
):
    """Products of neighbouring rows with a weight each; the grid is `[tiles at most, tiles of OUT]`.

    A tile has rows of one product only. Each program finds out which of them its tile belongs to.

    Args:
        x: `[rows, IN]`.
        weights: `[COUNT, OUT, IN]`.
        biases: `[COUNT, OUT]`, or None.
        ends: int64 `[COUNT]`, where the rows of each product end.
        output: `[rows, OUT]`, written up to the last end.
    """
    index = tl.arange(0, triton.next_power_of_2(COUNT))
    inside = index < COUNT
    end = tl.load(ends + index, mask=inside, other=0)
    start = tl.load(ends + index - 1, mask=inside & (index > 0), other=0)
    tiles = tl.where(inside, (end - start + TILE_ROWS - 1) // TILE_ROWS, 0)
    tiles_end = tl.cumsum(tiles, 0)
    mine = inside & (tiles_end - tiles <= tl.program_id(0)) & (tl.program_id(0) < tiles_end)  # one product
    if tl.program_id(0) < tl.sum(tiles, 0):
        first = tl.sum(tl.where(mine, start + (tl.program_id(0) - tiles_end + tiles) * TILE_ROWS, 0), 0)
        product = tl.sum(tl.where(mine, index, 0), 0).to(tl.int64)
        stop = tl.sum(tl.where(mine, end, 0), 0)
        weight, bias = weights + product * (OUT * IN), biases
        if biases is not None:
            bias += product * OUT
        m = first + tl.arange(0, TILE_ROWS)
        n = tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)
        is_row, is_out = m < stop, n < OUT
        wide_m, wide_n = m.to(tl.int64), n.to(tl.int64)
        total = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
        precision: tl.constexpr = "ieee" if x.dtype.element_ty == tl.float32 else "tf32"
        for begin in range(0, IN, TILE_IN):
            k = begin + tl.arange(0, TILE_IN)
            is_in = k < IN
            a = tl.load(x + wide_m[:, None] * IN + k[None, :], mask=is_row[:, None] & is_in[None, :], other=0.0)
            b = tl.load(weight + wide_n[:, None] * IN + k[None, :], mask=is_out[:, None] & is_in[None, :], other=0.0)
            total = tl.dot(a, tl.trans(b), total, input_precision=precision)
        if bias is not None:
            total += tl.load(bias + n, mask=is_out, other=0.0).to(tl.float32)[None, :]
        at = wide_m[:, None] * OUT + n[None, :]
        tl.store(output + at, total.to(output.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])
