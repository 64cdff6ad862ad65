"""A matrix product in float32 whose every output is summed in the order of the inner dimension, nothing else."""

import numba
import numpy as np
import torch

from espalier.kernels.cpu.launch import launch
from espalier.kernels.cpu.tiles import WIDE, multiply_add

PANEL = WIDE
"""Columns of the product whose weights lie side by side: what one tile is wide."""
_ROWS = 64
"""Rows of one work item at most: their inputs stay in a core's cache while the panels pass by."""


@numba.njit(parallel=True, cache=True)
def _multiply(x: np.ndarray, panels: np.ndarray, rows: int, inner: int, out: np.ndarray, stride: int) -> None:
    count = stride // PANEL
    for item in numba.prange((rows + _ROWS - 1) // _ROWS * count):
        first, panel = item // count * _ROWS, item % count
        multiply_add(
            x,
            first * inner,
            inner,
            panels,
            panel * inner * PANEL,
            out,
            first * stride + panel * PANEL,
            stride,
            min(_ROWS, rows - first),
            inner,
            PANEL,
        )


def linear_cpu(x: torch.Tensor, panels: torch.Tensor, out_features: int, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias` for a weight in panels.

    Args:
        x: float32 `[rows, in]`.
        panels: float32 `[panel, in, PANEL]`.
        out_features: columns of the product, at most those of the panels.
        bias: float32 `[out_features]` or None; what each sum begins with.

    Returns:
        float32 `[rows, out_features]`.
    """
    rows, inner = x.shape
    stride = panels.shape[0] * PANEL
    if bias is None:
        out = torch.zeros(rows, stride)
    else:
        out = torch.empty(rows, stride)
        out[:, :out_features] = bias
        out[:, out_features:] = 0.0
    flat_x, flat_panels, flat_out = (t.contiguous().view(-1).numpy() for t in (x, panels, out))
    launch(_multiply, flat_x, flat_panels, rows, inner, flat_out, stride)
    return out[:, :out_features]
