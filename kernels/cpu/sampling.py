"""Penalizing and filtering logits, and drawing tokens from them on CPU, each row by itself.

A filter needs only the largest logits of a vocabulary in order. All are counted and summed in narrow bins by their
distance from the largest one; then only the logits of bins that the filter may reach into are sorted.
"""

import math
from typing import Any

import numpy as np
import torch

from espalier.kernels.compilation.ahead import Compilation, compilation
from espalier.kernels.compilation.compiler import inner
from espalier.kernels.cpu import compiled
from espalier.kernels.cpu.pointwise import exp_in_place, largest
from espalier.kernels.cpu.threads import parallel_run, phase_items
from espalier.kernels.sampling import FILTERED, LEAST_REPETITION, LEAST_TEMPERATURE, TokenPenalties

_MASK_SPEED, _FILTER_SPEED, _DRAW_SPEED = 1e9, 1e8, 4e8
"""Logits a second that one thread masks, filters, or draws from, within a factor of two or so."""
_PENALTY_SPEED = 1e8
"""Tokens of sequences a second that one thread counts and penalizes, likewise."""
_BLOCK = 256
"""Tokens whose probabilities are summed before the cumulative distribution is looked at one by one."""
_NOTHING = 1e-30
"""Share of the most likely token's probability below which a token is never drawn; filtered ones are far below it."""


_LEAST, _FILTERED = np.float32(LEAST_TEMPERATURE), np.float32(FILTERED)
_LEAST_REPETITION = np.float32(LEAST_REPETITION)
_BINS_PER_NAT, _BINS = 64, 2048
"""Bins of log-probability below the most likely token; the last holds all the rest, from 32 nats on."""


@compiled(nogil=True)
def _penalize(counters: int, logits: np.ndarray, penalties: TokenPenalties) -> None:
    """Penalize each row; `counts` are 0 between rows, and -1 for tokens of a row that are done."""
    rows, all_tokens, starts, ends, repetitions, presences, frequencies = penalties
    vocabulary = logits.shape[1]
    counts = np.zeros(vocabulary, np.int32)
    for r in phase_items(counters, 0, len(rows)):
        row, tokens, end = logits[rows[r]], all_tokens[r], ends[r]
        repetition = max(repetitions[r], _LEAST_REPETITION)
        for i in range(starts[r], end):
            if 0 <= tokens[i] < vocabulary:
                counts[tokens[i]] += 1
        for i in range(end):
            token = tokens[i]
            if token < 0 or token >= vocabulary or counts[token] < 0:
                continue
            logit = row[token]
            logit = logit * repetition if logit < 0 else logit / repetition
            if counts[token]:
                logit = logit - frequencies[r] * np.float32(counts[token]) - presences[r]
            row[token], counts[token] = logit, -1
        for i in range(end):
            if 0 <= tokens[i] < vocabulary:
                counts[tokens[i]] = 0


def penalize_tokens_cpu(logits: torch.Tensor, penalties: TokenPenalties) -> None:
    """`kernels.sampling.penalize_tokens` on CPU; same arguments and result."""
    arrays: Any = TokenPenalties(*(tensor.contiguous().numpy() for tensor in penalties))
    parallel_run(_penalize, 1, logits.numpy(), arrays, seconds=penalties.tokens.numel() / _PENALTY_SPEED)


@compiled(nogil=True)
def _mask(counters: int, logits: np.ndarray, allowed: np.ndarray, out: np.ndarray) -> None:
    """Mask each row; `allowed` has a whole number of bytes for each."""
    for row in phase_items(counters, 0, len(logits)):
        given, bits, written = logits[row], allowed[row], out[row]
        for b in range(len(given) // 8):  # without a branch, for eight at a time
            for i in range(8):
                logit = given[8 * b + i]
                written[8 * b + i] = logit if bits[b] & (1 << i) else _FILTERED
        for i in range(8 * (len(given) // 8), len(given)):
            written[i] = given[i] if bits[i // 8] & (1 << i % 8) else _FILTERED


def mask_tokens_cpu(logits: torch.Tensor, allowed: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`kernels.sampling.mask_tokens` on CPU; same arguments and result."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format) if out is None else out
    args = (tensor.numpy() for tensor in (logits.contiguous(), allowed.contiguous(), out))
    parallel_run(_mask, 1, *args, seconds=logits.numel() / _MASK_SPEED)
    return out


@inner
def _weigh(x: np.ndarray, factor: np.float32, shares: np.ndarray, bins: np.ndarray, masses: np.ndarray) -> None:
    """Write exp(factor * (x - largest x)) to `shares`, each one's bin to `bins`, and the bins' sums to `masses`."""
    top = largest(x, 0, len(x))
    for i in range(len(x)):
        shares[i] = factor * (x[i] - top)
        below = -shares[i] * np.float32(_BINS_PER_NAT)
        bins[i] = np.int16(below) if below < _BINS - 1 else _BINS - 1  # false for NaN, which goes to the last bin
    exp_in_place(shares, 0, len(shares), np.float32(0.0))
    masses[:] = 0.0
    for i in range(len(shares)):
        masses[bins[i]] += shares[i]


@inner
def _bins_within_reach(bins: np.ndarray, masses: np.ndarray, top_k: int, top_p: float, min_p: float) -> int:
    """Number of bins that hold all tokens that the filters can keep."""
    if top_k == 0 and top_p >= 1:
        if min_p <= 0:
            return _BINS
        return min(_BINS, int(-math.log(min_p) * _BINS_PER_NAT) + 2)  # one more than its bin's index, one for rounding
    if top_k > 0:
        counts = np.zeros(_BINS, np.int64)
        for i in range(len(bins)):
            counts[bins[i]] += 1
        reached, held = 0, counts[0]
        while held < top_k and reached + 1 < _BINS:
            reached += 1
            held += counts[reached]
        return reached + 1
    wanted = masses.sum() * (top_p + 1e-9)  # the sums of bins and of sorted tokens are rounded differently
    reached, mass = 0, masses[0]
    while mass < wanted and reached + 1 < _BINS:
        reached += 1
        mass += masses[reached]
    return reached + 1


@inner
def _filter_row(
    x: np.ndarray,
    factor: np.float32,
    filters: tuple[int, float, float],
    room: tuple[np.ndarray, np.ndarray, np.ndarray],
    out: np.ndarray,
) -> None:
    """Filter a row by top-k, top-p and min-p, with room for shares, bins and masses."""
    (top_k, top_p, min_p), (shares, bins, masses) = filters, room
    _weigh(x, factor, shares, bins, masses)
    reach = _bins_within_reach(bins, masses, top_k, top_p, min_p)
    near = np.flatnonzero(bins < reach)
    near = near[np.argsort(-x[near], kind="mergesort")]  # stable: of equal tokens the lowest id comes first
    total = masses.sum()
    if top_k > 0:
        near = near[:top_k]
        total = 0.0
        for i in near:
            total += shares[i]
    out[:] = FILTERED
    before = 0.0
    for rank, i in enumerate(near):
        if rank > 0 and (before >= top_p * total or shares[i] < min_p * shares[near[0]]):
            break
        out[i] = x[i]
        before += shares[i]


@compiled(nogil=True)
def _filter(
    counters: int,
    logits: np.ndarray,
    limits: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    out: np.ndarray,
) -> None:
    """Filter each row; `limits` are temperatures, top-k, top-p and min-p."""
    (temperatures, top_ks, top_ps, min_ps), vocabulary = limits, logits.shape[1]
    room = np.empty(vocabulary, np.float32), np.empty(vocabulary, np.int16), np.empty(_BINS)
    for row in phase_items(counters, 0, len(temperatures)):
        factor = np.float32(1.0) / max(temperatures[row], _LEAST)
        filters = top_ks[row], np.float64(top_ps[row]), np.float64(min_ps[row])
        _filter_row(logits[row], factor, filters, room, out[row])


def filter_logits_cpu(
    logits: torch.Tensor, temperatures: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> torch.Tensor:
    """`kernels.sampling.filter_logits` on CPU; same arguments and result."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    limits = tuple(tensor.numpy() for tensor in (temperatures, top_ks, top_ps, min_ps))
    args = logits.contiguous().numpy(), limits, out.numpy()
    parallel_run(_filter, 1, *args, seconds=logits.numel() / _FILTER_SPEED)
    return out


@inner
def _exp_sum(x: np.ndarray, factor: np.float32, top: np.float32, out: np.ndarray, sums: np.ndarray) -> float:
    """Write exp(factor * (x - top)) to `out`, its blocks' sums to `sums`, and return the sum."""
    size, total = len(out), 0.0
    for i in range(size):
        out[i] = factor * (x[i] - top)
    for b in range(len(sums)):
        sums[b] = exp_in_place(out, b * _BLOCK, min(_BLOCK, size - b * _BLOCK), np.float32(0.0))
        total += sums[b]
    return total


@inner
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


@compiled(nogil=True)
def _draw(
    counters: int,
    logits: np.ndarray,
    candidates: np.ndarray,
    temperatures: np.ndarray,
    firsts: np.ndarray,
    draws: np.ndarray,
    token_ids: np.ndarray,
    log_probabilities: np.ndarray,
) -> None:
    """Draw from each row what is `draws[firsts[row] : firsts[row + 1]]`; `firsts` is int64 `[B + 1]`."""
    vocabulary = logits.shape[1]
    scratch, sums = np.empty(vocabulary, np.float32), np.empty((vocabulary + _BLOCK - 1) // _BLOCK, np.float32)
    for row in phase_items(counters, 0, len(temperatures)):
        x, mine = candidates[row], slice(firsts[row], firsts[row + 1])
        top = largest(x, 0, vocabulary)
        if not top > np.float32(-np.inf):  # nothing that could be drawn: no logit is a number
            token_ids[mine] = -1
        elif temperatures[row] > 0:
            factor = np.float32(1.0) / max(temperatures[row], _LEAST)
            total = _exp_sum(x, factor, top, scratch, sums)
            for draw in range(firsts[row], firsts[row + 1]):
                token_ids[draw] = _invert(scratch, sums, draws[draw] * total)
        else:
            i = 0
            while x[i] != top:
                i += 1
            token_ids[mine] = i
        x = logits[row]
        top = largest(x, 0, vocabulary)
        log_total = math.log(_exp_sum(x, np.float32(1.0), top, scratch, sums))
        for draw in range(firsts[row], firsts[row + 1]):
            drawn = token_ids[draw]
            log_probabilities[draw] = x[drawn] - top - log_total if drawn >= 0 else np.float32(np.nan)


def draw_tokens_cpu(
    logits: torch.Tensor, candidates: torch.Tensor, temperatures: torch.Tensor, draws: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.sampling.draw_tokens` on CPU; same arguments and result. What a row's draws share is computed once."""
    token_ids, log_probabilities = torch.empty(len(draws), dtype=torch.int64), torch.empty(len(draws))
    firsts = np.searchsorted(rows.numpy(), np.arange(len(logits) + 1))
    given = [t.numpy() for t in (logits.contiguous(), candidates.contiguous(), temperatures)]
    rest = [t.numpy() for t in (draws, token_ids, log_probabilities)]
    parallel_run(_draw, 1, *given, firsts, *rest, seconds=logits.numel() / _DRAW_SPEED)
    return token_ids, log_probabilities


def sampling_compilations() -> list[Compilation]:
    """Compilations of all that draws tokens, the longest first: a request may be the first with a filter or a mask."""
    int64s, floats, rows = np.zeros(1, np.int64), np.zeros(1, np.float32), np.zeros((1, 1), np.float32)
    tokens, bits = np.zeros((1, 1), np.int32), np.zeros((1, 1), np.uint8)
    penalties: Any = TokenPenalties(int64s, tokens, int64s, int64s, floats, floats, floats)
    return [
        compilation(_filter, 0, rows, (floats, int64s, floats, floats), rows),
        compilation(_draw, 0, rows, rows, floats, int64s, np.zeros(1), int64s, floats),
        compilation(_penalize, 0, rows, penalties),
        compilation(_mask, 0, rows, bits, rows),
    ]
