"""Sequences: token ids and block tables of one model, as rows of arrays so that a whole batch is read at once."""

from dataclasses import dataclass

import numpy as np

from espalier.engine.blocks import BlockPool
from espalier.engine.prefix_cache import chain_hashes


@dataclass(slots=True, eq=False)
class Sequence:
    """Handle of one sequence: a row of its model's `SequenceTable`, valid until released."""

    role: str
    row: int
    released: bool = False


class SequenceTable:
    """All live sequences of one model.

    Row `r` holds `lengths[r]` token ids, of which the first `computed[r]` have their KV in blocks; blocks cover exactly
    the computed tokens. Columns and rows grow by doubling.

    Attributes:
        tokens: int32 `[rows, columns]`.
        lengths: int32 `[rows]`.
        computed: int32 `[rows]`.
        blocks: int32 `[rows, columns / block_size]`, block ids in order.
        num_blocks: int32 `[rows]`.
        log_probabilities: float64 `[rows]`, summed over the tokens sampled in the current step.
    """

    def __init__(self, pool: BlockPool, rows: int = 64, columns: int = 256, cache_seed: bytes | None = None) -> None:
        """Make an empty table.

        Args:
            pool: where blocks come from.
            rows: sequences there is room for at first.
            columns: tokens of one sequence there is room for at first.
            cache_seed: what prefixes of this model are known by; None for no prefix cache.
        """
        self.pool = pool
        self._cache_seed = cache_seed
        self._unknown: dict[int, list[bytes]] = {}  # by row; hashes of a prompt whose blocks are not all known yet
        self.block_size = pool.layout.block_size
        self.tokens = np.zeros((rows, columns), dtype=np.int32)
        self.blocks = np.zeros((rows, -(-columns // self.block_size)), dtype=np.int32)
        self.lengths = np.zeros(rows, dtype=np.int32)
        self.computed = np.zeros(rows, dtype=np.int32)
        self.num_blocks = np.zeros(rows, dtype=np.int32)
        self.log_probabilities = np.zeros(rows, dtype=np.float64)
        self._free_rows = list(range(rows - 1, -1, -1))

    @property
    def live_sequences(self) -> int:
        """Sequences not yet released."""
        return len(self.lengths) - len(self._free_rows)

    def open(self, role: str, token_ids: list[int], salt: bytes = b"") -> Sequence:
        """A new sequence that holds `token_ids`; of these, only blocks that the prefix cache knows are computed.

        Args:
            role: whose sequence it is.
            token_ids: its tokens.
            salt: prefixes are shared with sequences of the same salt only.
        """
        row = self._take_row()
        self.lengths[row] = self.computed[row] = self.num_blocks[row] = 0
        sequence = Sequence(role, row)
        self.append(sequence, token_ids)
        if self._cache_seed is not None:
            hashes = chain_hashes(self._cache_seed + salt, token_ids, self.block_size)
            known = self.pool.match(hashes)
            self.blocks[row, : len(known)] = known
            self.num_blocks[row] = len(known)
            self.computed[row] = len(known) * self.block_size
            if len(known) < len(hashes):
                self._unknown[row] = hashes
        return sequence

    def register_prompt(self, row: int) -> None:
        """Make the full, computed blocks of an opened sequence known to the prefix cache."""
        if (hashes := self._unknown.get(row)) is None:
            return
        full = min(int(self.computed[row]) // self.block_size, len(hashes))
        for block, digest in zip(self.blocks[row, :full].tolist(), hashes, strict=False):
            self.pool.cache.register(block, digest)
        if full == len(hashes):
            del self._unknown[row]

    def append(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Add tokens at the end, to be computed later."""
        start = int(self.lengths[sequence.row])
        self.reserve_columns(start + len(token_ids))
        self.tokens[sequence.row, start : start + len(token_ids)] = token_ids
        self.lengths[sequence.row] += len(token_ids)

    def append_each(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Add one token to each of `rows`, int `[S]`, distinct."""
        lengths = self.lengths[rows]
        self.reserve_columns(int(lengths.max()) + 1)
        self.tokens[rows, lengths] = token_ids
        self.lengths[rows] = lengths + 1

    def fork(self, sequence: Sequence) -> Sequence:
        """A sequence with the same tokens that shares every block, the partial tail included."""
        source, row = sequence.row, self._take_row()
        length, blocks = self.lengths[source], self.num_blocks[source]
        self.tokens[row, :length] = self.tokens[source, :length]
        self.blocks[row, :blocks] = self.blocks[source, :blocks]
        self.lengths[row], self.computed[row], self.num_blocks[row] = length, self.computed[source], blocks
        self.pool.share(self.blocks[row, :blocks])
        return Sequence(sequence.role, row)

    def release(self, sequence: Sequence) -> None:
        """Drop the sequence's references; blocks that nobody else refers to become free."""
        assert not sequence.released, "the sequence is already released"
        sequence.released = True
        self._unknown.pop(sequence.row, None)
        # Tail first, so that blocks shared with others are reached last.
        self.pool.free(self.block_table(sequence)[::-1])
        self._free_rows.append(sequence.row)

    def token_ids(self, sequence: Sequence) -> list[int]:
        """The sequence's tokens."""
        return self.tokens[sequence.row, : self.lengths[sequence.row]].tolist()

    def block_table(self, sequence: Sequence) -> np.ndarray:
        """The sequence's block ids, int32 `[num_blocks]`, a view."""
        return self.blocks[sequence.row, : self.num_blocks[sequence.row]]

    def live_block_tables(self) -> list[np.ndarray]:
        """Block tables of every live sequence."""
        free = set(self._free_rows)
        return [self.blocks[r, : self.num_blocks[r]] for r in range(len(self.lengths)) if r not in free]

    def prepare_write(self, rows: np.ndarray, counts: np.ndarray) -> tuple[list[int], list[int]]:
        """Make each row own the blocks that its next `counts` tokens go to.

        A partial tail that others share is replaced by a fresh block, to be filled by copying; full blocks are never
        touched. `computed` is left for the caller to advance.

        Args:
            rows: int `[S]`, distinct.
            counts: int `[S]`, tokens about to be computed.

        Returns:
            Block ids to copy from, and the block ids to copy them to. The caller copies before anything is written.

        Raises:
            PoolExhaustedError: when there are not enough blocks for all rows; nothing is changed then.
        """
        size = self.block_size
        computed = self.computed[rows]
        tails = self.blocks[rows, np.maximum(self.num_blocks[rows] - 1, 0)]
        shared = (computed % size != 0) & (self.pool.ref_counts[tails] > 1)
        needed = -(-(computed + counts) // size) - self.num_blocks[rows]
        self.reserve_columns(int((computed + counts).max(initial=0)))
        self.pool.require(int(shared.sum() + needed.clip(min=0).sum()))
        sources, destinations = [], []
        for i in np.flatnonzero(shared):
            # Counts drop as owners leave: the last one keeps the block without a copy.
            if self.pool.ref_counts[tails[i]] > 1:
                fresh = self.pool.allocate()
                self.blocks[rows[i], self.num_blocks[rows[i]] - 1] = fresh
                sources.append(int(tails[i]))
                destinations.append(fresh)
                self.pool.free([int(tails[i])])
        for i in np.flatnonzero(needed > 0):
            row = rows[i]
            for _ in range(needed[i]):
                self.blocks[row, self.num_blocks[row]] = self.pool.allocate()
                self.num_blocks[row] += 1
        return sources, destinations

    def reserve_columns(self, columns: int) -> None:
        """Make room for rows of `columns` tokens."""
        have = self.tokens.shape[1]
        if columns <= have:
            return
        width = max(columns, 2 * have)
        self.tokens = _grown(self.tokens, (len(self.lengths), width))
        self.blocks = _grown(self.blocks, (len(self.lengths), -(-width // self.block_size)))

    def _take_row(self) -> int:
        if not self._free_rows:
            rows = len(self.lengths)
            self.tokens = _grown(self.tokens, (2 * rows, self.tokens.shape[1]))
            self.blocks = _grown(self.blocks, (2 * rows, self.blocks.shape[1]))
            for name in ("lengths", "computed", "num_blocks", "log_probabilities"):
                setattr(self, name, _grown(getattr(self, name), (2 * rows,)))
            self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
        return self._free_rows.pop()


def _grown(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    bigger = np.zeros(shape, dtype=array.dtype)
    bigger[tuple(slice(0, n) for n in array.shape)] = array
    return bigger
