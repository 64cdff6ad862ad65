"""Admission by memory: blocks for a search's worst case are reserved before it starts; preemption when they run out."""

import itertools
import logging
import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass

from espalier.engine.errors import PoolTooSmallError
from espalier.engine.memory.blocks import BlockPool, KVPool
from espalier.engine.scheduling.scheduler import Scheduler

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


class Preemption:
    """Preempts owners by freeing all their KV, and resumes them once there is room.

    Owners rank by priority, then by the order in which they were admitted; the last one is preempted first. Tokens are
    kept, so KV can be computed again (shared blocks once), and nothing that was sampled or scored is lost.

    The first owner with work is never preempted, and always goes on. It fits the KV pool alone once its blocks lie
    together; where its paths together do not, they take turns. If it finds no blocks for one model although nobody
    else holds any, that model's slabs have no free slot (free slots of a model's own slabs are used before another
    slab, however its blocks are scattered), so they are as few as its blocks need, and the slabs that it lacks are
    those of another model, or of another KV group of the same one, that its blocks there are scattered over.
    `compact` drops its KV of that model too; it is computed again later, and then that model fits.

    Attributes:
        preempted: the owners that wait for room, each with the blocks that it held, by KV group.
    """

    def __init__(self, kv_pool: KVPool, schedulers: Mapping[str, Scheduler], admission: Admission) -> None:
        self.preempted: dict[Hashable, dict[str, int]] = {}
        self._kv_pool = kv_pool
        self._schedulers = schedulers
        self._admission = admission
        self._suspended: set[Hashable] = set()  # preempted owners that wait for `resume_owner`

    def preempt(self, owner: Hashable) -> None:
        """Give up the KV of `owner` and pause its work until there is room."""
        held = self.preempted.setdefault(owner, {})
        for scheduler in self._schedulers.values():
            if scheduler.table.blocks_of(owner):
                scheduler.table.counters.preemptions += 1
                for group, pool in enumerate(scheduler.pools):
                    if pool.name in self._admission.pools:  # others need not have theirs back
                        held[pool.name] = held.get(pool.name, 0) + scheduler.table.blocks_of(owner, group)
            scheduler.drop_kv(owner)
            scheduler.planner.paused.add(owner)
        log.info("preempted %s, which frees blocks %s", owner, held)

    def suspend(self, owner: Hashable) -> None:
        """Preempt `owner` until `resume_owner`, whatever room there is."""
        self.preempt(owner)
        self._suspended.add(owner)

    def resume_owner(self, owner: Hashable) -> None:
        """Let `owner`, suspended by `suspend`, resume once there is room."""
        self._suspended.discard(owner)

    def make_room(self, requesters: Collection[Hashable]) -> bool:
        """Preempt one owner: one whose work does not go on, else the last one that ranks behind the first requester.

        Args:
            requesters: owners whose work needs blocks.

        Returns:
            Whether an owner was preempted.
        """
        tables = [scheduler.table for scheduler in self._schedulers.values()]
        holding = {owner for table in tables for owner in table.owners() if table.blocks_of(owner)}
        active, first = self._active(), min(map(self._admission.rank, requesters))
        behind = [o for o in holding & active if self._admission.rank(o) > first]
        if not (victims := list(holding - active) or behind):
            return False
        self.preempt(max(victims, key=self._admission.rank))
        return True

    def compact(self) -> bool:
        """Drop the first owner's KV of a model whose blocks lie in more slabs than they need, for work on another one.

        Only where no work goes on, and no owner can be preempted.

        Returns:
            Whether KV was dropped.
        """
        if not (active := self._active()):
            return False
        first = min(active, key=self._admission.rank)
        for scheduler in self._schedulers.values():
            others = [other for other in self._schedulers.values() if other is not scheduler or len(other.pools) > 1]
            scattered = any(pool.live_slabs > pool.slabs_for(pool.live_blocks) for pool in scheduler.pools)
            if scattered and scheduler.table.blocks_of(first) and any(first in other.owners() for other in others):
                scheduler.drop_kv(first)
                scheduler.table.counters.preemptions += 1
                return True
        return False

    def take_turns(self) -> bool:
        """Drop KV of the first owner, whose sequences do not fit the KV pool together: they go on one after another.

        Only where no work goes on, no owner can be preempted, and `compact` finds nothing.

        Returns:
            Whether KV was dropped.
        """
        first = min(self._active(), key=self._admission.rank, default=None)
        if first is None or not self._admission.is_admitted(first):
            return False
        for working in (False, True):
            for scheduler in self._schedulers.values():
                if scheduler.drop_some_kv(first, working):
                    scheduler.table.counters.preemptions += 1
                    return True
        return False

    def resume(self) -> None:
        """Resume preempted owners in order of rank while there is room for what they held; at least one if none runs.

        An owner never resumes before a higher one that is blocked for want of blocks, nor while it is suspended.
        """
        preempted = self.preempted.keys() - self._suspended
        if not preempted:
            return
        blocked = [
            scheduler.planner.blocked.owner for scheduler in self._schedulers.values() if scheduler.planner.blocked
        ]
        working = self._working()
        wanted: Counter[str] = Counter()  # by all who resume now
        for owner in sorted(preempted, key=self._admission.rank):
            if owner not in working:
                self.forget(owner)
                continue
            wanted.update(self.preempted[owner])
            behind = any(self._admission.rank(owner) > self._admission.rank(other) for other in blocked)
            if self._active() and (behind or not self._fits(wanted)):
                return
            self.forget(owner)

    def forget(self, owner: Hashable) -> None:
        """Stop pausing the work of `owner`: it resumes, or there is none any more."""
        self._suspended.discard(owner)
        if self.preempted.pop(owner, None) is not None:
            log.info("%s is not paused any more", owner)
            for scheduler in self._schedulers.values():
                scheduler.planner.paused.discard(owner)

    def _active(self) -> set[Hashable]:
        """Owners with work that is not paused."""
        return self._working() - self.preempted.keys()

    def _working(self) -> set[Hashable]:
        """Owners with waiting or running work, paused or not."""
        return {owner for scheduler in self._schedulers.values() for owner in scheduler.owners()}

    def _fits(self, blocks: Mapping[str, int]) -> bool:
        """True if there is room for `blocks` of each KV group, and a slab of each to grow into."""
        pools = self._admission.pools
        slabs = sum(pools[name].slabs_to_open(count) + 1 for name, count in blocks.items())
        return slabs <= self._kv_pool.available_slabs
