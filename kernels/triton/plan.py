"""Attention plans: rows that read the same blocks together, as work items for `attention.py`; no device is touched.

A *run* is some neighbouring blocks that some sequences share: the blocks before their fork, or the ones that a sequence
has for itself. Runs are cut at multiples of `chunk` positions. Shared ones end at multiples of a tile; where `chunk` is
given they end at multiples of that too, so the logits of a token are summed in the same portions alone and beside
siblings. A *work item* is one such portion and as many rows (tokens of the step) as fill a tile. Rows with several
items have their partial results merged, in the order of positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from espalier.kernels.compilation.compiler import Compiler

compiled = Compiler(Path(__file__).parent)
FIELDS = 6
"""Numbers of a work item: first entry in `rows`, rows, block table, first position, end, first partial result or -1.

Rows see nothing behind their own positions, so that an end beyond them costs nothing.
"""
TILE = 64
"""Positions whose logits a work item holds at a time; portions begin at multiples of it."""
_SMALLEST_CHUNK = 128
"""Positions of the smallest portions; those of twice the size are tried too."""
_BEYOND = -2
"""The entry of a block table beyond the context; behind all windows it is -1."""
_ITEMS_PER_PROCESSOR = 4
_ITEM_COST = 64
"""Positions that could be read in the time that an item takes to find its rows and to keep a partial result."""
_MERGE_COST = 8
"""The same for the time in which a partial result is merged."""
_OVERLAP = 1.5
"""Speed-up of several items on one multiprocessor over one after the other, as it waits for memory less."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs by which blocks are read together or not, and work is cut.

    Attributes:
        processors: multiprocessors of the device.
        wide_cost: time of a wide work item, where a narrow one with as many positions takes 1.
    """

    processors: int = 132
    wide_cost: float = 1.5


class AttentionPlan(NamedTuple):
    """Work items of one step, for all layers with one window; all arrays are int32.

    Attributes:
        narrow: `[items, FIELDS]`, items of at most `narrow_rows` rows.
        wide: `[items, FIELDS]`, the others.
        rows: the rows of every item, one item after the other.
        merge_starts: `[T + 1]`, the first of each row's `merges`; rows with none were written by their only item.
        merges: places of partial results, each row's in the order of positions.
        partials: number of partial results.
    """

    narrow: np.ndarray
    wide: np.ndarray
    rows: np.ndarray
    merge_starts: np.ndarray
    merges: np.ndarray
    partials: int


class _Step(NamedTuple):
    """A step's sequences, with the positions of all rows, and `order`, which puts equal first blocks side by side."""

    starts: np.ndarray
    contexts: np.ndarray
    positions: np.ndarray
    tables: np.ndarray
    order: np.ndarray
    block_size: int


def plan_attention(
    query_starts: np.ndarray,
    context_lengths: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    kv_heads: int,
    narrow_rows: int,
    wide_rows: int,
    costs: Costs,
    window: int | None = None,
    chunk: int | None = None,
    *,
    share: bool = True,
) -> AttentionPlan:
    """Plan the attention of a step over its sequences' blocks.

    Args:
        query_starts: int32 `[S + 1]`; see `kernels.batch.AttentionBatch`.
        context_lengths: int32 `[S]`.
        block_tables: int32 `[S, blocks]`.
        block_size: tokens of a block.
        kv_heads: key and value heads of the model; each work item is computed once for each.
        narrow_rows: rows that fit in a narrow tile; 0 makes all items wide.
        wide_rows: rows that fit in a wide tile.
        costs: of the device.
        window: positions that a token sees, its own the last; None for all before it.
        chunk: positions of a portion, a multiple of `TILE` and of the block size; None chooses one that keeps the
            device busy.
        share: whether blocks may be read once for several sequences.
    """
    blocks = -(-context_lengths // block_size)
    columns = np.arange(block_tables.shape[1], dtype=np.int32)
    # Beyond a context a table may hold anything.
    tables = np.where(columns < blocks[:, None], block_tables, _BEYOND).astype(np.int32)
    as_bytes = tables.view(np.dtype((np.void, 4 * tables.shape[1])))[:, 0]
    order = np.argsort(as_bytes, kind="stable").astype(np.int32)  # puts those with equal first blocks side by side

    positions = np.repeat(context_lengths - query_starts[1:], np.diff(query_starts)) + np.arange(query_starts[-1])
    step, shared_end = _Step(query_starts, context_lengths, positions, tables, order, block_size), chunk or TILE

    def plan(chunk: int, share: bool) -> AttentionPlan:
        return _plan(step, (narrow_rows, wide_rows), window or 0, chunk, shared_end, share)

    def seconds(plan: AttentionPlan) -> float:
        """Time of a plan, in that of a position of a narrow item: of narrow items, then wide ones, then merging.

        Each kind takes as long as its longest item, or as every processor's share; merging, as the row with most to do.
        """
        longest, total = int(context_lengths.max()), _MERGE_COST * float(np.diff(plan.merge_starts).max())
        for items, cost in ((plan.narrow, 1.0), (plan.wide, costs.wide_cost)):
            if len(items):
                each = cost * (np.minimum(items[:, 4], longest) - items[:, 3] + _ITEM_COST)
                total += max(float(each.max()), float(each.sum()) * kv_heads / (_OVERLAP * costs.processors))
        return total

    def best(*chunks: int) -> AttentionPlan:
        shared = (False, True) if share and len(order) > 1 else (False,)
        return min((plan(chunk, share) for chunk in chunks for share in shared), key=seconds)

    if chunk is not None:
        return best(chunk)
    small = best(_SMALLEST_CHUNK, 2 * _SMALLEST_CHUNK)
    # As many portions as keep every processor busy with several; more of them would only cost merging.
    spare = (len(small.narrow) + len(small.wide)) * kv_heads // (_ITEMS_PER_PROCESSOR * costs.processors)
    if spare < 2:
        return small
    larger = _SMALLEST_CHUNK << (spare.bit_length() - 1)
    return best(larger, 2 * larger)


class Planner:
    """Plans the steps of one model, and keeps the last plan as long as it holds.

    While the same sequences decode, their blocks before the last stay as they are, so a plan holds for many steps:
    until a sequence reaches the next portion, or a block is copied.
    """

    def __init__(
        self,
        block_size: int,
        kv_heads: int,
        tiles: tuple[int, int],
        costs: Costs,
        windows: Sequence[int | None],
        chunk: int | None,
    ) -> None:
        """Plan for each of `windows`; `tiles` are rows of a narrow and of a wide item; see `plan_attention`."""
        self._block_size = block_size
        self._windows = windows
        self._arguments = block_size, kv_heads, *tiles, costs
        self._chunk = chunk
        self._known: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        self._plans: list[AttentionPlan] = []

    def plan(
        self, query_starts: np.ndarray, context_lengths: np.ndarray, block_tables: Sequence[np.ndarray]
    ) -> list[AttentionPlan]:
        """One plan for each window, which has block tables of its own; arguments as `plan_attention` takes them."""
        decodes = query_starts[-1] == len(context_lengths)
        portions = -(-context_lengths // _SMALLEST_CHUNK)
        if decodes and self._known is not None and self._still_holds(query_starts, portions, block_tables[0]):
            return self._plans
        self._plans = [
            plan_attention(query_starts, context_lengths, tables, *self._arguments, window, self._chunk)
            for tables, window in zip(block_tables, self._windows, strict=True)
        ]
        self._known = None
        if decodes and self._windows == [None]:
            blocks = -(-context_lengths // self._block_size)
            columns = np.arange(block_tables[0].shape[1], dtype=np.int32)
            self._known = query_starts, portions, np.where(columns < blocks[:, None], block_tables[0], -1)
        return self._plans

    def _still_holds(self, starts: np.ndarray, portions: np.ndarray, tables: np.ndarray) -> bool:
        assert self._known is not None
        known_starts, known_portions, known_tables = self._known
        if len(starts) != len(known_starts) or tables.shape[1] < known_tables.shape[1]:
            return False
        same = (tables[:, : known_tables.shape[1]] == known_tables) | (known_tables < 0)
        return bool(same.all()) and np.array_equal(portions, known_portions)


@compiled()
def _plan(step: _Step, tiles: tuple[int, int], window: int, chunk: int, shared_end: int, share: bool) -> AttentionPlan:
    (starts, _, positions, _, order, _), (narrow_rows, wide_rows) = step, tiles
    tokens = len(positions)
    runs = _find_runs(step, chunk, shared_end, share)
    items = np.empty((16, FIELDS), np.int32)
    rows = np.empty(max(16, 2 * tokens), np.int32)
    of_row = np.zeros(tokens + 1, np.int32)  # items of each row
    count = filled = 0
    together = np.empty(tokens, np.int32)
    for run in range(len(runs)):
        first, end, begin, stop = runs[run, 0], runs[run, 1], runs[run, 2], runs[run, 3]
        size = 0
        for place in range(first, end):
            for row in range(starts[order[place]], starts[order[place] + 1]):
                together[size] = row
                size += 1
        tile = narrow_rows if size <= narrow_rows else wide_rows
        for at in range(0, size, tile):
            own = together[at : min(at + tile, size)]
            low = begin
            if window:
                low = max(begin, max(0, positions[own].min() - window + 1) // TILE * TILE)
            for at_chunk in range(low // chunk * chunk, min(stop, positions[own].max() + 1), chunk):
                if count == len(items):
                    items = np.concatenate((items, np.empty_like(items)))
                while filled + len(own) > len(rows):
                    rows = np.concatenate((rows, np.empty_like(rows)))
                items[count, 0], items[count, 1], items[count, 2] = filled, len(own), order[first]
                items[count, 3], items[count, 4] = max(low, at_chunk), min(at_chunk + chunk, stop)
                rows[filled : filled + len(own)] = own
                of_row[own] += 1
                filled += len(own)
                count += 1
    return _place_partials(items[:count], rows[:filled], of_row, narrow_rows)


@compiled()
def _place_partials(items: np.ndarray, rows: np.ndarray, of_row: np.ndarray, narrow_rows: int) -> AttentionPlan:
    """Give every item that has a row with several items a place for its partial results, and list them by row."""
    partials = 0
    merged = np.zeros(len(of_row), np.int32)  # by row, then where the row's list begins
    for item in items:
        own = rows[item[0] : item[0] + item[1]]
        item[5] = -1
        if of_row[own].max() > 1:
            item[5] = partials
            partials += len(own)
            merged[own + 1] += 1
    for row in range(1, len(merged)):
        merged[row] += merged[row - 1]
    merges, filled = np.empty(partials, np.int32), merged.copy()
    for item in items:
        if item[5] >= 0:
            own = rows[item[0] : item[0] + item[1]]
            merges[filled[own]] = item[5] + np.arange(len(own))
            filled[own] += 1
    is_narrow = items[:, 1] <= narrow_rows
    return AttentionPlan(items[is_narrow], items[~is_narrow], rows, merged, merges, partials)


@compiled()
def _find_runs(step: _Step, chunk: int, shared_end: int, share: bool) -> np.ndarray:
    """Runs `[runs, 4]`: first and end in `order`, first position and end; a parent stands before its children.

    Runs that several sequences share end at multiples of `shared_end`, others at multiples of `chunk`.
    """
    _, contexts, _, tables, order, size = step
    sequences = len(order)
    common = np.zeros(sequences + 1, np.int32)  # positions that a sequence and the one before it in order share
    if share:
        for place in range(1, sequences):
            mine, other = tables[order[place]], tables[order[place - 1]]
            blocks = 0
            while blocks < len(mine) and mine[blocks] == other[blocks] and mine[blocks] != _BEYOND:
                blocks += 1
            common[place] = blocks * size // shared_end * shared_end
    runs = np.empty((2 * sequences, 4), np.int32)
    waiting = np.empty((2 * sequences + 2, 3), np.int32)  # first and end in order, first position not read yet
    waiting[0, 0], waiting[0, 1], waiting[0, 2] = 0, sequences, 0
    count, left = 0, 1
    while left:
        left -= 1
        first, end, begin = waiting[left, 0], waiting[left, 1], waiting[left, 2]
        if end - first == 1:
            stop = -(-contexts[order[first]] // chunk) * chunk  # beyond the context: so a plan outlives some steps
            runs[count, 0], runs[count, 1], runs[count, 2], runs[count, 3] = first, end, begin, stop
            count += 1
            continue
        stop = common[first + 1 : end].min()
        if stop > begin:
            runs[count, 0], runs[count, 1], runs[count, 2], runs[count, 3] = first, end, begin, stop
            count += 1
            begin = stop
        part = end
        for place in range(end - 1, first - 1, -1):  # from the last on: the first is taken from the stack first
            if place == first or common[place] <= stop:
                waiting[left, 0], waiting[left, 1], waiting[left, 2] = place, part, begin
                left += 1
                part = place
    return runs[:count]
