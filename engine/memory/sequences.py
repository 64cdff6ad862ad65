"""Sequences: token ids and block tables of one model, as rows of arrays so that a whole batch is read at once."""

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from espalier.engine.errors import MisuseError
from espalier.engine.memory.blocks import BlockPool
from espalier.engine.memory.prefix_cache import chain_hashes


@dataclass(slots=True, eq=False)
class KVSequence:
    """Handle of one sequence: a row of its model's `SequenceTable`, valid until released.

    A fork has the owner of the sequence that it was forked from.
    """

    role: str
    row: int
    owner: Hashable = None
    released: bool = False


class SequenceTable:
    """All live sequences of one model.

    Row `r` holds `lengths[r]` token ids, of which the first `computed[r]` have their KV in blocks; blocks cover exactly
    the computed tokens. Where all layers have a window, blocks wholly behind it are given up, and their entries are -1.
    Columns and rows grow by doubling.

    Attributes:
        tokens: int32 `[rows, columns]`.
        lengths: int32 `[rows]`.
        computed: int32 `[rows]`.
        blocks: int32 `[rows, columns / block_size]`, block ids in order.
        num_blocks: int32 `[rows]`, entries of each block table.
        passed_blocks: int32 `[rows]`, how many of these, the first ones, are behind the window.
        log_probabilities: float32 `[rows, columns]`, of the tokens sampled in the current step.
    """

    def __init__(self, pool: BlockPool, rows: int = 64, columns: int = 256, cache_seed: bytes = b"") -> None:
        """Make an empty table.

        Args:
            pool: where blocks come from.
            rows: sequences there is room for at first.
            columns: tokens of one sequence there is room for at first.
            cache_seed: hashed into every prefix of this model.
        """
        self.pool = pool
        self._cache_seed = cache_seed
        self._seeds: dict[int, bytes] = {}  # by row; hashed into its prefixes
        self._unhashed: dict[int, list[bytes]] = {}  # by row; hashes of its blocks while the prefix cache lacks some
        self._preempted: set[int] = set()  # rows whose KV was freed and not looked up in the cache since
        self._of_owner: dict[Hashable, dict[KVSequence, None]] = {}  # in order of arrival
        self.block_size = pool.layout.block_size
        self.tokens = np.zeros((rows, columns), dtype=np.int32)
        self.blocks = np.zeros((rows, -(-columns // self.block_size)), dtype=np.int32)
        self.lengths = np.zeros(rows, dtype=np.int32)
        self.computed = np.zeros(rows, dtype=np.int32)
        self.num_blocks = np.zeros(rows, dtype=np.int32)
        self.passed_blocks = np.zeros(rows, dtype=np.int32)
        self.log_probabilities = np.zeros((rows, columns), dtype=np.float32)
        self._free_rows = list(range(rows - 1, -1, -1))

    @property
    def live_sequences(self) -> int:
        """Sequences not yet released."""
        return len(self.lengths) - len(self._free_rows)

    def missing(self, row: int) -> int:
        """Number of tokens of a row without KV."""
        return int(self.lengths[row] - self.computed[row])

    def computed_tokens(self) -> int:
        """Number of tokens of all live sequences with KV in blocks; shared ones count for each sequence."""
        held = self.computed - self.passed_blocks * self.block_size
        return sum(int(held[sequence.row]) for owned in self._of_owner.values() for sequence in owned)

    def open(self, role: str, token_ids: list[int], salt: bytes = b"", owner: Hashable = None) -> KVSequence:
        """A new sequence that holds `token_ids`, of which only blocks from the prefix cache count as computed.

        Args:
            role: the model's role.
            token_ids: its tokens.
            salt: prefixes are shared with sequences of the same salt only.
            owner: see `KVSequence`.
        """
        row = self._take_row()
        self.lengths[row] = 0
        self._clear_blocks(row)
        sequence = self._own(KVSequence(role, row, owner), self._cache_seed + salt)
        self.append(sequence, token_ids)
        if self.pool.enable_prefix_cache:
            self.pool.lookups += len(token_ids) // self.block_size
            self._take_cached(row, len(token_ids))
        return sequence

    def register(self, row: int, computed: int) -> None:
        """Enter the full blocks of a prompt, or of a sequence computed again, into the prefix cache.

        Args:
            row: any row; one whose blocks are all in the cache is left as it is.
            computed: tokens whose KV is in the row's blocks once the step that is being prepared has run: sequences
                of the same step may share them, as every layer writes before it reads.
        """
        if (hashes := self._unhashed.get(row)) is None:
            return
        full = min(computed // self.block_size, len(hashes))
        passed = int(self.passed_blocks[row])
        for block, digest in zip(self.blocks[row, passed:full].tolist(), hashes[passed:], strict=False):
            self.pool.cache.register(block, digest)
        if full == len(hashes):
            del self._unhashed[row]

    def is_unmatched(self, row: int) -> bool:
        """True if `match_prefix` or `register` has something to do for a row."""
        return row in self._unhashed or row in self._preempted

    def drop_kv(self, owner: Hashable) -> None:
        """Free all KV of an owner's sequences, which keep their tokens, so that it can be computed again."""
        for sequence in self._of_owner.get(owner, ()):
            self.pool.free(self.block_table(sequence)[::-1])
            self._clear_blocks(sequence.row)
            self._unhashed.pop(sequence.row, None)
            self._preempted.add(sequence.row)

    def drop_all(self) -> None:
        """Free all KV and forget its hashes, for a step failed and what its blocks hold is not certain."""
        for owner in list(self._of_owner):
            for sequence in self._of_owner[owner]:
                for block in self.block_table(sequence).tolist():
                    if block in self.pool.cache:
                        self.pool.cache.forget(block)
            self.drop_kv(owner)

    def match_prefix(self, row: int, most: int) -> None:
        """Look a row without computed tokens up in the prefix cache, and share the blocks found there.

        Args:
            row: any row; one with computed tokens is left as it is.
            most: tokens that may come from the cache; later ones are computed even if the cache has them.
        """
        fresh = self.pool.enable_prefix_cache and row in self._unhashed and not self.num_blocks[row]
        if row in self._preempted:
            self._preempted.discard(row)
            self.pool.lookups += most // self.block_size
        elif not fresh:  # a fresh one was counted by `open`
            return
        self._take_cached(row, most)

    def blocks_of(self, owner: Hashable) -> int:
        """Blocks that an owner's sequences hold, shared ones counted once."""
        tables = [self.block_table(sequence) for sequence in self._of_owner.get(owner, ())]
        return len(np.unique(np.concatenate(tables))) if tables else 0

    def of_owner(self, owner: Hashable) -> list[KVSequence]:
        """An owner's live sequences."""
        return list(self._of_owner.get(owner, ()))

    def require_live(self, sequence: KVSequence) -> None:
        """Raise MisuseError unless `sequence` is one of this table's that was not released."""
        if sequence in self._of_owner.get(sequence.owner, ()):
            return
        raise MisuseError(
            f"a {sequence.role} sequence was already released"
            if sequence.released
            else f"a {sequence.role} sequence belongs to another engine"
        )

    def owners(self) -> set[Hashable]:
        """Owners with live sequences."""
        return set(self._of_owner)

    def _own(self, sequence: KVSequence, seed: bytes) -> KVSequence:
        self._seeds[sequence.row] = seed
        self._of_owner.setdefault(sequence.owner, {})[sequence] = None
        return sequence

    def _take_cached(self, row: int, most: int) -> None:
        token_ids = self.tokens[row, : self.lengths[row]]
        hashes = chain_hashes(self._seeds[row], token_ids, self.block_size)
        known = self.pool.match(hashes[: most // self.block_size])
        self.blocks[row, : len(known)] = known
        self.num_blocks[row], self.passed_blocks[row] = len(known), known.count(-1)
        self.computed[row] = len(known) * self.block_size
        if len(known) < len(hashes):
            self._unhashed[row] = hashes

    def append(self, sequence: KVSequence, token_ids: list[int]) -> None:
        """Add tokens at the end, to be computed later."""
        start = int(self.lengths[sequence.row])
        self.reserve_columns(start + len(token_ids))
        self.tokens[sequence.row, start : start + len(token_ids)] = token_ids
        self.lengths[sequence.row] += len(token_ids)

    def write_tokens(self, rows: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        """Set the token at one position of each of `rows`, int `[S]`, distinct; that may be the end, where it is added.

        What is put for a token that is not known yet is negative, and put again later.
        """
        self.reserve_columns(int(positions.max()) + 1)
        self.tokens[rows, positions] = token_ids
        self.lengths[rows] = np.maximum(self.lengths[rows], positions + 1)

    def truncate(self, row: int, length: int) -> None:
        """Drop the tokens from `length` on; the last one left counts as not computed."""
        self.lengths[row] = length
        self.computed[row] = computed = min(int(self.computed[row]), length - 1)
        self._require_window(row, computed)
        blocks = -(-computed // self.block_size)
        self.pool.free(self.blocks[row, blocks : self.num_blocks[row]][::-1])
        self.num_blocks[row] = blocks

    def fork(self, sequence: KVSequence, length: int | None = None) -> KVSequence:
        """A sequence with the same tokens, or the first `length`; it shares every block, the partial tail included.

        With a window, `length` is at most one token less than what is computed: further back its blocks may be gone.
        """
        source, row = sequence.row, self._take_row()
        length = int(self.lengths[source]) if length is None else length
        computed = min(int(self.computed[source]), length)
        self._require_window(source, computed)
        blocks = -(-computed // self.block_size)
        self.tokens[row, :length] = self.tokens[source, :length]
        self.blocks[row, :blocks] = self.blocks[source, :blocks]
        self.lengths[row], self.computed[row], self.num_blocks[row] = length, computed, blocks
        self.passed_blocks[row] = self.passed_blocks[source]
        child = self._own(KVSequence(sequence.role, row, sequence.owner), self._seeds[source])
        self.pool.share(self.block_table(child))
        if source in self._preempted:
            self._preempted.add(row)
        return child

    def free_passed(self, rows: np.ndarray) -> None:
        """Drop the references of `rows`, int `[S]`, to blocks behind the window of all that they go on with."""
        if self.pool.window is None:
            return
        passed = self.pool.blocks_passed(self.computed[rows])
        for i in np.flatnonzero(passed > self.passed_blocks[rows]):
            gone = self.blocks[rows[i], self.passed_blocks[rows[i]] : passed[i]]
            self.pool.free(gone)
            gone[:] = -1
            self.passed_blocks[rows[i]] = passed[i]

    def release(self, sequence: KVSequence) -> None:
        """Drop the references of a sequence; blocks without others become free or cached."""
        sequence.released = True
        self._unhashed.pop(sequence.row, None)
        self._preempted.discard(sequence.row)
        siblings = self._of_owner[sequence.owner]
        del siblings[sequence]
        if not siblings:
            del self._of_owner[sequence.owner]
        # Tail first, so that blocks shared with others are reached last.
        self.pool.free(self.block_table(sequence)[::-1])
        self._free_rows.append(sequence.row)

    def token_ids(self, sequence: KVSequence) -> list[int]:
        """The sequence's tokens."""
        return self.tokens[sequence.row, : self.lengths[sequence.row]].tolist()

    def block_table(self, sequence: KVSequence) -> np.ndarray:
        """The block ids that the sequence holds, int32 `[num_blocks - passed_blocks]`, a view."""
        return self.blocks[sequence.row, self.passed_blocks[sequence.row] : self.num_blocks[sequence.row]]

    def live_block_tables(self) -> list[np.ndarray]:
        """Block tables of every live sequence."""
        return [self.block_table(sequence) for owned in self._of_owner.values() for sequence in owned]

    def blocks_needed(self, rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The most blocks that `prepare_write` would take for each row, int `[S]`; same arguments."""
        _, shared, needed = self._writes(rows, counts)
        return shared + needed

    def _writes(self, rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each row's last block, whether it is partial and shared, and how many new blocks follow it; each `[S]`."""
        computed, size = self.computed[rows], self.block_size
        tails = self.blocks[rows, np.maximum(self.num_blocks[rows] - 1, 0)]
        shared = (counts > 0) & (computed % size != 0) & (self.pool.ref_counts[tails] > 1)
        needed = -(-(computed + counts) // size) - self.num_blocks[rows]
        return tails, shared, np.maximum(needed, 0)  # several times faster than `clip`

    def prepare_write(self, rows: np.ndarray, counts: np.ndarray) -> tuple[list[int], list[int]]:
        """Make each row own the blocks that its next `counts` tokens go to.

        A partial tail that others share is replaced by a fresh block, to be filled by copying; full blocks are never
        touched. `computed` is left for the caller to advance.

        Args:
            rows: int `[S]`, distinct.
            counts: int `[S]`, tokens about to be computed for the first time.

        Returns:
            Block ids to copy from, and the block ids to copy them to. The caller copies before anything is written.

        Raises:
            PoolExhaustedError: when there are not enough blocks for all rows; then nothing has changed.
        """
        # blocks of a row   | -1, passed | full, shared | tail     | fresh ......... | fresh .......... |
        # positions         0                      computed ^                    computed + counts ^
        # Before `computed` nothing is written; a tail that others share is copied, the blocks after it are new.
        sources, destinations = [], []
        tails, shared, needed = self._writes(rows, counts)
        if not (blocks := int(shared.sum() + needed.sum())):
            return sources, destinations
        self.pool.require(blocks)
        self.reserve_columns(int((self.computed[rows] + counts).max()))
        for i in np.flatnonzero(shared):
            # Counts drop as rows of this loop leave the block: the last one keeps it without a copy.
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
        if columns > (have := self.tokens.shape[1]):
            self._grow(len(self.lengths), max(columns, 2 * have))

    def _take_row(self) -> int:
        if not self._free_rows:
            rows = len(self.lengths)
            self._grow(2 * rows, self.tokens.shape[1])
            self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
        return self._free_rows.pop()

    def _grow(self, rows: int, columns: int) -> None:
        self.tokens = _grown(self.tokens, (rows, columns))
        self.log_probabilities = _grown(self.log_probabilities, (rows, columns))
        self.blocks = _grown(self.blocks, (rows, -(-columns // self.block_size)))
        for name in ("lengths", "computed", "num_blocks", "passed_blocks"):
            setattr(self, name, _grown(getattr(self, name), (rows,)))

    def _clear_blocks(self, row: int) -> None:
        self.computed[row] = self.num_blocks[row] = self.passed_blocks[row] = 0

    def _require_window(self, row: int, computed: int) -> None:
        """Check that a row still has the blocks that the token after `computed` ones sees."""
        needed = self.pool.blocks_passed(np.array(computed + 1))
        assert self.passed_blocks[row] <= needed, f"a sequence goes back to {computed} tokens, whose window is gone"


def _grown(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    bigger = np.zeros(shape, dtype=array.dtype)
    bigger[tuple(slice(0, n) for n in array.shape)] = array
    return bigger
