"""Counts what a running search costs."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from espalier.engine.engine import Footprint
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.engine.work import Generated
from espalier.search.result import Usage
from espalier.search.tree import Node

_PEAK_LOOKS = 16
"""Times in a round of whole paths that memory is looked at: before paths end, as each gives its own back."""


@dataclass(slots=True, kw_only=True)
class UsageMeter(Usage):
    """The usage of a running search, counted as it runs.

    Attributes:
        clock: monotonic time in seconds.
        waited: seconds that the search had waited before its submission.
        generator_unshared_tokens: tokens if the generator computed every candidate from the prompt on.
        verifier_unshared_tokens: the same for the verifier.
    """

    clock: Callable[[], float] = time.monotonic
    waited: float = 0.0
    submitted: float = field(init=False)
    started: float | None = None
    first_step: float | None = None
    generator_unshared_tokens: int = 0
    verifier_unshared_tokens: int = 0
    _ended: int = 0  # paths of this round
    _look_every: int = 1  # before which of these ends memory is looked at

    def __post_init__(self) -> None:
        self.submitted = self.clock() - self.waited

    def start(self) -> None:
        """Record that the search left the queue."""
        self.started = self.clock()

    def elapsed(self) -> float:
        """Seconds since the search left the queue; 0 while it waits."""
        return 0.0 if self.started is None else self.clock() - self.started

    def note_step(self) -> None:
        """Record that a step was sampled."""
        if self.first_step is None:
            self.first_step = self.clock()

    def begin_round(self, paths: int) -> None:
        """Record that a round of so many paths begins."""
        self._ended, self._look_every = 0, max(1, paths // _PEAK_LOOKS)

    def path_ended(self, footprint: Callable[[], Footprint]) -> None:
        """Record that a path ends, which still holds its memory; at every few ends the peak is updated."""
        if self._ended % self._look_every == 0:
            self.observe(footprint())
        self._ended += 1

    def count_sampled(self, done: Generated) -> None:
        """Count the tokens of sampling."""
        self.generator_tokens += done.computed_tokens
        self.drafted_tokens += done.drafted_tokens
        self.accepted_tokens += done.accepted_tokens

    def add_node(self, node: Node) -> None:
        """Count a new node, with its multiplicity."""
        self.note_step()
        self.nodes += node.multiplicity
        self.duplicates += node.multiplicity - 1
        self.generated_tokens += node.multiplicity * node.num_tokens

    def observe(self, footprint: Footprint) -> None:
        """Update the peak, by physical bytes."""
        if footprint.physical_bytes > self.peak_kv_bytes:
            self.peak_kv_bytes = footprint.physical_bytes
            self.generator_peak_kv_bytes = footprint.bytes_by_role.get(GENERATOR, 0)
            self.verifier_peak_kv_bytes = footprint.bytes_by_role.get(VERIFIER, 0)
            self.logical_blocks, self.physical_blocks = footprint.logical_blocks, footprint.physical_blocks

    def close(self) -> Usage:
        """Return the final usage."""
        now = self.clock()
        started = now if self.started is None else self.started
        return Usage(
            **{each.name: getattr(self, each.name) for each in fields(Usage)}
            | {
                "generator_saved_tokens": max(0, self.generator_unshared_tokens - self.generator_tokens),
                "verifier_saved_tokens": max(0, self.verifier_unshared_tokens - self.verifier_tokens),
                "queue_seconds": started - self.submitted,
                "first_step_seconds": (now if self.first_step is None else self.first_step) - started,
                "seconds": now - started,
            }
        )
