"""The thread that owns the orchestrator, and its interface to the event loop.

    event loop                          engine thread
    submit, cancel, stop -- queue ----> submit / cancel / close, then step() while busy, else sleep on the queue
    woken up <-- call_soon_threadsafe - once a step, where there were events; failures, state
    EventBuffer <---------------------- events

The queue stays short: each call that may be in progress, which the session limits, can add a submit, its cancel, and
one late cancel of a previous search; only one report is asked for at a time.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from espalier.engine.errors import FatalError
from espalier.search.algorithms.base import Scores
from espalier.search.request import DEFAULT_OPTIONS, SubmitOptions
from espalier.search.result import Finished, StepDone
from espalier.search.run.executor import (
    AnyEvent,
    AnyRequest,
    AnyResult,
    Executor,
    ExecutorLoop,
    Rejected,
    Resolved,
    request_of,
)
from espalier.search.scores import SessionTurn
from espalier.search.server_info import Occupancy
from espalier.search.service.errors import BusyError, NotReadyError, as_exception
from espalier.search.service.queues import EventBuffer

log = logging.getLogger("espalier.service")

DEAD = "the engine has stopped, and the server with it; it needs a restart"
STOPPING = "the server is shutting down"


class EngineState(StrEnum):
    """State of the engine thread."""

    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    DEAD = "dead"


_WHY_NOT_READY = {
    EngineState.LOADING: "the server is still loading its models; try again later",
    EngineState.STOPPING: STOPPING,
    EngineState.DEAD: DEAD,
}


class RoundEnd(NamedTuple):
    """End of a round of a search: monotonic seconds, and depth and count of its `StepDone`."""

    at: float
    depth: int
    scored: int


class Search:
    """One submitted search as seen by the event loop: its events, and whether the orchestrator has finished it.

    Attributes:
        result: set when it has ended, unless it ended by an error.
        rounds: of the search so far; those of one that has ended are complete.
    """

    def __init__(self, request: AnyRequest, capacity: int, on_end: Callable[["Search"], None]) -> None:
        self.request = request
        self.events = EventBuffer(capacity)
        self.ended = False
        self.result: AnyResult | None = None
        self.rounds: list[RoundEnd] = []  # appended to on the engine thread
        self.search_id: str | None = None  # written and read on the engine thread
        self._on_end = on_end

    def deliver(self, end: AnyEvent | Rejected | None) -> None:
        """Wake who waits for events that were pushed, and forward the one that ends the search, if it has come."""
        if self.ended:
            return
        if isinstance(end, Rejected):
            self.fail(end.error)
            return
        if isinstance(end, Finished):
            self.result = end.result
            self.events.push(end)
        self.events.wake()
        if end is not None:
            self._end()

    def fail(self, error: Exception) -> None:
        """End the search with an error."""
        if not self.ended:
            self.events.fail(error)
            self._end()

    def _end(self) -> None:
        self.ended = True
        self._on_end(self)


class EngineThread:
    """Runs an orchestrator on its own thread. Create and use it on the event loop.

    Attributes:
        loaded: done when searches can be submitted; carries the exception if loading failed.
        max_running: searches that the orchestrator runs at once; 0 until it is loaded.
        models: what results depend on besides the request; empty until it is loaded, as the names are. Another mapping
            after a reload.
        model_names: names of the models by role.
        scores: those of the verifier; until it is loaded, as if there were all.
        kv_memory_bytes: size of the KV pool; 0 until it is loaded.
        over: done when no search is served any more, because the engine was stopped or died.
        last_report: what the executor held when it was last asked; None before.
        closed: done when the orchestrator is closed and the thread ends; True if both succeeded.
    """

    def __init__(self, load: Callable[[], Executor], event_capacity: int) -> None:
        self._load = load
        self._loop = asyncio.get_running_loop()
        self._executor_loop: ExecutorLoop[Executor] = ExecutorLoop()
        self._event_capacity = event_capacity
        self._executor: Executor | None = None  # its `check` is called by other threads
        # Written on the engine thread, before `loaded`:
        self.max_running = self.kv_memory_bytes = 0
        self.models: dict[str, str] = {}
        self.model_names: Mapping[str, str] = {}
        self.scores: Scores = "steps"
        self._live: set[Search] = set()
        # Searches with events in the step in progress, and the event that ends each; used on the engine thread.
        self._told: dict[Search, AnyEvent | Rejected | None] = {}
        self._report: asyncio.Future[Occupancy] | None = None  # the one asked for last
        self.last_report: Occupancy | None = None
        self._reloading: asyncio.Future[str] | None = None  # the reload in progress
        self._stop_asked = False  # used on the event loop only
        self.loaded: asyncio.Future[None] = self._loop.create_future()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.closed: asyncio.Future[bool] = self._loop.create_future()
        # A daemon, because loading cannot be interrupted and must not keep a stopped process alive.
        self._thread = threading.Thread(target=self._run, name="espalier-engine", daemon=True)

    # ---- the event loop's side

    def start(self) -> None:
        """Start loading."""
        self._thread.start()

    @property
    def state(self) -> EngineState:
        """State of the thread."""
        if self._stop_asked:
            return EngineState.STOPPING
        if self.over.done():
            return EngineState.DEAD
        return EngineState.READY if self.loaded.done() else EngineState.LOADING

    @property
    def ready(self) -> bool:
        """True if searches can be submitted."""
        return self.state is EngineState.READY

    def reachable(self) -> Executor:
        """Return the executor, for what any thread may call: `check` and `tokenize`, which may take long.

        Raises:
            NotReadyError: the engine is loading, stopping or dead.
        """
        executor = self._executor
        if why := _WHY_NOT_READY.get(self.state):
            raise NotReadyError(why)
        if executor is None:  # it has just died
            raise NotReadyError(DEAD)
        return executor

    def submit(
        self,
        checked: AnyRequest | Resolved,
        on_end: Callable[[Search], None],
        progress: bool,
        options: SubmitOptions = DEFAULT_OPTIONS,
    ) -> Search:
        """Start a search.

        Args:
            checked: what the executor's `check` returned.
            on_end: called once, on the event loop, when the orchestrator has finished the search in any way.
            progress: whether to deliver events other than the last.
            options: priority and other options of the submission.

        Raises:
            NotReadyError: the engine is loading, stopping or dead.
        """
        self.reachable()

        def ended(search: Search) -> None:
            self._live.discard(search)
            on_end(search)

        search = Search(request_of(checked), self._event_capacity, ended)

        def on_event(event: AnyEvent | Rejected) -> None:
            if isinstance(event, StepDone) and not event.partial:
                search.rounds.append(RoundEnd(time.monotonic(), event.depth, event.scored))
            if isinstance(event, Finished | Rejected):
                self._told[search] = event
            elif progress:
                search.events.push(event)
                self._told.setdefault(search, None)

        def start(executor: Executor) -> None:
            try:
                search.search_id = executor.submit(checked, on_event, options)
            except Exception as error:  # fails this search only; `errors` decides what the client sees
                self._post(search.fail, error)

        self._executor_loop.call(start)
        self._live.add(search)
        return search

    async def occupancy(self) -> Occupancy:
        """Return what the executor holds between two of its steps; a step may take seconds.

        Callers at the same time share one report, also if some of them stop waiting.

        Raises:
            NotReadyError: the engine is loading, stopping or dead.
        """
        self.reachable()
        return await asyncio.shield(self._asked_report())

    def ask_report(self) -> None:
        """Have `last_report` renewed after the step in progress, unless the engine is loading, stopping or dead."""
        if self.ready:
            self._asked_report()

    def _asked_report(self) -> asyncio.Future[Occupancy]:
        if self._report is None or self._report.done():
            self._executor_loop.call(lambda executor: self._post(self._deliver_report, executor.occupancy()))
            self._report = self._future()
        return self._report

    async def reload(self, folder: str) -> str:
        """Have the executor go on with other weights; see `Executor.reload`. It goes on if whoever waits stops.

        They are loaded on a thread of their own, while searches go on, and taken between two steps.

        Returns:
            The digest of the checkpoint.

        Raises:
            BusyError: another reload has not ended.
            CheckpointError: see `Executor.prepare_reload`.
            NotReadyError: the engine is loading, stopping or dead.
        """
        executor = self.reachable()
        if self._reloading is not None and not self._reloading.done():
            raise BusyError("weights are being reloaded already; try again later")
        reloading = self._reloading = self._future()

        def take(executor: Executor, digest: str) -> None:
            try:
                executor.reload(folder)
                self.models = executor.describe_models()
                self._post(_settle, reloading, digest)
            except Exception as error:
                self._post(_settle, reloading, error)
                if isinstance(error, FatalError):
                    raise

        def prepare() -> None:
            try:
                digest = executor.prepare_reload(folder)
            except BaseException as error:
                self._post(_settle, reloading, as_exception(error))
            else:
                self._executor_loop.call(partial(take, digest=digest))

        # A daemon, as the one that loads at first.
        threading.Thread(target=prepare, name="espalier-reload", daemon=True).start()
        return await asyncio.shield(reloading)

    def tell(self, session: Search, turn: SessionTurn) -> None:
        """Go on with a session of scores; does nothing if it has ended."""
        self._call_for(session, lambda executor, search_id: executor.tell(search_id, turn))

    def cancel(self, search: Search) -> None:
        """Request the cancellation of a search; does nothing if it has finished."""
        self._call_for(search, lambda executor, search_id: executor.cancel(search_id))

    def _call_for(self, search: Search, act: Callable[[Executor, str], None]) -> None:
        """Have the engine thread act on a search, unless it has ended or its submission fails."""

        def call(executor: Executor) -> None:
            if search.search_id is not None:
                act(executor, search.search_id)

        if not search.ended:
            self._executor_loop.call(call)

    def _future(self) -> asyncio.Future[Any]:
        """A future for which nobody may be waiting any more when it fails."""
        future = self._loop.create_future()
        future.add_done_callback(asyncio.Future.exception)  # read, else it would be logged
        return future

    async def stop(self, timeout: float) -> bool:
        """Fail all running searches, close the orchestrator and end the thread.

        Returns:
            Whether the thread ended within `timeout` seconds.
        """
        if not self._stop_asked:
            self._stop_asked = True
            self._fail_all(STOPPING)
            self._executor_loop.stop()
        if self._thread.ident is None and not self.closed.done():  # never started
            self.closed.set_result(True)
        done, _ = await asyncio.wait([self.closed], timeout=timeout)
        if done and self._thread.is_alive():
            # Freeing tensors on a thread that outlives the interpreter aborts the process, so wait for the thread.
            await asyncio.to_thread(self._thread.join, timeout)
        return bool(done)

    def _fail_all(self, text: str) -> None:
        for search in list(self._live):
            search.fail(NotReadyError(text))
        _settle(self._report, NotReadyError(text))
        _settle(self._reloading, NotReadyError(text))

    def _set_over(self) -> None:
        """Say that the thread serves nobody; at once, as a server that sees it shuts down, which fails searches too."""
        _settle(self.over, None)
        self._fail_all(DEAD)

    def _deliver_report(self, report: Occupancy) -> None:
        self.last_report = report
        _settle(self._report, report)

    def _deliver_all(self, told: Mapping[Search, AnyEvent | Rejected | None]) -> None:
        for search, end in told.items():
            _survives(partial(search.deliver, end), "events could not be delivered")

    # ---- the engine thread's side

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            log.debug("the event loop is closed; a callback was dropped")

    def _send(self) -> None:
        """Wake the event loop, once for all events of a step, as it then competes for the interpreter's lock."""
        if self._told:
            self._post(self._deliver_all, self._told)
            self._told = {}

    def _run(self) -> None:
        try:
            executor = self._load()
        except BaseException as error:
            # A future cannot carry SystemExit or StopIteration.
            fit = isinstance(error, Exception) and not isinstance(error, StopIteration)
            self._post(_settle, self.over, None)
            self._post(_settle, self.loaded, error if fit else RuntimeError(f"loading ended by {error!r}"))
            self._post(_settle, self.closed, False)
            return
        clean = _survives(partial(self._serve, executor), "the engine died")
        self._send()
        self._executor = None
        # Before closing, which may hang on a broken device and sends cancellations to searches.
        self._post(self._set_over)
        clean &= _survives(executor.close, "the orchestrator could not be closed")
        del executor  # freed before the thread is said to end
        self._post(self.closed.set_result, clean)

    def _serve(self, executor: Executor) -> None:
        self._executor = executor
        self.max_running, self.kv_memory_bytes = executor.max_running, executor.kv_memory_bytes
        self.models, self.model_names = executor.describe_models(), executor.model_names
        self.scores = executor.defaults.scores
        self._post(self.loaded.set_result, None)
        self._executor_loop.run(executor, lambda _: self._send())


def _settle(future: asyncio.Future[Any] | None, outcome: object) -> None:
    """End a future that has not ended, by its result or its exception."""
    if future is not None and not future.done():
        future.set_exception(outcome) if isinstance(outcome, Exception) else future.set_result(outcome)


def _survives(action: Callable[[], None], message: str) -> bool:
    try:
        action()
    except FatalError as error:  # typed: the message suffices without a traceback
        log.error("%s: %s", message, error)
        return False
    except BaseException:
        log.exception(message)
        return False
    return True
