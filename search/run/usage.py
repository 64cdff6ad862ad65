"""Counts what a running search costs, and splits its token budgets among its paths."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from espalier.engine.engine import Footprint
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.search.request import SearchRequest
from espalier.search.result import Usage
from espalier.search.tree import Node, Termination

_NOTHING = Footprint(0, {}, {})
_UNLIMITED = 2**62


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


class Budget:
    """Tracks how many tokens each path may still use under the request's budgets.

    Before each round, the rest of each budget is split evenly among the round's paths; unused tokens return for the
    next round. Thus a budget is never exceeded, and each path's share does not depend on the order of computation.
    """

    def __init__(self, request: SearchRequest, meter: UsageMeter, uses_verifier: bool) -> None:
        self._generator_budget = request.generator_budget
        self._verifier_budget = request.verifier_budget if uses_verifier else None
        self._meter = meter
        self._generator_share = self._verifier_share = _UNLIMITED
        self._round_roots: dict[Node, Node] = {}
        self._refused: set[Node] = set()

    @property
    def covers_the_problem(self) -> bool:
        """Whether the verifier's budget covers the problem's tokens."""
        return self._left(self._verifier_budget, self._meter.verifier_tree_tokens) >= 0

    def deal(self, paths: int) -> bool:
        """Start a round of `paths` paths; returns whether each of them gets at least one token of each model."""
        self._round_roots.clear()
        self._refused.clear()
        self._generator_share = self._left(self._generator_budget, self._meter.generated_tokens) // paths
        self._verifier_share = self._left(self._verifier_budget, self._meter.verifier_tree_tokens) // paths
        return min(self._generator_share, self._verifier_share) >= 1

    def begin(self, node: Node, round_root: Node) -> None:
        """Record that `node` was expanded from `round_root` in this round; its path's share counts from there."""
        self._round_roots[node] = round_root

    def generator_left(self, node: Node, round_root: Node) -> int:
        """Tokens that the path from `round_root` to `node` may still sample in this round."""
        return self._generator_share - (node.path_tokens() - round_root.path_tokens())

    def verifier_left(self, node: Node) -> int:
        """Verifier tokens that the path of `node` may still use in this round."""
        spent, step, round_root = 0, node.parent, self._round_roots[node]
        while step is not None and step is not round_root:
            spent, step = spent + step.verifier_tokens, step.parent
        return self._verifier_share - spent

    def refuse(self, node: Node) -> None:
        """Record that `node` is not scored because its path's share is used up."""
        self._refused.add(node)

    def why_unscored(self, node: Node) -> Termination:
        """The termination of a path with a step that could not be scored."""
        return Termination.BUDGET if self._refused.intersection(node.lineage()) else Termination.LENGTH

    @staticmethod
    def _left(budget: int | None, spent: int) -> int:
        return _UNLIMITED if budget is None else budget - spent
