"""Counters of an engine and the memory it holds: one `RoleStats` for each model."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

ROW_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKEN_BOUNDS = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
SECOND_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(slots=True)
class Histogram:
    """Counts values by their size. Adding one takes a fraction of a microsecond, as it happens in every step.

    Attributes:
        bounds: largest value of each bucket but the last, which has no limit; ascending.
        counts: values in each bucket.
        sum: of all values.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    sum: float = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def copy(self) -> "Histogram":
        """Return a histogram of the same values, which stays as it is."""
        made = replace(self)
        made.counts, made.sum = list(self.counts), self.sum
        return made

    def __add__(self, other: "Histogram") -> "Histogram":
        """Return a histogram of both's values; their bounds are the same."""
        made = replace(self)
        made.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        made.sum = self.sum + other.sum
        return made


@dataclass(frozen=True, slots=True)
class RoleStats:
    """Counters of one role since the engine was made, and the memory it holds now.

    Attributes:
        computed_tokens: tokens computed.
        steps: batches launched.
        copied_blocks: partial blocks copied for sequences that part.
        live_blocks: blocks that sequences refer to, of all KV groups of the model; so of cached and free blocks.
        live_states: recurrent states among the live blocks; so of cached ones.
        live_bytes: bytes of live blocks; so of cached and free ones.
        wasted_bytes: bytes at the ends of owned slabs that no block covers.
        preemptions: how often an owner's KV of this role was freed to make room.
        cache_lookups: full blocks of prompts that were looked up in the prefix cache.
        cache_hits: blocks taken from the prefix cache.
        drafted_tokens: tokens that were proposed for branches and verified.
        accepted_tokens: those of them that branches drew and went on behind, each without a step of its own.
        evicted_blocks: cached blocks given up to make room.
        batch_rows: sequences of each batch.
        batch_tokens: tokens computed in each batch.
        bytes_per_token: KV bytes of a token in all layers.
        block_bytes: bytes of one block of each KV group.
        step_seconds: seconds of each step: choosing the batch, its launch, the wait for its results, taking them in.
    """

    computed_tokens: int
    steps: int
    copied_blocks: int
    live_blocks: int
    cached_blocks: int
    free_blocks: int
    live_states: int
    cached_states: int
    live_bytes: int
    cached_bytes: int
    free_bytes: int
    wasted_bytes: int
    preemptions: int
    cache_lookups: int
    cache_hits: int
    drafted_tokens: int
    accepted_tokens: int
    evicted_blocks: int
    live_sequences: int
    owned_slabs: int
    bytes_per_token: int
    block_bytes: int
    batch_rows: Histogram
    batch_tokens: Histogram
    step_seconds: Histogram

    def of_ended(self) -> "RoleStats":
        """Return what stays true once the engine has ended: its counters, and that nothing is held."""
        return replace(self, **dict.fromkeys(_HELD, 0))


_HELD = (
    "live_blocks", "cached_blocks", "free_blocks", "live_bytes", "cached_bytes", "free_bytes", "wasted_bytes",
    "live_states", "cached_states", "live_sequences", "owned_slabs",
)  # fmt: skip
_SIZES = ("bytes_per_token", "block_bytes")


def total(stats: Iterable[RoleStats]) -> RoleStats:
    """Return the sum of one role's counters in several engines with the same model; there is at least one."""
    first, *others = stats
    for other in others:
        summed = {
            f.name: getattr(first, f.name) + getattr(other, f.name) for f in fields(first) if f.name not in _SIZES
        }
        first = replace(first, **summed)
    return first
