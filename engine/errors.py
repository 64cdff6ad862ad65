"""Errors a user can cause or meet: each names what is wrong, which limit, and what to change."""

from dataclasses import dataclass


class EspalierError(Exception):
    """Base of every error raised on purpose; its text is fit for a user to read."""


class CheckpointError(EspalierError):
    """A checkpoint is missing, unsupported, or does not hold what its configuration promises."""


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
            f"a search may need {needed_bytes / 2**20:.1f} MiB of KV memory and the pool holds "
            f"{pool_bytes / 2**20:.1f} MiB; raise --kv-memory, or lower -N, -M, --max-tokens or --max-step-tokens"
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
