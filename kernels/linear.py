"""Matrix products whose rows do not depend on how many other rows there are."""

import torch
import torch.nn.functional as F

ROW_TILE = 4
"""Rows are padded to a multiple of this before a matrix product.

Measured with oneDNN/MKL float32 on x86-64, widths 256 to 2048: `x[:m] @ w` equals the first m rows of `x @ w` bit for
bit for every m that is a multiple of 4 (other kernels, with another order of summation, serve 1-3, 5-7 and 9-11 rows).
A request's tokens then have the same bits whatever else runs in the batch.
"""


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` with zero rows appended up to a multiple of `ROW_TILE`; unchanged off the CPU."""
    missing = -x.shape[0] % ROW_TILE
    if missing == 0 or x.device.type != "cpu":
        return x
    return F.pad(x, (0,) * (2 * (x.dim() - 1)) + (0, missing))


def linear_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear` with each row independent of its company.

    Args:
        x: `[rows, in]`.
        weight: `[out, in]`.
        bias: `[out]` or None.

    Returns:
        `[rows, out]`.
    """
    return F.linear(pad_rows(x), weight, bias)[: x.shape[0]]
