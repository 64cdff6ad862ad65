"""Reference-counted KV blocks of one model, in sectors taken from the arena on demand."""

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterable

import numpy as np

from espalier.engine.errors import PoolExhaustedError
from espalier.engine.memory.pool import Arena
from espalier.engine.memory.prefix_cache import PrefixCache
from espalier.kernels.layout import KVLayout


class BlockPool:
    """Free, live and cached blocks of one model.

    A block id is `sector * blocks_per_sector + slot`, so ids are sparse: only those in owned sectors exist. A block is
    live while a sequence refers to it. Without references it becomes free, or cached if it holds a known prefix. A
    sector with live blocks is a live sector; one without gives way to whoever needs it, cached blocks and all.

    Allocation takes a slot of the lowest live sector that has one, so the last sectors run empty. Before that would
    give up a cached block, it opens another sector, provided that none promised to another model is taken: so cached
    blocks never spread live ones over more sectors than there are.
    """

    def __init__(self, owner: str, layout: KVLayout, arena: Arena, keeps_prefixes: bool = True) -> None:
        """Make a pool without sectors; unless it `keeps_prefixes`, a known block is free with its last reference."""
        self.owner = owner
        self.hits = 0
        self.evictions = 0
        self.keeps_prefixes = keeps_prefixes
        self._kept = KeptBlocks()
        self.layout = layout
        self.arena = arena
        self.ref_counts = np.zeros(arena.num_sectors * layout.blocks_per_sector, dtype=np.int32)
        self.cache = PrefixCache()
        self.entitled_sectors = 0
        self.live_blocks = 0
        self._free_slots: dict[int, list[int]] = {}  # by owned sector; free block ids
        self._live_in: dict[int, int] = {}  # by live sector; how many of its blocks are live
        self._candidates: list[int] = []  # a heap without duplicates of live sectors that may have a free slot
        self._in_candidates: set[int] = set()
        arena.register(owner, self)

    @property
    def owned_sectors(self) -> int:
        """Sectors this pool holds."""
        return len(self._free_slots)

    @property
    def live_sectors(self) -> int:
        """Owned sectors with live blocks."""
        return len(self._live_in)

    @property
    def idle_sectors(self) -> int:
        """Owned sectors that hold nothing but cached blocks."""
        return self.owned_sectors - self.live_sectors

    @property
    def owed_sectors(self) -> int:
        """Sectors this pool is entitled to and does not need yet."""
        return max(0, self.entitled_sectors - self.live_sectors)

    @property
    def cached_blocks(self) -> int:
        """Blocks kept for their prefix though nothing refers to them."""
        return len(self._kept)

    @property
    def free_blocks(self) -> int:
        """Blocks in owned sectors that hold nothing."""
        return self.owned_sectors * self.layout.blocks_per_sector - self.live_blocks - self.cached_blocks

    @property
    def allocatable_blocks(self) -> int:
        """How often `allocate` would succeed now."""
        sectors = self.live_sectors + self.arena.available_to(self.owner, self.live_sectors)
        return sectors * self.layout.blocks_per_sector - self.live_blocks

    def sectors_for(self, blocks: int) -> int:
        """Whole sectors that `blocks` blocks need."""
        return -(-blocks // self.layout.blocks_per_sector)

    def require(self, blocks: int, owners: frozenset[Hashable] = frozenset()) -> None:
        """Check that `allocate` would succeed `blocks` times now.

        Raises:
            PoolExhaustedError: when it would not; of `owners`.
        """
        if blocks > self.allocatable_blocks:
            raise PoolExhaustedError(
                f"the {self.owner} needs {blocks} KV blocks and {self.allocatable_blocks} are free in an arena of "
                f"{self.arena.num_bytes} bytes; raise --kv-memory or run fewer searches at once",
                owners,
            )

    def allocate(self) -> int:
        """Take a free block with one reference, giving up cached ones where it must.

        Raises:
            PoolExhaustedError: when live blocks fill the owned sectors and the arena has no other to give.
        """
        block = self._find_slots().pop()
        self._count_live(block)
        return block

    def share(self, blocks: np.ndarray) -> None:
        """Add one reference to each of `blocks`, which are live and distinct."""
        assert (self.ref_counts[blocks] > 0).all(), "a free block cannot be shared"
        self.ref_counts[blocks] += 1

    def match(self, hashes: list[bytes]) -> list[int]:
        """Blocks that hold the longest known beginning of a chain, with one more reference to each.

        A block is passed over where using it would take a sector that is promised to another model.
        """
        blocks = []
        for block in self.cache.match(hashes):
            if self.ref_counts[block]:
                self.ref_counts[block] += 1
            elif self._sector(block) in self._live_in or self._may_open:
                self._kept.remove(block, self._sector(block))
                self._count_live(block)
            else:
                break
            blocks.append(block)
        self.hits += len(blocks)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each of `blocks`; those with none left become free or cached."""
        for block in map(int, blocks):
            assert self.ref_counts[block] > 0, f"block {block} is already free"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._release(block)

    def surrender_idle_sector(self) -> bool:
        """Give the idle sector with the least recently used block back to the arena; False when there is none."""
        sector = self._kept.oldest_idle_sector()
        if sector is None:
            return False
        for block in self._kept.of(sector):
            self._evict(block)
        del self._free_slots[sector]
        self.arena.give_back(sector, self.owner)
        return True

    def check_integrity(self, tables: Iterable[np.ndarray]) -> None:
        """Raise AssertionError unless counts, owners and `tables` (block ids of every live sequence) agree."""
        per_sector = self.layout.blocks_per_sector
        expected = np.zeros_like(self.ref_counts)
        for table in tables:
            np.add.at(expected, table, 1)
        assert (expected == self.ref_counts).all(), f"{self.owner}: reference counts differ from the block tables"
        assert set(self._free_slots) == self.arena.owned_by(self.owner), f"{self.owner}: sector owners differ"
        live = set(np.flatnonzero(self.ref_counts).tolist())
        assert len(live) == self.live_blocks, f"{self.owner}: live block count is wrong"
        kept = {block for sector in self._free_slots for block in self._kept.of(sector)}
        assert len(kept) == self.cached_blocks, f"{self.owner}: a block of another's sector is kept"
        assert not kept & live, f"{self.owner}: a live block is kept as unused"
        assert all(block in self.cache for block in kept), f"{self.owner}: a kept block is not known"
        self._kept.check_integrity({block // per_sector for block in live})
        self.cache.check_integrity(live | kept)
        used = live | kept
        assert {block // per_sector for block in used} == set(self._free_slots), f"{self.owner}: holds an empty sector"
        for sector, slots in self._free_slots.items():
            own = set(range(sector * per_sector, (sector + 1) * per_sector))
            assert self._live_in.get(sector, 0) == len(own & live), f"{self.owner}: live blocks of sector {sector}"
            assert len(set(slots)) == len(slots), f"{self.owner}: a block of sector {sector} is free twice"
            assert own & used | set(slots) == own, f"{self.owner}: a block is lost"
            assert not own & used & set(slots), f"{self.owner}: a block of sector {sector} is both free and used"
            if slots and own & live:
                assert sector in self._candidates, f"{self.owner}: room in sector {sector} cannot be found"

    @property
    def _may_open(self) -> bool:
        """Whether another live sector breaks no promise made to another model."""
        return self.owed_sectors > 0 or self.arena.spare_sectors > 0

    def _find_slots(self) -> list[int]:
        """Free slots, at least one, of the sector that the next block should come from."""
        if slots := self._slots_of_a_live_sector():
            return slots
        if self._may_open and self.arena.free_sectors and self.owned_sectors < self.arena.quota(self.owner):
            return self._open_sector()
        if slots := self._evict_from_a_live_sector():
            return slots
        if self.arena.free_sectors and self.owned_sectors < self.arena.quota(self.owner):
            return self._open_sector()
        if (sector := self._kept.oldest_idle_sector()) is not None:
            slots = self._free_slots[sector]
            if not slots:
                self._evict(self._kept.of(sector)[0])
            return slots
        return self._open_sector()

    def _slots_of_a_live_sector(self) -> list[int] | None:
        while self._candidates:
            sector = self._candidates[0]
            if sector in self._live_in and self._free_slots[sector]:
                return self._free_slots[sector]
            self._in_candidates.remove(heapq.heappop(self._candidates))
        return None

    def _offer(self, sector: int) -> None:
        """Let the next allocations consider a live sector that may have room."""
        if sector not in self._in_candidates:
            self._in_candidates.add(sector)
            heapq.heappush(self._candidates, sector)

    def _evict_from_a_live_sector(self) -> list[int] | None:
        if (oldest := self._kept.oldest_in_live_sector()) is None:
            return None
        block, sector = oldest
        self._evict(block)
        self._offer(sector)
        return self._free_slots[sector]

    def _open_sector(self) -> list[int]:
        sector = self.arena.take(self.owner)
        if sector is None:
            self.require(1)
        assert sector is not None
        first = sector * self.layout.blocks_per_sector
        self._free_slots[sector] = list(range(first + self.layout.blocks_per_sector - 1, first - 1, -1))
        return self._free_slots[sector]

    def _evict(self, block: int) -> None:
        """Give up a kept block, which leaves a free slot."""
        self._kept.remove(block, self._sector(block))
        self.cache.forget(block)
        self._free_slots[self._sector(block)].append(block)
        self.evictions += 1

    def _count_live(self, block: int) -> None:
        """Count a block that now has its first reference."""
        sector = self._sector(block)
        if sector not in self._live_in:
            self._live_in[sector] = 0
            self._kept.set_live(sector)
            self._offer(sector)
        self._live_in[sector] += 1
        self.ref_counts[block] = 1
        self.live_blocks += 1

    def _release(self, block: int) -> None:
        """Make a block without references free or cached, and return a sector that holds nothing else."""
        sector = self._sector(block)
        self.live_blocks -= 1
        self._live_in[sector] -= 1
        slots = self._free_slots[sector]
        known = block in self.cache
        if known and self.keeps_prefixes:
            self._kept.keep(block, sector)
        else:
            if known:
                self.cache.forget(block)
            slots.append(block)
            if self._live_in[sector]:
                self._offer(sector)
        if not self._live_in[sector]:
            del self._live_in[sector]
            self._kept.set_idle(sector)
            if len(slots) == self.layout.blocks_per_sector:
                del self._free_slots[sector]
                self.arena.give_back(sector, self.owner)

    def _sector(self, block: int) -> int:
        return block // self.layout.blocks_per_sector


class KeptBlocks:
    """Blocks without references, by sector: least recently kept first, sectors as well as blocks within one.

    A live sector also holds blocks that are in use; an idle one holds nothing but kept blocks and free slots.
    """

    def __init__(self) -> None:
        self._of: dict[int, OrderedDict[int, None]] = {}
        self._live: OrderedDict[int, None] = OrderedDict()
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def of(self, sector: int) -> list[int]:
        """Kept blocks of a sector, least recently kept first."""
        return list(self._of.get(sector, ()))

    def keep(self, block: int, sector: int) -> None:
        """Keep `block` of the live `sector`, as the most recent one."""
        self._of.setdefault(sector, OrderedDict())[block] = None
        self._live[sector] = None
        self._live.move_to_end(sector)
        self._count += 1

    def remove(self, block: int, sector: int) -> None:
        """Keep `block` no longer: it is used again, or its room is needed."""
        kept = self._of[sector]
        del kept[block]
        self._count -= 1
        if not kept:
            del self._of[sector]
            self._live.pop(sector, None)
            self._idle.pop(sector, None)

    def set_idle(self, sector: int) -> None:
        """The last block in use of `sector` was given up."""
        if sector in self._of:
            self._live.pop(sector, None)
            self._idle[sector] = None

    def set_live(self, sector: int) -> None:
        """A block of `sector` is in use again."""
        if self._idle.pop(sector, 0) is None:
            self._live[sector] = None

    def oldest_in_live_sector(self) -> tuple[int, int] | None:
        """The block to give up first among live sectors, and its sector."""
        if not self._live:
            return None
        sector = next(iter(self._live))
        return next(iter(self._of[sector])), sector

    def oldest_idle_sector(self) -> int | None:
        """The idle sector to give up first."""
        return next(iter(self._idle), None)

    def check_integrity(self, live_sectors: set[int]) -> None:
        """Raise AssertionError unless every sector with kept blocks is counted as what it is, and once."""
        assert self._count == sum(map(len, self._of.values())), "the count of kept blocks is wrong"
        assert set(self._live) == set(self._of) & live_sectors, "live sectors with kept blocks differ"
        assert set(self._idle) == set(self._of) - live_sectors, "idle sectors differ"
