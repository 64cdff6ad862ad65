"""Tree-aware paged attention on CPU: reads keys and values in place, in their blocks, once for rows that share them.

One work item is some neighbouring tokens and one kv head, or all of them. It goes through the positions of the context
block by block; tokens whose sequences have the same block there, as siblings do below their fork and a prompt's tokens
everywhere, meet its keys and values together, while those are in registers. The softmax is taken over chunks of
positions, each result rescaled when a later chunk has a larger logit (Milakov and Gimelshein, 2018). Chunks begin at
fixed positions, so a token's output has the same bits alone and in any company.

Neighbouring tokens of a sequence meet a block that they see different parts of together, with weights of zero for what
comes after a token: where that is not a number, neither is the token's output. It is of the same sequence.
"""

import math

import numba
import numpy as np
import torch

from espalier.kernels.batch import AttentionBatch
from espalier.kernels.cpu.pointwise import exp_in_place, largest, scale_in_place
from espalier.kernels.cpu.simd import flush_denormals, restore_denormals
from espalier.kernels.cpu.threads import barrier, complete_and_fetch, fetch_item, num_threads, parallel_run
from espalier.kernels.cpu.tiles import TALL, WIDE, multiply_add, multiply_add_chain, multiply_pair, prefetch
from espalier.kernels.layout import LayerKV

TOKENS_PER_ITEM = 64
"""Tokens of a work item at most.

With one, no token shares what it reads: paged attention without regard to the tree, for comparison.
"""
_MOST_TOGETHER = 64
"""Queries of a work item that reads all kv heads, at most."""
_ITEMS_PER_THREAD = 4
"""So many that a thread that is held up leaves most of its share to others."""
_CHUNK = 256
"""Positions whose logits a work item holds at a time, unless one block has more: they stay in a core's cache."""
_NEAR = 2048
"""Elements of values that all queries of an item meet before the next: they stay in a core's nearest cache."""
UNLIMITED = 2**40
"""The window of a layer that has none."""


Geometry = tuple[int, int, int, int, int, int, int]
"""Elements from slab to slab; blocks of a slab; tokens of a block; heads; kv heads; head_dim; elements of a
token's row of queries."""
Spans = tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""What the tokens of a batch read together, found once for all layers and heads.

The tokens are cut into parts. A span is some neighbouring tokens of a part and some neighbouring blocks of a chunk that
all of them see, the last block perhaps in part, and some less of it than others. In order: the blocks of a chunk; each
work item's part, first kv head and kv heads; each part's first token, and their number at the end; the positions each
token sees, `[T]`; each part's first chunk; each chunk's first span; each span's first token within the part, tokens,
first block within the chunk, blocks, and positions of the last block that any token sees; where each of its blocks
begins, for the first layer's first kv head, `[spans * blocks of a chunk]`. All int64.
"""
Shape = tuple[int, int, int, int, int, int]
"""Of a work item: queries of a kv head; positions of a chunk; query heads of a kv head; kv heads; head_dim; tokens of a
block."""


@numba.njit
def attend(
    item: int,
    scale: np.float32,
    window: int,
    query: np.ndarray,
    flat: np.ndarray,
    keys_at: int,
    values_at: int,
    geometry: Geometry,
    all_spans: Spans,
    scratch: np.ndarray,
    output: np.ndarray,
) -> None:
    """Run one work item.

    Args:
        item: which of `all_spans`.
        scale: factor on the logits.
        window: positions that a token sees, its own the last.
        query: flat float32; a token's heads side by side, then what else a row holds.
        flat: float32, the whole KV pool.
        keys_at: where the layer's keys begin in the first slab, in elements.
        values_at: the same of its values.
        geometry: from `geometry_of`.
        all_spans: from `find_spans`.
        scratch: float32, from `scratch_for`, the thread's own.
        output: flat float32 `[T * heads * head_dim]`, written.
    """
    _, _, block_size, heads, kv_heads, head_dim, query_stride = geometry
    chunk, items, firsts, visible, chunks, spans_of, spans, places = all_spans
    groups = heads // kv_heads
    part, kv_head, num_kv_heads = items[item, 0], items[item, 1], items[item, 2]
    first = firsts[part]
    rows = int(firsts[part + 1] - first)
    of_head = rows * groups
    queries, width = num_kv_heads * of_head, chunk * block_size
    if chunks[part + 1] - chunks[part] == 1:
        width = (visible[first : first + rows].max() + block_size - 1) // block_size * block_size
    shape = of_head, width, groups, num_kv_heads, head_dim, block_size
    # A query is a row of these: groups of one token, then the next token's, then those of the next kv head.
    scaled = scratch[: queries * head_dim]
    logits = scratch[queries * head_dim : queries * (head_dim + width)]
    mixed = scratch[queries * (head_dim + width) : queries * (2 * head_dim + width)]
    tops = scratch[queries * (2 * head_dim + width) : queries * (2 * head_dim + width + 1)]
    totals = scratch[queries * (2 * head_dim + width + 1) : queries * (2 * head_dim + width + 2)]
    mixed[:] = np.float32(0.0)
    totals[:] = np.float32(0.0)
    q, size = 0, groups * head_dim
    for h in range(kv_head, kv_head + num_kv_heads):
        for r in range(first, first + rows):
            at = r * query_stride + h * size
            given, written = query[at : at + size], scaled[q : q + size]
            for i in range(size):
                written[i] = given[i] * scale
            q += size
    keys_at += kv_head * block_size * head_dim
    values_at += kv_head * block_size * head_dim
    passed = visible[first : first + rows].min() - window  # positions that no token sees any more
    for c in range(chunks[part], chunks[part + 1]):
        before = int(c - chunks[part]) * width
        if before + width <= passed:
            continue
        for i in range(spans_of[c], spans_of[c + 1]):
            _dot(scaled, flat, keys_at, places, i * chunk, spans[i], logits, shape)
        _soften(logits, visible[first : first + rows] - before, window, tops, totals, mixed, shape)
        for i in range(spans_of[c], spans_of[c + 1]):
            _mix(logits, flat, values_at, places, i * chunk, spans[i], mixed, shape)
    q = 0
    for h in range(kv_head, kv_head + num_kv_heads):
        for r in range(first, first + rows):
            for g in range(groups):
                at = ((r * kv_heads + h) * groups + g) * head_dim
                summed, written, total = mixed[q * head_dim : (q + 1) * head_dim], output[at : at + head_dim], totals[q]
                for i in range(head_dim):
                    written[i] = summed[i] / total
                q += 1


@numba.njit
def _dot(
    scaled: np.ndarray,
    flat: np.ndarray,
    keys_at: int,
    places: np.ndarray,
    first: int,
    span: np.ndarray,
    logits: np.ndarray,
    shape: Shape,
) -> None:
    """Write the logits of a span's queries with the keys of its blocks, which begin at `places[first]` and so on."""
    of_head, width, groups, num_kv_heads, head_dim, block_size = shape
    count, blocks = span[1] * groups, span[3]
    a, out, of_block = (
        span[0] * groups * head_dim,
        span[0] * groups * width + span[2] * block_size,
        block_size * head_dim,
    )
    k = 0
    while k < blocks:
        pair = 2 * block_size == WIDE and k + 1 < blocks
        if pair and num_kv_heads == 1:
            for ahead in range(k + 2, min(k + 4, blocks)):
                prefetch(flat, keys_at + places[first + ahead], of_block)
        for h in range(num_kv_heads):
            x, z = a + h * of_head * head_dim, out + h * of_head * width
            left = keys_at + places[first + k] + h * of_block
            if pair:
                right = keys_at + places[first + k + 1] + h * of_block
                multiply_pair(scaled, x, head_dim, flat, left, right, logits, z, width, count, head_dim)
                continue
            for q in range(count):
                for i in range(z + q * width, z + q * width + block_size):
                    logits[i] = np.float32(0.0)
            multiply_add(scaled, x, head_dim, flat, left, logits, z, width, count, head_dim, block_size)
        k, out = k + 1 + int(pair), out + (1 + int(pair)) * block_size


@numba.njit
def _soften(
    logits: np.ndarray,
    seen: np.ndarray,
    window: int,
    tops: np.ndarray,
    totals: np.ndarray,
    mixed: np.ndarray,
    shape: Shape,
) -> None:
    """Turn a chunk's logits into weights: zeros where a window has passed, and in a block beyond what a token sees.

    Args:
        logits: `[queries * width]`, written.
        seen: how many of the positions from the chunk's first on each token sees, int64; perhaps more than it has.
        window: see `attend`.
        tops: the largest logit of each query so far, updated.
        totals: the sum of its weights so far, 0 at first, updated.
        mixed: what it has of values, rescaled where its largest logit has changed.
        shape: see `Shape`.
    """
    of_head, width, groups, num_kv_heads, head_dim, block_size = shape
    for r in range(len(seen)):
        start, end = max(0, seen[r] - window), min(seen[r], width)
        beyond = (end + block_size - 1) // block_size * block_size
        for h in range(num_kv_heads):
            for q in range(h * of_head + r * groups, h * of_head + (r + 1) * groups):
                for i in range(q * width, q * width + min(start, end)):
                    logits[i] = np.float32(0.0)
                if end <= start:
                    continue
                for i in range(q * width + end, q * width + beyond):
                    logits[i] = np.float32(0.0)
                top = largest(logits, q * width + start, end - start)
                if totals[q] > 0:
                    if top > tops[q]:  # seldom, once some chunks have passed
                        factor = np.float32(math.exp(tops[q] - top))
                        totals[q] *= factor
                        scale_in_place(mixed, q * head_dim, head_dim, factor)
                    else:
                        top = tops[q]
                tops[q] = top
                totals[q] += exp_in_place(logits, q * width + start, end - start, top)


@numba.njit
def _mix(
    logits: np.ndarray,
    flat: np.ndarray,
    values_at: int,
    places: np.ndarray,
    first: int,
    span: np.ndarray,
    mixed: np.ndarray,
    shape: Shape,
) -> None:
    """Add the values of a span's blocks, weighted, to what its queries have; arguments as `_dot`."""
    of_head, width, groups, num_kv_heads, head_dim, block_size = shape
    count, blocks, last = span[1] * groups, span[3], span[4]
    a, out = span[0] * groups * width + span[2] * block_size, span[0] * groups * head_dim
    if num_kv_heads == 1:
        few = max(1, _NEAR // (block_size * head_dim))
        for k in range(0, blocks, few):
            some = min(few, blocks - k)
            size = last if k + some == blocks else block_size
            multiply_add_chain(
                logits, a + k * block_size, width, flat, values_at, places, first + k, some, block_size, size, mixed,
                out, head_dim, count, head_dim,
            )  # fmt: skip
        return
    for k in range(blocks):
        inner = last if k == blocks - 1 else block_size
        for h in range(num_kv_heads):
            x, z = a + h * of_head * width + k * block_size, out + h * of_head * head_dim
            at = values_at + places[first + k] + h * block_size * head_dim
            multiply_add(logits, x, width, flat, at, mixed, z, head_dim, count, inner, head_dim)


def find_spans(batch: AttentionBatch, most_tokens: int, geometry: Geometry) -> Spans:
    """The spans of a batch, in work items of at most `most_tokens` tokens, fewer where that leaves threads idle.

    Tokens that do not share their first block share nothing, and are in different items: side by side they would only
    take up room in a core's cache.
    """
    tensors = batch.block_tables, batch.query_starts, batch.context_lengths, batch.row_sequences
    tables, starts, contexts, sequences = (tensor.numpy() for tensor in tensors)
    visible = (contexts - starts[1:] + 1).astype(np.int64)[sequences] + np.arange(len(sequences))
    fair = -(-len(sequences) * geometry[4] // (_ITEMS_PER_THREAD * num_threads()))
    tile = min(most_tokens, -(-fair // TALL) * TALL)
    enough = _ITEMS_PER_THREAD * num_threads()
    return _find_spans(tables, sequences, visible, tile, enough, max(1, _CHUNK // geometry[2]), geometry)


@numba.njit(cache=True)
def _find_spans(
    tables: np.ndarray,
    sequences: np.ndarray,
    visible: np.ndarray,
    tile: int,
    enough: int,
    chunk: int,
    geometry: Geometry,
) -> Spans:
    firsts = np.empty(len(visible) + 1, np.int64)
    parts = 0
    for row in range(len(visible)):
        start = row == 0 or row - firsts[parts - 1] == tile
        if start or tables[sequences[row], 0] != tables[sequences[row - 1], 0]:
            firsts[parts] = row
            parts += 1
    firsts[parts] = len(visible)
    chunks = np.empty(parts + 1, np.int64)
    chunks[0] = 0
    for part in range(parts):
        longest = visible[firsts[part] : firsts[part + 1]].max()
        chunks[part + 1] = chunks[part] + (longest + chunk * geometry[2] - 1) // (chunk * geometry[2])
    spans_of = np.zeros(chunks[parts] + 1, np.int64)
    spans, places = np.empty((0, 5), np.int64), np.empty(0, np.int64)
    found = 0
    for writing in (False, True):
        if writing:
            spans, places = np.empty((found, 5), np.int64), np.empty(found * chunk, np.int64)
        found = 0
        for part in range(parts):
            rows = slice(firsts[part], firsts[part + 1])
            for c in range(chunks[part], chunks[part + 1]):
                before = (c - chunks[part]) * chunk
                found = _find_chunk(
                    tables, sequences[rows], visible[rows], before, chunk, geometry, found, spans, places, writing
                )
                spans_of[c + 1] = found
    firsts = firsts[: parts + 1]
    return chunk, _find_items(firsts, enough, geometry), firsts, visible, chunks, spans_of, spans, places


@numba.njit
def _find_items(firsts: np.ndarray, enough: int, geometry: Geometry) -> np.ndarray:
    """Work items of parts of the tokens: a kv head each, or all kv heads of tokens too few for one to fill a tile.

    The kv heads of a block lie side by side, and memory is faster the longer one reads on. That only where there are
    `enough` parts to share out among threads, and where what is held for all the heads stays in a core's cache.
    """
    _, _, _, heads, kv_heads, _, _ = geometry
    parts = len(firsts) - 1
    items, count = np.empty((parts * kv_heads, 3), np.int64), 0
    for part in range(parts):
        rows = firsts[part + 1] - firsts[part]
        few = rows * (heads // kv_heads) <= TALL and rows * heads <= _MOST_TOGETHER
        together = kv_heads if few and parts >= enough else 1
        for kv_head in range(0, kv_heads, together):
            items[count, 0], items[count, 1], items[count, 2] = part, kv_head, together
            count += 1
    return items[:count]


@numba.njit
def _find_chunk(
    tables: np.ndarray,
    sequences: np.ndarray,
    visible: np.ndarray,
    before: int,
    chunk: int,
    geometry: Geometry,
    found: int,
    spans: np.ndarray,
    places: np.ndarray,
    writing: bool,
) -> int:
    """Count the spans of one item and chunk up from `found`, and write them; block `before` is the chunk's first.

    Rows that share a block are a run, those too that see less of it than others, as earlier tokens of a sequence do. A
    block whose runs are those of the block before, seen whole, prolongs its spans.
    """
    slab_stride, slots, block_size, _, kv_heads, head_dim, _ = geometry
    rows, longest = len(visible), (visible.max() + block_size - 1) // block_size
    runs, last = np.empty((rows, 3), np.int64), np.empty((rows, 3), np.int64)
    num_last = opened = 0
    for b in range(before, min(before + chunk, longest)):
        num_runs, r, prolongs = 0, 0, b > before
        while r < rows:
            start, seen = r, min(visible[r] - b * block_size, block_size)
            r += 1
            if seen <= 0:
                continue
            block = tables[sequences[start], b]
            while r < rows and visible[r] > b * block_size and tables[sequences[r], b] == block:
                seen = max(seen, min(visible[r] - b * block_size, block_size))
                r += 1
            runs[num_runs, 0], runs[num_runs, 1], runs[num_runs, 2] = start, r - start, seen
            n = num_runs
            prolongs &= n < num_last and last[n, 0] == start and last[n, 1] == r - start and last[n, 2] == block_size
            num_runs += 1
        if not (prolongs and num_runs == num_last):
            opened, found = found, found + num_runs
            prolongs = False
        if writing:
            for n in range(num_runs):
                span = opened + n
                if not prolongs:
                    spans[span, 0], spans[span, 1], spans[span, 2], spans[span, 3] = (
                        runs[n, 0],
                        runs[n, 1],
                        b - before,
                        0,
                    )
                spans[span, 4] = runs[n, 2]
                block = tables[sequences[runs[n, 0]], b]
                at = block // slots * slab_stride + block % slots * kv_heads * block_size * head_dim
                places[span * chunk + spans[span, 3]] = at
                spans[span, 3] += 1
        runs, last, num_last = last, runs, num_runs
    return found


def geometry_of(layer_kv: LayerKV, heads: int, query_stride: int) -> Geometry:
    """What `attend` needs to find its way."""
    _, slots, block_size, kv_heads, head_dim = layer_kv.keys.shape
    return layer_kv.keys.stride(0), slots, block_size, heads, kv_heads, head_dim, query_stride


@numba.njit
def scratch_for(geometry: Geometry, all_spans: Spans) -> np.ndarray:
    """Memory in which a thread runs items, one after another; what one leaves there is of no use to the next."""
    _, _, block_size, heads, kv_heads, head_dim, _ = geometry
    chunk, items, firsts, _, _, _, _, _ = all_spans
    queries = 0
    for i in range(len(items)):
        rows = firsts[items[i, 0] + 1] - firsts[items[i, 0]]
        queries = max(queries, rows * items[i, 2] * heads // kv_heads)
    return np.empty(queries * (2 * head_dim + chunk * block_size + 2), np.float32)


def flat_kv_pool(layer_kv: LayerKV) -> np.ndarray:
    """The KV pool that a layer's keys and values lie in, float32 `[elements]`.

    One dimension with stride 1: numba vectorises nothing over strides it learns at run time.
    """
    keys = layer_kv.keys
    return keys.as_strided((keys.untyped_storage().nbytes() // 4,), (1,), 0).numpy()


@numba.njit(nogil=True, cache=True)
def _attend_all(
    counters: np.ndarray,
    scale: np.float32,
    window: int,
    query: np.ndarray,
    flat: np.ndarray,
    keys_at: int,
    values_at: int,
    geometry: Geometry,
    all_spans: Spans,
    output: np.ndarray,
) -> None:
    item, items, scratch = fetch_item(counters, 0), len(all_spans[1]), scratch_for(geometry, all_spans)
    denormals = flush_denormals()
    while item < items:
        attend(item, scale, window, query, flat, keys_at, values_at, geometry, all_spans, scratch, output)
        item = complete_and_fetch(counters, 0)
    restore_denormals(denormals)
    barrier(counters, 0, items)


class CpuAttention:
    """`paged_attention_reference` for float32 on CPU; which blocks sequences share is found out once for a step."""

    def __init__(self, layer_kv: LayerKV, batch: AttentionBatch, num_heads: int) -> None:
        """Prepare a step's attention; `layer_kv` is any of its layers."""
        self._geometry = geometry_of(layer_kv, num_heads, num_heads * layer_kv.keys.shape[-1])
        self._spans = find_spans(batch, TOKENS_PER_ITEM, self._geometry)

    def __call__(self, query: torch.Tensor, layer_kv: LayerKV, scale: float, window: int | None = None) -> torch.Tensor:
        """See `paged_attention_reference`."""
        output = torch.empty(query.shape, dtype=torch.float32)
        parallel_run(
            _attend_all,
            1,
            np.float32(scale),
            window or UNLIMITED,
            query.contiguous().view(-1).numpy(),
            flat_kv_pool(layer_kv),
            int(layer_kv.keys.storage_offset()),
            int(layer_kv.values.storage_offset()),
            self._geometry,
            self._spans,
            output.view(-1).numpy(),
        )
        return output
