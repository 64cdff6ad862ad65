"""Runs searches on workers: gives them to whoever has the least to do, and again to others if a worker is lost.

Each worker is a process with both models on a device of its own (data parallel). Its death costs the searches that it
was running their time only: they begin again on another worker, with the same seeds, and a result counts once.
"""

import bisect
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from espalier.engine.errors import first_line
from espalier.engine.interrupts import interrupts_held
from espalier.experiments.executors.routing import Search, WorkerState, choose_worker
from espalier.experiments.executors.worker import (
    Cancel,
    Lost,
    NoAnswerError,
    Run,
    Stepped,
    Tell,
    Transport,
)
from espalier.experiments.executors.workers import Workers
from espalier.search.completion import Tokenization, TokenizationRequest
from espalier.search.request import DEFAULT_OPTIONS, SubmitOptions
from espalier.search.result import Finished, StopReason
from espalier.search.run.executor import AnyEvent, AnyRequest, AnyResult, Rejected, Resolved, reason_of, result_without
from espalier.search.run.settings import RuntimeSettings, model_names
from espalier.search.scores import SessionTurn
from espalier.search.server_info import Occupancy
from espalier.search.voting.equivalence import make_equivalence

log = logging.getLogger("espalier.executors")

_WAIT_SECONDS = 0.01
"""Seconds that `step` waits for a report; new searches wait as long."""


class WorkerExecutor:
    """An `Executor` on workers, whatever process they are in; `Orchestrator` describes the methods.

    Attributes:
        max_running: searches that run at once on all workers where memory allows.
        kv_memory_bytes: size of each worker's KV pool, in bytes.
        hardware: the machine of each worker; see `provenance.hardware`.
    """

    def __init__(self, transport: Transport, runtime: RuntimeSettings, longest_first: bool = False) -> None:
        """Wait until all workers have loaded.

        Args:
            transport: the workers; closed with this executor, and if it cannot be created.
            runtime: what each worker loads.
            longest_first: whether searches of equal priority start in the order of their length, by that of the
                problem, and not in the order of arrival.

        Raises:
            EspalierError: a worker cannot load or ended, or workers differ in version or models.
        """
        self._longest_first = longest_first
        self.max_running = runtime.max_running * transport.workers
        self.model_names: Mapping[str, str] = model_names(runtime)
        self._most = runtime.max_running + max(1, runtime.max_running // 8)
        self._arrivals = itertools.count()
        self._searches: dict[str, Search] = {}  # all unfinished ones
        self._waiting: list[Search] = []  # those that no worker runs, in order
        self._finished: list[AnyResult] = []
        self.equivalence = make_equivalence(runtime.answer_equivalence, runtime.grader_memory)
        try:
            self._workers = Workers(transport)
        except BaseException:
            transport.close()
            if self.equivalence:
                self.equivalence.close()
            raise
        described, self.hardware = self._workers.description, self._workers.hardware
        self.kv_memory_bytes, self.defaults = described.kv_memory_bytes, described.defaults

    @property
    def busy(self) -> bool:
        """True if any search is waiting or running, or has a result that `step` has not returned."""
        return bool(self._searches or self._finished)

    @property
    def idle(self) -> bool:
        """True if nothing is left; `step` waits for the workers' reports itself."""
        return not self.busy

    def occupancy(self) -> Occupancy:
        """Return what is held now; blocks and counters are those of all workers, as each last reported."""
        self._hear(0)
        return self._workers.occupancy(len(self._searches))

    def describe_models(self) -> dict[str, str]:
        """Return what results depend on besides the request; the same on all workers."""
        return dict(self._workers.description.models)

    def check(self, request: AnyRequest) -> AnyRequest | Resolved:
        """Have one of the workers with the fewest searches resolve a request, or a second one if that does not answer.

        If neither answers in time, only invalid fields are found.
        """
        try:
            return self._workers.ask(request)
        except NoAnswerError as why:
            request.validate()
            log.warning("a request was checked without a worker: %s", why)
        return request

    def tokenize(self, request: TokenizationRequest) -> Tokenization:
        """Have one of the workers look at a prompt."""
        return self._workers.ask(request)

    def prepare_reload(self, folder: str) -> str:
        """Have all workers load weights beside those that go on; if one cannot, all let go of them."""
        return self._workers.prepare_reload(folder)

    def cancel_reload(self) -> None:
        """Have all workers let go of what they have loaded beside."""
        self._workers.cancel_reload()

    def reload(self, folder: str) -> None:
        """See `Workers.reload`."""
        self._workers.reload(folder, self._hear)

    def submit(
        self,
        request: AnyRequest | Resolved,
        on_event: Callable[[AnyEvent | Rejected], None] | None = None,
        options: SubmitOptions = DEFAULT_OPTIONS,
    ) -> str:
        """Queue a search; a request is checked first. What only a worker finds, if none answers, see `Rejected`.

        Raises:
            InvalidRequestError, RequestTooLargeError: see `check`.
        """
        checked = self.check(request) if isinstance(request, AnyRequest) else request
        search = Search(secrets.token_hex(8), checked, options, on_event, next(self._arrivals), time.monotonic())
        self._searches[search.search_id] = search
        self._enqueue(search)
        return search.search_id

    def tell(self, search_id: str, turn: SessionTurn) -> None:
        """Go on with a session of scores, which a worker that takes it over begins again. Other ids are ignored."""
        if search := self._searches.get(search_id):
            search.turns.append(turn)
            self._send_on(Tell(search_id, turn))

    def cancel(self, search_id: str) -> None:
        """Stop a search, which ends with its best answer so far. Unknown and finished ids are ignored."""
        if (search := self._searches.get(search_id)) and not search.cancelled:
            search.cancelled = True
            self._send_on(Cancel(search_id))

    def _send_on(self, order: Cancel | Tell) -> WorkerState | None:
        """Send an order to the worker that runs its search, if one does, and return that worker."""
        worker = next((worker for worker in self._workers.states if order.search_id in worker.running), None)
        if worker:
            self._workers.send(worker.number, order)
        return worker

    def drop(self, search_ids: Iterable[str]) -> None:
        """Cancel searches immediately; `step` does not return them."""
        names = set(search_ids)
        self._finished = [result for result in self._finished if result.search_id not in names]
        for name in names:
            if self._searches.pop(name, None) and (worker := self._send_on(Cancel(name))):
                del worker.running[name]
        self._waiting = [search for search in self._waiting if search.search_id not in names]

    def step(self) -> list[AnyResult]:
        """Give searches to workers with room, wait briefly, and return the searches that finished.

        Raises:
            FatalError: all workers are lost, and none has come back within some minutes.
            KeyboardInterrupt: the next `step` returns this one's results.
        """
        with interrupts_held():
            self._hear(0)  # an idle executor did not listen: a worker may have ended long ago
            self._stop_cancelled_and_late()
            self._dispatch()
            self._hear(_WAIT_SECONDS)
        self._workers.require_some()
        self._workers.restart_silent()
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """End all workers."""
        self._searches.clear()
        self._waiting.clear()
        self._finished.clear()
        self._workers.close()
        if self.equivalence:
            self.equivalence.close()

    def _hear(self, seconds: float) -> None:
        """Take in the workers' reports of some seconds."""
        for worker, report in self._workers.poll(seconds):
            match report:
                case Stepped(events=events):
                    for event in events:
                        self._take(worker, event)
                case Lost(error):
                    self._lose(worker, error)

    def _lose(self, worker: WorkerState, error: Exception) -> None:
        """Queue the searches of a worker that ended; a suspect has been the cause, and fails."""
        log.warning("worker %d was lost, with %d searches: %s", worker.number, len(worker.running), first_line(error))
        for search in worker.lose():
            if search.suspect and not search.cancelled:  # it ran alone
                died = f"{len(search.died_on) + 1} workers died while they ran this search"
                text = f"{died}, the last one with no other: {first_line(error)}"
                self._end_without(search, StopReason.FAILED, text)
            else:
                search.died_on.append(worker.number)
                search.repeated.clear()
                self._enqueue(search)

    # ---- searches

    def _enqueue(self, search: Search) -> None:
        def order(search: Search) -> tuple[bool, int, int, int]:
            length = -len(search.request.problem) if self._longest_first else 0
            return search.suspect, -search.options.priority, length, search.arrival

        bisect.insort(self._waiting, search, key=order)

    def _stop_cancelled_and_late(self) -> None:
        """End the searches that wait and were cancelled or are out of time; a worker that has one ends it itself."""
        now = time.monotonic()
        for search in [search for search in self._waiting if search.cancelled or search.due <= now]:
            self._waiting.remove(search)
            self._end_without(search, StopReason.CANCELLED if search.cancelled else StopReason.DEADLINE)

    def _dispatch(self) -> None:
        """Give waiting searches to workers, in order, until one has to wait."""
        while self._waiting:
            search = self._waiting[0]
            if not (worker := choose_worker(search, self._workers.states, self._most)):
                return
            del self._waiting[0]
            passed, options = time.monotonic() - search.submitted, search.options
            options = replace(options, waited=options.waited + passed, max_seconds=options.max_seconds - passed)
            worker.give(search)
            order = Run(search.search_id, search.checked, options, progress=search.on_event is not None)
            self._workers.send(worker.number, order)
            for turn in search.turns:
                self._workers.send(worker.number, Tell(search.search_id, turn))

    def _take(self, worker: WorkerState, event: AnyEvent | Rejected) -> None:
        """Pass an event on, unless its search was dropped, or given to another worker meanwhile."""
        if not (search := worker.running.get(event.search_id)):
            return
        match event:
            case Rejected(_, error):
                del worker.running[search.search_id]
                self._tell(search, event)
                search.on_event = None
                self._end_without(search, StopReason.FAILED, str(error))
            case Finished(_, result):
                del worker.running[search.search_id]
                self._end(search, result)
            case _ if (new := search.without_repeated(event)) is not None:
                self._tell(search, new)

    def _tell(self, search: Search, event: AnyEvent | Rejected) -> None:
        """Pass an event to the search's listener; one that raises fails its search, and hears of that."""
        try:
            if search.on_event:
                search.on_event(event)
        except Exception as error:
            why = reason_of(error, search.search_id)
            self.drop([search.search_id])
            failed = result_without(search.search_id, search.request, StopReason.FAILED, why)
            self._finished.append(failed)
            listen, search.on_event = search.on_event, None
            if listen and not isinstance(event, Finished):
                with suppress(Exception):  # the same again
                    listen(Finished(search.search_id, failed))

    def _end(self, search: Search, result: AnyResult) -> None:
        if self._searches.pop(search.search_id, None):  # else its listener has failed it
            self._finished.append(result)
            self._tell(search, Finished(result.search_id, result))

    def _end_without(self, search: Search, reason: StopReason, why: str = "") -> None:
        """End a search for which no worker has a result."""
        self._end(search, result_without(search.search_id, search.request, reason, why))
