"""Draws from any vocabulary, without a sort of it and without waiting for the device.

Logits are read in the dtype of the model. Where filters leave few tokens, a draw is made among these alone.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
# (within kernels, numbers and tensors have Triton's types, which are not those of Python)

import torch
import triton
import triton.language as tl

from espalier.kernels.sampling import LEAST_TEMPERATURE, Filters
from espalier.kernels.triton import filters as limited
from espalier.kernels.triton.filters import counted, first_beyond, held_candidates, segment_of_row

_LEAST = tl.constexpr(LEAST_TEMPERATURE)


def draw_tokens(
    logits: torch.Tensor,
    candidates: torch.Tensor,
    temperatures: torch.Tensor,
    draws: torch.Tensor,
    rows: torch.Tensor,
    filters: Filters | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.sampling.draw_tokens`; with `filters`, see `torch_backend.TorchBackend.draw_filtered`."""
    num_rows, vocabulary = logits.shape
    segments = triton.cdiv(vocabulary, limited.SEGMENT.value)
    padded = triton.next_power_of_2(segments)
    logits, candidates = logits.contiguous(), candidates.contiguous()

    def of_rows(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty((num_rows, *shape), dtype=dtype, device=logits.device)

    token_ids = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
    log_probabilities = torch.empty(len(draws), dtype=torch.float32, device=logits.device)
    if not len(draws):
        return token_ids, log_probabilities
    log_masses, tops = of_rows(torch.float32, segments), of_rows(torch.float32, segments)
    best, masses = of_rows(torch.int32, segments), of_rows(torch.int64, segments)
    group_tops, group = of_rows(torch.float32, limited.GROUPS.value), limited.group_size(vocabulary)
    measured = log_masses, group_tops, tops, best, masses
    measure_segments[num_rows, segments](
        logits, candidates, temperatures, *measured, vocabulary, GROUP=group, **limited.OPTIONS
    )
    left = None, None, None, None
    if filters is not None:
        left = limit_rows(candidates, temperatures, filters, group_tops, tops, masses)
    draw_rows[(len(draws),)](
        logits,
        candidates,
        temperatures,
        draws,
        rows,
        log_masses,
        tops,
        best,
        masses,
        *left,
        token_ids,
        log_probabilities,
        vocabulary,
        segments,
        PADDED_SEGMENTS=padded,
        **limited.OPTIONS,
    )
    return token_ids, log_probabilities


def limit_rows(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    filters: Filters,
    group_tops: torch.Tensor,
    tops: torch.Tensor,
    masses: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find what filters leave of rows of `logits`; the other arguments are those of `filters.find_floors`.

    Returns:
        `min_ps`, `limits`, `counts` and `candidates`, as `draw_rows` takes them.
    """
    (rows, vocabulary), segments = logits.shape, tops.shape[1]

    def of_rows(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty((rows, *shape), dtype=dtype, device=logits.device)

    floors, limits, counts = of_rows(torch.int64), of_rows(torch.int64), of_rows(torch.int32)
    candidates = of_rows(torch.int64, limited.CANDIDATES.value)
    given = temperatures, filters.top_ks, filters.top_ps, filters.min_ps
    groups = min(limited.GROUPS.value, segments * limited.SEGMENT.value // limited.group_size(vocabulary))
    options = {"PADDED_SEGMENTS": triton.next_power_of_2(segments), **limited.OPTIONS}
    limited.find_floors[(rows,)](
        *given, group_tops, tops, masses, floors, counts, vocabulary, groups, segments, **options
    )
    found = floors, counts, candidates
    limited.collect_candidates[rows, segments](logits, tops, *found, vocabulary, **limited.OPTIONS)
    limited.find_limits[(rows,)](logits, *given, tops, masses, *found, limits, vocabulary, segments, **options)
    return filters.min_ps, limits, counts, candidates


@triton.jit
def measure_segments(
    logits, candidates, temperatures, log_masses, group_tops, tops, best, masses, vocabulary, GROUP: tl.constexpr
):
    """Partial results of a segment of a row; the grid is `[B, segments]`, and results are `[B, segments]`.

    Args:
        logits: `[B, vocabulary]`.
        candidates: the same, without tokens that must not be drawn.
        temperatures: float32 `[B]`.
        log_masses: float32, log of the sum of `exp(logits)`, written.
        group_tops: float32 `[B, GROUPS]`, the largest candidate of each group of tokens, written. A group's tokens are
            spread over a segment, for likely ones have neighbouring ids.
        tops: float32, the largest candidate, written.
        best: int32, the lowest id that has it, written.
        masses: int64, the sum of weights by which candidates are drawn, if `tops` were the row's, written.
        vocabulary: its size.
    """
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    in_segment: tl.constexpr = limited.SEGMENT // GROUP
    group = tl.arange(0, in_segment)
    token = segment * limited.SEGMENT + tl.arange(0, GROUP)[:, None] * in_segment + group[None, :]
    mask, at = token < vocabulary, row * vocabulary + token
    to = row * tl.num_programs(1) + segment

    logit = tl.load(logits + at, mask=mask, other=float("-inf")).to(tl.float32)
    top = tl.max(tl.max(logit, 0), 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(log_masses + to, base + tl.log(tl.sum(tl.sum(tl.exp(logit - base), 0), 0)))

    candidate = tl.load(candidates + at, mask=mask, other=float("-inf")).to(tl.float32)
    largest = tl.max(candidate, 0)
    top = tl.max(largest, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    temperature = tl.maximum(tl.load(temperatures + row), _LEAST)
    mass = tl.where(mask, counted(candidate, base, temperature), 0)
    place = segment * in_segment + group
    tl.store(group_tops + row * limited.GROUPS + place, largest, mask=place < limited.GROUPS)
    tl.store(tops + to, top)
    tl.store(best + to, tl.min(tl.min(tl.where(candidate == top, token, vocabulary - 1), 0), 0))
    tl.store(masses + to, tl.sum(tl.sum(mass, 0), 0))


@triton.jit
def draw_rows(
    logits, candidates, temperatures, draws, rows, log_masses, tops, best, masses, min_ps, limits, counts, keys,
    token_ids, log_probabilities, vocabulary, segments, PADDED_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Draw a token for each draw by inverting its row's cumulative distribution; the grid is `[D]`.

    Args:
        draws: float64 `[D]` in [0, 1).
        rows: int64 `[D]`, the row that each draw is from.
        min_ps: float32 `[B]`; None without filters, as the next three.
        limits: int64 `[B]`; see `filters.find_limits`, as for the next two.
        counts: int32 `[B]`.
        keys: int64 `[B, CANDIDATES]`.
        token_ids: int64 `[D]`, written.
        log_probabilities: float32 `[D]`, of the tokens under `logits`, written.
        segments: their number; the other arguments are those of `measure_segments`.
    """
    draw = tl.program_id(0)
    row = tl.load(rows + draw)
    segment = tl.arange(0, PADDED_SEGMENTS)
    mask, at = segment < segments, row * segments + segment
    largest = tl.load(tops + at, mask=mask, other=float("-inf"))
    top = tl.max(largest, 0)
    token = tl.min(tl.where(mask & (largest == top), tl.load(best + at, mask=mask, other=0), vocabulary - 1), 0)

    given = tl.load(temperatures + row)
    temperature = tl.maximum(given, _LEAST)
    min_p, limit, count = tl.zeros([], tl.float32), tl.zeros([], tl.int64), tl.zeros([], tl.int32)
    if limits is not None:
        min_p, limit, count = tl.load(min_ps + row), tl.load(limits + row), tl.load(counts + row)
        if (given > 0) & (count > 0):
            key, logit, weight = held_candidates(keys, row, count, top, temperature)
            left = (key >= limit) & (tl.exp((logit - top) / temperature) >= min_p)
            weight = tl.where(left, weight, 0)
            total = tl.sum(weight, 0)
            target = (tl.load(draws + draw) * total.to(tl.float64)).to(tl.int64)
            token = first_beyond(key, weight, tl.minimum(target, total - 1)).to(tl.int32)
    if (given > 0) & (count == 0):
        # As measured, those of a segment are relative to its own largest; those of filtered rows to the row's.
        share = tl.where(limit > 0, 1.0, tl.exp((largest - top) / temperature)).to(tl.float64)
        mass = tl.where(mask, share * tl.load(masses + at, mask=mask, other=0).to(tl.float64), 0.0)
        sums = tl.cumsum(mass, 0)
        target = tl.load(draws + draw) * tl.sum(mass, 0)
        last = tl.max(tl.where(mass > 0, segment, 0), 0)
        chosen = tl.minimum(tl.sum((mask & (sums <= target)).to(tl.int32), 0), last)
        before = tl.sum(tl.where(segment < chosen, mass, 0.0), 0)
        own_share = tl.sum(tl.where(segment == chosen, share, 0.0), 0)
        base = tl.where(limit > 0, top, tl.load(tops + row * segments + chosen))
        row_at = candidates + row * vocabulary
        _kept, weight = segment_of_row(row_at, chosen, vocabulary, base, temperature, limit, min_p)
        places = tl.arange(0, limited.SEGMENT)
        passed = own_share * tl.cumsum(weight, 0).to(tl.float64) <= target - before
        last = tl.max(tl.where(weight > 0, places, 0), 0)
        token = chosen * limited.SEGMENT + tl.minimum(tl.sum(passed.to(tl.int32), 0), last)

    parts = tl.load(log_masses + at, mask=mask, other=float("-inf"))
    base = tl.max(parts, 0)
    total = base + tl.log(tl.sum(tl.where(mask, tl.exp(parts - base), 0.0), 0))
    tl.store(token_ids + draw, token.to(tl.int64))
    tl.store(log_probabilities + draw, tl.load(logits + row * vocabulary + token).to(tl.float32) - total)
