"""The batches of an engine: which model's is launched next, and what becomes of its results."""

import logging
from collections.abc import Callable, Collection, Hashable, Mapping
from time import perf_counter
from typing import NamedTuple

from espalier.engine.errors import FatalError, MisuseError, PartialFailureError, PoolExhaustedError, StepError
from espalier.engine.execution.runner import ModelRunner, WaitForResults
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.engine.scheduling.admission import Preemption
from espalier.engine.scheduling.planner import StepPlan
from espalier.engine.scheduling.scheduler import Scheduler
from espalier.engine.scheduling.turns import FairSharing, GeneratorFirst, RoleLoad
from espalier.engine.step_record import StepRecord
from espalier.engine.work import Done

log = logging.getLogger("espalier.engine")


class _Batch(NamedTuple):
    """A batch in flight: its model, its plan, what waits for its results.

    Attributes:
        times: when scheduling began, when the launch began and when it ended.
    """

    role: str
    plan: StepPlan
    wait: WaitForResults
    times: tuple[float, float, float]


class Batches:
    """Launches batches one after another, and takes their results in, the oldest first.

    Attributes:
        collected: work that is finished, for `Engine.step` to return.
        failures: of batches, for `Engine.step` to raise.
    """

    def __init__(
        self,
        schedulers: Mapping[str, Scheduler],
        runners: Mapping[str, ModelRunner],
        role_policy: GeneratorFirst,
        sharing: FairSharing,
        preemption: Preemption,
        max_tokens: int,
        listener: Callable[[], Callable[[StepRecord], None] | None],
    ) -> None:
        """Launch nothing yet.

        Args:
            schedulers: by role.
            runners: by role.
            role_policy: chooses between roles.
            sharing: chooses between owners.
            preemption: makes room.
            max_tokens: of a batch at most.
            listener: gives what is called after each batch; None for nobody.
        """
        self.collected: list[Done] = []
        self.failures: list[PartialFailureError] = []
        self._schedulers = schedulers
        self._runners = runners
        self._role_policy = role_policy
        self._sharing = sharing
        self._preemption = preemption
        self._max_tokens = max_tokens
        self._listener = listener
        self._in_flight: list[_Batch] = []  # the oldest first
        self._last_update_end = 0.0

    def run(self, launch_ahead: bool) -> None:
        """Launch a batch, and take in those in flight: all, or with `launch_ahead` those before the new one.

        Raises:
            PoolExhaustedError: when nobody's work finds blocks and no owner can give any up.
        """
        if self._preemption.preempted:
            self._preemption.resume()
        before = len(self._in_flight)
        try:
            self._launch()
        except PoolExhaustedError:
            if not before:
                raise  # else the batch in flight may free blocks
        left = 1 if launch_ahead and before < len(self._in_flight) else 0
        while len(self._in_flight) > left:
            self._collect()

    def settle(self) -> None:
        """Wait for all batches in flight, before sequences or blocks that they use are taken away."""
        while self._in_flight:
            self._collect()

    def forget(self, owner: Hashable) -> list[Done]:
        """Drop the failures of `owner`, and what is collected of its work, which is returned."""
        dropped = [done for done in self.collected if done.work.owner == owner]
        self.collected = [done for done in self.collected if done.work.owner != owner]
        for failure in self.failures:
            failure.owners -= {owner}
        self.failures = [failure for failure in self.failures if failure.owners]
        return dropped

    def _launch(self) -> None:
        """Launch a batch of the role whose turn it is; of the other one if the first cannot go on yet."""
        loads, fair = self._share_out()
        if self._launch_of(loads, fair):
            return
        if any(scheduler.planner.throttled for scheduler in self._schedulers.values()):
            self._throttle(frozenset())
            self._launch_of(self._loads(), fair=False)

    def _launch_of(self, loads: Mapping[str, RoleLoad], fair: bool) -> bool:
        """Launch a batch of `loads`, which accounts pay for if it is `fair`; returns whether there was one.

        Raises:
            PoolExhaustedError: when blocks run out for every role with work, and no owner can give any up.
        """
        roles = [role for role, load in loads.items() if load.busy]
        if len(roles) > 1 and self._role_policy.choose(loads[GENERATOR], loads[VERIFIER]) != roles[0]:
            roles.reverse()
        exhausted: PoolExhaustedError | None = None
        for role in roles:
            try:
                if self._launch_role(role, fair):
                    return True
            except PoolExhaustedError as error:
                exhausted = exhausted or error
        if exhausted is None:
            return False
        if not self._in_flight and (self._preemption.compact() or self._preemption.take_turns()):
            return self._launch_of(loads, fair)
        raise exhausted

    def _launch_role(self, role: str, fair: bool) -> bool:
        """Launch a batch of one role; returns whether there was one, even if it failed.

        Raises:
            PoolExhaustedError: when blocks run out for its work, and no owner can give any up.
        """
        scheduler, schedule_start = self._schedulers[role], perf_counter()
        most = min(self._max_tokens, self._sharing.most_tokens(role)) if self._sharing.contended else self._max_tokens
        try:
            plan = scheduler.schedule(most)
        except PoolExhaustedError:
            raise
        except BaseException as error:
            self._fail(role, scheduler.owners(), error)
            return True
        if plan is None:
            return False
        launch_start = perf_counter()
        try:
            wait = self._runners[role].launch(scheduler.table, plan)
        except BaseException as error:  # an interrupt too: the prefix cache lists blocks before they are written
            self._fail(role, plan.owners, error)
            return True
        self._in_flight.append(_Batch(role, plan, wait, (schedule_start, launch_start, perf_counter())))
        scheduler.launched(plan)
        if fair:
            self._sharing.charge(role, plan)
        return True

    def _share_out(self) -> tuple[dict[str, RoleLoad], bool]:
        """Throttle owners over their share; returns the work left by role, and whether the step is charged for."""
        self._throttle(frozenset())
        loads = self._loads()
        if not self._sharing.contended:
            return loads, False
        schedulers = self._schedulers.values()
        working = {owner for scheduler in schedulers for owner in scheduler.owners() - scheduler.planner.paused}
        if not (over_share := self._sharing.over_share(working)):
            return loads, True
        self._throttle(over_share)
        fewer = self._loads()
        if any(load.busy for load in fewer.values()) and self._sharing.is_worthwhile(loads, fewer):
            return fewer, True
        self._throttle(frozenset())
        return loads, False

    def _throttle(self, owners: frozenset[Hashable]) -> None:
        for scheduler in self._schedulers.values():
            scheduler.planner.throttled = owners

    def _loads(self) -> dict[str, RoleLoad]:
        schedulers = self._schedulers.items()
        return {role: RoleLoad(each.running_branches, each.waiting_tokens()) for role, each in schedulers}

    def _collect(self) -> None:
        """Take in the results of the oldest batch in flight."""
        role, plan, wait, launch_times = self._in_flight.pop(0)
        scheduler, wait_start = self._schedulers[role], perf_counter()
        try:
            results = wait()
            wait_end = perf_counter()
            self.collected += scheduler.update(plan, results)
        except BaseException as error:
            self._fail(role, plan.owners, error)
            return
        update_end = perf_counter()
        scheduler.table.counters.step_seconds.add(launch_times[2] - launch_times[0] + update_end - wait_start)
        if speculation := scheduler.speculation:
            seconds = update_end - max(launch_times[0], self._last_update_end)  # another batch may have been in flight
            speculation.record(plan, scheduler.running_branches, seconds)
        self._last_update_end = update_end
        if on_step := self._listener():
            draws, reads = len(plan.draws.step_positions) if plan.draws else 0, sum(map(len, plan.reads.values()))
            sizes = len(plan.rows), int(plan.counts.sum()), draws, reads, plan.copied_blocks
            on_step(StepRecord(role, *sizes, *launch_times, wait_start, wait_end, update_end))

    def _fail(self, role: str, owners: Collection[Hashable], error: BaseException) -> None:
        """Note the failure of a role's batch for the owners that it costs; raises what ends everybody's work.

        All KV of the role is freed, and the batches that were launched behind this one are forgotten.
        """
        self._in_flight = [batch for batch in self._in_flight if batch.role != role]
        self._schedulers[role].drop_all_kv()
        if isinstance(error, FatalError | MisuseError) or not isinstance(error, Exception):  # a closed engine is one
            raise error
        if not isinstance(error, PartialFailureError):
            log.error("a step of the %s failed", role, exc_info=error)
            cause, error = error, StepError(role, frozenset(owners))
            error.__cause__ = cause
        self.failures.append(error)
