"""Counters of an engine and the memory it holds, one `RoleStats` for each model, and where the time of a batch went.

A counter is one field, declared with its `Counter` and counted up in one place. Statistics, their sums over
workers, metrics, spans and reports follow from the declaration. Those of a search are fields of `search.result.Usage`.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

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

    def __add__(self, other: "Histogram") -> "Histogram":
        """Return a histogram of both's values; their bounds are the same."""
        made = replace(self)
        made.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        made.sum = self.sum + other.sum
        return made


@dataclass(frozen=True, slots=True)
class Counter:
    """Tells what a field counts, and where it is shown besides its class.

    Attributes:
        text: what it counts.
        metric: name of the Prometheus metric, without the prefix `espalier_`; empty for none.
        role: label of that metric, where the counters of both roles are fields of one class.
        span: whether spans of searches have it.
        column: title of a report's column of its mean, shown where it is not 0 in all runs; empty for none.
        share_of: another counter of which that column shows the share, in percent.
        note: how `solve` tells it where it is not 0, with the names of counters in braces; empty for not at all.
    """

    text: str
    metric: str = ""
    role: str = ""
    span: bool = False
    column: str = ""
    share_of: str = ""
    note: str = ""


def shown(text: str, **where: Any) -> dict[str, Counter]:
    """Metadata of a field that counts; `where` are further attributes of its `Counter`."""
    return {"counter": Counter(text, **where)}


def counter(text: str, start: float = 0, **where: Any) -> Any:
    """A field that counts from `start` on; see `shown`."""
    return field(default=start, metadata=shown(text, **where))


def counters(kind: Any) -> dict[str, Counter]:
    """Return the counters of a dataclass by the names of their fields."""
    return {each.name: each.metadata["counter"] for each in fields(kind) if "counter" in each.metadata}


@dataclass(slots=True, kw_only=True)
class RoleCounters:
    """Counters of one role since the engine was made, each counted up where it happens."""

    copied_blocks: int = counter("Partial KV blocks copied for paths that part.", metric="engine_copied_blocks")
    preemptions: int = counter("Times that a search gave up its KV to make room.", metric="engine_preemptions")
    cache_lookups: int = counter(
        "Full blocks of prompts looked up in the prefix cache.", metric="prefix_cache_lookup_blocks"
    )
    cache_hits: int = counter("Blocks of prompts found in the prefix cache.", metric="prefix_cache_hit_blocks")
    evicted_blocks: int = counter("Cached blocks given up to make room.", metric="prefix_cache_evicted_blocks")
    drafted_tokens: int = counter("Tokens proposed for paths and verified.", metric="drafted_tokens")
    accepted_tokens: int = counter(
        "Drafted tokens that paths drew, without a step of their own.", metric="accepted_tokens"
    )
    batch_rows: Histogram = field(
        default_factory=partial(Histogram, ROW_BOUNDS),
        metadata=shown("Sequences in a batch.", metric="engine_batch_rows"),
    )
    batch_tokens: Histogram = field(
        default_factory=partial(Histogram, TOKEN_BOUNDS),
        metadata=shown("Tokens computed in a batch.", metric="engine_batch_tokens"),
    )
    step_seconds: Histogram = field(
        default_factory=partial(Histogram, SECOND_BOUNDS),
        metadata=shown("Time of one engine step, a batch of one model.", metric="engine_step_seconds"),
    )

    @property
    def steps(self) -> int:
        """Batches launched."""
        return self.batch_rows.count

    @property
    def computed_tokens(self) -> int:
        """Tokens computed."""
        return int(self.batch_tokens.sum)


COUNTERS = counters(RoleCounters)
"""The counters of a role."""


@dataclass(slots=True, kw_only=True)
class RoleStats(RoleCounters):
    """Counters of one role since the engine was made, and the memory it holds now.

    Attributes:
        live_blocks: blocks that sequences refer to, of all KV groups of the model; so of cached and free blocks.
        live_states: recurrent states among the live blocks; so of cached ones.
        live_bytes: bytes of live blocks; so of cached and free ones.
        wasted_bytes: bytes at the ends of owned slabs that no block covers.
        bytes_per_token: KV bytes of a token in all layers.
        block_bytes: bytes of one block of each KV group.
    """

    live_blocks: int
    cached_blocks: int
    free_blocks: int
    live_states: int
    cached_states: int
    live_bytes: int
    cached_bytes: int
    free_bytes: int
    wasted_bytes: int
    live_sequences: int
    owned_slabs: int
    bytes_per_token: int
    block_bytes: int

    def of_ended(self) -> "RoleStats":
        """Return what stays true once the engine has ended: its counters, and that nothing is held."""
        return replace(self, **{name: 0 for name in _summed() if name not in COUNTERS})


def _summed() -> list[str]:
    """Names of the fields that add up over several engines."""
    return [each.name for each in fields(RoleStats) if each.name not in ("bytes_per_token", "block_bytes")]


def total(stats: Iterable[RoleStats]) -> RoleStats:
    """Return the sum of one role's counters in several engines with the same model; there is at least one."""
    first, *others = stats
    for other in others:
        first = replace(first, **{name: getattr(first, name) + getattr(other, name) for name in _summed()})
    return first


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One batch of one model. Times are `time.perf_counter` seconds.

    With `launch_ahead`, another batch is scheduled and launched between `launch_end` and `wait_start`.

    Attributes:
        role: the model.
        rows: sequences in the batch.
        tokens: tokens computed.
        draws: tokens sampled.
        reads: positions at which a score was read.
        copied_blocks: partial blocks copied for sequences that part.
        schedule_start: when scheduling began; it chooses rows and blocks.
        launch_start: when the launch began. On a CPU the launch computes the batch; on a GPU it enqueues kernels.
        launch_end: when the launch ended.
        wait_start: when the wait for the results began.
        wait_end: when the results were there.
        update_end: when the results were processed: sampled tokens appended, finished work taken out.
    """

    role: str
    rows: int
    tokens: int
    draws: int
    reads: int
    copied_blocks: int
    schedule_start: float
    launch_start: float
    launch_end: float
    wait_start: float
    wait_end: float
    update_end: float

    @property
    def scheduling_seconds(self) -> float:
        """Seconds that the host spent on choosing the batch and on processing its results."""
        return self.launch_start - self.schedule_start + self.update_end - self.wait_end

    @property
    def computing_seconds(self) -> float:
        """Seconds of the launch and of the wait for the results."""
        return self.launch_end - self.launch_start + self.wait_end - self.wait_start
