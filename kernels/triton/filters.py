"""Top-k, top-p and min-p over any vocabulary, without a sort of it and without waiting for the device.

Tokens are kept from the most likely one on, equal ones from the lowest id on, so that a filter is a limit: the last
token that is kept. It is searched bit by bit among candidates, tokens from a floor on that the largest of each group of
tokens give: for top-k no limit is below the floor; for top-p hardly any is. Where the candidates do not suffice, or are
more than there is room for, all tokens are searched. Weights are summed as integers: exactly, so in any order.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
# (within kernels, numbers and tensors have Triton's types, which are not those of Python)

import triton
import triton.language as tl

from espalier.kernels.sampling import LEAST_TEMPERATURE

SEGMENT = tl.constexpr(4096)
GROUPS = tl.constexpr(2048)
"""Groups of a row at most."""
CANDIDATES = tl.constexpr(2048)
"""Room for candidates of a row."""
ENOUGH_GROUPS = tl.constexpr(512)
"""Groups with a candidate, where the largest of each do not have the weight that top-p asks for."""
OPTIONS = {"num_warps": 8}
_UNIT = tl.constexpr(2**44)
"""The weight of the likeliest token."""
_LEAST = tl.constexpr(LEAST_TEMPERATURE)
_ORDER_BITS, _TOKEN_BITS = tl.constexpr(32), tl.constexpr(24)
_TOKENS = tl.constexpr(2**24)
_NOWHERE = tl.constexpr(2**32)
"""A floor above all logits."""


def group_size(vocabulary: int) -> int:
    """Tokens of a group: a power of 2, with which a row has at most `GROUPS`."""
    return triton.next_power_of_2(triton.cdiv(vocabulary, GROUPS.value))


@triton.jit
def find_floors(
    temperatures, top_ks, top_ps, min_ps, group_tops, segment_tops, masses, floors, counts, vocabulary, groups,
    segments, PADDED_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Say which tokens of a row are candidates; the grid is `[B]`.

    Args:
        temperatures: float32 `[B]`.
        top_ks: int64 `[B]`; 0 keeps all.
        top_ps: float32 `[B]`; 1 keeps all.
        min_ps: float32 `[B]`; 0 keeps all.
        group_tops: float32 `[B, GROUPS]`; see `sampling.measure_segments`, as of the next two.
        segment_tops: float32 `[B, segments]`.
        masses: int64 `[B, segments]`.
        floors: int64 `[B]`, the logit from which tokens are candidates, as `ordered` makes it, written; one above all
            for a row without filters, and for one whose most likely token is drawn.
        counts: int32 `[B]`, zeros, written.
        vocabulary: its size.
        groups: number of groups.
        segments: number of segments.
    """
    row = tl.program_id(0).to(tl.int64)
    given = tl.load(temperatures + row)
    temperature = tl.maximum(given, _LEAST)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    by_rank = (top_k > 0) & (top_k < vocabulary)
    floor = tl.full([], _NOWHERE, tl.int64)
    if (given > 0) & (by_rank | (top_p < 1) | (min_p > 0)):
        top, total = top_and_total(segment_tops, masses, row, temperature, segments, PADDED_SEGMENTS)
        floor = tl.zeros([], tl.int64)
        if by_rank | (top_p < 1):
            group = tl.arange(0, GROUPS)
            largest = tl.load(group_tops + row * GROUPS + group, mask=group < groups, other=float("-inf"))
            order = tl.where(group < groups, ordered(largest), -1)
            wanted = tl.where(by_rank, top_k, ENOUGH_GROUPS).to(tl.float64)
            floor = _last_kept(order, (order >= 0).to(tl.int64), wanted, _ORDER_BITS)
            if not by_rank:
                weight = tl.where(order >= 0, counted(largest, top, temperature), 0)
                by_mass = _last_kept(order, weight, top_p.to(tl.float64) * total, _ORDER_BITS)
                floor = tl.where(by_mass > 0, by_mass, floor)
        if not by_rank:
            floor = tl.maximum(floor, _least_order(min_p, top, temperature))
    tl.store(floors + row, floor)
    tl.store(counts + row, 0)


@triton.jit
def collect_candidates(logits, segment_tops, floors, counts, candidates, vocabulary):
    """Collect the tokens from the floor on, in any order; the grid is `[B, segments]`.

    Args:
        logits: `[B, vocabulary]`.
        segment_tops: float32 `[B, segments]`.
        floors: int64 `[B]`.
        counts: int32 `[B]`, how many there are, which may be more than there is room for; added to.
        candidates: int64 `[B, CANDIDATES]`, as `_keys` makes them, written.
        vocabulary: its size.
    """
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    floor = tl.load(floors + row)
    if ordered(tl.load(segment_tops + row * tl.num_programs(1) + segment)) < floor:
        return
    token = segment * SEGMENT + tl.arange(0, SEGMENT)
    mask = token < vocabulary
    order = ordered(tl.load(logits + row * vocabulary + token, mask=mask, other=float("-inf")).to(tl.float32))
    chosen = (mask & (order >= floor)).to(tl.int32)
    place = tl.atomic_add(counts + row, tl.sum(chosen, 0)) + tl.cumsum(chosen, 0) - 1
    tl.store(candidates + row * CANDIDATES + place, _keys(order, token), mask=(chosen > 0) & (place < CANDIDATES))


@triton.jit
def find_limits(
    logits, temperatures, top_ks, top_ps, min_ps, segment_tops, masses, floors, counts, candidates, limits, vocabulary,
    segments, PADDED_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """The limit of top-k, and of top-p of what that left; the grid is `[B]`.

    Where the candidates do not suffice, `counts` becomes 0 and `masses` those of tokens that are left.

    Args:
        logits: `[B, vocabulary]`.
        segment_tops: float32 `[B, segments]`.
        masses: int64 `[B, segments]`.
        floors: int64 `[B]`.
        counts: int32 `[B]`, numbers of candidates.
        candidates: int64 `[B, CANDIDATES]`, if there are no more.
        limits: int64 `[B]`, the last token that is kept, as `_keys` makes it, written; 0 for a row without filters.
        vocabulary: its size; the other arguments are those of `find_floors`.
    """
    row = tl.program_id(0).to(tl.int64)
    floor = tl.load(floors + row)
    if floor >= _NOWHERE:
        tl.store(limits + row, 0)
        return
    temperature = tl.maximum(tl.load(temperatures + row), _LEAST)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row).to(tl.float64), tl.load(min_ps + row)
    top, total = top_and_total(segment_tops, masses, row, temperature, segments, PADDED_SEGMENTS)
    by_rank = (top_k > 0) & (top_k < vocabulary)
    count = tl.load(counts + row)
    key, _logit, weight = held_candidates(candidates, row, count, top, temperature)
    row_at = logits + row * vocabulary
    searched = row_at, vocabulary, top, temperature
    limit = _limit(key, weight, searched, by_rank, top_k, top_p, total, False)
    # What min-p leaves are candidates all.
    suffice = (limit > 0) | ((min_p > 0) & (floor <= _least_order(min_p, top, temperature)) & (not by_rank))
    if (not suffice) | (count > CANDIDATES):
        limit = _limit(key, weight, searched, by_rank, top_k, top_p, total, True)
        for segment in range(segments):
            _kept, left = segment_of_row(row_at, segment, vocabulary, top, temperature, limit, min_p)
            tl.store(masses + row * segments + segment, tl.sum(left, 0))
        tl.store(counts + row, 0)
    tl.store(limits + row, tl.maximum(limit, 1))


@triton.jit
def _limit(key, weight, searched, by_rank, top_k, top_p, total, ALL: tl.constexpr):
    """The last token that top-k and top-p keep, of the candidates or of all tokens; 0 where these are too few."""
    limit = tl.zeros([], tl.int64)
    if by_rank:
        goal = top_k.to(tl.float64)
        if ALL:
            limit = _last_kept_of_all(searched, goal, True)
            total = _reached(searched, limit, False).to(tl.float64)
        else:
            limit = _last_kept(key, (key >= 0).to(tl.int64), goal, _ORDER_BITS + _TOKEN_BITS)
            total = tl.sum(tl.where(key >= limit, weight, 0), 0).to(tl.float64)
    if top_p < 1:
        if ALL:
            limit = tl.maximum(limit, _last_kept_of_all(searched, top_p * total, False))
        else:
            limit = tl.maximum(limit, _last_kept(key, weight, top_p * total, _ORDER_BITS + _TOKEN_BITS))
    return limit


@triton.jit
def _last_kept(key, amount, goal, BITS: tl.constexpr):
    """The largest number that keys of amounts from `goal` on reach; 0 where there is none."""
    limit = tl.zeros([], tl.int64)
    for bit in range(BITS):
        tried = limit + (tl.full([], 1, tl.int64) << (BITS - 1 - bit))
        reached = tl.sum(tl.where(key >= tried, amount, 0), 0)
        limit = tl.where(reached.to(tl.float64) >= goal, tried, limit)
    return limit


@triton.jit
def _last_kept_of_all(searched, goal, COUNTS: tl.constexpr):
    """`_last_kept` of a whole row, whose tokens count 1 each or their weights."""
    limit = tl.zeros([], tl.int64)
    for bit in range(_ORDER_BITS + _TOKEN_BITS):
        tried = limit + (tl.full([], 1, tl.int64) << (_ORDER_BITS + _TOKEN_BITS - 1 - bit))
        limit = tl.where(_reached(searched, tried, COUNTS).to(tl.float64) >= goal, tried, limit)
    return limit


@triton.jit
def _reached(searched, limit, COUNTS: tl.constexpr):
    """Number of a row's tokens that reach a limit, or their weight."""
    row_at, vocabulary, top, temperature = searched
    total = tl.zeros([SEGMENT], tl.int64)
    for segment in range(tl.cdiv(vocabulary, SEGMENT)):
        kept, weight = segment_of_row(row_at, segment, vocabulary, top, temperature, limit, 0.0)
        total += kept.to(tl.int64) if COUNTS else weight
    return tl.sum(total, 0)


@triton.jit
def segment_of_row(row_at, segment, vocabulary, top, temperature, limit, min_p):
    """Of a segment's tokens, which are kept, and their weights, int64, 0 for others."""
    token = segment * SEGMENT + tl.arange(0, SEGMENT)
    logit = tl.load(row_at + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    kept = (token < vocabulary) & (_keys(ordered(logit), token) >= limit)
    kept &= tl.exp((logit - top) / temperature) >= min_p
    return kept, tl.where(kept, counted(logit, top, temperature), 0)


@triton.jit
def held_candidates(candidates, row, count, top, temperature):
    """Candidates of a row, -1 where there is none, their logits, and their weights, int64."""
    held = tl.arange(0, CANDIDATES)
    key = tl.load(candidates + row * CANDIDATES + held, mask=held < count, other=-1)
    bits = (key // _TOKENS - 2147483648).to(tl.int32)
    logit = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    logit = tl.where(key >= 0, logit, float("-inf"))
    return key, logit, counted(logit, top, temperature)


@triton.jit
def top_and_total(segment_tops, masses, row, temperature, segments, PADDED_SEGMENTS: tl.constexpr):
    """A row's largest logit, and the weight of all of its tokens, float64."""
    segment = tl.arange(0, PADDED_SEGMENTS)
    at = row * segments + segment
    tops = tl.load(segment_tops + at, mask=segment < segments, other=float("-inf"))
    top = tl.max(tops, 0)
    mass = tl.load(masses + at, mask=segment < segments, other=0).to(tl.float64)
    share = tl.exp((tops - top) / temperature).to(tl.float64)
    return top, tl.sum(tl.where(mass > 0, share * mass, 0.0), 0)


@triton.jit
def ordered(logit):
    """Integers, as int64 from 0, in the order of the float32 numbers `logit`."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)  # + 0.0: zeros of either sign are equal
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def counted(logit, top, temperature):
    """The weights of logits, int64, in parts of `_UNIT`."""
    return (tl.exp((logit - top) / temperature) * _UNIT).to(tl.int64)


@triton.jit
def _least_order(min_p, top, temperature):
    """A logit, as `ordered` makes it, below all that min-p leaves, if not far; 0 where it leaves all."""
    least = top + temperature * tl.log(tl.maximum(min_p, 1e-30)) - (1e-3 * temperature + 1e-6 * tl.abs(top))
    return tl.where(min_p > 0, ordered(least), 0)


@triton.jit
def _keys(order, token):
    """Tokens as int64, in the order in which they are kept: by the order of their logits, the lowest ids last."""
    return order * _TOKENS + (_TOKENS - 1 - token)


@triton.jit
def first_beyond(key, weight, target):
    """Of the tokens in order of their ids, the first with which the sum of weights exceeds `target`, int64."""
    token = tl.where(key >= 0, _TOKENS - 1 - key % _TOKENS, _TOKENS)
    chosen = tl.zeros([], tl.int64)
    for bit in range(_TOKEN_BITS):
        tried = chosen + (tl.full([], 1, tl.int64) << (_TOKEN_BITS - 1 - bit))
        before = tl.sum(tl.where(token < tried, weight, 0), 0)
        chosen = tl.where(before <= target, tried, chosen)
    return chosen
