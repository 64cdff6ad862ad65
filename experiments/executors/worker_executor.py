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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from espalier.engine.errors import CheckpointError, EspalierError, FatalError, first_line
from espalier.engine.interrupts import interrupts_held
from espalier.engine.roles import GENERATOR
from espalier.experiments.executors.routing import RecentProblems, Search, WorkerState, choose_worker, totals
from espalier.experiments.executors.worker import (
    Cancel,
    Loaded,
    Lost,
    NoAnswerError,
    PrepareReload,
    Reload,
    Report,
    Run,
    Stepped,
    Tell,
    Transport,
)
from espalier.search.completion import Tokenization, TokenizationRequest
from espalier.search.request import DEFAULT_OPTIONS, SubmitOptions
from espalier.search.result import Finished, StopReason
from espalier.search.run.executor import AnyEvent, AnyRequest, AnyResult, Rejected, Resolved, reason_of, result_without
from espalier.search.run.settings import RuntimeSettings, model_names
from espalier.search.scores import SessionTurn
from espalier.search.server_info import KvBlocks, Occupancy
from espalier.search.voting.equivalence import make_equivalence

log = logging.getLogger("espalier.executors")

_WAIT_SECONDS = 0.01
"""Seconds that `step` waits for a report; new searches wait as long."""
_ANSWER_SECONDS = 2.0
"""Seconds that one worker has to check a request before another is asked."""
_MAX_ASKED = 2
"""Workers that are asked about a request before it is checked without them."""
_SILENT_SECONDS = 120.0
"""Seconds without a report after which a worker with searches hangs; its first steps may have to compile kernels."""
_LOAD_SECONDS = 1800.0
"""Seconds that a worker has to load weights that are to take the generator's place."""
_LOST_SECONDS = 300.0
"""Seconds without any worker after which no search can continue."""


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
        self._transport = transport
        self._longest_first = longest_first
        self.max_running = runtime.max_running * transport.workers
        self.model_names: Mapping[str, str] = model_names(runtime)
        self._most = runtime.max_running + max(1, runtime.max_running // 8)
        self._arrivals = itertools.count()
        self._searches: dict[str, Search] = {}  # all unfinished ones
        self._waiting: list[Search] = []  # those that no worker runs, in order
        self._finished: list[AnyResult] = []
        self._none_since: float | None = None
        self._folder = ""  # whose weights are to be in the generator's place; empty for those of the start
        self._prepared = "", ""  # folder and digest of what all workers have loaded beside
        self._workers = [WorkerState(number) for number in range(transport.workers)]
        self.equivalence = make_equivalence(runtime.answer_equivalence, runtime.grader_memory)
        try:
            described = self._wait_for_all()
            self._description = first = described[0]
            self.kv_memory_bytes, self.defaults = first.kv_memory_bytes, first.defaults
            self.hardware = [described[worker.number].hardware for worker in self._workers]
            if what := next(filter(None, (self._differs(*each) for each in described.items())), ""):
                raise FatalError(what)
        except BaseException:
            self.close()
            raise

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
        self._hear(self._transport.poll(0))
        running = sum(len(worker.running) for worker in self._workers)
        blocks: dict[str, KvBlocks] = {}
        for role, held in (item for worker in self._workers for item in worker.held.kv_blocks.items()):
            others = blocks.get(role, KvBlocks(0, 0, 0))
            blocks[role] = KvBlocks(others.live + held.live, others.cached + held.cached, others.free + held.free)
        stats = totals(worker.stats for worker in self._workers)
        up = sum(worker.up for worker in self._workers)
        return Occupancy(running, len(self._searches) - running, blocks, stats, up)

    def describe_models(self) -> dict[str, str]:
        """Return what results depend on besides the request; the same on all workers."""
        return dict(self._description.models)

    def check(self, request: AnyRequest) -> AnyRequest | Resolved:
        """Have one of the workers with the fewest searches resolve a request, or a second one if that does not answer.

        If neither answers in time, only invalid fields are found.
        """
        try:
            return self._ask(request)
        except NoAnswerError as why:
            request.validate()
            log.warning("a request was checked without a worker: %s", why)
        return request

    def tokenize(self, request: TokenizationRequest) -> Tokenization:
        """Have one of the workers look at a prompt."""
        return self._ask(request)

    def prepare_reload(self, folder: str) -> str:
        """Have all workers load weights beside those that go on; if one cannot, all let go of them."""
        workers, asked = range(len(self._workers)), PrepareReload(folder)
        try:
            with ThreadPoolExecutor(len(workers)) as pool:
                digest, *others = {*pool.map(lambda at: self._transport.check(at, asked, _LOAD_SECONDS), workers)}
            if others:
                raise CheckpointError(f"{folder} is not the same for all workers: their digests differ")
        except BaseException:
            self.cancel_reload()
            raise
        self._prepared = folder, digest
        return digest

    def cancel_reload(self) -> None:
        """Have all workers let go of what they have loaded beside."""
        for worker in self._workers:
            with suppress(EspalierError):  # it is lost, and so is what it held
                self._transport.check(worker.number, PrepareReload(None), _ANSWER_SECONDS)

    def reload(self, folder: str) -> None:
        """Have each worker go on with other weights between two of its steps; waits until all do, or are lost.

        One that comes back later is given them before its first search.
        """
        if self._prepared[0] != folder:
            self.prepare_reload(folder)
        self._folder, digest = self._prepared
        self._prepared = "", ""
        self._description = replace(self._description, models={**self._description.models, GENERATOR: digest})
        waited_for = [worker for worker in self._workers if worker.up]
        for worker in waited_for:
            worker.folder, worker.recent, worker.heard = "", RecentProblems(), time.monotonic()
            self._transport.send(worker.number, Reload(folder))
        late = time.monotonic() + _SILENT_SECONDS
        while True:
            self._hear(self._transport.poll(_WAIT_SECONDS))
            if not (left := [worker.number for worker in waited_for if worker.up and worker.folder != folder]):
                return
            if time.monotonic() > late:
                late += _SILENT_SECONDS
                for number in left:
                    log.warning("worker %d does not take the weights of %s, and is ended", number, folder)
                    self._transport.restart(number)

    def _ask(self, request: AnyRequest | TokenizationRequest) -> Any:
        why = NoAnswerError("all workers are lost")
        up = [worker for worker in self._workers if worker.up]
        for worker in sorted(up, key=lambda worker: len(worker.running))[:_MAX_ASKED]:
            try:
                return self._transport.check(worker.number, request, _ANSWER_SECONDS)
            except NoAnswerError as error:
                why = error
        raise why

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
        worker = next((worker for worker in self._workers if order.search_id in worker.running), None)
        if worker:
            self._transport.send(worker.number, order)
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
            self._hear(self._transport.poll(0))  # an idle executor did not listen: a worker may have ended long ago
            self._stop_cancelled_and_late()
            self._dispatch()
            self._hear(self._transport.poll(_WAIT_SECONDS))
        self._require_workers()
        self._restart_silent()
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """End all workers."""
        self._searches.clear()
        self._waiting.clear()
        self._finished.clear()
        for worker in self._workers:
            worker.lose()
        self._transport.close()
        if self.equivalence:
            self.equivalence.close()

    # ---- the workers

    def _wait_for_all(self) -> dict[int, Loaded]:
        """Wait for every worker; raises what one of them reports while others still load."""
        described: dict[int, Loaded] = {}
        while len(described) < len(self._workers):
            for number, report in self._transport.poll(_WAIT_SECONDS):
                if isinstance(report, Lost):
                    raise report.error
                assert isinstance(report, Loaded), "a worker without searches reports nothing else"
                described[number] = report
                self._workers[number].up, self._workers[number].held = True, report.held
        return described

    def _differs(self, number: int, other: Loaded) -> str:
        """Return how a worker differs from worker 0, which makes it useless; empty if it does not."""
        mine, theirs = ({"version": each.version, **each.models} for each in (self._description, other))
        differing = "; ".join(
            f"{name} {own} and {theirs.get(name)}" for name, own in mine.items() if own != theirs.get(name)
        )
        what = f"workers 0 and {number} differ, so that results would depend on the worker: {differing}"
        return what if differing else ""

    def _require_workers(self) -> None:
        if any(worker.up for worker in self._workers):
            self._none_since = None
            return
        if self._none_since is None:
            self._none_since = time.monotonic()
            log.warning("all workers are lost; waiting for one to come back")
        if time.monotonic() - self._none_since > _LOST_SECONDS:
            raise FatalError(f"all workers are lost, and none has come back within {_LOST_SECONDS:g} seconds")

    def _restart_silent(self) -> None:
        """Have workers ended that have searches and report nothing; they are lost, and come back."""
        now = time.monotonic()
        for worker in self._workers:
            if worker.up and worker.running and now - worker.heard > _SILENT_SECONDS:
                log.warning("worker %d has reported nothing for %g s, and is ended", worker.number, _SILENT_SECONDS)
                worker.heard = now
                self._transport.restart(worker.number)

    def _hear(self, reports: Iterable[tuple[int, Report]]) -> None:
        for number, report in reports:
            worker = self._workers[number]
            worker.heard = time.monotonic()
            match report:
                case Loaded(folder=folder) if folder != self._folder and not worker.up:
                    self._transport.send(number, Reload(self._folder))  # it has the weights of its start
                case Loaded() if why := self._differs(number, report):
                    worker.up = False
                    log.warning("worker %d did not come back: %s", number, why)
                case Loaded():
                    log.info("worker %d goes on" if worker.up else "worker %d is back", number)
                    worker.up, worker.held, worker.folder = True, report.held, report.folder
                case Stepped():
                    worker.held = report.held
                    for event in report.events:
                        self._take(worker, event)
                case Lost(error):
                    self._lose(worker, error)

    def _lose(self, worker: WorkerState, error: Exception) -> None:
        """Queue the searches of a worker that ended; a suspect has been the cause, and fails."""
        if not worker.up:
            log.warning("worker %d did not come back: %s", worker.number, first_line(error))
            return
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
            if not (worker := choose_worker(search, self._workers, self._most)):
                return
            del self._waiting[0]
            passed, options = time.monotonic() - search.submitted, search.options
            options = replace(options, waited=options.waited + passed, max_seconds=options.max_seconds - passed)
            worker.give(search)
            order = Run(search.search_id, search.checked, options, progress=search.on_event is not None)
            self._transport.send(worker.number, order)
            for turn in search.turns:
                self._transport.send(worker.number, Tell(search.search_id, turn))

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
