"""Many searches over one engine: queueing, admission, routing of finished work; no barrier between problems."""

import secrets
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from espalier.engine.engine import Engine
from espalier.engine.errors import FatalError, InvalidRequestError, OwnersError, RequestTooLargeError, Violation
from espalier.engine.interrupts import interrupts_held
from espalier.engine.scheduling.admission import Reservation
from espalier.engine.scheduling.role_policy import GENERATOR, VERIFIER
from espalier.engine.work import Done
from espalier.prm.generative import Critic
from espalier.prm.verifier import Verifier, require_room
from espalier.search.algorithms import (
    algorithms_for_answers,
    answers_suffice,
    memory_demand,
    needs_verifier,
    with_defaults,
)
from espalier.search.request import USUAL, AlgorithmName, SearchRequest, SubmitOptions, validate
from espalier.search.result import Event, SearchResult, StopReason
from espalier.search.run.generator import Generator
from espalier.search.run.memory import (
    CritiqueLimits,
    PathLimits,
    ResolvedRequest,
    verifier_limits,
    with_critiques,
    worst_case_blocks,
)
from espalier.search.run.search import RunningSearch
from espalier.search.run.usage import UsageMeter
from espalier.search.voting.equivalence import BySpelling, Grouping

DEFAULT_MAX_TOKENS = 2048
"""Generated tokens of one path when the request sets no limit."""

_REST = 0.01
"""Seconds for which a step waits where only votes are left; new searches wait as long."""


@dataclass(slots=True, eq=False)
class _Entry:
    """One search and what it needs; `reservation` while it may grow."""

    plan: ResolvedRequest
    blocks: dict[str, int]
    meter: UsageMeter
    priority: int
    search: RunningSearch
    reservation: Reservation | None = None

    @property
    def search_id(self) -> str:
        return self.plan.search_id

    @property
    def has_grown(self) -> bool:
        return self.search.waits_for is not None


class Orchestrator:
    """Runs searches on an engine; everything happens on the thread that calls `step`.

    A search waits until the memory it may need is free. Where only a share of the worst case is set aside for it, it
    may have to give its memory up to those before it, and computes it again later.

    One of a larger priority takes the place of those of a smaller one where there is no other: they give up all their
    memory, wait in the queue, and go on later from where they were, to the same results.

    A search that has grown gives all its memory back and may then wait for its vote, while others grow.

    What is raised while one search is worked on, by its algorithm, its verifier, the engine or whoever hears of its
    events, ends that search with the reason and no other. Only what belongs to none of them comes out of `step`.
    """

    def __init__(
        self,
        engine: Engine,
        generator: Generator,
        verifier: Verifier | None,
        max_running: int = 64,
        clock: Callable[[], float] = time.monotonic,
        grouping: Grouping | None = None,
    ) -> None:
        """Make an idle orchestrator.

        Args:
            engine: holds both models.
            generator: proposes steps.
            verifier: scores them; None where no search will read scores.
            max_running: searches that grow at once.
            clock: gives seconds and never goes back.
            grouping: tells equal answers from different ones in the vote, and is closed with the orchestrator; None
                goes by spelling.
        """
        self.engine = engine
        self._generator = generator
        self._verifier = verifier
        self._max_running = max_running
        self._clock = clock
        self._grouping: Grouping = grouping or BySpelling()
        self._queue: deque[_Entry] = deque()
        self._running: dict[str, _Entry] = {}
        self._aside: dict[str, _Entry] = {}  # of the queue, those that had started
        self._voting: dict[str, RunningSearch] = {}
        self._cancelled: set[str] = set()
        self._ended: list[SearchResult] = []

    @property
    def busy(self) -> bool:
        """Whether any search is running, waiting or voting."""
        return bool(self._queue or self._running or self._voting or self._ended)

    @property
    def running(self) -> int:
        """Searches that grow."""
        return len(self._running)

    @property
    def voting(self) -> int:
        """Searches that have grown and wait for their vote."""
        return len(self._voting)

    @property
    def waiting(self) -> int:
        """Searches in the queue, those that gave way to others too."""
        return len(self._queue)

    def describe_models(self) -> dict[str, str]:
        """What results depend on besides the request.

        Digests of the models, how the verifier is read, their dtype and device, the system prompt, and what groups the
        answers of a vote.
        """
        generator = self._generator.model
        digests = {role: model.digest for role, model in self.engine.models.items()}
        dtype, device = str(generator.decoder.dtype), generator.decoder.device.type
        if self._verifier:
            digests["verifier_family"] = self._verifier.family.identity
        prompt, grouping = self._generator.system_prompt, self._grouping.name
        return digests | {"dtype": dtype, "device": device, "system_prompt": prompt, "grouping": grouping}

    def effective(self, request: SearchRequest) -> SearchRequest:
        """The request with every default filled in: the algorithm's, the checkpoint's, and what a context holds.

        What stays None is a limit that there is none of, or nothing that the algorithm reads. The tokens of a path are
        what a search may have whose prompt leaves room for them.
        """
        generator = self._generator
        temperature = generator.temperature if request.temperature is None else request.temperature
        return replace(
            with_defaults(request),
            temperature=0.0 if request.algorithm is AlgorithmName.GREEDY else temperature,
            top_k=generator.top_k if request.top_k is None else request.top_k,
            top_p=generator.top_p if request.top_p is None else request.top_p,
            min_p=generator.min_p if request.min_p is None else request.min_p,
            max_tokens=min(request.max_tokens or DEFAULT_MAX_TOKENS, generator.model.config.max_positions),
        )

    def submit(
        self, request: SearchRequest, on_event: Callable[[Event], None] | None = None, terms: SubmitOptions = USUAL
    ) -> str:
        """Queue a search.

        Args:
            request: what to search.
            on_event: called with each of the search's events, on the thread that calls `step`.
            terms: its priority and the like.

        Returns:
            The search's id.

        Raises:
            InvalidRequestError: listing every field that breaks a rule; as NoEmbeddingError where the problem holds
                tokens that a model has no embedding for.
            RequestTooLargeError: when the prompt fills a model's context, or (PoolTooSmallError) when the KV pool could
                not hold the search even alone.
        """
        validate(request)
        plan = replace(self._plan(request), salt=terms.salt)
        blocks = self._worst_case(plan)
        self.engine.admission.require_fits_alone(blocks)
        meter = UsageMeter(self._clock, terms.waited, terms.timed_from_start)
        models = self._generator, self._verifier
        search = RunningSearch(plan, self.engine, *models, self._grouping, meter, on_event or _ignore)
        entry = _Entry(plan, blocks, meter, terms.priority, search)
        # Behind all that go first or came before: the queue is in order of priority.
        place = next((i for i, other in enumerate(self._queue) if other.priority < terms.priority), len(self._queue))
        self._queue.insert(place, entry)
        return plan.search_id

    def cancel(self, search_id: str) -> None:
        """End a search at the next step with what it has; ended and unknown ids are ignored."""
        self._cancelled.add(search_id)

    def step(self) -> list[SearchResult]:
        """Admit what fits, run one engine step, and return the searches that ended.

        Never waits for a vote but where votes are all there is, and then briefly.

        Raises:
            FatalError: when no search can go on: the device failed, or a score is not the one that it has to be.
            KeyboardInterrupt: after the step; the next one goes on, and returns what this one ended.
        """
        with interrupts_held():
            self._apply_cancellations()
            self._admit()
            for done in self._engine_step():
                search = self._grower(done.work.owner)
                self._guard(search, search.handle, done)
            self._stop_late()
            self._collect()
            self._rest()
        ended, self._ended = self._ended, []
        return ended

    def _engine_step(self) -> list[Done]:
        """What the engine finished; searches whose work cannot go on fail, and the others go on."""
        try:
            return self.engine.step()
        except OwnersError as error:
            if not error.owners:
                raise
            for owner in error.owners:
                self._grower(owner).fail(error)
            return []

    def _grower(self, owner: Hashable) -> RunningSearch:
        """The search that the engine knows as `owner`."""
        search_id = str(owner)
        return (self._running.get(search_id) or self._aside[search_id]).search

    @staticmethod
    def _guard(search: RunningSearch, action: Callable[..., None], *args: Any) -> None:
        """Do something for one search, which fails if that raises anything but what ends them all."""
        try:
            action(*args)
        except FatalError:
            raise
        except Exception as error:
            search.fail(error)

    def close(self) -> None:
        """Cancel every search and release everything; what is submitted later starts afresh."""
        for search_id in [entry.search_id for entry in self._queue] + [*self._running, *self._voting]:
            self.cancel(search_id)
        try:
            self._apply_cancellations()
        finally:
            self._ended.clear()
            self._grouping.close()

    def _plan(self, request: SearchRequest) -> ResolvedRequest:
        if needs_verifier(request) and self._verifier is None:
            raise InvalidRequestError(
                [Violation("algorithm", f"{request.algorithm} needs a verifier and none is loaded; set --verifier")]
            )
        if self._verifier and self._verifier.family.info.whole_answers and not answers_suffice(request):
            family, fit = self._verifier.family.name, " or ".join(algorithms_for_answers())
            what = f"{request.algorithm} reads the scores of steps, and {family} scores whole answers; choose {fit}"
            raise InvalidRequestError([Violation("algorithm", what)])
        prompt = len(self._generator.prompt_ids(request.problem))
        context = self._generator.model.config.max_positions
        if prompt >= context:
            raise RequestTooLargeError(f"the prompt has {prompt} tokens and the generator's context is {context}")
        effective = self.effective(request)
        assert effective.max_tokens is not None
        path_tokens = min(effective.max_tokens, context - prompt)
        effective = replace(effective, max_tokens=path_tokens)
        limits = PathLimits(prompt, path_tokens, min(effective.max_step_tokens, path_tokens))
        verifier_limits = self._verifier_limits(effective, limits) if needs_verifier(request) else None
        return ResolvedRequest(secrets.token_hex(8), effective, limits, verifier_limits)

    @cached_property
    def _same_vocabulary(self) -> bool:
        """Whether both models have the same tokens; compared once, for a vocabulary may have 150,000."""
        assert self._verifier is not None
        return self._verifier.family.model.tokenizer.vocabulary == self._generator.model.tokenizer.vocabulary

    def _verifier_limits(self, request: SearchRequest, generator: PathLimits) -> PathLimits:
        assert self._verifier is not None
        family = self._verifier.family
        ids, context = family.prompt_ids(request.problem), family.context
        family.model.require_embedded(VERIFIER, ids)
        prompt = len(ids)
        require_room(family, prompt)
        marks = family.mark_tokens, family.tail_tokens
        limits = verifier_limits(generator, prompt, context, request.max_steps, self._same_vocabulary, *marks)
        if isinstance(family, Critic):
            critique = CritiqueLimits(0, family.settings.chains, family.critique_tokens)
            return with_critiques(limits, context, family.closing_tokens, critique)
        return replace(limits, step_tokens=limits.path_tokens) if family.info.whole_answers else limits

    def _worst_case(self, plan: ResolvedRequest) -> dict[str, int]:
        size, demands = self.engine.settings.block_size, memory_demand(plan.request)
        blocks = {GENERATOR: worst_case_blocks(demands, plan.generator_limits, size)}
        if plan.verifier_limits:
            assert self._verifier is not None
            if self._verifier.oracle:
                demands = tuple(replace(demand, paths=demand.paths + 1) for demand in demands)  # the one being checked
            blocks[VERIFIER] = worst_case_blocks(demands, plan.verifier_limits, size)
        return blocks

    def _admit(self) -> None:
        """Start searches in order; one that does not fit yet holds back those behind it, so that none starves."""
        while self._queue and (reservation := self._reserve(self._queue[0])):
            entry = self._queue.popleft()
            entry.reservation = reservation
            self._running[entry.search_id] = entry
            if self._aside.pop(entry.search_id, None):
                self._guard(entry.search, self.engine.call_back, entry.search_id)
            else:
                self._guard(entry.search, entry.search.start)

    def _reserve(self, entry: _Entry) -> Reservation | None:
        """A place and memory for `entry`, taken from searches of a smaller priority if need be, the last one first."""
        admission = self.engine.admission
        behind = [other for other in self._running.values() if other.priority < entry.priority]
        if behind and not self._would_fit(entry, behind):
            behind = []
        behind.sort(key=lambda other: admission.rank(other.search_id))
        while True:
            room = len(self._running) < self._max_running
            if room and (reservation := admission.try_reserve(entry.blocks, entry.search_id, entry.priority)):
                return reservation
            if not behind:
                return None
            self._set_aside(behind.pop())

    def _would_fit(self, entry: _Entry, behind: list[_Entry]) -> bool:
        """Whether it is any use that all of `behind` give way to `entry`."""
        given = [other.reservation for other in behind if other.reservation]
        return self.engine.admission.would_fit(entry.blocks, given) and self.running - len(behind) < self._max_running

    def _set_aside(self, entry: _Entry) -> None:
        """Put a running search back into the queue, before all others of its priority, without any memory."""
        assert entry.reservation is not None
        self._guard(entry.search, self.engine.set_aside, entry.search_id)
        if entry.has_grown:  # by a fault
            self._end_growth(entry)
            return
        self.engine.admission.release(entry.reservation)
        entry.reservation = None
        self._aside[entry.search_id] = self._running.pop(entry.search_id)
        place = next((i for i, other in enumerate(self._queue) if other.priority <= entry.priority), len(self._queue))
        self._queue.insert(place, entry)

    def _apply_cancellations(self) -> None:
        cancelled, self._cancelled = self._cancelled, set()
        if not cancelled:
            return
        for entry in [entry for entry in self._queue if entry.search_id in cancelled]:
            self._stop_queued(entry, StopReason.CANCELLED)
        for search in self._searches():
            if search.plan.search_id in cancelled:
                self._guard(search, search.stop, StopReason.CANCELLED)
        self._collect()

    def _stop_late(self) -> None:
        """End the searches whose time is over, those that wait too."""
        for entry in list(self._queue):
            if entry.meter.is_late(entry.plan.request.time_limit):
                self._stop_queued(entry, StopReason.DEADLINE)
        for search in self._searches():
            if search.result is None and search.is_late():
                self._guard(search, search.stop, StopReason.DEADLINE)

    def _stop_queued(self, entry: _Entry, reason: StopReason) -> None:
        self._queue.remove(entry)
        self._aside.pop(entry.search_id, None)
        self._guard(entry.search, entry.search.stop, reason)
        assert entry.search.result is not None
        self._ended.append(entry.search.result)

    def _searches(self) -> list[RunningSearch]:
        return [*(entry.search for entry in self._running.values()), *self._voting.values()]

    def _collect(self) -> None:
        """Take back what searches that have grown had reserved, and the results of those that have voted."""
        for entry in [entry for entry in (*self._running.values(), *self._aside.values()) if entry.has_grown]:
            self._end_growth(entry)
        for search_id, search in list(self._voting.items()):
            self._guard(search, search.poll)
            if search.result is not None:
                del self._voting[search_id]
                self._ended.append(search.result)

    def _end_growth(self, entry: _Entry) -> None:
        if self._aside.pop(entry.search_id, None):  # what it waited for came as it was set aside
            self._queue.remove(entry)
            self.engine.call_back(entry.search_id)
        else:
            del self._running[entry.search_id]
        if entry.reservation:
            self.engine.admission.release(entry.reservation)
        self._voting[entry.search_id] = entry.search

    def _rest(self) -> None:
        """Leave the processor to those who count the votes, where nothing else is to be done."""
        if self._voting and not (self._queue or self._running or self._ended):
            wait([f for search in self._voting.values() for f in search.waits_for or ()], _REST, FIRST_COMPLETED)


def _ignore(_: Event) -> None:
    pass
