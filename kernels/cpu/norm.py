"""Normalisation of rows outside of a decoder's layers."""

import numba
import numpy as np
import torch

from espalier.kernels.cpu.pointwise import rms_norm


@numba.njit(nogil=True, cache=True)
def _norm_all(x: np.ndarray, weight: np.ndarray, eps: np.float32, out: np.ndarray) -> None:
    for start in range(0, len(x), len(weight)):
        rms_norm(x, start, weight, eps, out, start)


def rms_norm_cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`kernels.norm.rms_norm` in float32 on CPU; a row has the same bits alone and in any company."""
    out = torch.empty(x.shape)
    _norm_all(x.reshape(-1).numpy(), weight.numpy(), np.float32(eps), out.view(-1).numpy())
    return out
