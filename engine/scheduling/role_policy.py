"""Which model runs next: a policy over how much work each side has."""

from dataclasses import dataclass
from typing import Protocol

GENERATOR, VERIFIER = "generator", "verifier"


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """How much work one model has: branches being sampled and tokens waiting to be computed."""

    running_branches: int
    waiting_tokens: int

    @property
    def busy(self) -> bool:
        """Whether there is anything to run."""
        return self.running_branches > 0 or self.waiting_tokens > 0


class RolePolicy(Protocol):
    """Chooses whose batch runs next; called only when at least one side is busy."""

    def choose(self, generator: RoleLoad, verifier: RoleLoad) -> str:
        """`GENERATOR` or `VERIFIER`, one that is busy."""
        ...


@dataclass(slots=True)
class GeneratorFirst:
    """Score when a batch worth running has gathered, has waited long enough, or the generator has nothing left to do.

    Scoring in large batches is what makes the verifier cheap; a search that waits for scores costs nothing while others
    keep the generator busy.

    Attributes:
        enough_tokens: waiting verifier tokens that are worth a turn.
        max_deferred_steps: turns of the generator that fewer tokens wait at most, so that scoring never starves.
    """

    enough_tokens: int = 256
    max_deferred_steps: int = 16
    _waited: int = 0

    def choose(self, generator: RoleLoad, verifier: RoleLoad) -> str:
        """See the class."""
        worth_it = verifier.waiting_tokens >= self.enough_tokens or self._waited >= self.max_deferred_steps
        if verifier.busy and (not generator.busy or worth_it):
            self._waited = 0
            return VERIFIER
        self._waited += verifier.busy
        return GENERATOR
