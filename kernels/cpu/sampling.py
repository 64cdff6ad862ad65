"""Drawing tokens from logits on CPU, each row by itself."""

import math

import numba
import numpy as np
import torch

from espalier.kernels.cpu.pointwise import exp_in_place, largest
from espalier.kernels.cpu.workers import claim, claim_next, run_together, wait_for

_BLOCK = 256
"""Tokens whose probabilities are summed before the cumulative distribution is looked at one by one."""
_NOTHING = 1e-30
"""Share of the most likely token's probability below which a token is never drawn; what is filtered is far below."""


@numba.njit
def _exp_sum(
    x: np.ndarray, start: int, factor: np.float32, top: np.float32, out: np.ndarray, sums: np.ndarray
) -> float:
    """Write exp(factor * (x - top)) to `out`, its blocks' sums to `sums`, and return the sum."""
    size, total = len(out), 0.0
    for i in range(size):
        out[i] = factor * (x[start + i] - top)
    for b in range(len(sums)):
        sums[b] = exp_in_place(out, b * _BLOCK, min(_BLOCK, size - b * _BLOCK), np.float32(0.0))
        total += sums[b]
    return total


@numba.njit
def _invert(shares: np.ndarray, sums: np.ndarray, target: float) -> int:
    """The first token at which the running sum of `shares` passes `target`."""
    passed, last = 0.0, 0
    for b in range(len(sums)):
        if passed + sums[b] <= target:
            passed += sums[b]
            if sums[b] > _NOTHING:
                last = b
            continue
        if sums[b] > _NOTHING:
            last = b
            break
    drawn = -1
    for i in range(last * _BLOCK, min(len(shares), (last + 1) * _BLOCK)):
        if shares[i] > _NOTHING:
            passed += shares[i]
            drawn = i
            if passed > target:
                break
    return drawn


@numba.njit(nogil=True, cache=True)
def _draw(
    counters: np.ndarray,
    logits: np.ndarray,
    candidates: np.ndarray,
    vocabulary: int,
    temperatures: np.ndarray,
    draws: np.ndarray,
    token_ids: np.ndarray,
    log_probabilities: np.ndarray,
) -> None:
    rows = len(temperatures)
    scratch, sums = np.empty(vocabulary, np.float32), np.empty((vocabulary + _BLOCK - 1) // _BLOCK, np.float32)
    row = claim(counters, 0)
    while row < rows:
        start = row * vocabulary
        top = largest(candidates, start, vocabulary)
        if temperatures[row] > 0:
            total = _exp_sum(candidates, start, np.float32(1.0) / temperatures[row], top, scratch, sums)
            token_ids[row] = _invert(scratch, sums, draws[row] * total)
        else:
            i = start
            while candidates[i] != top:
                i += 1
            token_ids[row] = i - start
        top = largest(logits, start, vocabulary)
        total = _exp_sum(logits, start, np.float32(1.0), top, scratch, sums)
        log_probabilities[row] = logits[start + token_ids[row]] - top - math.log(total)
        row = claim_next(counters, 0)
    wait_for(counters, 0, rows)


def draw_tokens_cpu(
    logits: torch.Tensor, candidates: torch.Tensor, temperatures: torch.Tensor, draws: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw_tokens_reference` on CPU; same arguments and result."""
    rows, vocabulary = logits.shape
    token_ids, log_probabilities = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    flat = [t.contiguous().view(-1).numpy() for t in (logits, candidates)]
    rest = [t.numpy() for t in (temperatures, draws, token_ids, log_probabilities)]
    run_together(_draw, 1, *flat, vocabulary, *rest)
    return token_ids, log_probabilities
