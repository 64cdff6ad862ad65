"""Block tables: token ids and KV blocks of one model's sequences, as rows of arrays so that a batch is read at once."""

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from espalier.engine.memory.blocks import BlockPool


class BlockTables:
    """Rows of token ids, and of the blocks that hold their KV.

    Row `r` holds `lengths[r]` token ids, of which the first `computed[r]` have their KV in blocks, in each of the
    model's KV groups; blocks cover exactly the computed tokens. In a group with a window, blocks wholly behind it are
    given up, and their entries are -1. Of recurrent states a row has one, that after its `computed` tokens, where its
    last block would be; it goes on from there, and back to nothing but a state that is cached. Columns and rows grow by
    doubling.

    Attributes:
        tokens: int32 `[rows, columns]`.
        lengths: int32 `[rows]`.
        computed: int32 `[rows]`.
        pools: of each KV group, where its blocks come from, and then of the states of a model that has any; all have
            one block size.
        states: place of the states' pool in `pools`; None for a model without.
        blocks: int32 `[groups, rows, columns / block_size]`, block ids in order.
        num_blocks: int32 `[rows]`, entries of each block table.
        passed_blocks: int32 `[groups, rows]`, how many of these, the first ones, are behind the group's window.
        log_probabilities: float32 `[rows, columns]`, of the tokens sampled in the current step.
    """

    def __init__(self, pools: Sequence[BlockPool], rows: int, columns: int) -> None:
        """Make empty tables with room for `rows` sequences of `columns` tokens; `pools` are those of the class."""
        self.pools = tuple(pools)
        self.states = len(pools) - 1 if pools[-1].holds_states else None
        self.block_size = pools[0].layout.block_size
        self.tokens = np.zeros((rows, columns), dtype=np.int32)
        self.blocks = np.zeros((len(pools), rows, -(-columns // self.block_size)), dtype=np.int32)
        self.lengths = np.zeros(rows, dtype=np.int32)
        self.computed = np.zeros(rows, dtype=np.int32)
        self.num_blocks = np.zeros(rows, dtype=np.int32)
        self.passed_blocks = np.zeros((len(pools), rows), dtype=np.int32)
        self.log_probabilities = np.zeros((rows, columns), dtype=np.float32)
        self._free_rows = list(range(rows - 1, -1, -1))

    def missing(self, row: int) -> int:
        """Number of tokens of a row without KV."""
        return int(self.lengths[row] - self.computed[row])

    def held(self, row: int, group: int = 0) -> np.ndarray:
        """The block ids that a row holds in a KV group, int32 `[num_blocks - passed_blocks]`, a view."""
        return self.blocks[group, row, self.passed_blocks[group, row] : self.num_blocks[row]]

    def by_group(self, row: int) -> Iterable[tuple[BlockPool, np.ndarray, int]]:
        """Of each KV group: its pool, the row's block table, and how many of its first blocks are passed."""
        return zip(self.pools, self.blocks[:, row], self.passed_blocks[:, row], strict=True)

    def write_tokens(self, rows: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        """Set the token at one position of each of `rows`, int `[S]`, distinct; that may be the end, where it is added.

        What is put for a token that is not known yet is negative, and put again later.
        """
        self.reserve_columns(int(positions.max()) + 1)
        self.tokens[rows, positions] = token_ids
        self.lengths[rows] = np.maximum(self.lengths[rows], positions + 1)

    def hold(self, row: int, taken: Sequence[list[int]], count: int, computed: int) -> None:
        """Let a row that holds nothing have `computed` tokens in `count` blocks; `taken` are those of each group."""
        self.num_blocks[row], self.computed[row] = count, computed
        for group, blocks in enumerate(taken):
            passed = self.passed_blocks[group, row] = count - len(blocks)
            self.blocks[group, row, :passed] = -1
            self.blocks[group, row, passed:count] = blocks

    def free_beyond(self, row: int) -> None:
        """Free the blocks that `prepare_write` took for more tokens than are computed: those were not the row's."""
        blocks = -(-int(self.computed[row]) // self.block_size)
        for pool, table in zip(self.pools, self.blocks[:, row], strict=True):
            pool.free(table[blocks : self.num_blocks[row]][::-1])
        self.num_blocks[row] = blocks

    def free_passed(self, rows: np.ndarray) -> None:
        """Drop the references of `rows`, int `[S]`, to blocks behind the window of all that they go on with."""
        for pool, blocks, passed_blocks in zip(self.pools, self.blocks, self.passed_blocks, strict=True):
            if pool.window is None:
                continue
            passed = pool.blocks_passed(self.computed[rows])
            for i in np.flatnonzero(passed > passed_blocks[rows]):
                gone = blocks[rows[i], passed_blocks[rows[i]] : passed[i]]
                pool.free(gone)
                gone[:] = -1
                passed_blocks[rows[i]] = passed[i]

    def blocks_needed(self, rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The most blocks of each KV group that `prepare_write` would take, int `[groups]`; same arguments."""
        _, shared, needed = self._writes(rows, counts)
        return self._blocks_to_allocate(rows, counts, shared, needed)

    def has_room(self, blocks: np.ndarray) -> bool:
        """True if so many blocks of each KV group, int `[groups]`, can be allocated now."""
        opened = sum(pool.slabs_to_open(count) for pool, count in zip(self.pools, blocks.tolist(), strict=True))
        return opened <= self.pools[0].kv_pool.available_slabs

    def require(self, blocks: np.ndarray, owners: frozenset[Hashable] = frozenset()) -> None:
        """Check that there is room for so many blocks of each KV group, int `[groups]`.

        Raises:
            PoolExhaustedError: when there is none; it names `owners`.
        """
        if not self.has_room(blocks):
            available = self.pools[0].kv_pool.available_slabs
            for pool, count in zip(self.pools, blocks.tolist(), strict=True):
                pool.require(count, available, owners)
                available -= pool.slabs_to_open(count)

    def prepare_write(self, rows: np.ndarray, counts: np.ndarray) -> list[tuple[list[int], list[int]]]:
        """Make each row own the blocks that its next `counts` tokens go to.

        A partial tail that others share is replaced by a fresh block, to be filled by copying; full blocks are never
        touched. A state moves on with its row, unless others share it, or the prefix cache keeps it behind a full
        block: then it is copied, too. `computed` is left for the caller to advance.

        Args:
            rows: int `[S]`, distinct.
            counts: int `[S]`, tokens about to be computed for the first time.

        Returns:
            Of each KV group, block ids to copy from, and the block ids to copy them to. The caller copies before
            anything is written.

        Raises:
            PoolExhaustedError: when there are not enough blocks for all rows; then nothing has changed.
        """
        # blocks of a row   | -1, passed | full, shared | tail     | fresh ......... | fresh .......... |
        # positions         0                      computed ^                    computed + counts ^
        # Before `computed` nothing is written; a tail that others share is copied, the blocks after it are new.
        copies: list[tuple[list[int], list[int]]] = [([], []) for _ in self.pools]
        tails, shared, needed = self._writes(rows, counts)
        if not (shared.any() or needed.any()):
            self._forget_tails(rows, counts)
            return copies
        self.require(self._blocks_to_allocate(rows, counts, shared, needed))
        self.reserve_columns(int((self.computed[rows] + counts).max()))
        growing = np.flatnonzero(needed)
        for group, pool in enumerate(self.pools):
            table, (sources, destinations) = self.blocks[group], copies[group]
            if group == self.states:
                self._move_states(rows, needed, shared[group], copies[group])
                continue
            for i in np.flatnonzero(shared[group]):
                # Counts drop as rows of this loop leave the block: the last one keeps it without a copy.
                if pool.ref_counts[tail := int(tails[group, i])] > 1:
                    fresh = pool.allocate()
                    table[rows[i], self.num_blocks[rows[i]] - 1] = fresh
                    sources.append(tail)
                    destinations.append(fresh)
                    pool.free([tail])
            for i in growing:
                end = self.num_blocks[rows[i]]
                for column in range(end, end + needed[i]):
                    table[rows[i], column] = pool.allocate()
        self._forget_tails(rows, counts)
        self.num_blocks[rows] += needed
        return copies

    def reserve_columns(self, columns: int) -> None:
        """Make room for rows of `columns` tokens."""
        if columns > (have := self.tokens.shape[1]):
            self._grow(len(self.lengths), max(columns, 2 * have))

    def sees_back_to(self, row: int, computed: int) -> bool:
        """True if a row still has the blocks that the token after `computed` ones sees."""
        return all(
            self.passed_blocks[group, row] <= pool.blocks_passed(np.array(computed + 1))
            for group, pool in enumerate(self.pools)
            if pool.window is not None
        )

    def _writes(self, rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each row's last block, whether it is shared and written to, and how many new blocks follow it.

        A block of KV is written to while it is partial, a state always. The first two are `[groups, S]`, the last one
        is `[S]`.
        """
        computed, size = self.computed[rows], self.block_size
        tails = self.blocks[:, rows, np.maximum(self.num_blocks[rows] - 1, 0)]
        partial = (counts > 0) & (computed % size != 0)
        shared = [partial & (pool.ref_counts[tail] > 1) for pool, tail in zip(self.pools, tails, strict=True)]
        if (states := self.states) is not None:
            going_on = (counts > 0) & (self.num_blocks[rows] > 0)
            shared[states] = going_on & (self.pools[states].ref_counts[tails[states]] > 1)
        needed = -(-(computed + counts) // size) - self.num_blocks[rows]
        return tails, np.array(shared), np.maximum(needed, 0)  # several times faster than `clip`

    def _blocks_to_allocate(
        self, rows: np.ndarray, counts: np.ndarray, shared: np.ndarray, needed: np.ndarray
    ) -> np.ndarray:
        """The most blocks of each KV group, int `[groups]`; the last two arguments are of `_writes`."""
        blocks = shared.sum(axis=1) + needed.sum()
        if self.states is not None:  # a row has one, however far it goes
            begun = (counts > 0) & (self.num_blocks[rows] == 0)
            blocks[self.states] = shared[self.states].sum() + begun.sum()
        return blocks

    def _forget_tails(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """Take tails that rows are about to write to out of the cache; same arguments as `prepare_write`."""
        going_on = rows[(counts > 0) & (self.num_blocks[rows] > 0)]
        for group, pool in enumerate(self.pools):
            if not pool.cache.has_tails:
                continue
            written = going_on if group == self.states else going_on[self.computed[going_on] % self.block_size != 0]
            for block in self.blocks[group, written, self.num_blocks[written] - 1].tolist():
                if pool.cache.is_tail(block):
                    pool.cache.forget(block)

    def _move_states(
        self, rows: np.ndarray, needed: np.ndarray, shared: np.ndarray, copies: tuple[list[int], list[int]]
    ) -> None:
        """Give each row a state of its own, in the place of the last block that it is about to have.

        Args:
            rows: int `[S]`.
            needed: int `[S]`, new blocks of each.
            shared: bool `[S]`, rows that write to a state which others share.
            copies: added to.
        """
        assert self.states is not None
        pool, table = self.pools[self.states], self.blocks[self.states]
        passed_blocks = self.passed_blocks[self.states]
        for i in np.flatnonzero(shared | (needed > 0)):
            row, count = rows[i], int(self.num_blocks[rows[i]])
            state = int(table[row, count - 1]) if count else pool.allocate()
            known = state in pool.cache
            # Counts drop as rows of this loop leave a state: the last keeps it without a copy, unless the cache does.
            kept = known and not pool.cache.is_tail(state) and pool.enable_prefix_cache
            if count and (pool.ref_counts[state] > 1 or (kept and pool.has_spare_block)):
                fresh = pool.allocate()
                copies[0].append(state)
                copies[1].append(fresh)
                pool.free([state])
                state = fresh
            elif known:
                pool.cache.forget(state)
            last = count + int(needed[i]) - 1
            table[row, max(count - 1, 0) : last] = -1
            table[row, last], passed_blocks[row] = state, last

    def _share(self, source: int, row: int, length: int, computed: int) -> None:
        """Let a row have the first `length` tokens of another, and its blocks of the first `computed`."""
        blocks = -(-computed // self.block_size)
        self.tokens[row, :length] = self.tokens[source, :length]
        self.blocks[:, row, :blocks] = self.blocks[:, source, :blocks]
        self.lengths[row], self.computed[row], self.num_blocks[row] = length, computed, blocks
        self.passed_blocks[:, row] = self.passed_blocks[:, source] if computed else 0
        for group, pool in enumerate(self.pools):
            pool.share(self.held(row, group))

    def _free_all(self, row: int) -> None:
        """Free a row's blocks, the tail first, so that those shared with others are reached last."""
        for group, pool in enumerate(self.pools):
            pool.free(self.held(row, group)[::-1])

    def _clear_blocks(self, row: int) -> None:
        self.computed[row] = self.num_blocks[row] = self.passed_blocks[:, row] = 0

    def _require_window(self, row: int, computed: int) -> None:
        assert self.sees_back_to(row, computed), f"a sequence goes back to {computed} tokens, whose window is gone"

    def _take_row(self) -> int:
        if not self._free_rows:
            rows = len(self.lengths)
            self._grow(2 * rows, self.tokens.shape[1])
            self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
        return self._free_rows.pop()

    def _grow(self, rows: int, columns: int) -> None:
        self.tokens = _grown(self.tokens, (rows, columns))
        self.log_probabilities = _grown(self.log_probabilities, (rows, columns))
        groups = len(self.pools)
        self.blocks = _grown(self.blocks, (groups, rows, -(-columns // self.block_size)))
        self.passed_blocks = _grown(self.passed_blocks, (groups, rows))
        for name in ("lengths", "computed", "num_blocks"):
            setattr(self, name, _grown(getattr(self, name), (rows,)))


def _grown(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    bigger = np.zeros(shape, dtype=array.dtype)
    bigger[tuple(slice(0, n) for n in array.shape)] = array
    return bigger
