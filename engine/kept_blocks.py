"""Blocks kept for their prefix though no sequence refers to them, in the order in which they give way.

They give way by sector, so that sectors come back whole. Every operation takes constant time.
"""

from collections import OrderedDict


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
