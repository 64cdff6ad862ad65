"""Admission by memory: blocks for a search's worst case are reserved before it starts."""

import itertools
import logging
import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass

from espalier.engine.errors import PoolTooSmallError
from espalier.engine.memory.blocks import BlockPool
from espalier.engine.memory.pool import KVPool

log = logging.getLogger("espalier.engine.admission")


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks reserved for one owner, by KV group, until `Admission.release`."""

    blocks: Mapping[str, int]
    owner: Hashable = None


class Admission:
    """Reserves blocks, so that an admitted search never meets an empty pool.

    A slab belongs to one KV group of a model while any of its blocks is live, so memory is counted in slabs. A group,
    known by the name of its pool, never needs more slabs than it had live at the last admission, or than all its
    reservations need, whichever is more: it opens a slab beyond its reservations only when live blocks fill its own
    slabs. Admission keeps the sum over the groups within the KV pool, so every reserved block can be allocated. Cached
    blocks do not count: they are evicted on demand.

    Where less than the worst case is reserved, blocks can run out; see `Preemption`.
    """

    def __init__(self, kv_pool: KVPool, pools: Mapping[str, BlockPool], share: float = 1.0) -> None:
        """Admit searches to `kv_pool`, reserving `share` of each one's worst case."""
        self.kv_pool = kv_pool
        self.pools = pools
        self._share = share
        self._ranks: dict[Hashable, tuple[int, int]] = {}
        self._arrivals = itertools.count()
        self.reserved_blocks = dict.fromkeys(pools, 0)

    def require_fits_alone(self, blocks: Mapping[str, int]) -> None:
        """Raise PoolTooSmallError when an idle engine could not hold `blocks`."""
        slabs = sum(self.pools[role].slabs_for(count) for role, count in blocks.items())
        if slabs > self.kv_pool.num_slabs:
            raise PoolTooSmallError(slabs * self.kv_pool.slab_bytes, self.kv_pool.num_bytes)

    def is_admitted(self, owner: Hashable) -> bool:
        """True if an owner has a reservation."""
        return owner in self._ranks

    def rank(self, owner: Hashable) -> tuple[float, float]:
        """A sort key by which owners are ordered, smaller first; owners without a reservation come last."""
        return self._ranks.get(owner, (math.inf, math.inf))

    def try_reserve(self, blocks: Mapping[str, int], owner: Hashable = None, priority: int = 0) -> Reservation | None:
        """Reserve blocks, or return None when they are not free yet.

        Args:
            blocks: by KV group, the blocks that the owner may need at worst.
            owner: the search they are reserved for.
            priority: larger ranks first; of equal ones, the owner that was admitted first.

        Raises:
            PoolTooSmallError: when the blocks would not be free even on an idle engine.
        """
        self.require_fits_alone(blocks)
        blocks = {role: math.ceil(self._share * count) for role, count in blocks.items()}
        wanted = {role: self.reserved_blocks[role] + blocks.get(role, 0) for role in self.pools}
        slabs = sum(max(pool.live_slabs, pool.slabs_for(wanted[role])) for role, pool in self.pools.items())
        if slabs > self.kv_pool.num_slabs:
            return None
        self.reserved_blocks = wanted
        self._set_reserved_slabs()
        self._ranks[owner] = (-priority, next(self._arrivals))
        log.debug("admitted %s: reserved blocks %s, %d of %d slabs", owner, blocks, slabs, self.kv_pool.num_slabs)
        return Reservation(blocks, owner)

    def would_fit(self, blocks: Mapping[str, int], without: Collection[Reservation]) -> bool:
        """True if `blocks` could be reserved if the reservations `without` were released and their blocks were free.

        Only reservations count here: where other owners hold more than they reserved, or their blocks lie in more slabs
        than they need, room may come later than this says.
        """
        slabs = 0
        for role, pool in self.pools.items():
            others = self.reserved_blocks[role] - sum(reservation.blocks.get(role, 0) for reservation in without)
            slabs += pool.slabs_for(others + math.ceil(self._share * blocks.get(role, 0)))
        return slabs <= self.kv_pool.num_slabs

    def release(self, reservation: Reservation) -> None:
        """Release a reservation, after its owner's sequences."""
        for role, count in reservation.blocks.items():
            self.reserved_blocks[role] -= count
            assert self.reserved_blocks[role] >= 0, "a reservation was released twice"
        self._ranks.pop(reservation.owner, None)
        self._set_reserved_slabs()

    def _set_reserved_slabs(self) -> None:
        for role, pool in self.pools.items():
            pool.reserved_slabs = pool.slabs_for(self.reserved_blocks[role])
