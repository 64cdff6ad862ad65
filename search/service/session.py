"""Work for the callers of any transport: checks a request, waits for a slot, follows the search, cancels it.

Transports translate: a message to a `SearchRequest` or a `CompletionRequest`, events to messages, errors to their
protocol's statuses (`errors.failure_of`). Everything that must be the same for all of them happens here. Used on the
event loop.
"""

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Semaphore
from typing import Any, Protocol, TypeVar

from espalier import __version__
from espalier.engine.errors import CheckpointError, EspalierError, InvalidRequestError, Violation
from espalier.engine.roles import GENERATOR
from espalier.search.completion import ChatPrompt, Tokenization, TokenizationRequest
from espalier.search.request import MAX_PRIORITY, SubmitOptions
from espalier.search.result import Event, Finished, StepDone, StopReason
from espalier.search.rules import FORMS
from espalier.search.run.executor import AnyEvent, AnyRequest, AnyResult, Resolved
from espalier.search.scores import MAX_TURN_STEPS, OpenNodes, SessionTurn, StepsScored
from espalier.search.server_info import Reloaded, ServerInfo
from espalier.search.service import errors
from espalier.search.service.access.callers import Caller, Quotas, Salts
from espalier.search.service.access.calls import Call
from espalier.search.service.engine_thread import STOPPING, EngineThread, Search
from espalier.search.service.queues import CallQueue, ThreadedWork, TimeLimitReachedError, fitted
from espalier.search.service.reload import checkpoint_below, wrong_path
from espalier.search.service.settings import ServerSettings

log = logging.getLogger("espalier.service")

T = TypeVar("T")
E = TypeVar("E")

_GRACE = 15.0
"""Seconds after a search's time limit in which it must have ended."""
QUIET_SECONDS = 15.0
"""Silence of a search after which its call is told that it goes on."""
_COMPILING = 3
"""Requests whose forms are compiled at a time, which takes seconds of the worst."""
_SMALL_BYTES = 4096
"""Size of a request up to which the event loop reads it itself, in a millisecond at most."""
_SMALL_ENTRIES = 128
"""The same of nodes and steps in what is written."""
_PLAIN_BYTES = 1024
"""Bytes of text that take as long to check as everything else of a request."""


@dataclass(frozen=True, slots=True)
class SearchCall:
    """A search or a completion that a call asks for, as its transport has read it.

    Attributes:
        request: what to do.
        priority: calls of a larger priority go first.
        progress: whether to report events other than the last.
        report_nodes: whether steps tell how the tree has changed; see `SubmitOptions`.
        violations: what the transport found wrong with the request.
        turns: what a session of scores is told; None for anything else.
        places: fields of the request by what the transport calls them, where it has other names.
    """

    request: AnyRequest
    priority: int = 0
    progress: bool = False
    report_nodes: bool = False
    violations: Sequence[Violation] = ()
    turns: AsyncIterator[SessionTurn] | None = None
    places: Mapping[str, str] = field(default_factory=dict[str, str])


class Observer(Protocol):
    """Is notified on the event loop; its methods must not block or raise."""

    def call_ended(self, call: Call) -> None:
        """Handle the end of a call."""
        ...

    def search_ended(self, call: Call, search: Search) -> None:
        """Handle the end of a search, with the call that asked for it.

        The call is over already if its client left; otherwise it ends after its search.
        """
        ...


class Session:
    """Admits searches and follows them.

    Attributes:
        engine: runs the searches.
        settings: of the server.
        queue: of calls for slots, whose number is known once the engine has loaded.
        idle: set while no call is in progress.
    """

    def __init__(self, engine: EngineThread, settings: ServerSettings, observers: Sequence[Observer]) -> None:
        """Create a session.

        Args:
            engine: runs the searches.
            settings: slots, queue, limits.
            observers: notified of calls and searches that have ended.
        """
        self.engine = engine
        self.settings = settings
        self._observers = observers
        self.queue = CallQueue(settings.max_searches or 1, settings.max_queue, settings.queue_seconds)
        self._checking = ThreadedWork(self._max_waiting)  # what searches compute needs the processors, too
        self._compiling = ThreadedWork(self._max_waiting, _COMPILING)  # of requests with a form, so that no other waits
        self._writing = ThreadedWork(sys.maxsize)  # bounded by the slots
        self._late = Semaphore(settings.max_queue)  # of calls whose time limit has ended in the queue
        self._salts = Salts(settings.share_prompts)
        self._quotas = Quotas()
        self._calls = 0
        self._draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        engine.loaded.add_done_callback(self._open)

    def _open(self, loaded: asyncio.Future[None]) -> None:
        """Set the number of slots; no call has come to the queue yet, as `check` awaits a thread before."""
        if loaded.cancelled() or loaded.exception() is not None:
            return
        if self.settings.max_searches is None:
            self.queue.slots = self.engine.max_running
            self._checking.max_waiting = self._compiling.max_waiting = self._max_waiting

    @property
    def _max_waiting(self) -> int:
        """Calls that may wait to be checked: as many as could run, suspended ones too, and wait after it."""
        return 2 * self.queue.slots + self.settings.max_queue

    @property
    def ready(self) -> bool:
        """True if searches are accepted and there is a worker that can be given them, as the executor last said."""
        if self._draining or not self.engine.ready:
            return False
        held = self.engine.last_report
        self.engine.ask_report()
        return held is None or held.pools > 0

    def max_priority(self, caller: Caller) -> int:
        """The highest priority that a caller may ask for."""
        return self.settings.max_priority if caller.max_priority is None else caller.max_priority

    def call_ended(self, call: Call) -> None:
        """Notify the observers of a call that is over."""
        for observer in self._observers:
            observer.call_ended(call)

    def refuse_new(self) -> None:
        """Refuse all further calls; calls in progress continue."""
        self._draining = True

    async def info(self) -> ServerInfo:
        """Return what is served, and what is held now.

        Raises:
            NotReadyError: the engine is loading, stopping or dead.
        """
        engine, held = self.engine, await self.engine.occupancy()
        served = __version__, engine.models, engine.kv_memory_bytes
        counts = self.queue.held, self.queue.waiting, self.queue.slots, self.settings.max_queue
        return ServerInfo(*served, held, *counts, dict(engine.model_names))

    async def read(self, call: Call, size: int, reading: Callable[[], T]) -> T:
        """Read what a call has sent; where it is large, on a thread, when it is the caller's turn.

        Args:
            call: whose it is, identified if it needs to be.
            size: its bytes.
            reading: does it.

        Raises:
            BusyError: it is large, too much waits, and this caller asks for most.
        """
        return reading() if size <= _SMALL_BYTES else await self._checking.run(call.account, size, reading)

    async def reload(self, call: Call, path: str) -> Reloaded:
        """Have the generator go on with other weights, to the end also if the caller leaves.

        Args:
            call: who asks, identified.
            path: of a checkpoint, below `--reload-folder`.

        Raises:
            NotOfferedError, NotAllowedError: the server has no such folder, or not for this caller.
            InvalidRequestError: there is no such checkpoint, or it differs from the generator in more than its weights.
            BusyError, QuotaError: not now.
            NotReadyError: the server is loading, stopping or dead.
        """
        caller, root = call.caller, self.settings.reload_folder
        assert caller is not None
        if root is None:
            raise errors.NotOfferedError("weights are reloaded from below --reload-folder, and there is none")
        if caller.login and not caller.may_reload:
            raise errors.NotAllowedError(
                f"{caller.name} may not reload weights: its table in --callers lacks may_reload = true"
            )
        if self._draining:
            raise errors.NotReadyError(STOPPING)
        with self._quotas.call(caller):
            self.engine.reachable()
            began, before = time.monotonic(), self.engine.models[GENERATOR]
            folder = await asyncio.to_thread(checkpoint_below, root, path)
            try:
                digest = await self.engine.reload(str(folder))
            except CheckpointError as error:
                raise wrong_path(str(error).replace(str(folder), path)) from None
        reloaded = Reloaded(digest, before, time.monotonic() - began)
        log.info("the generator's weights are those of %s, %s, after %.1f s", folder, digest[:12], reloaded.seconds)
        return reloaded

    async def tokenize(self, call: Call, request: TokenizationRequest) -> Tokenization:
        """Have the generator's tokenizer look at a prompt, on a thread, when it is the caller's turn.

        Raises:
            InvalidRequestError: it cannot be tokenised.
            NotReadyError: the engine is loading, stopping or dead.
            BusyError: too much waits, and this caller asks for most.
        """
        size = _PLAIN_BYTES + (0 if isinstance(request.prompt, ChatPrompt) else len(request.prompt))
        return await self._checking.run(call.account, size, lambda: self.engine.reachable().tokenize(request))

    async def write(
        self, call: Call, event: Event, encode: Callable[[Event, dict[str, int]], T], size: Callable[[T], int]
    ) -> T | None:
        """Encode an event within the size that may be sent; where it is large, on a thread as `read` does.

        Arguments and result are those of `fitted`.
        """
        writing, entries = partial(fitted, event, encode, size, self.settings.max_send_bytes), _entries(event)
        return writing() if entries <= _SMALL_ENTRIES else await self._writing.run(call.account, entries, writing)

    @asynccontextmanager
    async def search(self, asked: SearchCall, call: Call) -> AsyncIterator[AsyncIterator[Sequence[Any]]]:
        """Check, admit and start what is asked for; yields its events, and cancels it on exit.

        Events come in lists of `AnyEvent`, as many as have arrived; none after `QUIET_SECONDS` of silence.

        Args:
            asked: the search or completion.
            call: the call that asks for it, identified; its result is set when the search ends.

        Raises:
            InvalidRequestError, RequestTooLargeError: it can never run; lists everything that is wrong with it.
            BusyError, QuotaError: it cannot run now.
            NotReadyError: the server is loading, stopping or dead.
            SearchTimeoutError, SearchFailedError: while it runs.
        """
        assert call.caller is not None
        self._calls += 1
        self.idle.clear()
        try:
            with self._quotas.call(call.caller):
                search = await self._start(asked, call, call.caller)
                room = asyncio.Semaphore(2 * MAX_TURN_STEPS)
                told = asyncio.create_task(self._tell(search, asked.turns, room)) if asked.turns else None
                try:
                    yield self._events(search, call, room)
                finally:
                    if told:
                        told.cancel()
                    # Also reached when the client cancels, disconnects or times out. The search keeps its slot until
                    # the orchestrator has finished it, so that slots reflect what the engine holds.
                    self.engine.cancel(search)
        except InvalidRequestError as error:
            raise InvalidRequestError(in_places(error.violations, asked.places)) from None
        finally:
            self._calls -= 1
            if self._calls == 0:
                self.idle.set()

    async def finish(self, asked: SearchCall, call: Call) -> Any:
        """Run what is asked for to its end, and return its last event; arguments and errors are those of `search`."""
        async with self.search(asked, call) as events:
            return await finished(events)

    async def _tell(self, search: Search, turns: AsyncIterator[SessionTurn], room: asyncio.Semaphore) -> None:
        """Tell a session what its caller says, but not much faster than it takes the scores; a wrong turn ends it."""
        nodes = OpenNodes()
        try:
            async for turn in turns:
                nodes.take(turn)
                for _ in turn.steps:
                    await room.acquire()
                if turn != SessionTurn():
                    self.engine.tell(search, turn)
            self.engine.tell(search, SessionTurn(last=True))
        except Exception as error:
            search.events.fail(error)

    async def _events(self, search: Search, call: Call, room: asyncio.Semaphore) -> AsyncIterator[Sequence[AnyEvent]]:
        clock = asyncio.get_running_loop().time
        limit = self.settings.search_seconds
        latest = clock() + limit + _GRACE
        last: AnyEvent | None = None
        while not isinstance(last, Finished):
            events = list[AnyEvent]()
            try:  # the time of the search alone: a client may read as slowly as it likes
                async with asyncio.timeout_at(min(latest, clock() + QUIET_SECONDS)):
                    events = await search.events.take()
                last = events[-1]
            except TimeoutError:
                if clock() >= latest:
                    raise errors.SearchTimeoutError(
                        f"the search did not end at the server's limit of {limit:g} s; lower beam_width, expansion, "
                        "max_steps, max_step_tokens or max_tokens"
                    ) from None
            if isinstance(last, Finished):
                call.result = last.result
                if (error := _failure_of(last.result)) is not None:
                    if events := events[:-1]:
                        yield events
                    raise error
            yield events
            for event in events:
                if isinstance(event, StepsScored):
                    for _ in event.scores:
                        room.release()

    async def _start(self, asked: SearchCall, call: Call, caller: Caller) -> Search:
        """Check a request, wait for a slot and submit it; its time limit runs from here."""
        if self._draining:
            raise errors.NotReadyError(STOPPING)
        account, request, priority = call.account, asked.request, asked.priority
        size = _PLAIN_BYTES + request.size
        clock = asyncio.get_running_loop().time
        came = clock()
        checking = self._compiling if any(getattr(request, form, "") for form in FORMS) else self._checking
        checked = await checking.run(account, size, partial(self._check, asked, caller))
        waited, limit = clock() - came, request.time_limit
        give_back: Callable[[], None] = partial(self.queue.release, priority, account)
        try:
            left = None if limit is None else limit - waited
            waited += await self.queue.acquire(priority, left, account, request.estimated_tokens)
        except TimeLimitReachedError:
            assert limit is not None
            waited, give_back = limit, self._late.release  # ended at once, with an empty result
            if not self._late.acquire(blocking=False):
                raise errors.BusyError("too many calls whose time has passed; try again later") from None

        def ended(search: Search) -> None:
            give_back()
            if search.result is not None:
                self._quotas.take(caller, search.result.usage.charged_tokens)
            for observer in self._observers:
                observer.search_ended(call, search)

        try:
            salt, seconds = self._salts.of(caller), self.settings.search_seconds
            shown = {"report_nodes": asked.report_nodes, "stream_text": asked.progress}
            options = SubmitOptions(priority, *account, salt, waited, max_seconds=seconds, **shown)
            return self.engine.submit(checked, ended, asked.progress, options)
        except BaseException:
            give_back()
            raise

    def _check(self, asked: SearchCall, caller: Caller) -> AnyRequest | Resolved:
        """Resolve a request, or raise all that is wrong with it; on a thread, in turn."""
        found, priority = list(asked.violations), asked.priority
        most = self.max_priority(caller)
        if not -MAX_PRIORITY <= priority <= most:
            found.append(Violation("priority", f"must be between {-MAX_PRIORITY} and {most} for you, is {priority}"))
        if found or not self.engine.ready:  # else the executor validates it
            try:
                asked.request.validate()
            except InvalidRequestError as error:
                found += error.violations
        if found:
            raise InvalidRequestError(found)
        return self.engine.reachable().check(asked.request)


def in_places(violations: Iterable[Violation], places: Mapping[str, str]) -> list[Violation]:
    """Return violations of fields by the places that set them; `history[3]` has that of `history`."""
    return [Violation(places.get(v.field.partition("[")[0], v.field), v.description) for v in violations]


async def finished(search: AsyncIterator[Sequence[E]]) -> E:
    """Follow a search or a completion to its last event."""
    last: E | None = None
    async for events in search:  # to its end: an iterator that is left early is closed by a task of its own
        if events:
            last = events[-1]
    assert isinstance(last, Finished)
    return last


def _entries(event: Event) -> int:
    """About how much there is to write of an event, in nodes and steps."""
    match event:
        case Finished():
            return len(event.result.nodes) + sum(len(candidate.steps) for candidate in event.result.candidates)
        case StepDone():
            return len(event.kept) + len(event.nodes)
        case _:
            return 0


def _failure_of(result: AnyResult) -> EspalierError | None:
    """The error of a search that has not ended well."""
    if result.stop_reason is StopReason.FAILED:
        log.error("search %s failed: %s", result.search_id, result.error)
        return errors.SearchFailedError(result.error)
    if result.stop_reason is StopReason.CANCELLED:
        # Not by this call, which is still waiting: only a server shutdown cancels others.
        return errors.NotReadyError(STOPPING)
    return None
