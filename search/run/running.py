"""The contract of what an orchestrator runs, from submission to result, and the meter of what it costs."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Generic, TypeVar

from espalier.engine.engine import Engine, Footprint
from espalier.engine.guidance.grammar import Grammar
from espalier.engine.guidance.matcher import Matcher
from espalier.engine.roles import DRAFT, GENERATOR, VERIFIER
from espalier.engine.scheduling.admission import Reservation
from espalier.engine.work import Done, Generated
from espalier.prm.scorer import Scorer
from espalier.search.request import SubmitOptions
from espalier.search.result import Finished, StopReason, Usage
from espalier.search.run.executor import KINDS, AnyResult, Resolved, reason_of
from espalier.search.run.resolve import Resolver
from espalier.search.scores import SessionTurn
from espalier.search.tree import Node
from espalier.search.voting.equivalence import MathVerify

GENERATOR_BEFORE = "generator_before"
"""Role, among digests, of the weights that a search had begun with when others took their place."""

R = TypeVar("R", bound=Resolved)
T = TypeVar("T", bound=AnyResult)


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


@dataclass(frozen=True, slots=True)
class Submission:
    """A submission to an orchestrator, and what it runs on.

    Attributes:
        search_id: its id.
        options: its options.
        on_event: receives its events.
        engine: runs the models.
        scorer: of steps; None if there is none.
        equivalence: compares answers in votes; None for exact match.
        clock: monotonic time in seconds.
        outside: runs a function on another thread, for what the first argument names, and then another one with its
            result on the thread of the engine, unless it has ended by then.
    """

    search_id: str
    options: SubmitOptions
    on_event: Callable[[Any], None]
    engine: Engine
    scorer: Scorer | None
    equivalence: MathVerify | None
    clock: Callable[[], float]
    outside: "Callable[[AnyRunning, Callable[[], Any], Callable[[Any], None]], None]"


def digests(engine: Engine, scorer: Scorer | None) -> dict[str, str]:
    """Digests of the weights and of the code that results depend on, by role."""
    models = {role: model for role, model in engine.models.items() if role != DRAFT}  # which changes no result
    return {role: model.digest for role, model in models.items()} | dict(scorer.digests if scorer else {})


class Running(ABC, Generic[R, T]):
    """A search, a completion or a request for scores; finished engine work is passed to `handle`.

    Attributes:
        search_id: its id; also the owner of its engine work.
        resolved: the resolved request.
        options: options of the submission.
        priority: searches of a larger one run first.
        account: what it is charged to.
        meter: its usage so far.
        digests: see `digests`; after a reload within it also of `GENERATOR_BEFORE`.
        result: None until it is finished.
        reservation: its reserved KV memory while it may run.
        suspended: whether it was suspended for another one while running.
        cancelled: whether its cancellation was requested.
        arrival: its position in the order of submission.
        since: when it last began to run or to wait, by its queue's clock.
        deadline: end of its time limit, by the meter's clock.
        matchers: what binds the generator's texts, each at its beginning; all of `resolved.grammars` once it runs.
        released: whether it needs the engine no longer and what was set aside for it is given back.
    """

    @classmethod
    @abstractmethod
    def resolve(cls, resolver: Resolver, request: Any) -> R:
        """Validate a request and work out what follows from it.

        Raises:
            InvalidRequestError: lists every invalid field; NoEmbeddingError if there are tokens without an embedding.
            RequestTooLargeError: a prompt fills a model's context; PoolTooSmallError if the KV pool could not hold the
                request alone.
        """

    def __init__(self, resolved: R, submission: Submission) -> None:
        self.search_id = submission.search_id
        self.resolved = resolved
        self.options = options = submission.options
        self.priority, self.account = options.priority, options.account
        self.meter = UsageMeter(clock=submission.clock, waited=options.waited)
        self._engine, self._on_event = submission.engine, submission.on_event
        self._outside = partial(submission.outside, self)
        self.digests = digests(submission.engine, submission.scorer)
        self.result: T | None = None
        self.reservation: Reservation | None = None
        self.suspended = False
        self.cancelled = False
        self.matchers: dict[Grammar, Matcher] = {}
        self.arrival = 0
        self.since = 0.0
        self._latest = self.meter.clock() + options.max_seconds
        self.deadline = self._latest if options.timed_from_start else self._time_limit_from(self.meter.submitted)
        self.released = False

    @property
    def waits_for_caller(self) -> bool:
        """True if it does nothing more, once its engine work is done, until its caller says something."""
        return False

    def tell(self, turn: SessionTurn) -> None:
        """Go on with what the caller says; nothing but a session of scores takes that."""

    def conclude(self) -> None:
        """Work out the result, once its memory is given back; only called where there is none yet."""

    @property
    def tree_complete(self) -> bool:
        """True if it holds no engine resources: it votes, or is finished."""
        return self.result is not None

    def _time_limit_from(self, start: float) -> float:
        limit = self.resolved.request.time_limit
        own = math.inf if limit is None else start + limit
        return min(own, self._latest)

    def start(self) -> None:
        """Begin to run."""
        self.meter.start()
        if self.options.timed_from_start:
            self.deadline = self._time_limit_from(self.meter.clock())
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Submit the first work."""

    @abstractmethod
    def handle(self, done: Done) -> None:
        """Process one piece of finished engine work, until it is `released`."""

    def note_reload(self, before: str) -> None:
        """Take note that other weights have taken the place of the generator's, those with the digest `before`."""
        if self.tree_complete:
            return
        self.digests[GENERATOR] = self._engine.model(GENERATOR).digest
        if self.meter.started is not None:
            self.digests.setdefault(GENERATOR_BEFORE, before)

    def report_growth(self) -> None:
        """Report how far it has come between two rounds, if the submission asked for it."""

    @abstractmethod
    def stop(self, reason: StopReason) -> None:
        """Stop with what there is; cancels its work and releases every block."""

    def fail(self, error: Exception) -> None:
        """Fail, in any state, because of `error`; what was found so far is kept."""
        self._engine.abandon(self.search_id)
        self._end(StopReason.FAILED, reason_of(error, self.search_id))

    def _end(self, reason: StopReason, error: str = "") -> None:
        """Make the result of what was found so far, and report it."""
        request = self.resolved.request
        of_request = {"search_id": self.search_id, "configuration": request, **self._own_fields()}
        result: Any = KINDS[type(request)].result
        self.end_with(result(**of_request, stop_reason=reason, usage=self.meter.close(), error=error))

    @abstractmethod
    def _own_fields(self) -> dict[str, Any]:
        """The fields that results of its kind alone have, of what was found so far."""

    def end_with(self, result: T) -> None:
        """End with a result, and report it."""
        self.result = result
        self._on_event(Finished(self.search_id, result))


AnyRunning = Running[Any, Any]
