"""A worker: the messages between it and its executor, the contract of what carries them, and its inside."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from espalier import __version__
from espalier.engine.errors import EspalierError
from espalier.experiments.runs.provenance import hardware
from espalier.search.completion import Tokenization, TokenizationRequest
from espalier.search.request import SubmitOptions
from espalier.search.result import Finished
from espalier.search.run.executor import (
    AnyEvent,
    AnyRequest,
    ExecutorLoop,
    Rejected,
    RequestDefaults,
    Resolved,
    reason_of,
)
from espalier.search.run.settings import RuntimeSettings
from espalier.search.scores import SessionTurn
from espalier.search.server_info import Occupancy
from espalier.search.service.errors import NotReadyError

if TYPE_CHECKING:
    from espalier.search.run.orchestrator import Orchestrator

_REPORT_SECONDS = 0.25
"""Seconds after which a busy worker reports what it holds, if no search has had an event."""


@dataclass(frozen=True, slots=True)
class Run:
    """Order to run a search; one that the worker runs already is ignored.

    Attributes:
        search_id: the executor's id of the search, which the worker's events carry.
        request: what to search, resolved if a worker has been asked about it.
        options: options of the submission.
        progress: whether events other than `Finished` are wanted.
    """

    search_id: str
    request: AnyRequest | Resolved
    options: SubmitOptions
    progress: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """Order to stop a search, which ends with its best answer so far."""

    search_id: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Order to go on with a session of scores."""

    search_id: str
    turn: SessionTurn


@dataclass(frozen=True, slots=True)
class Reload:
    """Order to go on with the weights of a folder, once they are loaded; answered by a `Loaded` with its name."""

    folder: str


@dataclass(frozen=True, slots=True)
class PrepareReload:
    """Request to load the weights of a folder, beside those that go on, for `Reload`; None lets go of such."""

    folder: str | None


Question = AnyRequest | TokenizationRequest | PrepareReload
"""Asked of a worker, which answers whatever it runs meanwhile."""
Order = Run | Cancel | Tell | Reload


@dataclass(frozen=True, slots=True)
class Loaded:
    """The worker can search from now on, and runs nothing yet; or it goes on with the weights of `folder`.

    Version and models must be the same for all workers, for results not to depend on the worker.
    """

    version: str
    models: dict[str, str]
    kv_memory_bytes: int
    hardware: dict[str, Any]
    defaults: RequestDefaults
    held: Occupancy
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Stepped:
    """Report after a step: what the worker holds, and the events of its searches since the last one, in order."""

    held: Occupancy
    events: tuple[AnyEvent | Rejected, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker ended or could not load; all that it ran is lost. It may come back, which `Loaded` tells."""

    error: Exception


Report = Loaded | Stepped | Lost


class NoAnswerError(NotReadyError):
    """A worker did not answer in time, or has ended."""


class Transport(Protocol):
    """Workers that are being started, numbered from 0, and the way to them.

    All methods but `check` are called on one thread. A transport starts a lost worker again, as often as it can.

    Attributes:
        workers: number of workers, lost ones included.
    """

    workers: int

    def send(self, worker: int, order: Order) -> None:
        """Send an order to a worker that `poll` last told to be loaded; it is lost with the worker.

        A worker is given its orders one after another, as they were sent.
        """
        ...

    def check(self, worker: int, request: Question, seconds: float) -> Any:
        """Have a worker resolve a request, or prepare a reload; may be called on any thread.

        Raises:
            NoAnswerError: it did not answer within `seconds`.
            EspalierError: see `Executor.check`.
        """
        ...

    def restart(self, worker: int) -> None:
        """End a worker that hangs; `poll` tells that it is lost, and when it is back."""
        ...

    def poll(self, seconds: float) -> list[tuple[int, Report]]:
        """Return what workers have reported, in the order of each; waits for the first report, at most `seconds`."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...


class Worker:
    """Generator and verifier in one KV pool, and the searches that an executor elsewhere runs on them.

    `run` loads and then works on the thread that calls it; the other methods may be called on any thread. Reports are
    sent on the thread of `run`: one `Loaded`, a `Stepped` after each step that has something to tell, and a `Lost` if
    it cannot load or its engine fails.
    """

    def __init__(self, runtime: RuntimeSettings, send: Callable[[Report], object]) -> None:
        """Create a worker that has not loaded.

        Args:
            runtime: what to load.
            send: called with each report.
        """
        self._runtime = runtime
        self._send = send
        self._loop: ExecutorLoop[Orchestrator] = ExecutorLoop()
        self._orchestrator: Orchestrator | None = None
        # Used on the thread of `run` only:
        self._running: set[str] = set()  # ids of searches
        self._events: list[AnyEvent | Rejected] = []
        self._report_due = 0.0
        self._was_busy = False

    @property
    def loaded(self) -> bool:
        """True if it can search."""
        return self._orchestrator is not None

    def run(self) -> bool:
        """Load, and run searches until `stop`.

        Returns:
            Whether it was stopped; False if it could not load or its engine failed, which was reported.
        """
        from espalier.search.run.load import load_orchestrator  # imports torch

        try:
            self._orchestrator = orchestrator = load_orchestrator(self._runtime)
            self._send(_loaded(orchestrator))
            self._loop.run(orchestrator, self._report)
            orchestrator.close()
        except Exception as error:
            self._send(Lost(_public(error)))
            return False
        return True

    def tell(self, order: Order) -> None:
        """Take an order, to be carried out before the next step."""
        self._loop.call(partial(self._carry_out, order=order))

    def forget(self) -> None:
        """Drop all searches, for an executor that has taken this worker for lost."""
        self._loop.call(self._forget)

    def stop(self) -> None:
        """Make `run` return after the current step, without any further result."""
        self._loop.stop()

    def check(self, request: Question) -> Resolved | Tokenization | str:
        """Resolve a request, or prepare a reload; see `Executor.prepare_reload`.

        Raises:
            NoAnswerError: nothing is loaded yet.
            EspalierError: see `Executor.check`.
        """
        if self._orchestrator is None:
            raise NoAnswerError("the worker has not loaded its models yet")
        try:
            if isinstance(request, TokenizationRequest):
                return self._orchestrator.tokenize(request)
            if isinstance(request, PrepareReload):
                if request.folder is not None:
                    return self._orchestrator.prepare_reload(request.folder)
                self._orchestrator.cancel_reload()
                return ""
            return self._orchestrator.check(request)
        except Exception as error:
            raise _public(error) from None

    # ---- the thread of `run`

    def _report(self, orchestrator: Orchestrator) -> None:
        """Report what has happened, that no search is left, or what a busy worker holds now and then."""
        now, was_busy, self._was_busy = time.monotonic(), self._was_busy, orchestrator.busy
        if self._events or (now >= self._report_due if self._was_busy else was_busy):
            events, self._events = tuple(self._events), []
            self._send(Stepped(orchestrator.occupancy(), events))
            self._report_due = now + _REPORT_SECONDS

    def _carry_out(self, orchestrator: Orchestrator, order: Order) -> None:
        match order:
            case Run(name) if name not in self._running:
                self._start(orchestrator, order)
            case Cancel(name):
                orchestrator.cancel(name)
            case Tell(name, turn):
                orchestrator.tell(name, turn)
            case Reload(folder):
                orchestrator.reload(folder)
                self._send(_loaded(orchestrator, folder))

    def _start(self, orchestrator: Orchestrator, order: Run) -> None:
        name = order.search_id

        def on_event(event: AnyEvent) -> None:
            if isinstance(event, Finished):
                self._running.discard(name)
            elif not order.progress:
                return
            self._events.append(event)

        try:
            orchestrator.submit(order.request, on_event, replace(order.options, keep_rounds=False), name)
            self._running.add(name)
        except Exception as error:
            self._events.append(Rejected(name, _public(error)))

    def _forget(self, orchestrator: Orchestrator) -> None:
        orchestrator.drop(list(self._running))
        self._running.clear()
        self._events.clear()


def _loaded(orchestrator: Orchestrator, folder: str = "") -> Loaded:
    models, kv_memory = orchestrator.describe_models(), orchestrator.kv_memory_bytes
    held, defaults = orchestrator.occupancy(), orchestrator.defaults
    return Loaded(__version__, models, kv_memory, hardware(), defaults, held, folder)


def _public(error: Exception) -> EspalierError:
    """The error if it is typed, which can be sent; else one that names the place in this process's log."""
    return error if isinstance(error, EspalierError) else EspalierError(reason_of(error, "of a worker"))
