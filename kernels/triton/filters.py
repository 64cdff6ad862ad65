"""Top-k, top-p and min-p over any vocabulary, without a sort of it and without waiting for the device.

Tokens are kept from the most likely one on, so that a filter is a limit: the last logit that is kept, and how many of
the tokens that have it. It is searched digit by digit, in base 16: among few candidates, which are all tokens that are
not less likely than the 1024th of the largest of each group of tokens, or among all where these do not suffice.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
# (within kernels, numbers and tensors have Triton's types, which are not those of Python)

import torch
import triton
import triton.language as tl

from espalier.kernels.sampling import FILTERED, LEAST_TEMPERATURE

SEGMENT = tl.constexpr(4096)
GROUPS = tl.constexpr(2048)
"""Groups of a row at most: of neighbouring tokens, as many in each."""
ENOUGH_GROUPS = 1024
CANDIDATES = tl.constexpr(4096)
_PORTION = tl.constexpr(1024)
OPTIONS = {"num_warps": 8}
_UNIT = tl.constexpr(2**44)
"""The weight of the likeliest token where weights are summed as integers: exactly, so in any order."""
_LEAST, _FILTERED = tl.constexpr(LEAST_TEMPERATURE), tl.constexpr(FILTERED)


def filter_logits(
    logits: torch.Tensor, temperatures: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> torch.Tensor:
    """See `kernels.sampling.filter_logits`."""
    rows, vocabulary = logits.shape
    logits = logits.contiguous()
    output = torch.empty_like(logits)
    if not rows:
        return output
    segments, group = triton.cdiv(vocabulary, SEGMENT.value), group_size(vocabulary)

    def of_rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty((rows, *shape), dtype=dtype, device=logits.device)

    measured = of_rows(GROUPS.value), of_rows(segments), of_rows(segments, dtype=torch.float64)
    floors, counts, candidates = of_rows(dtype=torch.int64), of_rows(dtype=torch.int32), of_rows(CANDIDATES.value)
    tops, totals = of_rows(), of_rows(dtype=torch.float64)
    limits = of_rows(dtype=torch.int64), of_rows(dtype=torch.int64)
    measure_groups[rows, segments](logits, temperatures, *measured, vocabulary, GROUP=group, **OPTIONS)
    enough = ENOUGH_GROUPS if group > 1 else GROUPS.value
    sizes, padded = (triton.cdiv(vocabulary, group), enough, segments), triton.next_power_of_2(segments)
    combined = floors, tops, totals, counts
    find_floors[(rows,)](temperatures, *measured, *combined, *sizes, PADDED_SEGMENTS=padded, **OPTIONS)
    collect_candidates[rows, segments](logits, floors, counts, candidates, vocabulary, **OPTIONS)
    searched = tops, totals, counts, candidates
    find_limits[(rows,)](logits, temperatures, top_ks, top_ps, *searched, *limits, vocabulary, **OPTIONS)
    filter_rows[rows, segments](logits, temperatures, min_ps, tops, *limits, output, vocabulary, **OPTIONS)
    return output


def group_size(vocabulary: int) -> int:
    """Tokens of a group: a power of 2, with which a row has at most `GROUPS`."""
    return triton.next_power_of_2(triton.cdiv(vocabulary, GROUPS.value))


@triton.jit
def measure_groups(logits, temperatures, group_tops, segment_tops, masses, vocabulary, GROUP: tl.constexpr):
    """Largest logits and weights of a segment of a row; the grid is `[B, segments]`.

    Args:
        logits: float32 `[B, vocabulary]`.
        temperatures: float32 `[B]`.
        group_tops: float32 `[B, GROUPS]`, the largest logit of each group, written.
        segment_tops: float32 `[B, segments]`, the largest of each segment, written.
        masses: float64 `[B, segments]`, the sum of `exp((logits - largest) / temperature)`, written.
        vocabulary: its size.
    """
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    in_segment: tl.constexpr = SEGMENT // GROUP
    group = segment * in_segment + tl.arange(0, in_segment)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = token < vocabulary
    logit = tl.load(logits + row * vocabulary + token, mask=mask, other=float("-inf"))
    largest = tl.max(logit, 1)
    tl.store(group_tops + row * GROUPS + group, largest, mask=group * GROUP < vocabulary)
    top = tl.max(largest, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    temperature = tl.maximum(tl.load(temperatures + row), _LEAST)
    mass = tl.where(mask, tl.exp((logit - base) / temperature), 0.0).to(tl.float64)
    at = row * tl.num_programs(1) + segment
    tl.store(segment_tops + at, top)
    tl.store(masses + at, tl.sum(tl.sum(mass, 1), 0))


@triton.jit
def find_floors(
    temperatures,
    group_tops,
    segment_tops,
    masses,
    floors,
    tops,
    totals,
    counts,
    groups,
    enough_groups,
    segments,
    PADDED_SEGMENTS: tl.constexpr,
):
    """Combine what was measured of a row; the grid is `[B]`.

    Args:
        floors: int64 `[B]`, the logit from which tokens are candidates, as `_ordered` makes it, written.
        tops: float32 `[B]`, the largest logit, written.
        totals: float64 `[B]`, the sum of `exp((logits - top) / temperature)`, written.
        counts: int32 `[B]`, zeros, written.
        groups: number of groups.
        enough_groups: how many of them have a candidate at least, if there are as many.
        segments: number of segments; the other arguments are those of `measure_groups`.
    """
    row = tl.program_id(0).to(tl.int64)
    segment = tl.arange(0, PADDED_SEGMENTS)
    floor, _ = _last_kept(group_tops + row * GROUPS, enough_groups, -1, 0.0, 0.0, 1.0, groups, True)
    at = row * segments + segment
    segment_top = tl.load(segment_tops + at, mask=segment < segments, other=float("-inf"))
    top = tl.max(segment_top, 0)
    temperature = tl.maximum(tl.load(temperatures + row), _LEAST)
    share = tl.exp((segment_top - top) / temperature).to(tl.float64)
    mass = tl.load(masses + at, mask=segment < segments, other=0.0)
    tl.store(floors + row, floor)
    tl.store(tops + row, top)
    tl.store(totals + row, tl.sum(tl.where(mass > 0, share * mass, 0.0), 0))
    tl.store(counts + row, 0)


@triton.jit
def collect_candidates(logits, floors, counts, candidates, vocabulary):
    """Collect the logits from the floor on, in any order; the grid is `[B, segments]`.

    Args:
        logits: float32 `[B, vocabulary]`.
        floors: int64 `[B]`.
        counts: int32 `[B]`, how many there are, which may be more than there is room for; added to.
        candidates: float32 `[B, CANDIDATES]`, written.
        vocabulary: its size.
    """
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = segment * SEGMENT + tl.arange(0, SEGMENT)
    mask = token < vocabulary
    logit = tl.load(logits + row * vocabulary + token, mask=mask, other=float("-inf"))
    chosen = mask & (_ordered(logit) >= tl.load(floors + row))
    count = tl.sum(chosen.to(tl.int32), 0)
    if count > 0:
        place = tl.atomic_add(counts + row, count) + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(candidates + row * CANDIDATES + place, logit, mask=chosen & (place < CANDIDATES))


@triton.jit
def find_limits(logits, temperatures, top_ks, top_ps, tops, totals, counts, candidates, thresholds, ties, vocabulary):
    """The limit of top-k, and of top-p of what that left; the grid is `[B]`.

    Both keep a prefix of the tokens in the order of their logits, equal ones in that of their ids.

    Args:
        logits: float32 `[B, vocabulary]`.
        temperatures: float32 `[B]`.
        top_ks: int64 `[B]`; 0 keeps all.
        top_ps: float32 `[B]`.
        tops: float32 `[B]`, the largest logits.
        totals: float64 `[B]`, the sums of `exp((logits - top) / temperature)`.
        counts: int32 `[B]`, numbers of candidates.
        candidates: float32 `[B, CANDIDATES]`, the largest logits if there are no more, in any order.
        thresholds: int64 `[B]`, the last logit that is kept, as `_ordered` makes it, written.
        ties: int64 `[B]`, how many of the tokens that have it are kept, written.
        vocabulary: its size.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.maximum(tl.load(temperatures + row), _LEAST)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row).to(tl.float64)
    top, total = tl.load(tops + row), tl.load(totals + row)

    count = tl.load(counts + row)
    held = tl.arange(0, CANDIDATES)
    candidate = tl.load(candidates + row * CANDIDATES + held, mask=held < count, other=float("-inf"))
    weight = tl.where(held < count, _counted(candidate, top, temperature), 0)
    by_rank = (top_k > 0) & (top_k < vocabulary)
    reached = tl.sum(weight, 0).to(tl.float64) / _UNIT
    suffice = tl.where(by_rank, top_k <= count, (top_p * total <= reached) | (count == vocabulary))
    searched_at, searched = logits + row * vocabulary, vocabulary
    if suffice & (count <= CANDIDATES):
        searched_at, searched = candidates + row * CANDIDATES, count
    threshold, kept_ties = _limit(searched_at, by_rank, top_k, top_p, top, total, temperature, searched)
    tl.store(thresholds + row, threshold)
    tl.store(ties + row, tl.maximum(kept_ties, 1))


@triton.jit
def filter_rows(logits, temperatures, min_ps, tops, thresholds, ties, output, vocabulary):
    """Remove the tokens of a segment that are beyond the limit, or below min-p; the grid is `[B, segments]`.

    Args:
        logits: float32 `[B, vocabulary]`.
        temperatures: float32 `[B]`.
        min_ps: float32 `[B]`.
        tops: float32 `[B]`, the largest logits.
        thresholds: int64 `[B]`, the last logit that is kept, as `_ordered` makes it.
        ties: int64 `[B]`, how many of the tokens that have it are kept: those with the lowest ids.
        output: float32 `[B, vocabulary]`, written: `logits`, or `FILTERED` for a token that is removed.
        vocabulary: its size.
    """
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_at = logits + row * vocabulary
    temperature = tl.maximum(tl.load(temperatures + row), _LEAST)
    top, threshold = tl.load(tops + row), tl.load(thresholds + row)
    token = segment * SEGMENT + tl.arange(0, SEGMENT)
    mask = token < vocabulary
    logit = tl.load(row_at + token, mask=mask, other=float("-inf"))
    order = _ordered(logit)
    share = tl.exp((logit - top) / temperature)
    kept = (order >= threshold) & (share > 0) & (share >= tl.load(min_ps + row))
    is_tie = (mask & (order == threshold)).to(tl.int32)
    in_segment = tl.sum(is_tie, 0)
    if in_segment > 0:
        before = tl.zeros([], tl.int32)
        for begin in range(0, segment * SEGMENT, SEGMENT):
            other = tl.load(row_at + begin + tl.arange(0, SEGMENT))
            before += tl.sum((_ordered(other) == threshold).to(tl.int32), 0)
        kept &= (is_tie == 0) | (before + tl.cumsum(is_tie, 0) <= tl.load(ties + row))
    tl.store(output + row * vocabulary + token, tl.where(kept, logit, _FILTERED), mask=mask)


@triton.jit
def _limit(row_at, by_rank, top_k, top_p, top, total, temperature, vocabulary):
    """The last logit that is kept, as `_ordered` makes it, and how many of the tokens with it are."""
    threshold = tl.full([], -1, tl.int64)
    ties = tl.full([], 0, tl.int64)
    if by_rank:
        goal = top_k.to(tl.float64)
        threshold, above = _last_kept(row_at, goal, -1, 0.0, top, temperature, vocabulary, True)
        ties = top_k - above.to(tl.int64)
        # Their weight, with that of all above.
        above_at = threshold + 1 + tl.zeros([16], tl.int64)
        weights = _weight_from(row_at, above_at, top, temperature, vocabulary, False)
        total = tl.max(weights, 0) + ties.to(tl.float64) * _weight_at(threshold, top, temperature)
    if top_p < 1:
        goal = top_p * total
        last, above = _last_kept(row_at, goal, threshold, total, top, temperature, vocabulary, False)
        needed = tl.ceil((goal - above) / tl.maximum(_weight_at(last, top, temperature), 1e-300)).to(tl.int64)
        ties = tl.where(last == threshold, tl.minimum(ties, needed), needed)
        threshold = last
    return threshold, ties


@triton.jit
def _ordered(logit):
    """Integers, as int64 from 0, in the order of the float32 numbers `logit`."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)  # + 0.0: zeros of either sign are equal
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _weight_from(row_at, thresholds, top, temperature, vocabulary, COUNTS: tl.constexpr):
    """For each of 16 thresholds, float64, how many tokens reach it (`COUNTS`), or their weights' sum."""
    total = tl.zeros([16], tl.int64)
    for begin in range(0, vocabulary, _PORTION):
        token = begin + tl.arange(0, _PORTION)
        mask = token < vocabulary
        logit = tl.load(row_at + token, mask=mask, other=float("-inf"))
        weight = mask.to(tl.int64)
        if not COUNTS:
            weight = tl.where(mask, _counted(logit, top, temperature), 0)
        reaches = _ordered(logit)[:, None] >= thresholds[None, :]
        total += tl.sum(tl.where(reaches, weight[:, None], 0), 0)
    return total.to(tl.float64) if COUNTS else total.to(tl.float64) / _UNIT


@triton.jit
def _counted(logit, top, temperature):
    """The weights of logits, in parts of `_UNIT`."""
    return (tl.exp((logit - top) / temperature) * _UNIT).to(tl.int64)


@triton.jit
def _last_kept(row_at, goal, floor, kept, top, temperature, vocabulary, COUNTS: tl.constexpr):
    """The largest threshold that tokens of weight `goal` reach, and the weight of those above it.

    All tokens from `floor` down count as ones of weight `kept` together.
    """
    digit = tl.arange(0, 16).to(tl.int64)
    threshold = tl.zeros([], tl.int64)
    above = tl.zeros([], tl.float64)
    for step in range(8):
        thresholds = threshold + (digit << (28 - 4 * step))
        weight = _weight_from(row_at, thresholds, top, temperature, vocabulary, COUNTS)
        weight = tl.where(thresholds <= floor, kept, weight)
        reached = weight >= goal
        threshold = tl.max(tl.where(reached, thresholds, 0), 0)
        # The nearest threshold that is too high: the heavier, the nearer.
        above = tl.maximum(above, tl.max(tl.where(reached, 0.0, weight), 0))
    return threshold, above


@triton.jit
def _weight_at(order, top, temperature):
    """The weight of tokens whose logit `_ordered` made `order` of."""
    bits = (order - 2147483648).to(tl.int32)
    logit = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.exp((logit - top) / temperature).to(tl.float64)
