"""Spans: tokens of a batch that read the same blocks together, cut into work items."""

from typing import NamedTuple

import numpy as np

from espalier.kernels.compilation.ahead import Compilation, compilation
from espalier.kernels.compilation.compiler import inner
from espalier.kernels.cpu import compiled
from espalier.kernels.cpu.products.tiles import MR
from espalier.kernels.cpu.threads import num_threads
from espalier.kernels.layout import AttentionBatch, LayerKV

_MAX_TOGETHER = 64
"""Queries of a work item that reads all kv heads, at most."""
_ITEMS_PER_THREAD = 4
"""So many that a thread which is interrupted leaves most of its share to other threads."""
_CHUNK = 256
"""Positions whose logits a work item holds at a time, unless one block has more: they stay in a core's cache."""


class Geometry(NamedTuple):
    """Layout of keys, values and queries in memory.

    Attributes:
        slab_stride: elements from slab to slab.
        slots: blocks of a slab.
        block_size: tokens of a block.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: elements of a head of queries and keys.
        value_dim: elements of a head of values.
        query_stride: elements from one token's queries to the next one's.
    """

    slab_stride: int
    slots: int
    block_size: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    query_stride: int


class FlatKV(NamedTuple):
    """A layer's keys and values in the KV pool, flat float32.

    Attributes:
        flat: the whole pool.
        keys_at: where the layer's keys begin in the first slab, in elements.
        values_at: the same of its values.
    """

    flat: np.ndarray
    keys_at: int
    values_at: int


class Spans(NamedTuple):
    """Tokens of a batch that read the same blocks together, found once for all layers and heads; all arrays are int64.

    The tokens are cut into parts, and the positions of each part into chunks. A span is some neighbouring tokens of a
    part and some neighbouring blocks of a chunk that all of these tokens see; of the last block some may see less.

    Attributes:
        geometry: of the keys, values and queries.
        chunk_blocks: blocks of a chunk.
        items: `[items, 3]`, the part, first kv head and number of kv heads of each work item.
        firsts: `[parts + 1]`, the first token of each part, and the number of tokens at the end.
        visible: `[T]`, how many positions each token sees.
        chunks: `[parts + 1]`, the first chunk of each part, and the number of chunks.
        chunk_spans: `[chunks + 1]`, the first span of each chunk, and the number of spans.
        spans: `[spans, 5]`, of each span its first token within the part, its tokens, its first block within the
            chunk, its blocks, and how many positions of the last block any of its tokens sees.
        places: `[2, spans * chunk_blocks]`, where keys and values of each block of a span begin, for the first layer's
            first kv head.
    """

    geometry: Geometry
    chunk_blocks: int
    items: np.ndarray
    firsts: np.ndarray
    visible: np.ndarray
    chunks: np.ndarray
    chunk_spans: np.ndarray
    spans: np.ndarray
    places: np.ndarray


def no_spans(geometry: Geometry) -> Spans:
    """The spans of no tokens."""
    return Spans(geometry, 1, *(np.empty(shape, np.int64) for shape in ((0, 3), 0, 0, 0, 0, (0, 5), (2, 0))))


def find_spans(batch: AttentionBatch, most_tokens: int, geometry: Geometry) -> Spans:
    """The spans of a batch, in work items of at most `most_tokens` tokens, fewer where that leaves threads idle.

    Tokens with different first blocks share no block, and are in different items: together they would only compete for
    a core's cache.
    """
    tensors = batch.block_tables, batch.query_starts, batch.context_lengths, batch.row_sequences
    tables, starts, contexts, sequences = (tensor.numpy() for tensor in tensors)
    enough = _ITEMS_PER_THREAD * num_threads()
    fair = -(-len(sequences) * geometry.kv_heads // enough)
    tile, chunk = min(most_tokens, -(-fair // MR) * MR), max(1, _CHUNK // geometry.block_size)
    return _find_spans(tables, starts, contexts, sequences, tile, enough, chunk, geometry)


def spans_compilation() -> Compilation:
    """The compilation of `find_spans`."""
    tables, int32s = np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
    return compilation(_find_spans, tables, int32s, int32s, int32s, 0, 0, 0, Geometry(0, 0, 0, 0, 0, 0, 0, 0))


@compiled()
def _find_spans(
    tables: np.ndarray,
    starts: np.ndarray,
    contexts: np.ndarray,
    sequences: np.ndarray,
    tile: int,
    enough: int,
    chunk: int,
    geometry: Geometry,
) -> Spans:
    visible = np.empty(len(sequences), np.int64)
    for row in range(len(visible)):
        sequence = sequences[row]
        visible[row] = contexts[sequence] - starts[sequence + 1] + 1 + row
    firsts = np.empty(len(visible) + 1, np.int64)
    parts = 0
    for row in range(len(visible)):
        start = row == 0 or row - firsts[parts - 1] == tile
        if start or not _share_first(tables, sequences[row], sequences[row - 1]):
            firsts[parts] = row
            parts += 1
    firsts[parts] = len(visible)
    chunks, width = np.empty(parts + 1, np.int64), chunk * geometry.block_size
    chunks[0] = 0
    for part in range(parts):
        _, longest = extremes(visible, firsts[part], firsts[part + 1])
        chunks[part + 1] = chunks[part] + (longest + width - 1) // width
    chunk_spans = np.zeros(chunks[parts] + 1, np.int64)
    spans, places = np.empty((0, 5), np.int64), np.empty((2, 0), np.int64)
    found = chunk_spans[0]  # a plain 0 has a type of its own, for which `_find_chunk` would be compiled as well
    for writing in range(2):
        if writing:
            spans, places = np.empty((found, 5), np.int64), np.empty((2, found * chunk), np.int64)
        found = chunk_spans[0]
        for part in range(parts):
            rows = slice(firsts[part], firsts[part + 1])
            for c in range(chunks[part], chunks[part + 1]):
                before = (c - chunks[part]) * chunk
                found = _find_chunk(
                    tables, sequences[rows], visible[rows], before, chunk, geometry, found, spans, places, writing == 1
                )
                chunk_spans[c + 1] = found
    firsts = firsts[: parts + 1]
    items = _find_items(firsts, enough, geometry)
    return Spans(geometry, chunk, items, firsts, visible, chunks, chunk_spans, spans, places)


@inner
def _share_first(tables: np.ndarray, sequence: int, other: int) -> bool:
    """True if two sequences have the same first block of those that are not behind all windows."""
    b = 0
    while tables[sequence, b] < 0 and tables[other, b] < 0:
        b += 1
    return tables[sequence, b] == tables[other, b]


@inner
def extremes(x: np.ndarray, first: int, last: int) -> tuple[int, int]:
    """The least and the largest of at least one element; numpy's functions take several times as long to compile."""
    least = most = x[first]
    for i in range(first + 1, last):
        least, most = min(least, x[i]), max(most, x[i])
    return least, most


@inner
def _find_items(firsts: np.ndarray, enough: int, geometry: Geometry) -> np.ndarray:
    """Work items of parts of the tokens: a kv head each, or all kv heads of tokens too few for one to fill a tile.

    The kv heads of a block lie side by side, and longer reads are faster. An item has all kv heads only where there are
    `enough` parts to share out among threads, and where its scratch memory stays in a core's cache.
    """
    heads, kv_heads = geometry.heads, geometry.kv_heads
    parts = len(firsts) - 1
    items, count = np.empty((parts * kv_heads, 3), np.int64), 0
    for part in range(parts):
        rows = firsts[part + 1] - firsts[part]
        few = rows * (heads // kv_heads) <= MR and rows * heads <= _MAX_TOGETHER
        together = kv_heads if few and parts >= enough else 1
        for kv_head in range(0, kv_heads, together):
            items[count, 0], items[count, 1], items[count, 2] = part, kv_head, together
            count += 1
    return items[:count]


@inner
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

    Rows with a negative block have given it up: it is behind the windows of all layers.
    Neighbouring rows that share a block are a run, even if some see less of the block than others, as earlier tokens of
    a sequence do. A block with the same runs as the block before, if all of that one is seen, prolongs its spans.
    """
    slab_stride, slots, block_size, _, kv_heads, head_dim, value_dim, _ = geometry
    rows = len(visible)
    longest = (extremes(visible, 0, rows)[1] + block_size - 1) // block_size
    runs, last = np.empty((rows, 3), np.int64), np.empty((rows, 3), np.int64)
    num_last = opened = 0
    # block        0   1   2   3
    # row 0      | A | B | C | D |     spans   0: rows 0 to 2, blocks 0 and 1 (A, B)
    # row 1      | A | B | E | F |             1: row 0, block 2 (C)     2: rows 1 and 2, block 2 (E)
    # row 2      | A | B | E |                 3: row 0, block 3 (D)     4: row 1, block 3 (F)
    for b in range(before, min(before + chunk, longest)):
        num_runs, r, prolongs = 0, 0, b > before
        while r < rows:
            start, seen = r, min(visible[r] - b * block_size, block_size)
            r += 1
            if seen <= 0:
                continue
            block = tables[sequences[start], b]
            if block < 0:
                continue
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
                    spans[span, 0], spans[span, 1] = runs[n, 0], runs[n, 1]
                    spans[span, 2], spans[span, 3] = b - before, 0
                spans[span, 4] = runs[n, 2]
                block = tables[sequences[runs[n, 0]], b]
                slab, slot = block // slots * slab_stride, block % slots * kv_heads * block_size
                places[0, span * chunk + spans[span, 3]] = slab + slot * head_dim
                places[1, span * chunk + spans[span, 3]] = slab + slot * value_dim
                spans[span, 3] += 1
        runs, last, num_last = last, runs, num_runs
    return found


def geometry_of(layer_kv: LayerKV, heads: int, query_stride: int) -> Geometry:
    """The layout of keys, values and queries, for `attend`."""
    _, slots, block_size, kv_heads, head_dim = layer_kv.keys.shape
    value_dim = layer_kv.values.shape[-1]
    return Geometry(layer_kv.keys.stride(0), slots, block_size, heads, kv_heads, head_dim, value_dim, query_stride)
