"""Many searches over one engine: queueing, admission, routing of finished work, votes."""

import bisect
import itertools
import math
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Any

from espalier.engine.engine import Engine
from espalier.engine.errors import FatalError, InvalidRequestError, OwnersError, RequestTooLargeError, Violation
from espalier.engine.interrupts import interrupts_held
from espalier.engine.scheduling.role_policy import GENERATOR, VERIFIER
from espalier.engine.work import Done
from espalier.prm.generative import GenerativeVerifier
from espalier.prm.verifier import Verifier, require_room
from espalier.search.algorithms import (
    algorithms_for_answers,
    answers_suffice,
    memory_estimate,
    needs_verifier,
    with_defaults,
)
from espalier.search.request import EXACT_MATCH, USUAL, AlgorithmName, SearchRequest, SubmitOptions, Vote, validate
from espalier.search.result import Event, SearchResult, StopReason
from espalier.search.run.generator import Generator
from espalier.search.run.memory import (
    PathLimits,
    RationaleLimits,
    ResolvedRequest,
    verifier_limits,
    with_rationales,
    worst_case_blocks,
)
from espalier.search.run.search import RunningSearch
from espalier.search.voting.equivalence import Equivalence
from espalier.search.voting.vote import VoteResult, is_decided, select

DEFAULT_MAX_TOKENS = 2048
"""Generated tokens of one path when the request sets no limit."""

_VOTE_SECONDS = 60.0
"""Time after which a vote is settled by exact match: answers made to run away could hold it up for hours."""

_VOTE_THREADS = 4
"""Votes that are counted at once; each of these threads waits for child processes, and computes little itself."""

_REST_SECONDS = 0.01
"""For how long a step waits where only votes are left; new searches wait as long."""


class Orchestrator:
    """Runs searches on an engine; everything happens on the thread that calls `step`, but for the counting of votes.

    A search waits in the queue, grows, votes, and is over:

    - It waits until the memory that it may need is free, and a place among those that grow. The queue is in order of
      priority, then of arrival. Where only a share of the worst case is set aside for a search, it may have to give its
      memory up to those before it, and computes it again later.
    - Where there is no other memory or place for it, a search of a larger priority takes those of smaller priorities.
      They return to the queue without any memory, and go on later from where they were, to the same results.
    - A search that has grown gives all its memory back. Its vote is counted by other threads where answers have to be
      compared, and until then others grow.

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
        equivalence: Equivalence | None = None,
    ) -> None:
        """Make an idle orchestrator.

        Args:
            engine: holds both models.
            generator: proposes steps.
            verifier: scores them; None where no search will read scores.
            max_running: searches that grow at once.
            clock: gives seconds and never goes back.
            equivalence: tells equal answers from different ones in a vote, and is closed with the orchestrator; None
                for exact match.
        """
        self.engine = engine
        self._generator = generator
        self._verifier = verifier
        self._max_running = max_running
        self._clock = clock
        self._equivalence = equivalence
        self._searches: dict[str, RunningSearch] = {}  # all that are not over, in order of arrival
        self._arrivals = itertools.count()
        self._queue: list[RunningSearch] = []  # of these, who waits; the next one first
        self._voted: SimpleQueue[tuple[RunningSearch, Future[VoteResult]]] = SimpleQueue()
        self._vote_threads = ThreadPoolExecutor(_VOTE_THREADS, "espalier-vote")

    @property
    def busy(self) -> bool:
        """Whether any search is running, waiting or voting."""
        return bool(self._searches)

    @property
    def running(self) -> int:
        """Searches that grow."""
        return len(self._growing())

    @property
    def voting(self) -> int:
        """Searches that have grown and wait for their vote."""
        return sum(search.voting for search in self._searches.values())

    @property
    def waiting(self) -> int:
        """Searches in the queue, those that gave way to others too."""
        return len(self._queue)

    def describe_models(self) -> dict[str, str]:
        """What results depend on besides the request.

        Digests of the models, how the verifier is read, their dtype and device, the system prompt, and what tells the
        answers of a vote apart.
        """
        generator = self._generator.model
        digests = {role: model.digest for role, model in self.engine.models.items()}
        dtype, device = str(generator.decoder.dtype), generator.decoder.device.type
        if self._verifier:
            digests["verifier_family"] = self._verifier.family.identity
        prompt = self._generator.system_prompt
        equivalence = self._equivalence.name if self._equivalence else EXACT_MATCH
        return digests | {"dtype": dtype, "device": device, "system_prompt": prompt, "answer_equivalence": equivalence}

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
        self, request: SearchRequest, on_event: Callable[[Event], None] | None = None, options: SubmitOptions = USUAL
    ) -> str:
        """Queue a search.

        Args:
            request: what to search.
            on_event: called with each of the search's events, on the thread that calls `step`.
            options: its priority and the like.

        Returns:
            The search's id.

        Raises:
            InvalidRequestError: listing every field that breaks a rule; as NoEmbeddingError where the problem holds
                tokens that a model has no embedding for.
            RequestTooLargeError: when the prompt fills a model's context, or (PoolTooSmallError) when the KV pool could
                not hold the search even alone.
        """
        validate(request)
        resolved = self._resolve(request, options)
        self.engine.admission.require_fits_alone(resolved.blocks)
        models = self._generator, self._verifier
        search = RunningSearch(resolved, self.engine, *models, on_event or _ignore, self._clock)
        search.arrival = next(self._arrivals)
        self._searches[search.search_id] = search
        self._enqueue(search)
        return search.search_id

    def cancel(self, search_id: str) -> None:
        """End a search at the next step with what it has; ended and unknown ids are ignored."""
        if search := self._searches.get(search_id):
            search.cancelled = True

    def drop(self, search_ids: Iterable[str]) -> None:
        """End searches at once: each hears of its end as when it is cancelled, and no `step` returns it any more."""
        for search in [self._searches[name] for name in search_ids if name in self._searches]:
            if search.result is None:
                self._work_on(search, search.stop, StopReason.CANCELLED)
            del self._searches[search.search_id]

    def step(self) -> list[SearchResult]:
        """Admit what fits, run one engine step, and return the searches that ended.

        Never waits for a vote but where votes are all there is, and then briefly.

        Raises:
            FatalError: when no search can go on: the device failed, or a score is not the one that it has to be.
            KeyboardInterrupt: after the step; the next one goes on, and returns what this one ended.
        """
        with interrupts_held():
            self._stop_cancelled_and_late()
            self._admit()
            for done in self._engine_step():
                search = self._searches[str(done.work.owner)]
                self._work_on(search, search.handle, done)
            self._take_votes()
        ended = [search.result for search in self._searches.values() if search.result is not None]
        for result in ended:
            del self._searches[result.search_id]
        return ended

    def close(self) -> None:
        """Cancel every search and release everything; what is submitted later starts afresh."""
        try:
            self.drop(list(self._searches))
        finally:
            self._searches.clear()
            self._close_votes()

    # ---- one search

    def _engine_step(self) -> list[Done]:
        """What the engine finished; searches whose work cannot go on fail, and the others go on."""
        try:
            return self.engine.step()
        except OwnersError as error:
            if not error.owners:
                raise
            for owner in error.owners:
                search = self._searches[str(owner)]
                self._work_on(search, search.fail, error)
            return []

    def _work_on(self, search: RunningSearch, action: Callable[..., None], *args: Any) -> None:
        """Do something for one search, which fails if that raises anything but what ends them all.

        A search that has grown by it gives back what it holds, and votes.
        """
        try:
            action(*args)
            if search.has_grown and search.vote_deadline == math.inf:
                self._end_growth(search)
        except FatalError:
            raise
        except Exception as error:
            search.fail(error)
            self._give_back(search)

    def _stop_cancelled_and_late(self) -> None:
        now = self._clock()
        for search in [s for s in self._searches.values() if s.cancelled or now >= min(s.deadline, s.vote_deadline)]:
            reason = StopReason.DEADLINE if now >= search.deadline else None
            if search.result is None:
                self._work_on(search, search.stop, StopReason.CANCELLED if search.cancelled else reason)

    def _end_growth(self, search: RunningSearch) -> None:
        """Take back what a search that has grown holds, and begin its vote."""
        self._give_back(search)
        search.vote_deadline = self._clock() + _VOTE_SECONDS
        if search.result is None:
            self._begin_vote(search)

    def _give_back(self, search: RunningSearch) -> None:
        """Take a search out of the queue, and back what was set aside for it."""
        if search in self._queue:
            self._queue.remove(search)
        if search.suspended:  # what it waited for came as it was suspended
            search.suspended = False
            self.engine.call_back(search.search_id)
        if search.reservation:
            self.engine.admission.release(search.reservation)
            search.reservation = None

    # ---- votes

    def _begin_vote(self, search: RunningSearch) -> None:
        """Let the candidates of a search vote: at once where no answers have to be compared, else on another thread."""
        candidates, vote, equivalence = search.candidates, search.vote, self._equivalence
        assert candidates is not None
        if equivalence is None or search.cut_short or vote is Vote.NAIVE or is_decided(candidates, vote):
            search.end(select(candidates, vote))
            return
        future = self._vote_threads.submit(select, candidates, vote, equivalence, lambda: search.result is not None)
        future.add_done_callback(lambda future: self._voted.put((search, future)))

    def _take_votes(self) -> None:
        """End the searches whose votes are counted; wait for one, briefly, where nothing else is to be done."""
        idle = bool(self._searches) and all(search.voting for search in self._searches.values())
        while True:
            try:
                search, future = self._voted.get(block=idle, timeout=_REST_SECONDS)
            except Empty:
                return
            idle = False
            if search.result is None:
                self._work_on(search, lambda search=search, future=future: search.end(future.result()))

    def _close_votes(self) -> None:
        """End the threads of votes that nobody waits for any more, and what they ask."""
        equivalence, threads = self._equivalence, self._vote_threads
        self._vote_threads = ThreadPoolExecutor(_VOTE_THREADS, "espalier-vote")
        if equivalence:
            equivalence.close()  # answers the questions that are open
        threads.shutdown()
        if equivalence:
            equivalence.close()  # a thread may have asked another one meanwhile
        self._voted = SimpleQueue()

    # ---- the queue

    def _growing(self) -> list[RunningSearch]:
        return [search for search in self._searches.values() if search.reservation]

    def _enqueue(self, search: RunningSearch) -> None:
        """Put a search behind all of a larger priority, and those of its own that came before it."""
        bisect.insort(self._queue, search, key=lambda other: (-other.priority, other.arrival))

    def _admit(self) -> None:
        """Start searches in order; one that does not fit yet holds back those behind it, so that none starves."""
        while self._queue and self._reserve(search := self._queue[0]):
            self._queue.remove(search)
            if search.suspended:
                search.suspended = False
                self._work_on(search, self.engine.call_back, search.search_id)
            else:
                self._work_on(search, search.start)

    def _reserve(self, search: RunningSearch) -> bool:
        """Set memory aside for a search, taken from those of a smaller priority if need be, the last one first."""
        growing, admission = self._growing(), self.engine.admission
        blocks, places = search.resolved.blocks, self._max_running - len(growing)
        behind = [other for other in growing if other.priority < search.priority]
        given = [other.reservation for other in behind if other.reservation]
        if behind and (places + len(behind) < 1 or not admission.would_fit(blocks, given)):
            behind = []  # it is of no use that they give way
        behind.sort(key=lambda other: admission.rank(other.search_id))
        while True:
            if places > 0:
                search.reservation = admission.try_reserve(blocks, search.search_id, search.priority)
            if search.reservation or not behind:
                return search.reservation is not None
            self._suspend(behind.pop())
            places += 1

    def _suspend(self, search: RunningSearch) -> None:
        """Put a search that grows back into the queue, without any memory."""
        self._work_on(search, self.engine.set_aside, search.search_id)
        if search.reservation:  # else a fault has ended it
            self.engine.admission.release(search.reservation)
            search.reservation, search.suspended = None, True
            self._enqueue(search)

    # ---- what a request comes to

    def _resolve(self, request: SearchRequest, options: SubmitOptions) -> ResolvedRequest:
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
        blocks = self._worst_case(effective, limits, verifier_limits)
        return ResolvedRequest(secrets.token_hex(8), effective, options, limits, verifier_limits, blocks)

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
        special_tokens = family.max_special_tokens, family.max_probe_tokens
        limits = verifier_limits(generator, prompt, context, request.max_steps, self._same_vocabulary, *special_tokens)
        if isinstance(family, GenerativeVerifier):
            rationale = RationaleLimits(0, family.settings.chains, family.rationale_tokens)
            return with_rationales(limits, context, family.closing_tokens, rationale)
        return replace(limits, step_tokens=limits.path_tokens) if family.info.whole_answers else limits

    def _worst_case(self, request: SearchRequest, generator: PathLimits, verifier: PathLimits | None) -> dict[str, int]:
        """The most blocks of each role that a search can come to hold."""
        size, estimates = self.engine.settings.block_size, memory_estimate(request)
        blocks = {GENERATOR: worst_case_blocks(estimates, generator, size)}
        if verifier:
            assert self._verifier is not None
            if self._verifier.full_rescore:
                estimates = tuple(
                    replace(estimate, paths=estimate.paths + 1) for estimate in estimates
                )  # the one being checked
            blocks[VERIFIER] = worst_case_blocks(estimates, verifier, size)
        return blocks


def _ignore(_: Event) -> None:
    pass
