"""Role policy: the model whose batch runs next, by how much work each one has."""

from dataclasses import dataclass
from typing import Protocol

from espalier.engine.roles import GENERATOR, VERIFIER


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


class RolePolicy(Protocol):
    """Chooses the role whose batch runs next; called only when at least one is busy."""

    def choose(self, generator: RoleLoad, verifier: RoleLoad) -> str:
        """`GENERATOR` or `VERIFIER`; the chosen one is busy."""
        ...


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
        """See the class."""
        worth_it = verifier.waiting_tokens >= self.enough_tokens or self._waited >= self.max_deferred_steps
        if verifier.busy and (not generator.busy or worth_it):
            self._waited = 0
            return VERIFIER
        self._waited += verifier.busy
        return GENERATOR
