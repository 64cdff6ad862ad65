"""Sequences of one model: opened, forked, truncated and released, each with an owner; prefix matching of their rows.

Matching finds which blocks of a row the prefix cache knows, and enters those that it is to know.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from espalier.engine.errors import MisuseError
from espalier.engine.memory.block_tables import BlockTables
from espalier.engine.memory.blocks import BlockPool, chain_hashes, chain_start
from espalier.engine.stats import COUNTERS, RoleStats


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


class PrefixMatching:
    """Finds the beginnings of a model's rows in the prefix caches of its KV groups, and enters them there.

    Attributes:
        seeds: by row, what is hashed into its prefixes: equal for rows of one salt alone.
    """

    def __init__(self, tables: BlockTables, siblings: Callable[[int], Iterable[int]]) -> None:
        """Know of no row of `tables` yet; `siblings` gives the other rows of a row's owner."""
        self._counters = tables.pools[0].counters
        self._tables = tables
        self._pools, self._states, self._block_size = tables.pools, tables.states, tables.block_size
        self._siblings = siblings
        self.seeds: dict[int, bytes] = {}
        self._unhashed: dict[int, list[bytes]] = {}  # by row; hashes of its blocks while the prefix cache lacks some
        self._stops: dict[int, list[int]] = {}  # by row; full blocks after which its state is kept in the cache
        self._promised: set[bytes] = set()  # hashes of the states that rows of the step being planned go on to
        self._preempted: set[int] = set()  # rows whose KV was freed and not looked up in the cache since

    def open(self, row: int, seed: bytes) -> None:
        """Take a new row in that holds its prompt; blocks that the cache knows count as computed.

        Args:
            row: a row without blocks.
            seed: prefixes are shared with rows of an equal seed only.
        """
        self.seeds[row] = seed
        if self._enabled:
            length = int(self._tables.lengths[row])
            self._counters.cache_lookups += length // self._block_size
            self._take_cached(row, length)

    def fork(self, source: int, row: int, shares: bool) -> None:
        """Take a row in that is a fork of `source`, and `shares` its blocks or has none."""
        self.seeds[row] = self.seeds[source]
        if source in self._preempted or not shares:
            self._preempted.add(row)

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
        full = min(computed // self._block_size, len(hashes))
        for pool, blocks, passed in self._tables.by_group(row):
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
        return min(count, stops[0] * self._block_size - int(self._tables.computed[row])) if stops else count

    def is_unmatched(self, row: int) -> bool:
        """True if `match` or `register` has something to do for a row."""
        return row in self._unhashed or row in self._preempted

    def match(self, row: int, most: int) -> bool:
        """Look a row without computed tokens up in the prefix cache, and share the blocks found there.

        Args:
            row: any row; one with computed tokens is left as it is.
            most: tokens that may come from the cache; later ones are computed even if the cache has them.

        Returns:
            Whether the row can go on: not while another row of the step computes a state that it can go on from.
        """
        preempted = row in self._preempted
        fresh = self._enabled and row in self._unhashed and not self._tables.num_blocks[row]
        if not preempted and not fresh:
            return True
        if not self._take_cached(row, most, self._fork_points(row) if preempted else []):
            return False
        if preempted:  # a fresh one was counted by `open`
            self._preempted.discard(row)
            self._counters.cache_lookups += most // self._block_size
        return True

    def keep(self, row: int, transient: bool = False) -> None:
        """Enter a row's state, and the blocks that it has computed up to there, into the prefix cache.

        Args:
            row: any row; one without a state is left as it is, and if `transient` one whose state others share.
            transient: whether their room is given up first.
        """
        tables = self._tables
        if self._states is None or not self._enabled or not tables.num_blocks[row]:
            return
        state = tables.blocks[self._states, row, tables.num_blocks[row] - 1]
        if transient and self._pools[self._states].ref_counts[state] > 1:
            return
        token_ids = tables.tokens[row, : tables.computed[row]]
        hashes = chain_hashes(self.seeds[row], token_ids, self._block_size)
        full, before = len(hashes), self._hash_before(row, hashes)
        tail = token_ids[full * self._block_size :].tobytes()
        for pool, blocks, passed in tables.by_group(row):
            for block, digest in zip(blocks[passed:full].tolist(), hashes[passed:], strict=True):
                pool.cache.register(block, digest, transient)
            if tail:
                pool.cache.register_tail(int(blocks[full]), before, tail, transient)

    def forget_hashes(self, row: int, blocks: int) -> None:
        """Let a row's blocks from `blocks` on have other tokens than when they were hashed."""
        if row in self._unhashed:
            self._unhashed[row] = self._unhashed[row][:blocks]
            self._stops[row] = [stop for stop in self._stops.get(row, ()) if stop <= blocks]

    def forget_blocks(self, row: int) -> None:
        """Take note that a row's blocks are gone: it is looked up again before it is computed again."""
        self._unhashed.pop(row, None)
        self._stops.pop(row, None)
        self._preempted.add(row)

    def release(self, row: int) -> None:
        """Forget a row, whose sequence has ended."""
        self.forget_blocks(row)
        self._preempted.discard(row)

    @property
    def _enabled(self) -> bool:
        return self._pools[0].enable_prefix_cache

    def _fork_points(self, row: int) -> list[int]:
        """Full blocks that a row has in common with others of its owner, for each number of them."""
        if self._states is None or not self._enabled:
            return []
        points, tables = set[int](), self._tables
        for other in self._siblings(row):
            length = min(tables.lengths[row], tables.lengths[other])
            differs = np.flatnonzero(tables.tokens[row, :length] != tables.tokens[other, :length])
            points.add(int(differs[0] if len(differs) else length) // self._block_size)
        return sorted(points - {0})

    def _take_cached(self, row: int, most: int, fork_points: Sequence[int] = ()) -> bool:
        """Share the blocks of the longest beginning of a row that the caches of all groups know, as far as it is seen.

        It ends early at a block whose use would take a slab that is reserved by another model. The row's own state will
        be kept behind its last full block and at `fork_points`. Returns False, and shares nothing, where the row had
        better wait for a state that another row of the step computes.
        """
        token_ids = self._tables.tokens[row, : self._tables.lengths[row]]
        hashes = chain_hashes(self.seeds[row], token_ids, self._block_size)
        count = most // self._block_size
        taken: list[list[int]] = []
        if self._states is not None:
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
            if tail is not None:
                count_of_tail, taken = self._take(tail.hashes, tail.computed)
                if count_of_tail == len(tail.hashes):
                    self._tables.hold(row, taken, count_of_tail, tail.computed)
                    self._note_cached(row, hashes, count_of_tail - 1)
                    return True
        while count:
            # What one group knows need not be what another knows.
            count = self._longest_known(hashes[:count])
            found, taken = self._take(hashes[:count], count * self._block_size)
            if found == count:
                break
            count = found
        self._tables.hold(row, taken if count else [], count, count * self._block_size)
        self._note_cached(row, hashes, count)
        return True

    def _take(self, hashes: Sequence[bytes], computed: int) -> tuple[int, list[list[int]]]:
        """Share the known blocks with these hashes, of each group those that are seen behind `computed` tokens.

        Returns:
            How many were found, and the blocks of each group; fewer, and none, where the next would take a slab that is
            reserved by another model.
        """
        passed = [int(pool.blocks_passed(np.array(computed))) for pool in self._pools]
        taken = [pool.take(hashes[first:]) for pool, first in zip(self._pools, passed, strict=True)]
        found = min(first + len(blocks) for blocks, first in zip(taken, passed, strict=True))
        if found == len(hashes):
            return found, taken
        for pool, blocks in zip(self._pools, taken, strict=True):
            pool.free(reversed(blocks))
        return found, []

    def _note_cached(self, row: int, hashes: list[bytes], count: int) -> None:
        """Note that a row's first `count` full blocks came from the cache, which may lack the others."""
        self._counters.cache_hits += count
        if count < len(hashes):
            self._unhashed[row] = hashes
        else:
            self._unhashed.pop(row, None)
        if stops := [stop for stop in self._stops.pop(row, ()) if stop > count]:
            self._stops[row] = stops

    def _longest_tail(self, row: int, hashes: list[bytes], token_ids: np.ndarray) -> _Tail | None:
        """The longest tail that all groups know, as far as it is seen; `hashes` are of full blocks of `token_ids`."""
        assert self._states is not None
        cache, size = self._pools[self._states].cache, self._block_size
        for full in range(len(hashes), -1, -1) if cache.has_tails else ():
            rest = token_ids[full * size : (full + 1) * size].tobytes()
            length, digest = cache.longest_tail(self._hash_before(row, hashes[:full]), rest)
            found = _Tail((*hashes[:full], digest), full * size + length)
            if length and all(pool.cache.knows(found.hashes[found.passed(pool) :]) for pool in self._pools):
                return found
        return None

    def _longest_known(self, hashes: list[bytes]) -> int:
        """The most full blocks with these hashes that all groups know, as far as they are seen."""
        count = len(hashes)
        while (longest := min(pool.longest(hashes[:count]) for pool in self._pools)) < count:
            count = longest
        return count

    def _hash_before(self, row: int, hashes: Sequence[bytes]) -> bytes:
        """The hash of what comes before a block of a row, `hashes` those of all blocks before."""
        return hashes[-1] if hashes else chain_start(self.seeds[row])


@dataclass(slots=True, eq=False)
class KVSequence:
    """Handle of one sequence: a row of its model's `SequenceTable`, valid until released.

    A fork has the owner of the sequence that it was forked from.
    """

    role: str
    row: int
    owner: Hashable = None
    released: bool = False


class SequenceTable(BlockTables):
    """All live sequences of one model: each is a row of block tables, and has an owner.

    Attributes:
        counters: what is counted of the model.
        prefixes: how rows are found in the prefix cache.
        drafts: a draft model's table; None without one.
        followers: of sequences, the one in `drafts` with the same beginning, forked and released with it.
    """

    def __init__(self, pools: Sequence[BlockPool], rows: int = 64, columns: int = 256, cache_seed: bytes = b"") -> None:
        """Make an empty table.

        Args:
            pools: of each KV group, and then of states.
            rows: sequences there is room for at first.
            columns: tokens of one sequence there is room for at first.
            cache_seed: hashed into every prefix of this model.
        """
        super().__init__(pools, rows, columns)
        self._cache_seed = cache_seed
        self.counters = pools[0].counters
        self.prefixes = PrefixMatching(self, self._siblings)
        self._of_owner: dict[Hashable, dict[KVSequence, None]] = {}  # in order of arrival
        self.drafts: SequenceTable | None = None
        self.followers: dict[KVSequence, KVSequence] = {}

    @property
    def live_sequences(self) -> int:
        """Sequences not yet released."""
        return len(self.lengths) - len(self._free_rows)

    def stats(self) -> RoleStats:
        """Return the counters as they are now, and the memory that the model holds."""
        pools, summed = self.pools, ("live_blocks", "cached_blocks", "free_blocks", "live_bytes", "owned_slabs")
        values: dict[str, Any] = {name: deepcopy(getattr(self.counters, name)) for name in COUNTERS}
        values |= {name: sum(getattr(pool, name) for pool in pools) for name in summed}
        states = [pool for pool in pools if pool.holds_states]
        return RoleStats(
            **values,
            live_states=sum(pool.live_blocks for pool in states),
            cached_states=sum(pool.cached_blocks for pool in states),
            cached_bytes=sum(pool.cached_blocks * pool.layout.block_bytes for pool in pools),
            free_bytes=sum(pool.free_blocks * pool.layout.block_bytes for pool in pools),
            wasted_bytes=sum(pool.owned_slabs * pool.layout.wasted_bytes_per_slab for pool in pools),
            live_sequences=self.live_sequences,
            bytes_per_token=sum(pool.layout.bytes_per_token for pool in pools),
            block_bytes=sum(pool.layout.block_bytes for pool in pools),
        )

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
        sequence = self._own(KVSequence(role, row, owner))
        self.append(sequence, token_ids)
        self.prefixes.open(row, self._cache_seed + salt)
        return sequence

    def append(self, sequence: KVSequence, token_ids: list[int]) -> None:
        """Add tokens at the end, to be computed later."""
        start = int(self.lengths[sequence.row])
        self.reserve_columns(start + len(token_ids))
        self.tokens[sequence.row, start : start + len(token_ids)] = token_ids
        self.lengths[sequence.row] += len(token_ids)

    def truncate(self, row: int, length: int) -> None:
        """Drop the tokens from `length` on; the last one left counts as not computed.

        A recurrent state cannot go back: one of fewer tokens stays, another is given up with all blocks.
        """
        self.lengths[row] = length
        self.prefixes.forget_hashes(row, length // self.block_size)
        if self.states is not None:
            if self.computed[row] > length:
                self._drop(row)
            return
        self.computed[row] = computed = min(int(self.computed[row]), length - 1)
        self._require_window(row, computed)
        self.free_beyond(row)

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
        self._share(source, row, length, computed)
        self.prefixes.fork(source, row, shares=not went_back)
        child = self._own(KVSequence(sequence.role, row, sequence.owner))
        if self.drafts and (follower := self.followers.get(sequence)):
            self.followers[child] = self.drafts.fork(follower)
        return child

    def release(self, sequence: KVSequence) -> None:
        """Drop the references of a sequence; blocks without others become free or cached.

        The recurrent state at its end stays in the prefix cache, with all before it, while nobody needs the room.
        """
        sequence.released = True
        if self.drafts and (follower := self.followers.pop(sequence, None)):
            self.drafts.release(follower)
        self.prefixes.keep(sequence.row, transient=True)
        self.prefixes.release(sequence.row)
        siblings = self._of_owner[sequence.owner]
        del siblings[sequence]
        if not siblings:
            del self._of_owner[sequence.owner]
        self._free_all(sequence.row)
        self._free_rows.append(sequence.row)

    def drop_kv_of(self, sequences: Iterable[KVSequence]) -> None:
        """Free all KV of sequences, which keep their tokens, so that it can be computed again.

        What recurrent states need to go on stays in the prefix cache until its room is needed.
        """
        for sequence in sequences:
            self.prefixes.keep(sequence.row)
            self._drop(sequence.row)

    def drop_all(self, cached: bool = False) -> None:
        """Free all KV and forget its hashes, for a step failed and what its blocks hold is not certain.

        Args:
            cached: whether blocks that no sequence refers to are not to be used again either.
        """
        for group, pool in enumerate(self.pools):
            for block in {block for held in self.live_block_tables(group) for block in held.tolist()}:
                if block in pool.cache:
                    pool.cache.forget(block)
        for sequence in (sequence for owned in self._of_owner.values() for sequence in owned):
            self._drop(sequence.row)
        for pool in self.pools:  # what the step wrote may be behind a window already, and in no block table any more
            while (cached or pool.window is not None) and pool.reclaim_idle_slab():
                pass

    def of_owner(self, owner: Hashable) -> list[KVSequence]:
        """An owner's live sequences."""
        return list(self._of_owner.get(owner, ()))

    def owners(self) -> set[Hashable]:
        """Owners with live sequences."""
        return set(self._of_owner)

    def blocks_of(self, owner: Hashable, group: int = 0) -> int:
        """Blocks of a KV group that an owner's sequences hold, shared ones counted once; of one group if of any."""
        tables = [self.block_table(sequence, group) for sequence in self._of_owner.get(owner, ())]
        return len(np.unique(np.concatenate(tables))) if tables else 0

    def require_live(self, sequence: KVSequence) -> None:
        """Raise MisuseError unless `sequence` is one of this table's that was not released."""
        if sequence in self._of_owner.get(sequence.owner, ()):
            return
        raise MisuseError(
            f"a {sequence.role} sequence was already released"
            if sequence.released
            else f"a {sequence.role} sequence belongs to another engine"
        )

    def token_ids(self, sequence: KVSequence) -> list[int]:
        """The sequence's tokens."""
        return self.tokens[sequence.row, : self.lengths[sequence.row]].tolist()

    def block_table(self, sequence: KVSequence, group: int = 0) -> np.ndarray:
        """The block ids that the sequence holds in a KV group, int32 `[num_blocks - passed_blocks]`, a view."""
        return self.held(sequence.row, group)

    def live_block_tables(self, group: int = 0) -> list[np.ndarray]:
        """Block tables of every live sequence."""
        return [self.block_table(sequence, group) for owned in self._of_owner.values() for sequence in owned]

    def _drop(self, row: int) -> None:
        self._free_all(row)
        self._clear_blocks(row)
        self.prefixes.forget_blocks(row)

    def _own(self, sequence: KVSequence) -> KVSequence:
        self._of_owner.setdefault(sequence.owner, {})[sequence] = None
        return sequence

    def _siblings(self, row: int) -> list[int]:
        """The other rows of a row's owner."""
        owned = next(owned for owned in self._of_owner.values() if any(each.row == row for each in owned))
        return [each.row for each in owned if each.row != row]
