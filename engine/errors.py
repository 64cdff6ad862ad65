"""Errors a user can cause or meet: each names what is wrong, which limit, and what to change."""

from collections.abc import Hashable
from dataclasses import dataclass


class EspalierError(Exception):
    """Base of every error raised on purpose; its text is fit for a user to read."""


class CheckpointError(EspalierError):
    """A checkpoint is missing, unsupported, or does not hold what its configuration promises."""


class AdapterError(CheckpointError):
    """A file that describes a family of process reward models holds an unknown key or a value it cannot have."""


class ScoreMismatchError(EspalierError):
    """A score computed step by step is not the one that the whole text gives: a fault in the family or the engine.

    Attributes:
        incremental: the score from the step's own tokens after its parent's.
        whole: the score from the whole text in a fresh sequence.
    """

    def __init__(self, family: str, step: int, incremental: float, whole: float, tolerance: float) -> None:
        self.incremental = incremental
        self.whole = whole
        super().__init__(
            f"--verify-incremental: {family} gives step {step} of a path {incremental!r} step by step and {whole!r} "
            f"from the whole text, {abs(incremental - whole):.3g} apart where at most {tolerance:.3g} is allowed; "
            "please report this with the family's name and the device"
        )


class NumericalError(EspalierError):
    """What a model computes is not a number: its weights are damaged, or do not fit the range of its dtype.

    Attributes:
        owners: of the work that it computed; all other work goes on with the next step.
    """

    def __init__(self, role: str, owners: frozenset[Hashable]) -> None:
        self.owners = owners
        super().__init__(
            f"the {role}'s logits are not numbers; its weights are damaged or too large for --dtype: try float32 or "
            "bfloat16"
        )


class RequestTooLargeError(EspalierError):
    """A request can never fit: its worst case is over a limit even on an idle engine."""


class PoolTooSmallError(RequestTooLargeError):
    """The worst case of one search is larger than the whole KV pool.

    Attributes:
        needed_bytes: KV bytes the search may need at its widest, in whole sectors.
        pool_bytes: bytes of the pool.
    """

    def __init__(self, needed_bytes: int, pool_bytes: int) -> None:
        self.needed_bytes = needed_bytes
        self.pool_bytes = pool_bytes
        super().__init__(
            f"a search may need {_size(needed_bytes)} of KV memory and the pool holds {_size(pool_bytes)}; "
            "raise --kv-memory, or lower -N, -M, --max-tokens or --max-step-tokens"
        )


class PoolExhaustedError(EspalierError):
    """A block was needed, none was free, and nothing that could free one was running."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One field of a request that breaks a rule: the field's name and what it must be."""

    field: str
    description: str


class InvalidRequestError(EspalierError):
    """A request breaks rules; lists all of them, not only the first."""

    def __init__(self, violations: list[Violation]) -> None:
        self.violations = violations
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
