"""Filters and draws over any vocabulary, without a sort and without waiting for the device."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
# (within kernels, numbers and tensors have Triton's types, which are not those of Python)

import torch
import triton
import triton.language as tl

from espalier.kernels.sampling import FILTERED, LEAST_TEMPERATURE

SEGMENT = 4096
PORTION = 512


def filter_logits(
    logits: torch.Tensor, temperatures: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> torch.Tensor:
    """See `kernels.sampling.filter_logits`."""
    rows, vocabulary = logits.shape
    output = torch.empty_like(logits)
    if rows:
        filter_rows[(rows,)](
            logits.contiguous(),
            temperatures,
            top_ks,
            top_ps,
            min_ps,
            output,
            vocabulary,
            PORTION=PORTION,
            FILTERED=FILTERED,
            LEAST_TEMPERATURE=LEAST_TEMPERATURE,
        )
    return output


def draw_tokens(
    logits: torch.Tensor, candidates: torch.Tensor, temperatures: torch.Tensor, draws: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.sampling.draw_tokens`."""
    num_rows, vocabulary = logits.shape
    segments = triton.cdiv(vocabulary, SEGMENT)
    logits, candidates = logits.contiguous(), candidates.contiguous()

    def parts(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((num_rows, segments), dtype=dtype, device=logits.device)

    measured = parts(torch.float32), parts(torch.float32), parts(torch.int32), parts(torch.float64)
    token_ids = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
    log_probabilities = torch.empty(len(draws), dtype=torch.float32, device=logits.device)
    if len(draws):
        measure_segments[(num_rows, segments)](
            logits,
            candidates,
            temperatures,
            *measured,
            vocabulary,
            SEGMENT=SEGMENT,
            LEAST_TEMPERATURE=LEAST_TEMPERATURE,
        )
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
            SEGMENT=SEGMENT,
            PADDED_SEGMENTS=triton.next_power_of_2(segments),
            LEAST_TEMPERATURE=LEAST_TEMPERATURE,
        )
    return token_ids, log_probabilities


@triton.jit
def measure_segments(
    logits,
    candidates,
    temperatures,
    log_masses,
    largest,
    best,
    masses,
    vocabulary,
    SEGMENT: tl.constexpr,
    LEAST_TEMPERATURE: tl.constexpr,
):
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
    temperature = tl.maximum(tl.load(temperatures + row), LEAST_TEMPERATURE)
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
    SEGMENT: tl.constexpr,
    PADDED_SEGMENTS: tl.constexpr,
    LEAST_TEMPERATURE: tl.constexpr,
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
    temperature = tl.maximum(given, LEAST_TEMPERATURE)
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


@triton.jit
def _ordered(logit):
    """Integers, as int64 from 0, in the order of the float32 numbers `logit`."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)  # + 0.0: zeros of either sign are equal
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _weight_from(row_at, thresholds, top, temperature, vocabulary, COUNTS: tl.constexpr, PORTION: tl.constexpr):
    """For each of 16 thresholds, float64, how many tokens reach it (`COUNTS`), or their weights' sum."""
    total = tl.zeros([16], tl.float64)
    for begin in range(0, vocabulary, PORTION):
        token = begin + tl.arange(0, PORTION)
        mask = token < vocabulary
        logit = tl.load(row_at + token, mask=mask, other=float("-inf"))
        weight = mask.to(tl.float64)
        if not COUNTS:
            weight = tl.where(mask, tl.exp((logit - top) / temperature), 0.0).to(tl.float64)
        reaches = _ordered(logit)[:, None] >= thresholds[None, :]
        total += tl.sum(tl.where(reaches, weight[:, None], 0.0), 0)
    return total


@triton.jit
def _last_kept(row_at, goal, floor, kept, top, temperature, vocabulary, COUNTS: tl.constexpr, PORTION: tl.constexpr):
    """The largest threshold that tokens of weight `goal` reach, and the weight of those above it.

    All tokens from `floor` down count as ones of weight `kept` together.
    """
    digit = tl.arange(0, 16).to(tl.int64)
    threshold = tl.zeros([], tl.int64)
    above = tl.zeros([], tl.float64)
    for step in tl.static_range(8):
        thresholds = threshold + (digit << (28 - 4 * step))
        weight = _weight_from(row_at, thresholds, top, temperature, vocabulary, COUNTS, PORTION)
        weight = tl.where(thresholds <= floor, kept, weight)
        reached = weight >= goal
        threshold = tl.max(tl.where(reached, thresholds, 0), 0)
        # The nearest threshold that is too high: the heavier, the nearer.
        above = tl.maximum(above, tl.max(tl.where(reached, 0.0, weight), 0))
    return threshold, above


@triton.jit
def filter_rows(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    output,
    vocabulary,
    PORTION: tl.constexpr,
    FILTERED: tl.constexpr,
    LEAST_TEMPERATURE: tl.constexpr,
):
    """Top-k, top-p of what it left, and min-p; the grid is `[B]`.

    Each keeps a prefix of the tokens in the order of their logits, equal ones in that of their ids; so all three keep
    the shortest of three prefixes. Its last logit is found digit by digit, in base 16.

    Args:
        logits: float32 `[B, vocabulary]`.
        temperatures: float32 `[B]`.
        top_ks: int64 `[B]`; 0 keeps all.
        top_ps: float32 `[B]`.
        min_ps: float32 `[B]`.
        output: float32 `[B, vocabulary]`, written: `logits`, or `FILTERED` for a token that is removed.
        vocabulary: its size.
    """
    row = tl.program_id(0)
    row_at, output_at = logits + row.to(tl.int64) * vocabulary, output + row.to(tl.int64) * vocabulary
    temperature = tl.maximum(tl.load(temperatures + row), LEAST_TEMPERATURE)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row).to(tl.float64)
    min_p = tl.load(min_ps + row).to(tl.float64)

    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float64)
    for begin in range(0, vocabulary, PORTION):
        token = begin + tl.arange(0, PORTION)
        top = tl.maximum(top, tl.max(tl.load(row_at + token, mask=token < vocabulary, other=float("-inf")), 0))
    for begin in range(0, vocabulary, PORTION):
        token = begin + tl.arange(0, PORTION)
        logit = tl.load(row_at + token, mask=token < vocabulary, other=float("-inf"))
        total += tl.sum(tl.where(token < vocabulary, tl.exp((logit - top) / temperature), 0.0).to(tl.float64), 0)

    threshold = tl.full([], -1, tl.int64)
    ties = tl.full([], 0, tl.int64)  # tokens with the last kept logit that are kept
    if (top_k > 0) & (top_k < vocabulary):
        goal = top_k.to(tl.float64)
        threshold, above = _last_kept(row_at, goal, -1, 0.0, top, temperature, vocabulary, True, PORTION)
        ties = top_k - above.to(tl.int64)
        # Their weight, with that of all above.
        above_at = threshold + 1 + tl.zeros([16], tl.int64)
        weights = _weight_from(row_at, above_at, top, temperature, vocabulary, False, PORTION)
        total = tl.max(weights, 0) + ties.to(tl.float64) * _weight_at(threshold, top, temperature)
    if top_p < 1:
        goal = top_p * total
        last, above = _last_kept(row_at, goal, threshold, total, top, temperature, vocabulary, False, PORTION)
        needed = tl.ceil((goal - above) / tl.maximum(_weight_at(last, top, temperature), 1e-300)).to(tl.int64)
        ties = tl.where(last == threshold, tl.minimum(ties, needed), needed)
        threshold = last
    ties = tl.maximum(ties, 1)

    seen = tl.zeros([], tl.int64)
    for begin in range(0, vocabulary, PORTION):
        token = begin + tl.arange(0, PORTION)
        mask = token < vocabulary
        logit = tl.load(row_at + token, mask=mask, other=float("-inf"))
        order = _ordered(logit)
        is_tie = mask & (order == threshold)
        rank = seen + tl.cumsum(is_tie.to(tl.int64), 0)
        weight = tl.exp((logit - top) / temperature).to(tl.float64)
        kept = ((order > threshold) | (is_tie & (rank <= ties))) & (weight > 0) & (weight >= min_p)
        tl.store(output_at + token, tl.where(kept, logit, FILTERED), mask=mask)
        seen += tl.sum(is_tie.to(tl.int64), 0)


@triton.jit
def _weight_at(order, top, temperature):
    """The weight of tokens whose logit `_ordered` made `order` of."""
    bits = (order - 2147483648).to(tl.int32)
    logit = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.exp((logit - top) / temperature).to(tl.float64)
