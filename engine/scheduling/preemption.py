"""Preemption: who gives up their KV when blocks run out, and when it is computed again."""

from collections.abc import Hashable, Mapping

from espalier.engine.memory.pool import KVPool
from espalier.engine.scheduling.admission import Admission
from espalier.engine.scheduling.scheduler import Scheduler


class Preemption:
    """Makes owners give up all KV they hold, and lets them go on once there is room.

    Owners rank by priority, then by when they were admitted; the last one gives up first. Tokens stay, so KV can be
    computed again, blocks that several sequences share once, and nothing that was sampled or scored is lost. The first
    owner never gives up, and fits the KV pool alone, so there is always one that gets on.
    """

    def __init__(self, kv_pool: KVPool, schedulers: Mapping[str, Scheduler], admission: Admission) -> None:
        self.counts = dict.fromkeys(schedulers, 0)
        self._kv_pool = kv_pool
        self._schedulers = schedulers
        self._admission = admission
        self._resting: dict[Hashable, dict[str, int]] = {}  # blocks each held, by role
        self._set_aside: set[Hashable] = set()  # of those who rest, who must be called back

    def preempt(self, owner: Hashable) -> None:
        """Make `owner` give up its KV and rest."""
        self._resting[owner] = {}
        for role, scheduler in self._schedulers.items():
            if held := scheduler.table.blocks_of(owner):
                self._resting[owner][role] = held
                self.counts[role] += 1
            scheduler.drop_kv(owner)
            scheduler.planner.paused.add(owner)

    def set_aside(self, owner: Hashable) -> None:
        """Make `owner` give up its KV and rest until it is called back, whatever room there is."""
        if owner not in self._resting:
            self.preempt(owner)
        self._set_aside.add(owner)

    def call_back(self, owner: Hashable) -> None:
        """Let `owner`, set aside before, go on once there is room."""
        self._set_aside.discard(owner)

    def make_room(self, needy: Hashable) -> bool:
        """Make somebody give up their blocks: one without work, else the last one behind `needy`.

        Args:
            needy: for whom; None for whoever comes first.

        Returns:
            Whether anybody gave up anything.
        """
        holding = {
            o
            for scheduler in self._schedulers.values()
            for o in scheduler.table.owners()
            if scheduler.table.blocks_of(o)
        }
        working = self._working()
        active = working - self._resting.keys()
        if needy is None:
            needy = min(active, key=self._admission.rank, default=None)
        behind = [o for o in holding & active if self._admission.rank(o) > self._admission.rank(needy)]
        if not (victims := list(holding - working) or behind):
            return False
        self.preempt(max(victims, key=self._admission.rank))
        return True

    def resume(self) -> None:
        """Let resting owners go on, in order of rank, while there is room for what they held; one if nobody runs.

        None goes before an owner that is held up for want of blocks, and none that is set aside at all.
        """
        resting = self._resting.keys() - self._set_aside
        if not resting:
            return
        held_up = [
            scheduler.planner.held_up.owner for scheduler in self._schedulers.values() if scheduler.planner.held_up
        ]
        working = self._working()
        for owner in sorted(resting, key=self._admission.rank):
            if owner not in working:
                self.forget(owner)
                continue
            behind = any(self._admission.rank(owner) > self._admission.rank(other) for other in held_up)
            if working - self._resting.keys() and (behind or not self._fits(self._resting[owner])):
                return
            self.forget(owner)

    def forget(self, owner: Hashable) -> None:
        """Let `owner` rest no longer."""
        self._set_aside.discard(owner)
        if self._resting.pop(owner, None) is not None:
            for scheduler in self._schedulers.values():
                scheduler.planner.paused.discard(owner)

    def _working(self) -> set[Hashable]:
        """Owners whose work waits or runs, or would if they did not rest."""
        return {owner for scheduler in self._schedulers.values() for owner in scheduler.owners()}

    def _fits(self, blocks: Mapping[str, int]) -> bool:
        """Whether there is room for `blocks` of each role, and a slab of each to grow into."""
        slabs = 0
        for role, count in blocks.items():
            pool = self._schedulers[role].pool
            room = pool.live_slabs * pool.layout.blocks_per_slab - pool.live_blocks
            needed = pool.slabs_for(max(0, count - room)) + 1
            if needed > self._kv_pool.available_to(role, pool.live_slabs):
                return False
            slabs += needed
        return slabs <= self._kv_pool.available_slabs
