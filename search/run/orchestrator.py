"""Runs many searches and completions on one engine: queueing, admission, routing of finished work, and votes."""

import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import Any, TypeVar

from espalier.engine.engine import Engine
from espalier.engine.errors import FatalError, MisuseError, PartialFailureError
from espalier.engine.guidance.grammar import Grammar
from espalier.engine.guidance.matcher import Matcher
from espalier.engine.interrupts import interrupts_held
from espalier.engine.models.model import Model
from espalier.engine.roles import GENERATOR
from espalier.engine.scheduling.admission import Reservation
from espalier.engine.work import Done
from espalier.prm.scorer import Scorer
from espalier.search.completion import Tokenization, TokenizationRequest
from espalier.search.fairness import AccountThreads
from espalier.search.request import DEFAULT_OPTIONS, EXACT_MATCH, SubmitOptions
from espalier.search.result import StopReason
from espalier.search.run.executor import KINDS, AnyEvent, AnyRequest, AnyResult, Resolved, reason_of, result_without
from espalier.search.run.generator import Generator
from espalier.search.run.resolve import Resolver
from espalier.search.run.running import AnyRunning, Submission, digests
from espalier.search.run.search_queue import SearchQueue
from espalier.search.scores import SessionTurn
from espalier.search.server_info import KvBlocks, Occupancy
from espalier.search.voting.equivalence import MathVerify

log = logging.getLogger("espalier.search")

_THREADS = 4
"""Votes of one account counted, and grammars compiled, concurrently; each thread mostly waits for child processes."""

T = TypeVar("T")

_POLL_SECONDS = 0.01
"""Seconds that `step` waits when only votes are left; new searches wait as long."""


class Orchestrator:
    """Runs searches on an engine. All methods run on one thread, the one that calls `step`; votes run on other threads.

    A search is queued, runs, votes, and is finished:

    - It is queued until its reservation of KV memory and a slot are free. The queue is ordered by priority, then by
      arrival. If only a share of the worst case is reserved, a running search may be preempted and recomputed later.
    - If memory or slots are missing, a search of higher priority suspends running ones of lower priority. They return
      to the queue without any memory and later resume where they were, with the same results.
    - A search whose tree is complete releases all its memory. If answers must be compared, its vote runs on another
      thread while other searches continue.

    An exception raised on behalf of one search, by its algorithm, its verifier, the engine or an event callback, fails
    that search only. One that cannot be traced to a search fails all that run, and those that wait go on. Only a
    `FatalError` is raised by `step`.
    """

    def __init__(
        self,
        engine: Engine,
        generator: Generator | None,
        scorer: Scorer | None,
        max_running: int = 64,
        clock: Callable[[], float] = time.monotonic,
        equivalence: MathVerify | None = None,
        model_names: Mapping[str, str] = MappingProxyType({}),
        expected_tokens: int | None = None,
        load_weights: Callable[[str], Model] | None = None,
    ) -> None:
        """Create an idle orchestrator.

        Args:
            engine: holds both models.
            generator: samples steps; None where only given steps are scored.
            scorer: scores steps; None if no search needs scores.
            max_running: maximum number of searches running at once.
            clock: monotonic time in seconds.
            equivalence: compares answers in votes, closed with the orchestrator; None for exact match.
            model_names: names of the models by role, for people.
            expected_tokens: tokens of a usual path, for which memory is reserved; None for the path's limit.
            load_weights: loads a folder whose weights are to take the generator's place; None where none can.
        """
        self.model_names = model_names
        self.kv_memory_bytes = engine.settings.kv_memory_bytes
        self.engine = engine
        self._generator = generator
        self._scorer = scorer
        self._resolver = Resolver(engine, generator, scorer, expected_tokens)
        if self._resolver.defaults:
            self.defaults = self._resolver.defaults
        self.max_running = max_running
        self._clock = clock
        self.equivalence = equivalence
        self._load_weights = load_weights
        self._loaded_beside: tuple[str, Model] | None = None  # by `prepare_reload`, with its folder
        self._searches: dict[str, AnyRunning] = {}  # all unfinished searches, in order of arrival
        self._arrivals = itertools.count()
        self._queue = SearchQueue(clock)
        self._ended: list[AnyRunning] = []
        self._next_due = math.inf  # the earliest time at which a search has to be stopped
        self._asked = False  # since the last step, or something has ended in it that others may have waited for
        self._threads = AccountThreads(_THREADS, "espalier-vote")
        # What they have worked out for a search, to be taken in on this thread.
        self._worked_out: SimpleQueue[tuple[AnyRunning, Callable[[], None]]] = SimpleQueue()

    @property
    def busy(self) -> bool:
        """True if any search is waiting, running or voting."""
        return bool(self._searches)

    @property
    def idle(self) -> bool:
        """True if nothing runs, or all that runs waits for its callers, whatever waits behind it."""
        waits = all(search.waits_for_caller for search in self._queue.running)
        return not self.busy or (waits and bool(self.running) and not self._asked and not self.engine.busy)

    @property
    def running(self) -> int:
        """Number of running searches."""
        return len(self._queue.running)

    def occupancy(self) -> Occupancy:
        """Return what is held now."""
        stats = self.engine.stats()
        blocks = {
            role: KvBlocks(each.live_blocks, each.cached_blocks, each.free_blocks) for role, each in stats.items()
        }
        return Occupancy(self.running, len(self._queue), blocks, stats)

    def describe_models(self) -> dict[str, str]:
        """Return what results depend on besides the request.

        Digests of the models, the verifier's family, dtype and device, the system prompt, and how votes compare
        answers.
        """
        assert self._generator, "a server has a generator"
        generator = self._generator.model
        found = digests(self.engine, self._scorer)
        dtype, device = str(generator.decoder.dtype), generator.decoder.device.type
        if self._scorer:
            found["verifier_family"] = self._scorer.identity
        prompt = self._generator.system_prompt
        equivalence = self.equivalence.name if self.equivalence else EXACT_MATCH
        return found | {"dtype": dtype, "device": device, "system_prompt": prompt, "answer_equivalence": equivalence}

    def check(self, request: AnyRequest) -> Resolved:
        """Resolve a request, for `submit`; may be called on any thread. See `Running.resolve`."""
        kind: type[AnyRunning] = KINDS[type(request)].running
        return kind.resolve(self._resolver, request)

    def tokenize(self, request: TokenizationRequest) -> Tokenization:
        """See `Executor.tokenize`."""
        request.validate()
        assert self._generator, "a server has a generator"
        return self._generator.tokenize(request)

    def prepare_reload(self, folder: str) -> str:
        """See `Executor.prepare_reload`."""
        if self._load_weights is None:
            raise MisuseError("this orchestrator's weights were not loaded from a checkpoint, and cannot be reloaded")
        self._loaded_beside = None  # first, so that no third copy is held
        model = self._load_weights(folder)
        self._loaded_beside = folder, model
        return model.digest

    def reload(self, folder: str) -> None:
        """See `Executor.reload`."""
        if self._loaded_beside is None or self._loaded_beside[0] != folder:
            self.prepare_reload(folder)
        assert self._loaded_beside
        (_, model), self._loaded_beside = self._loaded_beside, None
        before = self.engine.model(GENERATOR).digest
        self.engine.replace_model(GENERATOR, model)
        for search in list(self._searches.values()):
            self._run_guarded(search, search.note_reload, before)

    def cancel_reload(self) -> None:
        """See `Executor.cancel_reload`."""
        self._loaded_beside = None

    def submit(
        self,
        request: AnyRequest | Resolved,
        on_event: Callable[[AnyEvent], None] | None = None,
        options: SubmitOptions = DEFAULT_OPTIONS,
        search_id: str = "",
    ) -> str:
        """Queue a search or a completion.

        Args:
            request: what to do; it is resolved unless `check` has done that.
            on_event: called with each event of the search, on the thread that calls `step`.
            options: priority and other options of the submission.
            search_id: its id; drawn if empty.

        Returns:
            The id of the search.

        Raises:
            InvalidRequestError, RequestTooLargeError: see `Resolver.resolve`.
        """
        resolved = self.check(request) if isinstance(request, AnyRequest) else request
        name, of_engine = search_id or secrets.token_hex(8), (self.engine, self._scorer, self.equivalence, self._clock)
        submission = Submission(name, options, on_event or (lambda _: None), *of_engine, self._work_out)
        search: AnyRunning = KINDS[type(resolved.request)].running(resolved, submission)
        search.arrival = next(self._arrivals)
        self._searches[search.search_id] = search
        self._next_due = min(self._next_due, search.deadline)
        self._queue.add(search)
        self._asked = True
        return search.search_id

    def tell(self, search_id: str, turn: SessionTurn) -> None:
        """Go on with a session of scores. Unknown and finished ids are ignored."""
        if running := self._searches.get(search_id):
            self._run_guarded(running, running.tell, turn)
            self._asked = True

    def cancel(self, search_id: str) -> None:
        """Stop a search at the next `step`, with its best answer so far. Unknown and finished ids are ignored."""
        if search := self._searches.get(search_id):
            self._asked = True
            search.cancelled = True
            self._next_due = -math.inf

    def drop(self, search_ids: Iterable[str]) -> None:
        """Cancel searches immediately: each gets its last event, and `step` does not return them."""
        for search in [self._searches[name] for name in search_ids if name in self._searches]:
            if search.result is None:
                self._run_guarded(search, search.stop, StopReason.CANCELLED)
            del self._searches[search.search_id]

    def step(self) -> list[AnyResult]:
        """Admit queued searches, run one engine step, and return the searches that finished.

        Waits only if votes are all that is left, and then at most briefly.

        Raises:
            FatalError: no search can continue: the device failed, or the full-rescore check found a different score.
            KeyboardInterrupt: raised after the step is complete; the next `step` returns this one's results.
        """
        with interrupts_held():
            self._asked = False
            self._stop_cancelled_and_late()
            self._admit()
            for done in self._engine_step():
                if search := self._growing(done.work.owner):
                    self._run_guarded(search, search.handle, done)
            for search in [search for search in self._queue.running if search.options.report_nodes]:
                self._run_guarded(search, search.report_growth)
            self._take_worked_out()
        ended, self._ended = self._ended, []
        self._asked |= bool(ended)
        return [s.result for s in ended if s.result is not None and self._searches.pop(s.search_id, None)]

    def close(self) -> None:
        """Cancel every search and release everything; new searches may be submitted afterwards."""
        try:
            self.drop(list(self._searches))
        finally:
            self._searches.clear()
            self._ended.clear()
            self._close_threads()

    # ---- one search

    def _engine_step(self) -> list[Done]:
        """Return the engine's finished work; searches whose work failed are failed, the others continue."""
        try:
            return self.engine.step()
        except FatalError:
            raise
        except Exception as error:
            owners = error.owners if isinstance(error, PartialFailureError) else ()
            failed = [search for owner in owners if (search := self._growing(owner))]
            if not owners and not (failed := list(self._queue.running)):
                raise  # nobody is left to be failed: the next step would raise it again
            for search in failed:
                self._fail(search, error)
            return []

    def _growing(self, owner: Hashable) -> AnyRunning | None:
        """The search that owns engine work; None, and the engine drops its work, if it has ended or votes.

        A search may end while other finished work of its own is still to be handled.
        """
        search = self._searches.get(str(owner))
        if search and not search.released:
            return search
        self.engine.abandon(owner)
        return None

    def _run_guarded(self, search: AnyRunning, action: Callable[..., None], *args: Any) -> None:
        """Run `action` for one search; any exception but a fatal one fails that search.

        If its tree is complete afterwards, the search releases its memory and votes.
        """
        try:
            action(*args)
            if search.tree_complete and not search.released:
                self._give_back(search)
                if search.result is None:
                    search.conclude()
        except FatalError:
            raise
        except Exception as error:
            self._fail(search, error)
        else:
            self._note_end(search)

    def _fail(self, search: AnyRunning, error: Exception) -> None:
        """Fail a search, in any state; it gets a result even if it cannot make one."""
        name = search.search_id
        try:
            try:
                search.fail(error)
            finally:
                if search.result is None:
                    why = reason_of(error, name)
                    search.end_with(result_without(name, search.resolved.request, StopReason.FAILED, why))
        except FatalError:
            raise
        except Exception:
            log.exception("search %s failed, and could not say how far it had come", name)
        self._give_back(search)
        self._note_end(search)

    def _note_end(self, search: AnyRunning) -> None:
        if search.result is None:
            self._next_due = min(self._next_due, search.deadline)
        elif search not in self._ended:
            self._ended.append(search)

    def _stop_cancelled_and_late(self) -> None:
        now = self._clock()
        if now < self._next_due:
            return
        self._next_due = math.inf
        for search in [search for search in self._searches.values() if search.result is None]:
            if search.cancelled or now >= search.deadline:
                reason = StopReason.CANCELLED if search.cancelled else StopReason.DEADLINE
                self._run_guarded(search, search.stop, reason)
            else:
                self._next_due = min(self._next_due, search.deadline)

    def _give_back(self, search: AnyRunning) -> None:
        """Remove a search from the queue and free its reservation."""
        search.released = True
        self._queue.remove(search)
        if search.suspended:  # completed while suspended
            search.suspended = False
            self.engine.resume_owner(search.search_id)
        self._release(search)

    def _release(self, search: AnyRunning) -> None:
        """Give back what was set aside for a search, which grows no longer."""
        if search.reservation:
            self.engine.admission.release(search.reservation)
            self.engine.sharing.forget(search.search_id)
            search.reservation = None
            self._queue.end(search)

    # ---- other threads

    def _work_out(self, search: AnyRunning, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Have something worked out on another thread of a search's account, and `then` take it in on this one."""

        def done(future: Future[T]) -> None:
            self._worked_out.put((search, lambda: then(future.result())))

        self._threads.submit(search.account, work).add_done_callback(done)

    def _take_worked_out(self) -> None:
        """Take in what other threads have worked out; wait briefly if there is nothing else to do."""
        idle = bool(self._searches) and not (self._ended or self._asked or self.engine.busy)
        while True:
            try:
                search, then = self._worked_out.get(block=idle, timeout=_POLL_SECONDS)
            except Empty:
                return
            idle = False
            if search.result is None:
                self._run_guarded(search, then)

    def _close_threads(self) -> None:
        """Stop other threads' work, which is no longer needed, and the comparisons of votes."""
        equivalence, threads = self.equivalence, self._threads
        self._threads = AccountThreads(_THREADS, "espalier-vote")
        if equivalence:
            equivalence.close()  # ends open comparisons
        threads.close()
        if equivalence:
            equivalence.close()  # a thread may have started another one meanwhile
        self._worked_out = SimpleQueue()

    # ---- the queue

    def _admit(self) -> None:
        """Start searches in queue order. One that does not fit blocks those behind it, so that it cannot starve."""
        while search := self._queue.next():
            try:
                if not self._has_matchers(search):
                    continue
                if not (self._reserve(search) or self._reserve_in_place_of_others(search)):
                    return
            except FatalError:
                raise
            except Exception as error:
                self._fail(search, error)
                continue
            if search.suspended:
                search.suspended = False
                self._run_guarded(search, self.engine.resume_owner, search.search_id)
            else:
                self._run_guarded(search, search.start)

    def _has_matchers(self, search: AnyRunning) -> bool:
        """Return whether a search has all that binds its texts; else it leaves the queue until that is compiled.

        What `check` has compiled may be in another process, or may have made room for others'.
        """
        compiler, missing = self._resolver.grammars, list[Grammar]()
        for grammar in search.resolved.grammars:
            if grammar not in search.matchers and compiler:
                if matcher := compiler.prepared(grammar):
                    search.matchers[grammar] = matcher
                else:
                    missing.append(grammar)
        if missing and compiler:

            def take(matchers: dict[Grammar, Matcher]) -> None:
                search.matchers |= matchers
                self._queue.add(search)

            self._queue.remove(search)
            self._work_out(search, lambda: {grammar: compiler.compile(grammar) for grammar in missing}, take)
        return not missing

    def _reserve(self, search: AnyRunning) -> bool:
        """Take a slot and memory for a search that waits, if they are free."""
        if self.running < self.max_running:
            blocks = search.resolved.blocks
            search.reservation = self.engine.admission.try_reserve(blocks, search.search_id, search.priority)
        if search.reservation:
            self.engine.sharing.assign(search.search_id, search.account, search.account.caller)
            self._queue.start(search)
        return search.reservation is not None

    def _reserve_in_place_of_others(self, search: AnyRunning) -> bool:
        """Reserve what a search needs and suspend those that give way to it; none if that would not suffice."""
        free, given, victims = self.max_running - self.running, list[Reservation](), list[AnyRunning]()
        for other in self._queue.giving_way(search):
            assert other.reservation is not None
            victims.append(other)
            given.append(other.reservation)
            if free + len(given) > 0 and self.engine.admission.would_fit(search.resolved.blocks, given):
                break
        else:
            return False
        for other in victims:
            self._suspend(other)
            if self._reserve(search):
                return True
        return False

    def _suspend(self, search: AnyRunning) -> None:
        """Return a running search to the queue without any memory."""
        self._run_guarded(search, self.engine.suspend, search.search_id)
        if search.reservation:  # else it has failed
            search.suspended = True
            self._queue.add(search)
            self._release(search)
