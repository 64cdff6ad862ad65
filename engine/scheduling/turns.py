"""Turns at the models: whose batch runs next, the generator's or the verifier's, and whose work is left out of it.

Steps are shared among accounts: who had more of the models' time than others waits until these catch up.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass

from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.engine.scheduling.planner import StepPlan

_STEP_COST_CPU, _STEP_COST_GPU = 16, 300
"""Tokens that take as long as what a step costs whatever it computes, mostly the reading of the weights. That of a GPU
is not measured."""
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

    enough_tokens: int = 256
    max_deferred_steps: int = 16
    _waited: int = 0

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
