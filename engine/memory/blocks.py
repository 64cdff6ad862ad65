"""The KV pool, one tensor cut into slabs, and the reference-counted blocks of each model that lie in them.

Blocks that the prefix cache knows stay without references until their room is needed, see `EvictableBlocks`.
"""

import hashlib
import heapq
import logging
from collections import OrderedDict
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile

import numpy as np
import torch

from espalier.engine.errors import PoolExhaustedError
from espalier.engine.stats import RoleCounters
from espalier.kernels.layout import Layout, StateLayout

log = logging.getLogger("espalier.engine.memory")


def chain_start(seed: bytes) -> bytes:
    """Stands for the hash of a block before the first; see `chain_hashes`."""
    return hashlib.sha256(seed).digest()


def chain_hashes(seed: bytes, token_ids: Sequence[int] | np.ndarray, block_size: int) -> list[bytes]:
    """The hash of each full block of `token_ids`, from `seed` on.

    Args:
        seed: hashed first, so that only sequences of one model and one cache salt have equal hashes.
        token_ids: a sequence's tokens, from its start.
        block_size: tokens per block.
    """
    data = np.asarray(token_ids, dtype=np.int32).tobytes()
    width = 4 * block_size
    hashes, last = [], chain_start(seed)
    for end in range(width, len(data) + 1, width):
        last = hashlib.sha256(last + data[end - width : end]).digest()
        hashes.append(last)
    return hashes


class PrefixCache:
    """Finds blocks of one model by the hash of their tokens; it knows computed blocks, live or cached.

    So a prompt seen before is not computed again. A block is known by the sha256 of its tokens and of all before them:
    equal hashes mean equal prefixes. Most blocks are full. Tails, which are not, go on being written to: only what is
    about to be freed is entered as one. What is entered as a sequence is released is transient until it is found again:
    its room is given up first.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._tails: dict[bytes, dict[bytes, bytes]] = {}  # by the hash of the block before: their hashes by tokens
        self._tail_of: dict[int, tuple[bytes, bytes]] = {}  # by block: the hash of the one before, and its tokens
        self._transient: set[int] = set()  # blocks

    def __contains__(self, block: int) -> bool:
        """True if the cache knows the tokens of `block`."""
        return block in self._hash_of

    def longest(self, hashes: Sequence[bytes], passed: Sequence[int]) -> int:
        """The most blocks that a sequence with this chain of hashes can go on after.

        Args:
            hashes: of its full blocks.
            passed: for each number of blocks, how many of the first are not seen by what comes after them.
        """
        longest = known = 0  # known: blocks side by side up to the present one
        for count, digest in enumerate(hashes, start=1):
            known = known + 1 if digest in self._block_of else 0
            if known >= count - passed[count]:
                longest = count
        return longest

    def knows(self, hashes: Sequence[bytes]) -> bool:
        """True if it knows a block with each of these hashes."""
        return all(digest in self._block_of for digest in hashes)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks with these hashes, all of which it knows; they are transient no longer."""
        found = [self._block_of[digest] for digest in hashes]
        self._transient.difference_update(found)
        return found

    def register(self, block: int, digest: bytes, transient: bool = False) -> None:
        """Enter a full, computed block; of two with the same tokens the first stays in the cache."""
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest
            if transient:
                self._transient.add(block)
        elif not transient:
            self._transient.discard(self._block_of[digest])

    @property
    def has_tails(self) -> bool:
        """True if it knows a tail."""
        return bool(self._tail_of)

    def is_tail(self, block: int) -> bool:
        """True if it knows `block` as a tail."""
        return block in self._tail_of

    def is_transient(self, block: int) -> bool:
        """True if it knows `block` from a released sequence alone."""
        return block in self._transient

    def register_tail(self, block: int, before: bytes, token_ids: bytes, transient: bool = False) -> None:
        """Enter a block that is not full.

        Args:
            block: a computed block that is not written to while it is known.
            before: the hash of the block before it.
            token_ids: int32, what it has of its own.
            transient: whether its room is given up first.
        """
        digest = hashlib.sha256(before + token_ids).digest()
        if digest not in self._block_of:
            self.register(block, digest, transient)
            self._tails.setdefault(before, {})[token_ids] = digest
            self._tail_of[block] = before, token_ids

    def longest_tail(self, before: bytes, token_ids: bytes) -> tuple[int, bytes]:
        """Length and hash of the longest tail behind a block that `token_ids`, int32, begin with; 0 without any."""
        known = [tail for tail in self._tails.get(before, ()) if token_ids.startswith(tail)]
        longest = max(known, key=len, default=b"")
        return len(longest) // 4, self._tails[before][longest] if longest else b""

    def forget(self, block: int) -> None:
        """Take a block out, before other tokens are written to it."""
        del self._block_of[self._hash_of.pop(block)]
        self._transient.discard(block)
        if tail := self._tail_of.pop(block, None):
            before, token_ids = tail
            del self._tails[before][token_ids]
            if not self._tails[before]:
                del self._tails[before]

    def check_integrity(self, held: set[int]) -> None:
        """Raise AssertionError unless both maps agree and every block of the cache is in `held`, live or cached."""
        assert {block: digest for digest, block in self._block_of.items()} == self._hash_of, "the two maps differ"
        assert set(self._hash_of) <= held, "a block of the prefix cache is neither live nor evictable"
        assert self._transient <= set(self._hash_of), "a block that is not known is transient"
        tails = {self._block_of[digest] for known in self._tails.values() for digest in known.values()}
        assert tails == set(self._tail_of), "tails differ from the blocks that are known as such"


class EvictableBlocks:
    """Cached blocks without references, by slab; slabs, and blocks of a slab, in order of least recent use.

    A live slab also holds blocks that are in use; an idle one holds nothing but cached blocks and free slots. Transient
    blocks are evicted before others, and idle slabs with transient blocks alone before other slabs.
    """

    def __init__(self, live: Container[int]) -> None:
        """Keep nothing yet; `live` says which slabs are."""
        self._live = live
        # Blocks that last, and transient ones.
        self._of: tuple[OrderedDict[int, OrderedDict[int, None]], ...] = (OrderedDict(), OrderedDict())
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def of(self, slab: int) -> list[int]:
        """Cached blocks of a slab, those to evict first at the front."""
        return [block for blocks in reversed(self._of) for block in blocks.get(slab, ())]

    def keep(self, block: int, slab: int, transient: bool = False) -> None:
        """Add `block` of the live `slab` as the most recently used one."""
        self._of[transient].setdefault(slab, OrderedDict())[block] = None
        self._of[transient].move_to_end(slab)
        self._count += 1

    def remove(self, block: int, slab: int) -> None:
        """Take `block` out: it is used again, or its room is needed."""
        of = next(of for of in self._of if block in of.get(slab, ()))
        del of[slab][block]
        if not of[slab]:
            del of[slab]
        self._count -= 1

    def touch(self, slab: int) -> None:
        """Note that `slab` has become live or idle, and so is the one used last."""
        for of in self._of:
            if slab in of:
                of.move_to_end(slab)

    def next_is_transient(self) -> tuple[bool, bool]:
        """True if the block to evict first among live slabs is transient; the same for that among all slabs.

        Blocks of idle slabs come after all those of live ones.
        """
        lasts, transient = (any(slab in self._live for slab in of) for of in self._of)
        return transient, transient or (not lasts and self.oldest_idle_slab(lasting=False) is not None)

    def oldest_in_live_slab(self) -> tuple[int, int] | None:
        """The block to evict first among live slabs, and its slab; None without any."""
        slabs = (each for of in reversed(self._of) for each in of.items())
        return next(((next(iter(blocks)), slab) for slab, blocks in slabs if slab in self._live), None)

    def oldest_idle_slab(self, lasting: bool = True) -> int | None:
        """The idle slab to give back first; None without any. With `lasting` it may hold more than transient blocks."""
        lasts, transient = self._of
        slabs = chain((slab for slab in transient if slab not in lasts), lasts if lasting else ())
        return next((slab for slab in slabs if slab not in self._live), None)


class KVPool:
    """One uint8 tensor cut into equal slabs, each owned by one model or by none.

    The KV pool knows bytes and roles, not blocks: a `BlockPool` takes slabs, lays its model's blocks out in them, and
    gives a slab back when its last block is freed, or when a model needs it more than the prefix cache does.
    """

    def __init__(self, num_bytes: int, slab_bytes: int, device: torch.device | str = "cpu") -> None:
        """Allocate `num_bytes // slab_bytes` slabs on `device`.

        Raises:
            PoolExhaustedError: when the device has less memory than that.
        """
        self.slab_bytes = slab_bytes
        self.num_slabs = num_bytes // slab_bytes
        self.num_bytes = self.num_slabs * slab_bytes
        # Not zeroed: memory is only touched once a block is written, and nothing reads bytes that were not.
        try:
            self.bytes = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # torch's out-of-memory, on either kind of device
            raise PoolExhaustedError(
                f"cannot allocate {num_bytes / 2**20:.0f} MiB for the KV pool on {device}; lower --kv-memory"
            ) from error
        self._role_of: list[str | None] = [None] * self.num_slabs
        self._holders: dict[str, BlockPool] = {}
        self._free = list(range(self.num_slabs - 1, -1, -1))  # a stack: the lowest slab is on top at first

    @property
    def free_slabs(self) -> int:
        """Slabs that no model owns."""
        return len(self._free)

    @property
    def available_slabs(self) -> int:
        """Slabs that `take` could give: free ones and idle ones."""
        return len(self._free) + sum(holder.idle_slabs for holder in self._holders.values())

    @property
    def unreserved_slabs(self) -> int:
        """Available slabs that no role has reserved."""
        return self.available_slabs - sum(holder.unclaimed_slabs for holder in self._holders.values())

    def register(self, role: str, holder: "BlockPool") -> None:
        """Name the holder of `role`'s slabs."""
        self._holders[role] = holder

    def take(self, role: str) -> int | None:
        """Give a free or idle slab to `role`; None when there is none."""
        holders = self._holders.values()
        if not self._free and not any(one.reclaim_idle_slab(lasting) for lasting in (False, True) for one in holders):
            return None
        slab = self._free.pop()
        self._role_of[slab] = role
        log.debug("slab %d goes to the %s; %d slabs are free", slab, role, len(self._free))
        return slab

    def give_back(self, slab: int, role: str) -> None:
        """Take `slab` back from `role`, which has no block in it any more."""
        assert self._role_of[slab] == role, f"slab {slab} belongs to {self._role_of[slab]}, not {role}"
        self._role_of[slab] = None
        self._free.append(slab)
        log.debug("slab %d comes back from the %s; %d slabs are free", slab, role, len(self._free))

    def owned_by(self, role: str) -> set[int]:
        """Slabs that `role` holds."""
        return {slab for slab, held_by in enumerate(self._role_of) if held_by == role}

    def close(self) -> None:
        """Give the memory back to the device once no view of it is left; no block can be read or written then."""
        self.bytes = self.bytes.new_empty(0)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slab is either free once or owned once."""
        assert len(set(self._free)) == len(self._free), "a slab is free twice"
        assert {s for s, role in enumerate(self._role_of) if role is None} == set(self._free), (
            "free list and roles differ"
        )


@dataclass(eq=False)
class BlockPool:
    """Free, live and cached blocks of one KV group, or of a model's recurrent states.

    A block holds the KV of `block_size` tokens, or the recurrent state of a sequence after its last computed token.

    A block id is `slab * blocks_per_slab + slot`, so ids are sparse: only those in owned slabs exist. A block is
    live while a sequence refers to it. Without references it becomes free, or cached if the prefix cache knows its
    tokens. A slab with live blocks is a live slab; an idle one, with cached blocks alone, is given back when either
    model needs it.

    Allocation takes a free slot of the lowest live slab that has one, so that the last slabs run empty. Where there is
    none, it opens another slab rather than evict a cached block, unless that slab is reserved by another model: so
    cached blocks never spread live ones over more slabs than the pool has.

    Attributes:
        role: the model's role.
        layout: where keys and values lie in a block, or the parts of a state.
        kv_pool: where slabs come from.
        enable_prefix_cache: whether blocks without references stay cached.
        window: how many positions a token sees, or None for all before it.
        name: what the KV pool knows it by; its role if the model has no other group.
        counters: what all pools of the model count in; its own without.
        cache: finds its computed blocks.
        reserved_slabs: what admission has reserved.
        live_blocks: blocks that sequences refer to.
        holds_states: whether a block is a sequence's recurrent state.
    """

    role: str
    layout: Layout
    kv_pool: KVPool
    enable_prefix_cache: bool = True
    window: int | None = None
    name: str = ""
    counters: RoleCounters = field(default_factory=RoleCounters)
    cache: PrefixCache = field(default_factory=PrefixCache)
    reserved_slabs: int = 0
    live_blocks: int = 0
    _free_slots: dict[int, list[int]] = field(default_factory=dict)  # by owned slab; free block ids
    _live_in: dict[int, int] = field(default_factory=dict)  # by live slab; how many of its blocks are live
    _candidates: list[int] = field(default_factory=list)  # a heap of live slabs that may have a free slot, each once
    _in_candidates: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.name = self.name or self.role
        self.holds_states = isinstance(self.layout, StateLayout)
        self.ref_counts = np.zeros(self.kv_pool.num_slabs * self.layout.blocks_per_slab, dtype=np.int32)
        self._evictable = EvictableBlocks(self._live_in)
        self.kv_pool.register(self.name, self)

    @property
    def owned_slabs(self) -> int:
        """Slabs this pool holds."""
        return len(self._free_slots)

    @property
    def live_slabs(self) -> int:
        """Owned slabs with live blocks."""
        return len(self._live_in)

    @property
    def idle_slabs(self) -> int:
        """Owned slabs that hold nothing but cached blocks."""
        return self.owned_slabs - self.live_slabs

    @property
    def unclaimed_slabs(self) -> int:
        """Slabs reserved for this pool that it does not need yet."""
        return max(0, self.reserved_slabs - self.live_slabs)

    @property
    def cached_blocks(self) -> int:
        """Blocks kept for their prefix, which no sequence refers to."""
        return len(self._evictable)

    @property
    def free_blocks(self) -> int:
        """Blocks in owned slabs that hold nothing."""
        return self.owned_slabs * self.layout.blocks_per_slab - self.live_blocks - self.cached_blocks

    @property
    def has_spare_block(self) -> bool:
        """True if `allocate` would give a block that holds nothing lasting, in a slab that nobody else has reserved."""
        if self._slots_of_a_live_slab() or (self._can_claim_slab and self.kv_pool.free_slabs):
            return True
        in_live_slab, in_any = self._evictable.next_is_transient()
        return in_live_slab or (in_any and self._can_claim_slab)

    @property
    def live_bytes(self) -> int:
        """Bytes of the live blocks."""
        return self.live_blocks * self.layout.block_bytes

    @property
    def allocatable_blocks(self) -> int:
        """Number of times that `allocate` would succeed now."""
        slabs = self.live_slabs + self.kv_pool.available_slabs
        return slabs * self.layout.blocks_per_slab - self.live_blocks

    def slabs_for(self, blocks: int) -> int:
        """Whole slabs that `blocks` blocks need."""
        return -(-blocks // self.layout.blocks_per_slab)

    def slabs_to_open(self, blocks: int) -> int:
        """Number of slabs that `blocks` more live blocks need beyond the live slabs."""
        return max(0, self.slabs_for(self.live_blocks + blocks) - self.live_slabs)

    def require(self, blocks: int, slabs: int, owners: frozenset[Hashable] = frozenset()) -> None:
        """Check that there is room for `blocks` more live blocks if `slabs` may be opened for them.

        Raises:
            PoolExhaustedError: when there is not; it names `owners`.
        """
        if self.slabs_to_open(blocks) > slabs:
            free = (self.live_slabs + slabs) * self.layout.blocks_per_slab - self.live_blocks
            what = "recurrent states" if self.holds_states else "KV blocks"
            raise PoolExhaustedError(
                f"the {self.role} needs {blocks} {what} and {free} are free in a KV pool of "
                f"{self.kv_pool.num_bytes} bytes; raise --kv-memory or run fewer searches at once",
                owners,
            )

    def allocate(self) -> int:
        """Take a free block and give it one reference, evicting a cached block where no other is left.

        Raises:
            PoolExhaustedError: when live blocks fill the owned slabs and the KV pool has no other to give.
        """
        block = self._find_slots().pop()
        self._count_live(block)
        return block

    def share(self, blocks: np.ndarray) -> None:
        """Add one reference to each of `blocks`, which are live and distinct."""
        assert (self.ref_counts[blocks] > 0).all(), "a free block cannot be shared"
        self.ref_counts[blocks] += 1

    def blocks_passed(self, computed: np.ndarray) -> np.ndarray:
        """Number of leading blocks behind the windows of the last of `computed` tokens, and of all that follow.

        Of states a sequence needs its last one alone.
        """
        if self.holds_states:
            return np.maximum(-(-computed // self.layout.block_size) - 1, 0)
        if self.window is None:
            return np.zeros_like(computed)
        return np.maximum(computed - self.window, 0) // self.layout.block_size

    def longest(self, hashes: list[bytes]) -> int:
        """The most full blocks with these hashes that a sequence can go on after: what comes then sees known ones."""
        passed = self.blocks_passed(np.arange(len(hashes) + 1) * self.layout.block_size)
        return self.cache.longest(hashes, passed.tolist())

    def take(self, hashes: Sequence[bytes]) -> list[int]:
        """Add a reference to each of the blocks with these hashes, all known.

        The blocks end early at one whose use would take a slab that is reserved by another model.
        """
        return list(takewhile(self._refer, self.cache.find(hashes)))

    def _refer(self, block: int) -> bool:
        """Add a reference to a live or cached block; False if that would take a slab reserved by another model."""
        if self.ref_counts[block]:
            self.ref_counts[block] += 1
        elif self._slab(block) in self._live_in or self._can_claim_slab:
            self._evictable.remove(block, self._slab(block))
            self._count_live(block)
        else:
            return False
        return True

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each of `blocks`; those with none left become free or cached."""
        for block in map(int, blocks):
            assert self.ref_counts[block] > 0, f"block {block} is already free"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._release(block)

    def reclaim_idle_slab(self, lasting: bool = True) -> bool:
        """Give the idle slab to evict first back to the KV pool; False when there is none.

        Args:
            lasting: whether it may hold blocks that are not transient.
        """
        slab = self._evictable.oldest_idle_slab(lasting)
        if slab is None:
            return False
        for block in self._evictable.of(slab):
            self._evict(block)
        del self._free_slots[slab]
        self.kv_pool.give_back(slab, self.name)
        return True

    def check_integrity(self, tables: Iterable[np.ndarray]) -> None:
        """Raise AssertionError unless counts, owners and `tables` (block ids of every live sequence) agree."""
        per_slab = self.layout.blocks_per_slab
        expected = np.zeros_like(self.ref_counts)
        for table in tables:
            np.add.at(expected, table, 1)
        assert (expected == self.ref_counts).all(), f"{self.name}: reference counts differ from the block tables"
        assert set(self._free_slots) == self.kv_pool.owned_by(self.name), f"{self.name}: slab owners differ"
        live = set(np.flatnonzero(self.ref_counts).tolist())
        assert len(live) == self.live_blocks, f"{self.name}: live block count is wrong"
        kept = {block for slab in self._free_slots for block in self._evictable.of(slab)}
        assert len(kept) == self.cached_blocks, f"{self.name}: a block of another model's slab is cached"
        assert not kept & live, f"{self.name}: a live block is listed as evictable"
        assert all(block in self.cache for block in kept), f"{self.name}: a cached block has no hash"
        self.cache.check_integrity(live | kept)
        used = live | kept
        assert {block // per_slab for block in used} == set(self._free_slots), f"{self.name}: holds an empty slab"
        for slab, slots in self._free_slots.items():
            own = set(range(slab * per_slab, (slab + 1) * per_slab))
            assert self._live_in.get(slab, 0) == len(own & live), f"{self.name}: live blocks of slab {slab}"
            assert len(set(slots)) == len(slots), f"{self.name}: a block of slab {slab} is free twice"
            assert own & used | set(slots) == own, f"{self.name}: a block is lost"
            assert not own & used & set(slots), f"{self.name}: a block of slab {slab} is both free and used"
            if slots and own & live:
                assert slab in self._candidates, f"{self.name}: room in slab {slab} cannot be found"

    @property
    def _can_claim_slab(self) -> bool:
        """True if this pool may have one more live slab without taking one that another model has reserved."""
        return self.unclaimed_slabs > 0 or self.kv_pool.unreserved_slabs > 0

    # slab 0 (live)   | live | cached | free | live |   blocks 0 to 3: block id = slab * blocks_per_slab + slot
    # slab 1 (idle)   | free | cached | free | free |   blocks 4 to 7
    # slab 2          of the other model, or of none
    #
    # Slots are sought in this order: free ones of live slabs, another slab that may be claimed, cached ones of live
    # slabs, a free slab that the other model has reserved and does not need yet, an idle slab of one's own.
    def _find_slots(self) -> list[int]:
        """Free slots, at least one, of the slab that the next block should come from."""
        if slots := self._slots_of_a_live_slab():
            return slots
        if self._can_claim_slab and self.kv_pool.free_slabs:
            return self._open_slab()
        if oldest := self._evictable.oldest_in_live_slab():
            block, slab = oldest
            self._evict(block)
            self._push_candidate(slab)
            return self._free_slots[slab]
        if self.kv_pool.free_slabs:
            return self._open_slab()
        if (slab := self._evictable.oldest_idle_slab()) is not None:
            slots = self._free_slots[slab]
            if not slots:
                self._evict(self._evictable.of(slab)[0])
            return slots
        return self._open_slab()

    def _slots_of_a_live_slab(self) -> list[int] | None:
        while self._candidates:
            slab = self._candidates[0]
            if slab in self._live_in and self._free_slots[slab]:
                return self._free_slots[slab]
            self._in_candidates.remove(heapq.heappop(self._candidates))
        return None

    def _push_candidate(self, slab: int) -> None:
        """Let the next allocations consider a live slab that may have room."""
        if slab not in self._in_candidates:
            self._in_candidates.add(slab)
            heapq.heappush(self._candidates, slab)

    def _open_slab(self) -> list[int]:
        slab = self.kv_pool.take(self.name)
        if slab is None:
            self.require(1, 0)
        assert slab is not None
        first = slab * self.layout.blocks_per_slab
        self._free_slots[slab] = list(range(first + self.layout.blocks_per_slab - 1, first - 1, -1))
        return self._free_slots[slab]

    def _evict(self, block: int) -> None:
        """Evict a cached block, which leaves a free slot."""
        self._evictable.remove(block, self._slab(block))
        self.cache.forget(block)
        self._free_slots[self._slab(block)].append(block)
        self.counters.evicted_blocks += 1
        log.debug("evicted block %d of the %s from the prefix cache", block, self.name)

    def _count_live(self, block: int) -> None:
        """Count a block that now has its first reference."""
        slab = self._slab(block)
        if slab not in self._live_in:
            self._live_in[slab] = 0
            self._evictable.touch(slab)
            self._push_candidate(slab)
        self._live_in[slab] += 1
        self.ref_counts[block] = 1
        self.live_blocks += 1

    def _release(self, block: int) -> None:
        """Make a block without references free or cached, and give its slab back if that holds nothing else."""
        slab = self._slab(block)
        self.live_blocks -= 1
        self._live_in[slab] -= 1
        slots = self._free_slots[slab]
        known = block in self.cache
        if known and self.enable_prefix_cache:
            self._evictable.keep(block, slab, self.cache.is_transient(block))
        else:
            if known:
                self.cache.forget(block)
            slots.append(block)
            if self._live_in[slab]:
                self._push_candidate(slab)
        if not self._live_in[slab]:
            del self._live_in[slab]
            self._evictable.touch(slab)
            if len(slots) == self.layout.blocks_per_slab:
                del self._free_slots[slab]
                self.kv_pool.give_back(slab, self.name)

    def _slab(self, block: int) -> int:
        return block // self.layout.blocks_per_slab
