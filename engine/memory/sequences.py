"""Sequences: token ids and block tables of one model, as rows of arrays so that a whole batch is read at once."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from espalier.engine.errors import MisuseError
from espalier.engine.memory.blocks import BlockPool
from espalier.engine.memory.prefix_cache import chain_hashes, chain_start


class _Tail(NamedTuple):
    """A cached block that is not full, and those before it.

    Attributes:
        hashes: of all these blocks, the tail's last.
        computed: tokens in them.
    """

    hashes: tuple[bytes, ...]
    computed: int

    def passed(self, pool: BlockPool) -> int:
        """Number of leading blocks of a group behind the window of all that comes after the tail."""
        return int(pool.blocks_passed(np.array(self.computed)))


@dataclass(slots=True, eq=False)
class KVSequence:
    """Handle of one sequence: a row of its model's `SequenceTable`, valid until released.

    A fork has the owner of the sequence that it was forked from.
    """

    role: str
    row: int
    owner: Hashable = None
    released: bool = False


class Follower(Protocol):
    """Has something of its own for some sequences of a table, and for their forks."""

    def forked(self, sequence: KVSequence, child: KVSequence) -> None:
        """Take note of a fork."""
        ...

    def released(self, sequence: KVSequence) -> None:
        """Take note of a release."""
        ...


class SequenceTable:
    """All live sequences of one model.

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
        cache_lookups: full blocks of prompts that might have been in the prefix cache, each once.
        cache_hits: those that were.
        log_probabilities: float32 `[rows, columns]`, of the tokens sampled in the current step.
    """

    def __init__(self, pools: Sequence[BlockPool], rows: int = 64, columns: int = 256, cache_seed: bytes = b"") -> None:
        """Make an empty table.

        Args:
            pools: of each KV group, and then of states.
            rows: sequences there is room for at first.
            columns: tokens of one sequence there is room for at first.
            cache_seed: hashed into every prefix of this model.
        """
        self.pools = tuple(pools)
        self.states = len(pools) - 1 if pools[-1].holds_states else None
        self.cache_lookups = self.cache_hits = 0
        self._cache_seed = cache_seed
        self._seeds: dict[int, bytes] = {}  # by row; hashed into its prefixes
        self._unhashed: dict[int, list[bytes]] = {}  # by row; hashes of its blocks while the prefix cache lacks some
        self._stops: dict[int, list[int]] = {}  # by row; full blocks after which its state is kept in the cache
        self._promised: set[bytes] = set()  # hashes of the states that rows of the step being planned go on to
        self._preempted: set[int] = set()  # rows whose KV was freed and not looked up in the cache since
        self._of_owner: dict[Hashable, dict[KVSequence, None]] = {}  # in order of arrival
        self._follower: Follower | None = None
        self.block_size = pools[0].layout.block_size
        self.tokens = np.zeros((rows, columns), dtype=np.int32)
        self.blocks = np.zeros((len(pools), rows, -(-columns // self.block_size)), dtype=np.int32)
        self.lengths = np.zeros(rows, dtype=np.int32)
        self.computed = np.zeros(rows, dtype=np.int32)
        self.num_blocks = np.zeros(rows, dtype=np.int32)
        self.passed_blocks = np.zeros((len(pools), rows), dtype=np.int32)
        self.log_probabilities = np.zeros((rows, columns), dtype=np.float32)
        self._free_rows = list(range(rows - 1, -1, -1))

    @property
    def live_sequences(self) -> int:
        """Sequences not yet released."""
        return len(self.lengths) - len(self._free_rows)

    def missing(self, row: int) -> int:
        """Number of tokens of a row without KV."""
        return int(self.lengths[row] - self.computed[row])

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
        if self._enable_prefix_cache:
            self.cache_lookups += len(token_ids) // self.block_size
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
        self._promised.update(hashes[stop - 1] for stop in self._stops.get(row, ())[:1])
        full = min(computed // self.block_size, len(hashes))
        for pool, blocks, passed in zip(self.pools, self.blocks[:, row], self.passed_blocks[:, row], strict=True):
            for block, digest in zip(blocks[passed:full].tolist(), hashes[passed:], strict=False):
                pool.cache.register(block, digest)
        if stops := [stop for stop in self._stops.pop(row, ()) if stop > full]:
            self._stops[row] = stops
        if full == len(hashes):
            del self._unhashed[row]

    def begin_step(self) -> None:
        """Note that a step is planned anew: the one before it has been launched."""
        self._promised.clear()

    def tokens_to_stop(self, row: int, count: int) -> int:
        """Number of a row's next `count` tokens that a step may compute: its state is to be cached behind them."""
        stops = self._stops.get(row)
        return min(count, stops[0] * self.block_size - int(self.computed[row])) if stops else count

    def is_unmatched(self, row: int) -> bool:
        """True if `match_prefix` or `register` has something to do for a row."""
        return row in self._unhashed or row in self._preempted

    def drop_kv(self, owner: Hashable) -> None:
        """Free all KV of an owner's sequences; see `drop_kv_of`."""
        self.drop_kv_of(self._of_owner.get(owner, ()))

    def drop_kv_of(self, sequences: Iterable[KVSequence]) -> None:
        """Free all KV of sequences, which keep their tokens, so that it can be computed again.

        What recurrent states need to go on stays in the prefix cache until its room is needed.
        """
        for sequence in sequences:
            self._keep_in_cache(sequence.row)
            self._drop(sequence.row)

    def _drop(self, row: int) -> None:
        self._free_all(row)
        self._forget_blocks(row)

    def _keep_in_cache(self, row: int, transient: bool = False) -> None:
        """Enter a row's state, and the blocks that it has computed up to there, into the prefix cache.

        Args:
            row: any row; one without a state is left as it is, and if `transient` one whose state others share.
            transient: whether their room is given up first.
        """
        if self.states is None or not self._enable_prefix_cache or not self.num_blocks[row]:
            return
        state = self.blocks[self.states, row, self.num_blocks[row] - 1]
        if transient and self.pools[self.states].ref_counts[state] > 1:
            return
        token_ids = self.tokens[row, : self.computed[row]]
        hashes = chain_hashes(self._seeds[row], token_ids, self.block_size)
        full, before = len(hashes), self._hash_before(row, hashes)
        tail = token_ids[full * self.block_size :].tobytes()
        for pool, blocks, passed in zip(self.pools, self.blocks[:, row], self.passed_blocks[:, row], strict=True):
            for block, digest in zip(blocks[passed:full].tolist(), hashes[passed:], strict=True):
                pool.cache.register(block, digest, transient)
            if tail:
                pool.cache.register_tail(int(blocks[full]), before, tail, transient)

    def _hash_before(self, row: int, hashes: Sequence[bytes]) -> bytes:
        """The hash of what comes before a block of a row, `hashes` those of all blocks before."""
        return hashes[-1] if hashes else chain_start(self._seeds[row])

    def _forget_blocks(self, row: int) -> None:
        """Let a row without blocks be computed again."""
        self._clear_blocks(row)
        self._unhashed.pop(row, None)
        self._stops.pop(row, None)
        self._preempted.add(row)

    def drop_all(self, cached: bool = False) -> None:
        """Free all KV and forget its hashes, for a step failed and what its blocks hold is not certain.

        Args:
            cached: whether blocks that no sequence refers to are not to be used again either.
        """
        for group, pool in enumerate(self.pools):
            for sequence in (sequence for owned in self._of_owner.values() for sequence in owned):
                for block in self.block_table(sequence, group).tolist():
                    if block in pool.cache:
                        pool.cache.forget(block)
        for sequence in (sequence for owned in self._of_owner.values() for sequence in owned):
            self._drop(sequence.row)
        for pool in self.pools:  # what the step wrote may be behind a window already, and in no block table any more
            while (cached or pool.window is not None) and pool.reclaim_idle_slab():
                pass

    def match_prefix(self, row: int, most: int) -> bool:
        """Look a row without computed tokens up in the prefix cache, and share the blocks found there.

        Args:
            row: any row; one with computed tokens is left as it is.
            most: tokens that may come from the cache; later ones are computed even if the cache has them.

        Returns:
            Whether the row can go on: not while another row of the step computes a state that it can go on from.
        """
        preempted = row in self._preempted
        fresh = self._enable_prefix_cache and row in self._unhashed and not self.num_blocks[row]
        if not preempted and not fresh:
            return True
        if not self._take_cached(row, most, self._fork_points(row) if preempted else []):
            return False
        if preempted:  # a fresh one was counted by `open`
            self._preempted.discard(row)
            self.cache_lookups += most // self.block_size
        return True

    def _fork_points(self, row: int) -> list[int]:
        """Full blocks that a row has in common with others of its owner, for each number of them."""
        if self.states is None or not self._enable_prefix_cache:
            return []
        siblings = next(owned for owned in self._of_owner.values() if any(each.row == row for each in owned))
        points = set[int]()
        for other in (each.row for each in siblings if each.row != row):
            length = min(self.lengths[row], self.lengths[other])
            differs = np.flatnonzero(self.tokens[row, :length] != self.tokens[other, :length])
            points.add(int(differs[0] if len(differs) else length) // self.block_size)
        return sorted(points - {0})

    def blocks_of(self, owner: Hashable, group: int = 0) -> int:
        """Blocks of a KV group that an owner's sequences hold, shared ones counted once; of one group if of any."""
        tables = [self.block_table(sequence, group) for sequence in self._of_owner.get(owner, ())]
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

    def followed_by(self, follower: Follower) -> None:
        """Let `follower` know of all forks and releases from now on."""
        self._follower = follower

    def seed_of(self, sequence: KVSequence) -> bytes:
        """Bytes that are equal for sequences of one salt alone."""
        return self._seeds[sequence.row]

    def _own(self, sequence: KVSequence, seed: bytes) -> KVSequence:
        self._seeds[sequence.row] = seed
        self._of_owner.setdefault(sequence.owner, {})[sequence] = None
        return sequence

    @property
    def _enable_prefix_cache(self) -> bool:
        return self.pools[0].enable_prefix_cache

    def _take_cached(self, row: int, most: int, fork_points: Sequence[int] = ()) -> bool:
        """Share the blocks of the longest beginning of a row that the caches of all groups know, as far as it is seen.

        It ends early at a block whose use would take a slab that is reserved by another model. The row's own state will
        be kept behind its last full block and at `fork_points`. Returns False, and shares nothing, where the row had
        better wait for a state that another row of the step computes.
        """
        token_ids = self.tokens[row, : self.lengths[row]]
        hashes = chain_hashes(self._seeds[row], token_ids, self.block_size)
        count = most // self.block_size
        taken: list[list[int]] = []
        if self.states is not None:
            if hashes:
                self._unhashed[row] = hashes
                at_open = (stop for stop in self._stops.get(row, ()) if stop < len(hashes))  # the prompt's end, for one
                self._stops[row] = sorted({*fork_points, *at_open, len(hashes)})
            known, tail = self._longest_known(hashes[:count]), self._longest_tail(row, hashes[:count], token_ids[:most])
            if tail is None or len(tail.hashes) <= known:
                tail, known = None, max(known - 1, 0)  # the last one that is known may be promised, too
            else:
                known = len(tail.hashes) - 1
            if not self._promised.isdisjoint(hashes[known:count]):
                return False
            if tail is not None and self._take_tail(row, tail):
                self._note_cached(row, hashes, len(tail.hashes) - 1)
                return True
        while count:
            # What one group knows need not be what another knows.
            count = self._longest_known(hashes[:count])
            passed = [int(pool.blocks_passed(np.array(count * self.block_size))) for pool in self.pools]
            taken = [pool.take(hashes[first:count]) for pool, first in zip(self.pools, passed, strict=True)]
            short = [len(blocks) < count - first for blocks, first in zip(taken, passed, strict=True)]
            if not any(short):
                break
            count = min(first + len(blocks) for blocks, first in zip(taken, passed, strict=True))
            for pool, blocks in zip(self.pools, taken, strict=True):
                pool.free(reversed(blocks))
        self._hold(row, taken if count else [], count, count * self.block_size)
        self._note_cached(row, hashes, count)
        return True

    def _hold(self, row: int, taken: Sequence[list[int]], count: int, computed: int) -> None:
        """Let a row that holds nothing have `computed` tokens in `count` blocks; `taken` are those of each group."""
        self.num_blocks[row], self.computed[row] = count, computed
        for group, blocks in enumerate(taken):
            passed = self.passed_blocks[group, row] = count - len(blocks)
            self.blocks[group, row, :passed] = -1
            self.blocks[group, row, passed:count] = blocks

    def _note_cached(self, row: int, hashes: list[bytes], count: int) -> None:
        """Note that a row's first `count` full blocks came from the cache, which may lack the others."""
        self.cache_hits += count
        if count < len(hashes):
            self._unhashed[row] = hashes
        else:
            self._unhashed.pop(row, None)
        if stops := [stop for stop in self._stops.pop(row, ()) if stop > count]:
            self._stops[row] = stops

    def _longest_tail(self, row: int, hashes: list[bytes], token_ids: np.ndarray) -> _Tail | None:
        """The longest tail that all groups know, as far as it is seen; `hashes` are of full blocks of `token_ids`."""
        assert self.states is not None
        cache, size = self.pools[self.states].cache, self.block_size
        for full in range(len(hashes), -1, -1) if cache.has_tails else ():
            rest = token_ids[full * size : (full + 1) * size].tobytes()
            length, digest = cache.longest_tail(self._hash_before(row, hashes[:full]), rest)
            found = _Tail((*hashes[:full], digest), full * size + length)
            if length and all(pool.cache.knows(found.hashes[found.passed(pool) :]) for pool in self.pools):
                return found
        return None

    def _take_tail(self, row: int, tail: _Tail) -> bool:
        """Share the blocks up to a tail; False, and none, if that takes a slab that is reserved by another model."""
        taken = [pool.take(list(tail.hashes[tail.passed(pool) :])) for pool in self.pools]
        count = len(tail.hashes)
        if any(len(blocks) < count - tail.passed(pool) for pool, blocks in zip(self.pools, taken, strict=True)):
            for pool, blocks in zip(self.pools, taken, strict=True):
                pool.free(reversed(blocks))
            return False
        self._hold(row, taken, count, tail.computed)
        return True

    def _longest_known(self, hashes: list[bytes]) -> int:
        """The most full blocks with these hashes that all groups know, as far as they are seen."""
        count = len(hashes)
        while (longest := min(pool.longest(hashes[:count]) for pool in self.pools)) < count:
            count = longest
        return count

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
        """Drop the tokens from `length` on; the last one left counts as not computed.

        A recurrent state cannot go back: one of fewer tokens stays, another is given up with all blocks.
        """
        self.lengths[row] = length
        self._forget_hashes(row, length // self.block_size)
        if self.states is not None:
            if self.computed[row] > length:
                self._free_all(row)
                self._forget_blocks(row)
            return
        self.computed[row] = computed = min(int(self.computed[row]), length - 1)
        self._require_window(row, computed)
        self.free_beyond(row)

    def free_beyond(self, row: int) -> None:
        """Free the blocks that `prepare_write` took for more tokens than are computed: those were not the row's."""
        blocks = -(-int(self.computed[row]) // self.block_size)
        for pool, table in zip(self.pools, self.blocks[:, row], strict=True):
            pool.free(table[blocks : self.num_blocks[row]][::-1])
        self.num_blocks[row] = blocks

    def _forget_hashes(self, row: int, blocks: int) -> None:
        """Let a row's blocks from `blocks` on have other tokens than when they were hashed."""
        if row in self._unhashed:
            self._unhashed[row] = self._unhashed[row][:blocks]
            self._stops[row] = [stop for stop in self._stops.get(row, ()) if stop <= blocks]

    def fork(self, sequence: KVSequence, length: int | None = None) -> KVSequence:
        """A sequence with the same tokens, or the first `length`; it shares every block, the partial tail included.

        With a window, `length` is at most one token less than what is computed: further back its blocks may be gone.
        With recurrent states, a fork of fewer tokens than are computed shares nothing.
        """
        source, row = sequence.row, self._take_row()
        length = int(self.lengths[source]) if length is None else length
        computed = min(int(self.computed[source]), length)
        if went_back := self.states is not None and computed < self.computed[source]:
            computed = 0
        else:
            self._require_window(source, computed)
        blocks = -(-computed // self.block_size)
        self.tokens[row, :length] = self.tokens[source, :length]
        self.blocks[:, row, :blocks] = self.blocks[:, source, :blocks]
        self.lengths[row], self.computed[row], self.num_blocks[row] = length, computed, blocks
        self.passed_blocks[:, row] = 0 if went_back else self.passed_blocks[:, source]
        child = self._own(KVSequence(sequence.role, row, sequence.owner), self._seeds[source])
        for group, pool in enumerate(self.pools):
            pool.share(self.block_table(child, group))
        if went_back or source in self._preempted:
            self._preempted.add(row)
        if self._follower:
            self._follower.forked(sequence, child)
        return child

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

    def release(self, sequence: KVSequence) -> None:
        """Drop the references of a sequence; blocks without others become free or cached.

        The recurrent state at its end stays in the prefix cache, with all before it, while nobody needs the room.
        """
        sequence.released = True
        if self._follower:
            self._follower.released(sequence)
        self._keep_in_cache(sequence.row, transient=True)
        self._unhashed.pop(sequence.row, None)
        self._stops.pop(sequence.row, None)
        self._preempted.discard(sequence.row)
        siblings = self._of_owner[sequence.owner]
        del siblings[sequence]
        if not siblings:
            del self._of_owner[sequence.owner]
        self._free_all(sequence.row)
        self._free_rows.append(sequence.row)

    def token_ids(self, sequence: KVSequence) -> list[int]:
        """The sequence's tokens."""
        return self.tokens[sequence.row, : self.lengths[sequence.row]].tolist()

    def block_table(self, sequence: KVSequence, group: int = 0) -> np.ndarray:
        """The block ids that the sequence holds in a KV group, int32 `[num_blocks - passed_blocks]`, a view."""
        row = sequence.row
        return self.blocks[group, row, self.passed_blocks[group, row] : self.num_blocks[row]]

    def live_block_tables(self, group: int = 0) -> list[np.ndarray]:
        """Block tables of every live sequence."""
        return [self.block_table(sequence, group) for owned in self._of_owner.values() for sequence in owned]

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

    def _free_all(self, row: int) -> None:
        """Free a row's blocks, the tail first, so that those shared with others are reached last."""
        for group, pool in enumerate(self.pools):
            pool.free(self.blocks[group, row, self.passed_blocks[group, row] : self.num_blocks[row]][::-1])

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
        groups = len(self.pools)
        self.blocks = _grown(self.blocks, (groups, rows, -(-columns // self.block_size)))
        self.passed_blocks = _grown(self.passed_blocks, (groups, rows))
        for name in ("lengths", "computed", "num_blocks"):
            setattr(self, name, _grown(getattr(self, name), (rows,)))

    def _clear_blocks(self, row: int) -> None:
        self.computed[row] = self.num_blocks[row] = self.passed_blocks[:, row] = 0

    def sees_back_to(self, row: int, computed: int) -> bool:
        """True if a row still has the blocks that the token after `computed` ones sees."""
        return all(
            self.passed_blocks[group, row] <= pool.blocks_passed(np.array(computed + 1))
            for group, pool in enumerate(self.pools)
            if pool.window is not None
        )

    def _require_window(self, row: int, computed: int) -> None:
        assert self.sees_back_to(row, computed), f"a sequence goes back to {computed} tokens, whose window is gone"


def _grown(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    bigger = np.zeros(shape, dtype=array.dtype)
    bigger[tuple(slice(0, n) for n in array.shape)] = array
    return bigger
