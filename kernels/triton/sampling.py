"""Draws from any vocabulary, without a sort of it and without waiting for the device."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
# (within kernels, numbers and tensors have Triton's types, which are not those of Python)

import torch
import triton
import triton.language as tl

from espalier.kernels.sampling import LEAST_TEMPERATURE

SEGMENT = tl.constexpr(4096)
_LEAST = tl.constexpr(LEAST_TEMPERATURE)


def draw_tokens(
    logits: torch.Tensor, candidates: torch.Tensor, temperatures: torch.Tensor, draws: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.sampling.draw_tokens`."""
    num_rows, vocabulary = logits.shape
    segments = triton.cdiv(vocabulary, SEGMENT.value)
    logits, candidates = logits.contiguous(), candidates.contiguous()

    def parts(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((num_rows, segments), dtype=dtype, device=logits.device)

    measured = parts(torch.float32), parts(torch.float32), parts(torch.int32), parts(torch.float64)
    token_ids = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
    log_probabilities = torch.empty(len(draws), dtype=torch.float32, device=logits.device)
    if len(draws):
        measure_segments[(num_rows, segments)](logits, candidates, temperatures, *measured, vocabulary)
        draw_rows[(len(draws),)](
            logits,
            candidates,
            temperatures,
            draws,
            rows,
            *measured,
            token_ids,
            log_probabilities,
            vocabulary,
            segments,
            PADDED_SEGMENTS=triton.next_power_of_2(segments),
        )
    return token_ids, log_probabilities


@triton.jit
def measure_segments(logits, candidates, temperatures, log_masses, largest, best, masses, vocabulary):
    """Partial results of a segment of a row; the grid is `[B, segments]`, and results are `[B, segments]`.

    Args:
        logits: float32 `[B, vocabulary]`.
        candidates: the same, filtered.
        temperatures: float32 `[B]`.
        log_masses: float32, log of the sum of `exp(logits)`, written.
        largest: float32, the largest candidate, written.
        best: int32, the lowest id that has it, written.
        masses: float64, the sum of `exp((candidates - largest) / temperature)`, written.
        vocabulary: its size.
    """
    row, segment = tl.program_id(0), tl.program_id(1)
    token = segment * SEGMENT + tl.arange(0, SEGMENT)
    mask, at = token < vocabulary, row.to(tl.int64) * vocabulary + token
    to = row * tl.num_programs(1) + segment

    logit = tl.load(logits + at, mask=mask, other=float("-inf"))
    top = tl.max(logit, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(log_masses + to, base + tl.log(tl.sum(tl.exp(logit - base), 0)))

    candidate = tl.load(candidates + at, mask=mask, other=float("-inf"))
    top = tl.max(candidate, 0)
    temperature = tl.maximum(tl.load(temperatures + row), _LEAST)
    mass = tl.where(mask, tl.exp((candidate - top) / temperature), 0.0)
    tl.store(largest + to, top)
    tl.store(best + to, tl.min(tl.where(candidate == top, token, vocabulary - 1), 0))
    tl.store(masses + to, tl.sum(mass.to(tl.float64), 0))


@triton.jit
def draw_rows(
    logits,
    candidates,
    temperatures,
    draws,
    rows,
    log_masses,
    largest,
    best,
    masses,
    token_ids,
    log_probabilities,
    vocabulary,
    segments,
    PADDED_SEGMENTS: tl.constexpr,
):
    """Draw a token for each draw by inverting its row's cumulative distribution; the grid is `[D]`.

    Args:
        draws: float64 `[D]` in [0, 1).
        rows: int64 `[D]`, the row that each draw is from.
        token_ids: int64 `[D]`, written.
        log_probabilities: float32 `[D]`, of the tokens under `logits`, written.
        segments: their number; the other arguments are those of `measure_segments`.
    """
    draw = tl.program_id(0)
    row = tl.load(rows + draw)
    segment = tl.arange(0, PADDED_SEGMENTS)
    mask, at = segment < segments, row * segments + segment
    tops = tl.load(largest + at, mask=mask, other=float("-inf"))
    top = tl.max(tops, 0)
    token = tl.min(tl.where(mask & (tops == top), tl.load(best + at, mask=mask, other=0), vocabulary - 1), 0)

    given = tl.load(temperatures + row)
    temperature = tl.maximum(given, _LEAST)
    if given > 0:
        shares = tl.exp((tops - top) / temperature).to(tl.float64)
        mass = tl.where(mask, shares * tl.load(masses + at, mask=mask, other=0.0), 0.0)
        sums = tl.cumsum(mass, 0)
        target = tl.load(draws + draw) * tl.sum(mass, 0)
        last = tl.max(tl.where(mass > 0, segment, 0), 0)
        chosen = tl.minimum(tl.sum((mask & (sums <= target)).to(tl.int32), 0), last)
        before = tl.sum(tl.where(segment < chosen, mass, 0.0), 0)

        ids = chosen * SEGMENT + tl.arange(0, SEGMENT)
        inside = ids < vocabulary
        candidate = tl.load(candidates + row * vocabulary + ids, mask=inside, other=float("-inf"))
        weight = tl.where(inside, tl.exp((candidate - top) / temperature), 0.0).to(tl.float64)
        passed = tl.cumsum(weight, 0) <= target - before
        last = tl.max(tl.where(weight > 0, ids, 0), 0)
        token = tl.minimum(chosen * SEGMENT + tl.sum((passed & inside).to(tl.int32), 0), last)

    parts = tl.load(log_masses + at, mask=mask, other=float("-inf"))
    base = tl.max(parts, 0)
    total = base + tl.log(tl.sum(tl.where(mask, tl.exp(parts - base), 0.0), 0))
    tl.store(token_ids + draw, token.to(tl.int64))
    tl.store(log_probabilities + draw, tl.load(logits + row * vocabulary + token) - total)
