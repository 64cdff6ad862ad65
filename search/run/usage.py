"""Counts what a running search costs, and splits its token budgets among its paths."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from espalier.engine.engine import Footprint
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.prm.limits import UNLIMITED
from espalier.search.request import SearchRequest
from espalier.search.result import Usage
from espalier.search.tree import Node, Termination


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


class Budget:
    """Tracks how many tokens each path may still use under the request's budgets.

    Before each round, the rest of each budget is split evenly among the round's paths; unused tokens return for the
    next round. Thus a budget is never exceeded, and each path's share does not depend on the order of computation.
    """

    def __init__(self, request: SearchRequest, meter: UsageMeter, uses_verifier: bool) -> None:
        self._generator_budget = request.generator_budget
        self._verifier_budget = request.verifier_budget if uses_verifier else None
        self._meter = meter
        self._generator_share = self._verifier_share = UNLIMITED
        self._round_roots: dict[Node, Node] = {}
        self._exhausted: set[Node] = set()

    @property
    def covers_the_problem(self) -> bool:
        """True if the verifier's budget covers the problem's tokens."""
        return self._left(self._verifier_budget, self._meter.verifier_tree_tokens) >= 0

    def split(self, paths: int) -> bool:
        """Start a round of `paths` paths; returns whether each of them gets at least one token of each model."""
        self._round_roots.clear()
        self._exhausted.clear()
        self._generator_share = self._left(self._generator_budget, self._meter.generated_tokens) // paths
        self._verifier_share = self._left(self._verifier_budget, self._meter.verifier_tree_tokens) // paths
        return min(self._generator_share, self._verifier_share) >= 1

    def begin(self, node: Node, round_root: Node) -> None:
        """Record that `node` was expanded from `round_root` in this round; its path's share counts from there."""
        self._round_roots[node] = round_root

    def generator_left(self, node: Node, round_root: Node) -> int:
        """Tokens that the path from `round_root` to `node` may still sample in this round."""
        if self._generator_budget is None:
            return UNLIMITED
        return self._generator_share - (node.charged_tokens() - round_root.charged_tokens())

    def verifier_left(self, node: Node) -> int:
        """Verifier tokens that the path of `node` may still use in this round."""
        spent, step, round_root = 0, node.parent, self._round_roots[node]
        while step is not None and step is not round_root:
            spent, step = spent + step.verifier_tokens, step.parent
        return self._verifier_share - spent

    def mark_exhausted(self, node: Node) -> None:
        """Record that `node` is not scored because its path's share is used up."""
        self._exhausted.add(node)

    def why_unscored(self, node: Node) -> Termination:
        """The termination of a path with a step that could not be scored."""
        return Termination.BUDGET if self._exhausted.intersection(node.lineage()) else Termination.LENGTH

    @staticmethod
    def _left(budget: int | None, spent: int) -> int:
        return UNLIMITED if budget is None else budget - spent
