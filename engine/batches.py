"""The batches of an engine: which model's is launched next, whose work is left out, and what becomes of the results.

Steps are shared among accounts: who had more of the models' time than others waits until these catch up.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from espalier.engine.errors import FatalError, MisuseError, PartialFailureError, PoolExhaustedError, StepError
from espalier.engine.execution.runner import ModelRunner, WaitForResults
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.engine.scheduling.admission import Preemption
from espalier.engine.scheduling.planner import StepPlan
from espalier.engine.scheduling.scheduler import Scheduler
from espalier.engine.stats import StepRecord
from espalier.engine.work import Done

log = logging.getLogger("espalier.engine")

_STEP_COST_CPU, _STEP_COST_GPU = 16, 300
"""Tokens that take as long as what a step costs whatever it computes, mostly the reading of the weights. That of a GPU
is not measured."""
_ENOUGH_CPU, _ENOUGH_GPU = (256, 16), (1024, 32)
"""Defaults of `GeneratorFirst`. Those of a CPU were tuned there. On an H200 a 7B verifier scored 29,800 tokens a second
in steps of 250 and 42,400 in steps of 2,000; the numbers for GPUs follow from that and are themselves not timed."""
_MAX_LAG = 20
"""Step costs by which an account may be ahead of another one before its work is held back: a few batches, so that
searches that take turns at the models stay in one batch."""
_WORTHWHILE = 2
"""Step costs that holding back must save, for one is paid once more by those who are held back."""


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """Work of one model: branches being sampled and tokens waiting to be computed."""

    running_branches: int
    waiting_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens that could be computed now."""
        return self.running_branches + self.waiting_tokens

    @property
    def busy(self) -> bool:
        """True if there is anything to run."""
        return self.running_branches > 0 or self.waiting_tokens > 0


@dataclass(slots=True)
class GeneratorFirst:
    """Runs the generator until the verifier has a large batch, has waited long enough, or nothing else is left.

    Large batches make scoring cheap, and a search that waits for its scores costs nothing while other searches keep the
    generator busy.

    Attributes:
        enough_tokens: waiting verifier tokens that are worth a batch.
        max_deferred_steps: generator steps for which fewer tokens wait at most, so that scoring never starves.
    """

    enough_tokens: int = _ENOUGH_CPU[0]
    max_deferred_steps: int = _ENOUGH_CPU[1]
    _waited: int = 0

    @classmethod
    def on(cls, device_type: str) -> "GeneratorFirst":
        """One that suits a device, given as the type of a `torch.device`."""
        return cls(*(_ENOUGH_CPU if device_type == "cpu" else _ENOUGH_GPU))

    def choose(self, generator: RoleLoad, verifier: RoleLoad) -> str:
        """`GENERATOR` or `VERIFIER`, one that is busy; called only when at least one is."""
        worth_it = verifier.waiting_tokens >= self.enough_tokens or self._waited >= self.max_deferred_steps
        if verifier.busy and (not generator.busy or worth_it):
            self._waited = 0
            return VERIFIER
        self._waited += verifier.busy
        return GENERATOR


class FairSharing:
    """Start-time fair queueing (Goyal, Vin and Cheng, 1996) of accounts over what their part of each step costs.

    A step costs its tokens, which each account pays for its own, and a constant, the step cost, that all in the step
    share; both are weighed by the size of the model. Accounts that are too far ahead of another one are held back,
    unless the step is hardly shorter without them; no account pays for such a step. An account that has had no work for
    a while has no credit from it. Accounts of one group get together what an account alone gets.
    """

    def __init__(self, model_bytes: Mapping[str, int], device_type: str) -> None:
        """Make the books of no accounts.

        Args:
            model_bytes: bytes of each role's weights.
            device_type: that of a `torch.device`.
        """
        self._weights = {role: size / max(model_bytes.values()) for role, size in model_bytes.items()}
        self._step_cost = _STEP_COST_CPU if device_type == "cpu" else _STEP_COST_GPU
        self._max_lag = _MAX_LAG * self._step_cost
        self._accounts: dict[Hashable, Hashable] = {}  # of owners
        self._groups: dict[Hashable, Hashable] = {}  # of accounts with owners
        self._virtual_time: dict[Hashable, float] = {}  # by accounts
        self._floor = 0.0  # what the account that paid least had paid, of those with work; never falls
        self._active: frozenset[Hashable] = frozenset()

    def assign(self, owner: Hashable, account: Hashable, group: Hashable | None = None) -> None:
        """Let `account` pay for the work of `owner` until `forget`; it belongs to `group`, or is alone."""
        self._accounts[owner] = account
        self._groups[account] = account if group is None else group

    def forget(self, owner: Hashable) -> None:
        """Forget an owner without work."""
        account = self._accounts.pop(owner, None)
        if account not in self._accounts.values():
            self._groups.pop(account, None)

    @property
    def contended(self) -> bool:
        """True if several accounts have owners."""
        return len(self._groups) > 1

    def over_share(self, owners: Collection[Hashable]) -> frozenset[Hashable]:
        """Those of `owners`, all with work, whose accounts are too far ahead of another one's."""
        active = frozenset(self._accounts.get(owner) for owner in owners)
        if active != self._active:
            self._active = active
            self._virtual_time = {account: paid for account, paid in self._virtual_time.items() if paid > self._floor}
            self._virtual_time |= dict.fromkeys(active - self._virtual_time.keys(), self._floor)
        if len(active) < 2:
            return frozenset()
        self._floor = max(self._floor, min(self._virtual_time[account] for account in active))
        limit = self._floor + self._max_lag
        return frozenset(owner for owner in owners if self._virtual_time[self._accounts.get(owner)] > limit)

    def is_worthwhile(self, loads: Mapping[str, RoleLoad], left: Mapping[str, RoleLoad]) -> bool:
        """True if steps that leave out what is in `loads`, by role, and not in `left` are shorter by enough."""
        saved = sum(load.tokens - left[role].tokens for role, load in loads.items())
        return saved >= _WORTHWHILE * self._step_cost

    def most_tokens(self, role: str) -> int:
        """Tokens of a step that costs as much as an account may be ahead, so that nobody waits for a longer one."""
        return int(self._max_lag / self._weights[role])

    def charge(self, role: str, plan: StepPlan) -> None:
        """Let the accounts in a step pay for it."""
        tokens: Counter[Hashable] = Counter()
        for branch in plan.branches:
            tokens[self._accounts.get(branch.work.owner)] += 1 + len(branch.draft)
        for chunk in plan.chunks:
            tokens[self._accounts.get(chunk.target.work.owner)] += chunk.count
        sizes = Counter(self._groups.values())
        even = len(sizes) / max(1, len(self._groups))  # 1 over the mean size of a group
        for account, count in tokens.items():
            cost = self._weights[role] * (count + self._step_cost / len(tokens))
            self._virtual_time[account] += cost * sizes.get(self._groups.get(account), 1) * even


class _Batch(NamedTuple):
    """A batch in flight: its model, its plan, what waits for its results.

    Attributes:
        times: when scheduling began, when the launch began and when it ended.
    """

    role: str
    plan: StepPlan
    wait: WaitForResults
    times: tuple[float, float, float]


@dataclass(eq=False)
class Batches:
    """Launches batches one after another, and takes their results in, the oldest first.

    Attributes:
        schedulers: by role.
        runners: by role.
        role_policy: chooses between roles.
        sharing: chooses between owners.
        preemption: makes room.
        max_tokens: of a batch at most.
        listener: gives what is called after each batch; None for nobody.
        collected: work that is finished, for `Engine.step` to return.
        failures: of batches, for `Engine.step` to raise.
    """

    schedulers: Mapping[str, Scheduler]
    runners: Mapping[str, ModelRunner]
    role_policy: GeneratorFirst
    sharing: FairSharing
    preemption: Preemption
    max_tokens: int
    listener: Callable[[], Callable[[StepRecord], None] | None]
    collected: list[Done] = field(default_factory=list)
    failures: list[PartialFailureError] = field(default_factory=list)
    _in_flight: list[_Batch] = field(default_factory=list)  # the oldest first
    _last_update_end: float = 0.0

    def run(self, launch_ahead: bool) -> None:
        """Launch a batch, and take in those in flight: all, or with `launch_ahead` those before the new one.

        Raises:
            PoolExhaustedError: when nobody's work finds blocks and no owner can give any up.
        """
        if self.preemption.preempted:
            self.preemption.resume()
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
        """Launch a batch of the role whose turn it is; of the other one if the first cannot go on yet.

        Owners over their share are left out and accounts are charged, where that is worthwhile.
        """
        self._throttle(frozenset())
        loads, fair = self._loads(), self.sharing.contended
        if fair:
            schedulers = self.schedulers.values()
            working = {owner for scheduler in schedulers for owner in scheduler.owners() - scheduler.planner.paused}
            if over_share := self.sharing.over_share(working):
                self._throttle(over_share)
                fewer = self._loads()
                fair = any(load.busy for load in fewer.values()) and self.sharing.is_worthwhile(loads, fewer)
                if fair:
                    loads = fewer
                else:
                    self._throttle(frozenset())
        if not self._launch_of(loads, fair) and any(each.planner.throttled for each in self.schedulers.values()):
            self._throttle(frozenset())
            self._launch_of(self._loads(), fair=False)

    def _launch_of(self, loads: Mapping[str, RoleLoad], fair: bool) -> bool:
        """Launch a batch of `loads`, which accounts pay for if it is `fair`; returns whether there was one.

        Raises:
            PoolExhaustedError: when blocks run out for every role with work, and no owner can give any up.
        """
        roles = [role for role, load in loads.items() if load.busy]
        if len(roles) > 1 and self.role_policy.choose(loads[GENERATOR], loads[VERIFIER]) != roles[0]:
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
        if not self._in_flight and (self.preemption.compact() or self.preemption.take_turns()):
            return self._launch_of(loads, fair)
        raise exhausted

    def _launch_role(self, role: str, fair: bool) -> bool:
        """Launch a batch of one role; returns whether there was one, even if it failed.

        Raises:
            PoolExhaustedError: when blocks run out for its work, and no owner can give any up.
        """
        scheduler, schedule_start = self.schedulers[role], perf_counter()
        most = min(self.max_tokens, self.sharing.most_tokens(role)) if self.sharing.contended else self.max_tokens
        plan: StepPlan | None = None
        try:
            if (plan := scheduler.schedule(most)) is None:
                return False
            launch_start = perf_counter()
            wait = self.runners[role].launch(scheduler.table, plan)
        except BaseException as error:  # an interrupt too: the prefix cache lists blocks before they are written
            if plan is None and isinstance(error, PoolExhaustedError):
                raise
            self._fail(role, plan.owners if plan else scheduler.owners(), error)
            return True
        self._in_flight.append(_Batch(role, plan, wait, (schedule_start, launch_start, perf_counter())))
        scheduler.launched(plan)
        if fair:
            self.sharing.charge(role, plan)
        return True

    def _throttle(self, owners: frozenset[Hashable]) -> None:
        for scheduler in self.schedulers.values():
            scheduler.planner.throttled = owners

    def _loads(self) -> dict[str, RoleLoad]:
        schedulers = self.schedulers.items()
        return {role: RoleLoad(each.running_branches, each.waiting_tokens()) for role, each in schedulers}

    def _collect(self) -> None:
        """Take in the results of the oldest batch in flight."""
        role, plan, wait, launch_times = self._in_flight.pop(0)
        scheduler, wait_start = self.schedulers[role], perf_counter()
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
        if on_step := self.listener():
            draws, reads = len(plan.draws.step_positions) if plan.draws else 0, sum(map(len, plan.reads.values()))
            sizes = len(plan.rows), int(plan.counts.sum()), draws, reads, plan.copied_blocks
            on_step(StepRecord(role, *sizes, *launch_times, wait_start, wait_end, update_end))

    def _fail(self, role: str, owners: Collection[Hashable], error: BaseException) -> None:
        """Note the failure of a role's batch for the owners that it costs; raises what ends everybody's work.

        All KV of the role is freed, and the batches that were launched behind this one are forgotten.
        """
        self._in_flight = [batch for batch in self._in_flight if batch.role != role]
        self.schedulers[role].drop_all_kv()
        if isinstance(error, FatalError | MisuseError) or not isinstance(error, Exception):  # a closed engine is one
            raise error
        if not isinstance(error, PartialFailureError):
            log.error("a step of the %s failed", role, exc_info=error)
            cause, error = error, StepError(role, frozenset(owners))
            error.__cause__ = cause
        self.failures.append(error)
