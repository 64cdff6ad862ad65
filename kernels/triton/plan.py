"""Attention plans: rows that read the same blocks together, as work items for `attention.py`; no device is touched.

A *run* is some neighbouring blocks that some sequences share: the blocks before their fork, or the ones that a sequence
has for itself. Runs are cut into equal portions. Where `chunk` is given they are cut at its multiples, and shared runs
end there too, so the logits of a token are summed in the same portions alone and beside siblings. A *work item* is one
such portion and as many rows (tokens of the step) as fill a tile. Rows with several items have their partial results
merged, in the order of positions.
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

An item of one row has that row instead of its entry, which saves the device a look-up. Rows see nothing behind their
own positions, so that an end beyond them costs nothing.
"""
TILE = 64
"""Positions whose logits a work item holds at a time; portions begin at multiples of it."""
_SMALLEST_CHUNK = 128
"""Positions of the smallest portions; those of twice the size are tried too."""
_BEYOND = -2
"""The entry of a block table beyond the context; behind all windows it is -1."""
_ENDLESS = 2**30
"""The end of a sequence's last portion, so that a plan outlives some steps."""
_KEPT_PLANS = 32
"""Plans that are cut as one before, until the best cut is looked for again."""
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
        shared_memory: bytes that a program may have of a multiprocessor's.
        wide_cost: time of a wide work item, where a narrow one with as many positions takes 1.
        dependent: whether it has programmatic dependent launch; see `launches.py`.
    """

    processors: int = 132
    shared_memory: int = 227 * 1024
    wide_cost: float = 1.5
    dependent: bool = False


class Cut(NamedTuple):
    """A way to cut the attention of a step: about `chunk` positions to a portion, blocks shared or read by each."""

    chunk: int
    share: bool


class AttentionPlan(NamedTuple):
    """Work items of one step, for all layers with one window; all arrays are int32.

    Attributes:
        narrow: `[items, FIELDS]`, items of at most `narrow_rows` rows.
        wide: `[items, FIELDS]`, the others.
        rows: the rows of every item, one item after the other.
        merge_starts: `[T + 1]`, the first of each row's `merges`; rows with none were written by their only item.
        merges: places of partial results, each row's in the order of positions.
        partials: number of partial results.
        cut: how it is cut.
        seconds: the time it takes, in that of one position of a narrow item.
    """

    narrow: np.ndarray
    wide: np.ndarray
    rows: np.ndarray
    merge_starts: np.ndarray
    merges: np.ndarray
    partials: int
    cut: Cut
    seconds: float


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
    cut: Cut | None = None,
    *,
    share: bool = True,
) -> AttentionPlan:
    """Plan the attention of a step over its sequences' blocks.

    Args:
        query_starts: int32 `[S + 1]`; see `kernels.layout.AttentionBatch`.
        context_lengths: int32 `[S]`.
        block_tables: int32 `[S, blocks]`.
        block_size: tokens of a block.
        kv_heads: key and value heads of the model; each work item is computed once for each.
        narrow_rows: rows that fit in a narrow tile; 0 makes all items wide.
        wide_rows: rows that fit in a wide tile.
        costs: of the device.
        window: positions that a token sees, its own the last; None for all before it.
        chunk: positions of a portion, a multiple of `TILE` and of the block size, which begins at a multiple of it;
            None for about as many as keep the device busy.
        cut: taken as it is; None chooses the one that takes the least time.
        share: whether blocks may be read once for several sequences.
    """
    blocks = -(-context_lengths // block_size)
    columns = np.arange(block_tables.shape[1], dtype=np.int32)
    # Beyond a context a table may hold anything.
    tables = np.where(columns < blocks[:, None], block_tables, _BEYOND).astype(np.int32)
    as_bytes = tables.view(np.dtype((np.void, 4 * tables.shape[1])))[:, 0]
    order = np.argsort(as_bytes, kind="stable").astype(np.int32)  # puts those with equal first blocks side by side

    positions = np.repeat(context_lengths - query_starts[1:], np.diff(query_starts)) + np.arange(query_starts[-1])
    step = _Step(query_starts, context_lengths, positions, tables, order, block_size)
    tiles, fixed = (narrow_rows, wide_rows), chunk is not None
    lanes = _OVERLAP * costs.processors / kv_heads  # items that are computed at a time

    def plan(cut: Cut) -> AttentionPlan:
        return _plan(step, tiles, window or 0, cut, fixed, costs.wide_cost, lanes)

    def best(*chunks: int) -> AttentionPlan:
        shared = (False, True) if share and len(order) > 1 else (False,)
        return min((plan(Cut(chunk, share)) for chunk in chunks for share in shared), key=lambda made: made.seconds)

    if cut is not None:
        return plan(cut)
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
    until a block is copied, or a sequence has grown by so much that its last portion is far too long. Where other
    sequences decode, a plan is cut as the last one was: nearly the same number of rows is best cut in the same way.
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
        self._plans: list[AttentionPlan] = []
        self._known: tuple[np.ndarray, np.ndarray] | None = None  # block tables, and contexts up to which plans hold
        self._kept_cuts: Sequence[Cut | None] = ()
        self._kept_for = range(0)  # numbers of rows, and
        self._kept_times = 0  # plans to come, for which cuts are kept

    def plan(
        self, query_starts: np.ndarray, context_lengths: np.ndarray, block_tables: Sequence[np.ndarray]
    ) -> list[AttentionPlan]:
        """One plan for each window, which has block tables of its own; arguments as `plan_attention` takes them."""
        rows = len(context_lengths)
        decodes = query_starts[-1] == rows
        if decodes and self._still_holds(context_lengths, block_tables[0]):
            return self._plans
        kept = decodes and rows in self._kept_for and self._kept_times > 0
        cuts = self._kept_cuts if kept else [None] * len(self._windows)
        self._plans = [
            plan_attention(query_starts, context_lengths, tables, *self._arguments, window, self._chunk, cut)
            for tables, window, cut in zip(block_tables, self._windows, cuts, strict=True)
        ]
        self._known = None
        if kept:
            self._kept_times -= 1
        elif decodes:
            self._kept_cuts, self._kept_times = [plan.cut for plan in self._plans], _KEPT_PLANS
            self._kept_for = range(rows - rows // 8, rows + rows // 8 + 1)
        if decodes and self._windows == [None]:
            blocks = -(-context_lengths // self._block_size)
            columns = np.arange(block_tables[0].shape[1], dtype=np.int32)
            until = context_lengths + _SMALLEST_CHUNK
            if self._chunk:
                until = -(-context_lengths // self._chunk) * self._chunk
            self._known = np.where(columns < blocks[:, None], block_tables[0], -1), until
        return self._plans

    def _still_holds(self, contexts: np.ndarray, tables: np.ndarray) -> bool:
        """True if the last plan is one of these sequences: rows see nothing behind their own positions."""
        if self._known is None or len(contexts) != len(self._known[1]):
            return False
        known, until = self._known
        width = known.shape[1]
        if tables.shape[1] < width or (contexts > until).any():
            return False
        return bool(((tables[:, :width] == known) | (known < 0)).all())


@compiled()
def _plan(
    step: _Step,
    tiles: tuple[int, int],
    window: int,
    cut: Cut,
    fixed: bool,
    wide_cost: float,
    lanes: float,
) -> AttentionPlan:
    """A plan; narrow items are computed first, then wide ones, and results are merged.

    Each kind takes as long as its longest item, or as its share of `lanes`; merging, as the row with most to do.
    """
    (starts, _, positions, _, order, _), (narrow_rows, wide_rows), (chunk, share) = step, tiles, cut
    tokens = len(positions)
    runs = _find_runs(step, chunk if fixed else TILE, share)
    items = np.empty((2 * len(runs) + 16, FIELDS), np.int32)
    rows = np.empty(max(16, 2 * tokens), np.int32)
    of_row = np.zeros(tokens + 1, np.int32)  # items of each row
    count = filled = 0
    together = np.empty(tokens, np.int32)
    longest, total = np.zeros(2), np.zeros(2)  # of narrow items, and of wide ones
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
            low, high = begin, min(stop, positions[own].max() + 1)
            if window:
                low = max(begin, max(0, positions[own].min() - window + 1) // TILE * TILE)
            if high <= low:
                continue
            portion, here = chunk, low // chunk * chunk
            if not fixed:  # equal portions, of whole tiles
                parts = max(1, (high - low + chunk // 2) // chunk)
                portion, here = -(-(high - low) // (parts * TILE)) * TILE, low
            while here < high:
                if count == len(items):
                    items = np.concatenate((items, np.empty_like(items)))
                while filled + len(own) > len(rows):
                    rows = np.concatenate((rows, np.empty_like(rows)))
                last = not fixed and here + portion >= high
                items[count, 0], items[count, 1], items[count, 2] = filled, len(own), order[first]
                items[count, 3], items[count, 4] = max(low, here), stop if last else min(here + portion, stop)
                rows[filled : filled + len(own)] = own
                of_row[own] += 1
                wide = int(len(own) > narrow_rows)
                seconds = min(here + portion, high) - max(low, here) + _ITEM_COST
                longest[wide] = max(longest[wide], seconds)
                total[wide] += seconds
                filled += len(own)
                count += 1
                here += portion
    seconds = _MERGE_COST * float(of_row.max() if of_row.max() > 1 else 0)
    seconds += max(longest[0], total[0] / lanes) + wide_cost * max(longest[1], total[1] / lanes)
    return _place_partials(items[:count], rows[:filled], of_row, narrow_rows, cut, seconds)


@compiled()
def _place_partials(
    items: np.ndarray, rows: np.ndarray, of_row: np.ndarray, narrow_rows: int, cut: Cut, seconds: float
) -> AttentionPlan:
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
    alone = items[:, 1] == 1
    items[alone, 0] = rows[items[alone, 0]]
    is_narrow = items[:, 1] <= narrow_rows
    return AttentionPlan(items[is_narrow], items[~is_narrow], rows, merged, merges, partials, cut, seconds)


@compiled()
def _find_runs(step: _Step, shared_end: int, share: bool) -> np.ndarray:
    """Runs `[runs, 4]`: first and end in `order`, first position and end; a parent stands before its children.

    Runs that several sequences share end at multiples of `shared_end`; one of a sequence alone has no end.
    """
    _, _, _, tables, order, size = step
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
            runs[count, 0], runs[count, 1], runs[count, 2], runs[count, 3] = first, end, begin, _ENDLESS
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
