"""Counts what a running search costs."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from espalier.engine.engine import Footprint
from espalier.engine.scheduling.role_policy import GENERATOR, VERIFIER
from espalier.search.result import Usage

_NOTHING = Footprint(0, {}, {})


@dataclass(slots=True)
class UsageMeter:
    """Counters of one search; see `Usage` for their meaning.

    Attributes:
        clock: monotonic time in seconds.
        waited: seconds that the search had waited before its submission.
        prompt_tokens: length of the generator's prompt.
        generator_unshared_tokens: tokens if the generator computed every candidate from the prompt on.
        verifier_unshared_tokens: the same for the verifier.
    """

    clock: Callable[[], float] = time.monotonic
    waited: float = 0.0
    prompt_tokens: int = 0
    submitted: float = field(init=False)
    started: float | None = None
    first_step: float | None = None
    generator_tokens: int = 0
    generator_tree_tokens: int = 0
    generator_unshared_tokens: int = 0
    generated_tokens: int = 0
    verifier_tokens: int = 0
    verifier_tree_tokens: int = 0
    verifier_unshared_tokens: int = 0
    nodes: int = 0
    pruned: int = 0
    duplicates: int = 0
    stopped_paths: int = 0
    stopped_tokens: int = 0
    widest: Footprint = field(default=_NOTHING)

    def __post_init__(self) -> None:
        self.submitted = self.clock() - self.waited

    def start(self) -> None:
        """Record that the search left the queue."""
        self.started = self.clock()

    def seconds(self) -> float:
        """Seconds since the search left the queue; 0 while it waits."""
        return 0.0 if self.started is None else self.clock() - self.started

    def note_step(self) -> None:
        """Record that a step was sampled."""
        if self.first_step is None:
            self.first_step = self.clock()

    def observe(self, footprint: Footprint) -> None:
        """Update the peak footprint, by physical bytes."""
        if footprint.physical_bytes > self.widest.physical_bytes:
            self.widest = footprint

    def close(self) -> Usage:
        """Return the final usage."""
        now = self.clock()
        started = now if self.started is None else self.started
        return Usage(
            generator_tokens=self.generator_tokens,
            generator_tree_tokens=self.generator_tree_tokens,
            generator_saved_tokens=max(0, self.generator_unshared_tokens - self.generator_tokens),
            generated_tokens=self.generated_tokens,
            verifier_tokens=self.verifier_tokens,
            verifier_tree_tokens=self.verifier_tree_tokens,
            verifier_saved_tokens=max(0, self.verifier_unshared_tokens - self.verifier_tokens),
            nodes=self.nodes,
            pruned=self.pruned,
            duplicates=self.duplicates,
            peak_kv_bytes=self.widest.physical_bytes,
            generator_peak_kv_bytes=self.widest.bytes_by_role.get(GENERATOR, 0),
            verifier_peak_kv_bytes=self.widest.bytes_by_role.get(VERIFIER, 0),
            logical_blocks=self.widest.logical_blocks,
            physical_blocks=self.widest.physical_blocks,
            queue_seconds=started - self.submitted,
            first_step_seconds=(now if self.first_step is None else self.first_step) - started,
            seconds=now - started,
            stopped_paths=self.stopped_paths,
            stopped_tokens=self.stopped_tokens,
            prompt_tokens=self.prompt_tokens,
        )
