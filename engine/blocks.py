"""Reference-counted KV blocks of one model, in sectors taken from the arena on demand."""

import heapq
from collections.abc import Iterable

import numpy as np

from espalier.engine.arena import Arena
from espalier.engine.errors import PoolExhaustedError
from espalier.kernels.layout import KVLayout


class BlockPool:
    """Free and live blocks of one model.

    A block id is `sector * blocks_per_sector + slot`, so ids are sparse: only those in owned sectors exist. Allocation
    takes a slot of the lowest sector that has one, so the last sectors run empty and return to the arena.
    """

    def __init__(self, owner: str, layout: KVLayout, arena: Arena) -> None:
        self.owner = owner
        self.layout = layout
        self.arena = arena
        self.ref_counts = np.zeros(arena.num_sectors * layout.blocks_per_sector, dtype=np.int32)
        self._free_slots: dict[int, list[int]] = {}  # by owned sector; free block ids
        self._candidates: list[int] = []  # a heap without duplicates of sectors that may have a free slot
        self.live_blocks = 0

    @property
    def owned_sectors(self) -> int:
        """Sectors this pool holds."""
        return len(self._free_slots)

    @property
    def free_blocks(self) -> int:
        """Blocks in owned sectors that nothing refers to."""
        return self.owned_sectors * self.layout.blocks_per_sector - self.live_blocks

    @property
    def allocatable_blocks(self) -> int:
        """How often `allocate` would succeed now."""
        return self.free_blocks + self.arena.free_sectors * self.layout.blocks_per_sector

    def sectors_for(self, blocks: int) -> int:
        """Whole sectors that `blocks` blocks need."""
        return -(-blocks // self.layout.blocks_per_sector)

    def require(self, blocks: int) -> None:
        """Check that `allocate` would succeed `blocks` times now.

        Raises:
            PoolExhaustedError: when it would not.
        """
        if blocks > self.allocatable_blocks:
            raise PoolExhaustedError(
                f"the {self.owner} needs {blocks} KV blocks and {self.allocatable_blocks} are free in an arena of "
                f"{self.arena.num_bytes} bytes; raise --kv-memory or run fewer searches at once"
            )

    def allocate(self) -> int:
        """Take a free block with one reference.

        Raises:
            PoolExhaustedError: when no slot is free in owned sectors and the arena has no free sector.
        """
        block = self._lowest_sector_with_room().pop()
        self.ref_counts[block] = 1
        self.live_blocks += 1
        return block

    def share(self, blocks: np.ndarray) -> None:
        """Add one reference to each of `blocks`, which are live and distinct."""
        assert (self.ref_counts[blocks] > 0).all(), "a free block cannot be shared"
        self.ref_counts[blocks] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each of `blocks`; those with none left become free."""
        for block in blocks:
            assert self.ref_counts[block] > 0, f"block {block} is already free"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._release(int(block))

    def check_integrity(self, tables: Iterable[np.ndarray]) -> None:
        """Raise AssertionError unless counts, owners and `tables` (block ids of every live sequence) agree."""
        per_sector = self.layout.blocks_per_sector
        expected = np.zeros_like(self.ref_counts)
        for table in tables:
            np.add.at(expected, table, 1)
        assert (expected == self.ref_counts).all(), f"{self.owner}: reference counts differ from the block tables"
        assert set(self._free_slots) == self.arena.owned_by(self.owner), f"{self.owner}: sector owners differ"
        live = np.flatnonzero(self.ref_counts)
        assert len(live) == self.live_blocks, f"{self.owner}: live block count is wrong"
        for sector, slots in self._free_slots.items():
            used = {int(b) for b in live if b // per_sector == sector}
            assert used, f"{self.owner}: holds the empty sector {sector}"
            assert len(set(slots)) == len(slots), f"{self.owner}: a block of sector {sector} is free twice"
            assert used | set(slots) == set(range(sector * per_sector, (sector + 1) * per_sector)), "a block is lost"
            assert not used & set(slots), f"{self.owner}: a block of sector {sector} is both free and live"
            assert not slots or sector in self._candidates, f"{self.owner}: room in sector {sector} cannot be found"

    def _lowest_sector_with_room(self) -> list[int]:
        while self._candidates:
            slots = self._free_slots.get(self._candidates[0])
            if slots:
                return slots
            heapq.heappop(self._candidates)
        sector = self.arena.take(self.owner)
        if sector is None:
            self.require(1)
        assert sector is not None
        first = sector * self.layout.blocks_per_sector
        self._free_slots[sector] = list(range(first + self.layout.blocks_per_sector - 1, first - 1, -1))
        self._candidates.append(sector)  # the heap is empty, so this keeps it one
        return self._free_slots[sector]

    def _release(self, block: int) -> None:
        self.live_blocks -= 1
        sector = block // self.layout.blocks_per_sector
        slots = self._free_slots[sector]
        slots.append(block)
        if len(slots) == self.layout.blocks_per_sector:
            del self._free_slots[sector]
            self.arena.give_back(sector, self.owner)
        elif sector not in self._candidates:
            heapq.heappush(self._candidates, sector)
