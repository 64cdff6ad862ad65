"""Admission by memory: what a search may need at worst is set aside before it starts."""

import itertools
import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass

from espalier.engine.errors import PoolTooSmallError
from espalier.engine.memory.blocks import BlockPool
from espalier.engine.memory.pool import KVPool


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks set aside for each role; hand it back with `Admission.release`."""

    blocks: Mapping[str, int]
    owner: Hashable = None


class Admission:
    """Sets blocks aside so that an admitted search never meets an empty pool.

    A slab belongs to one model while any of its blocks is live, so memory is counted in slabs. A role never needs
    more than `max(live at the last admission, slabs for all it has reserved)`: beyond what it has reserved, it opens
    a slab only when live blocks fill its own. Admission keeps the sum of these over the roles within the KV pool, so
    every reserved block can be allocated. Cached blocks count for nothing: they give way.

    Where less than the worst case is set aside, blocks can run out; see `Preemption`.
    """

    def __init__(self, kv_pool: KVPool, pools: Mapping[str, BlockPool], share: float = 1.0) -> None:
        """Admit to `kv_pool`, setting `share` of each worst case aside."""
        self.kv_pool = kv_pool
        self.pools = pools
        self._share = share
        self._ranks: dict[Hashable, tuple[int, int]] = {}
        self._arrivals = itertools.count()
        self.reserved_blocks = dict.fromkeys(pools, 0)

    def require_fits_alone(self, blocks: Mapping[str, int]) -> None:
        """Raise PoolTooSmallError when an idle engine could not hold `blocks`."""
        slabs = {role: self.pools[role].slabs_for(count) for role, count in blocks.items()}
        limits = [(sum(slabs.values()), self.kv_pool.num_slabs)]
        limits += [(needed, self.kv_pool.quota(role)) for role, needed in slabs.items()]
        for needed, limit in limits:
            if needed > limit:
                raise PoolTooSmallError(needed * self.kv_pool.slab_bytes, limit * self.kv_pool.slab_bytes)

    def rank(self, owner: Hashable) -> tuple[float, float]:
        """Where `owner` stands: smaller goes first. Who reserved nothing comes last."""
        return self._ranks.get(owner, (math.inf, math.inf))

    def try_reserve(self, blocks: Mapping[str, int], owner: Hashable = None, priority: int = 0) -> Reservation | None:
        """Set blocks aside, or return None when they are not free yet.

        Args:
            blocks: of each role, what the owner may need at worst.
            owner: for whom.
            priority: larger goes first; of equals, who was admitted first.

        Raises:
            PoolTooSmallError: when they never can be.
        """
        self.require_fits_alone(blocks)
        blocks = {role: math.ceil(self._share * count) for role, count in blocks.items()}
        wanted = {role: self.reserved_blocks[role] + blocks.get(role, 0) for role in self.pools}
        slabs = {role: max(pool.live_slabs, pool.slabs_for(wanted[role])) for role, pool in self.pools.items()}
        if any(needed > self.kv_pool.quota(role) for role, needed in slabs.items()):
            return None
        if sum(slabs.values()) > self.kv_pool.num_slabs:
            return None
        self.reserved_blocks = wanted
        self._set_reserved_slabs()
        self._ranks[owner] = (-priority, next(self._arrivals))
        return Reservation(blocks, owner)

    def would_fit(self, blocks: Mapping[str, int], without: Collection[Reservation]) -> bool:
        """Whether `blocks` could be set aside if the reservations `without` were handed back and their blocks free.

        Goes by what is reserved: where others hold more, or theirs lie scattered, it may take longer than that.
        """
        slabs = 0
        for role, pool in self.pools.items():
            others = self.reserved_blocks[role] - sum(reservation.blocks.get(role, 0) for reservation in without)
            needed = pool.slabs_for(others + math.ceil(self._share * blocks.get(role, 0)))
            if needed > self.kv_pool.quota(role):
                return False
            slabs += needed
        return slabs <= self.kv_pool.num_slabs

    def release(self, reservation: Reservation) -> None:
        """Hand a reservation back; its sequences are released already."""
        for role, count in reservation.blocks.items():
            self.reserved_blocks[role] -= count
            assert self.reserved_blocks[role] >= 0, "a reservation was released twice"
        self._ranks.pop(reservation.owner, None)
        self._set_reserved_slabs()

    def _set_reserved_slabs(self) -> None:
        for role, pool in self.pools.items():
            pool.reserved_slabs = pool.slabs_for(self.reserved_blocks[role])
