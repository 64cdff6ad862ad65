"""Sequences of one model: opened, forked, truncated and released, each with an owner."""

from collections.abc import Hashable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from espalier.engine.errors import MisuseError
from espalier.engine.memory.block_tables import BlockTables
from espalier.engine.memory.blocks import BlockPool
from espalier.engine.memory.prefix_matching import PrefixMatching
from espalier.engine.stats import COUNTERS, RoleStats


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


class SequenceTable(BlockTables):
    """All live sequences of one model: each is a row of block tables, and has an owner.

    Attributes:
        counters: what is counted of the model.
        prefixes: how rows are found in the prefix cache.
        follower: who is to know of all forks and releases; None for nobody.
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
        self.follower: Follower | None = None

    @property
    def live_sequences(self) -> int:
        """Sequences not yet released."""
        return len(self.lengths) - len(self._free_rows)

    def stats(self) -> RoleStats:
        """Return the counters as they are now, and the memory that the model holds."""
        pools = self.pools
        states = [pool for pool in pools if pool.holds_states]
        return RoleStats(
            **{name: deepcopy(getattr(self.counters, name)) for name in COUNTERS},
            live_blocks=sum(pool.live_blocks for pool in pools),
            cached_blocks=sum(pool.cached_blocks for pool in pools),
            free_blocks=sum(pool.free_blocks for pool in pools),
            live_states=sum(pool.live_blocks for pool in states),
            cached_states=sum(pool.cached_blocks for pool in states),
            live_bytes=sum(pool.live_bytes for pool in pools),
            cached_bytes=sum(pool.cached_blocks * pool.layout.block_bytes for pool in pools),
            free_bytes=sum(pool.free_blocks * pool.layout.block_bytes for pool in pools),
            wasted_bytes=sum(pool.owned_slabs * pool.layout.wasted_bytes_per_slab for pool in pools),
            live_sequences=self.live_sequences,
            owned_slabs=sum(pool.owned_slabs for pool in pools),
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
        if self.follower:
            self.follower.forked(sequence, child)
        return child

    def release(self, sequence: KVSequence) -> None:
        """Drop the references of a sequence; blocks without others become free or cached.

        The recurrent state at its end stays in the prefix cache, with all before it, while nobody needs the room.
        """
        sequence.released = True
        if self.follower:
            self.follower.released(sequence)
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
            for sequence in (sequence for owned in self._of_owner.values() for sequence in owned):
                for block in self.block_table(sequence, group).tolist():
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
