"""Runs searches on Ray workers: gives problems to whoever is free, and again to others if a worker is lost.

Each worker is an actor with both models on a device of its own (data parallel). Its death, or that of its node, costs
the searches that it was running their time only: they begin again on another worker, with the same seeds, and a result
counts once. Ray restarts the actor, wherever there is room.
"""

import heapq
import itertools
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from espalier.engine.errors import EspalierError, FatalError, InvalidRequestError, RequestTooLargeError
from espalier.engine.interrupts import interrupts_held
from espalier.experiments.executors.ray_worker import RayWorker, WorkerDescription
from espalier.experiments.executors.settings import ExecutorSettings
from espalier.search.request import USUAL, SearchRequest, SubmitOptions, Vote, validate
from espalier.search.result import Candidate, Event, Finished, SearchResult, StopReason
from espalier.search.run.executor import Occupancy, Rejected
from espalier.search.run.load import RuntimeSettings
from espalier.search.run.usage import UsageMeter
from espalier.search.voting.equivalence import make_equivalence
from espalier.search.voting.vote import VOTE_SECONDS, VoteResult, select

log = logging.getLogger("espalier.executors")

_WAIT_SECONDS = 0.02
"""Seconds that `step` waits for a result; new searches wait as long."""
_REMIND_SECONDS = 30.0
"""Seconds between two reports that workers have not started."""
_CONNECT_SECONDS = 10.0
_LOST_SECONDS = 300.0
"""Seconds without any worker after which no search can continue."""
_PATHS = ("generator", "verifier", "verifier_family", "verifier_reference", "cache_dir")
"""Settings that may name files, relative to the folder of this process."""
_DEATHS_IN_COMPANY = 3
"""Workers that may die while they run a search before it runs alone on one, to find out whether it is the cause."""


@dataclass(eq=False, slots=True)
class _Search:
    name: str
    request: SearchRequest
    options: SubmitOptions
    on_event: Callable[[Event | Rejected], None] | None
    arrival: int
    submitted: float
    deaths: int = 0
    cancelled: bool = False

    @property
    def suspect(self) -> bool:
        """Whether it may be what kills workers."""
        return self.deaths >= _DEATHS_IN_COMPANY


@dataclass(eq=False, slots=True)
class _Worker:
    number: int
    actor: Any
    up: bool = True
    running: dict[str, tuple[_Search, Any]] = field(default_factory=dict)
    """Each search with the reference to its result, or the generator of its events."""

    @property
    def has_suspect(self) -> bool:
        return any(search.suspect for search, _ in self.running.values())


class RayExecutor:
    """An `Executor` on Ray workers; `Orchestrator` describes the methods."""

    def __init__(self, runtime: RuntimeSettings, settings: ExecutorSettings, longest_first: bool = False) -> None:
        """Join or start a cluster, and start the workers; returns when all have loaded.

        Args:
            runtime: what each worker loads.
            settings: the cluster and the workers.
            longest_first: whether searches of equal priority start in the order of their length, by that of the
                problem, and not in the order of arrival.

        Raises:
            EspalierError: Ray is not installed, there is no such cluster, it is too small, a worker cannot load, or
                workers differ in version or models.
        """
        self._ray = import_ray()
        self._longest_first = longest_first
        self.max_running = runtime.max_running * settings.workers
        self._limit = runtime.max_running + max(1, runtime.max_running // 8)
        self._arrivals = itertools.count()
        self._queue: list[tuple[Any, _Search]] = []
        self._searches: dict[str, _Search] = {}  # all unfinished ones
        self._cancelled: list[_Search] = []  # those that no worker runs
        self._revivals: dict[Any, _Worker] = {}  # by the reference to the description of a worker that was lost
        self._none_since: float | None = None
        self._effective: dict[SearchRequest, SearchRequest] = {}
        self._workers: list[_Worker] = []
        self._equivalence = make_equivalence(runtime.answer_equivalence, runtime.grader_memory)
        self._started_ray = not self._ray.is_initialized()
        if self._started_ray:
            self._join(settings, runtime)
        try:
            self._start(runtime, settings)
        except BaseException:
            self.close()
            raise

    @property
    def busy(self) -> bool:
        """Whether any search is waiting or running."""
        return bool(self._searches)

    @property
    def kv_memory_bytes(self) -> int:
        """Size of each worker's KV pool, in bytes."""
        return self._description.kv_memory_bytes

    @property
    def hardware(self) -> list[dict[str, Any]]:
        """The machine of each worker; see `provenance.hardware`."""
        return self._hardware

    def occupancy(self) -> Occupancy:
        """Return what is held now; blocks are the workers' own."""
        running = sum(len(worker.running) for worker in self._workers)
        return Occupancy(running, len(self._searches) - running, {})

    def describe_models(self) -> dict[str, str]:
        """Return what results depend on besides the request; the same on all workers."""
        return dict(self._description.models)

    def effective(self, request: SearchRequest) -> SearchRequest:
        """Return the request with every default filled in; asks a worker."""
        if request not in self._effective:
            worker = next((worker for worker in self._workers if worker.up), self._workers[0])
            asked = worker.actor.effective.options(max_task_retries=-1).remote(request)
            self._effective[request] = self._get(asked)
        return self._effective[request]

    def check(self, request: SearchRequest) -> None:
        """Raise what `submit` would raise; what only a worker can tell comes later."""
        validate(request)

    def submit(
        self,
        request: SearchRequest,
        on_event: Callable[[Event | Rejected], None] | None = None,
        options: SubmitOptions = USUAL,
    ) -> str:
        """Queue a search; what only a worker can tell to be wrong with it is told later, see `Rejected`.

        Raises:
            InvalidRequestError: lists every invalid field.
        """
        validate(request)
        search = _Search(
            secrets.token_hex(8), request, options, on_event, next(self._arrivals), time.monotonic()
        )  # fmt: skip
        self._searches[search.name] = search
        self._enqueue(search)
        return search.name

    def cancel(self, search_id: str) -> None:
        """Stop a search, which ends with its best answer so far. Unknown and finished ids are ignored."""
        if not (search := self._searches.get(search_id)) or search.cancelled:
            return
        search.cancelled = True
        for worker in self._workers:
            if search_id in worker.running:
                worker.actor.cancel.remote(search_id)
                return
        self._cancelled.append(search)
        self._unqueue()

    def drop(self, search_ids: Iterable[str]) -> None:
        """Cancel searches immediately; `step` does not return them."""
        for name in search_ids:
            if self._searches.pop(name, None):
                for worker in self._workers:
                    if worker.running.pop(name, None):
                        worker.actor.cancel.remote(name)
        self._unqueue()

    def step(self) -> list[SearchResult]:
        """Give searches to workers with room, wait briefly, and return the searches that finished.

        Raises:
            FatalError: all workers are lost, and none has come back within some minutes.
        """
        with interrupts_held():
            self._dispatch()
            finished = self._collect() + self._end_cancelled()
        self._require_workers()
        return finished

    def vote(self, candidates: Sequence[Candidate], vote: Vote) -> VoteResult:
        """Select one of a finished search's candidates as its own vote would; counted in this process."""
        end = time.monotonic() + VOTE_SECONDS
        return select(candidates, vote, self._equivalence, lambda: time.monotonic() > end)

    def close(self) -> None:
        """End all workers, and the cluster if this executor has started it."""
        self._searches.clear()
        self._queue.clear()
        self._revivals.clear()
        for worker in self._workers:
            worker.running.clear()
            self._ray.kill(worker.actor)
        self._workers.clear()
        if self._equivalence:
            self._equivalence.close()
        if self._started_ray:
            self._ray.shutdown()

    # ---- the cluster and the workers

    def _join(self, settings: ExecutorSettings, runtime: RuntimeSettings) -> None:
        address = settings.ray_address or "local"
        try:
            if ":" in address:
                _require_listening(address)
            self._ray.init(
                address=address,
                num_cpus=settings.workers * (runtime.threads or 1) if address == "local" and runtime.threads else None,
                include_dashboard=False if address == "local" else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            raise EspalierError(f"--ray-address {address}: {error}") from error

    def _start(self, runtime: RuntimeSettings, settings: ExecutorSettings) -> None:
        total: Mapping[str, float] = self._ray.cluster_resources()
        gpus = settings.gpus_per_worker
        if gpus is None:
            gpus = 1.0 if total.get("GPU", 0) and not runtime.device.startswith("cpu") else 0.0
        threads = runtime.threads or (1 if gpus else max(1, int(total.get("CPU", 1)) // settings.workers))
        for kind, each, flag in (("CPU", threads, "--threads"), ("GPU", gpus, "--gpus-per-worker")):
            if each * settings.workers > total.get(kind, 0):
                raise EspalierError(
                    f"{settings.workers} workers with {each:g} {kind}s each need {each * settings.workers:g}, and the "
                    f"cluster has {total.get(kind, 0):g}; lower --workers or {flag}"
                )
        runtime = replace(
            runtime,
            threads=threads if runtime.threads or not gpus else None,
            **{name: _absolute(getattr(runtime, name)) for name in _PATHS},
        )
        actor_class = self._ray.remote(RayWorker)
        for number in range(settings.workers):
            actor = actor_class.options(
                num_cpus=threads,
                num_gpus=gpus,
                max_restarts=-1,
                max_concurrency=4 * self._limit,
                scheduling_strategy="SPREAD",
            ).remote(runtime, self._limit)
            self._workers.append(_Worker(number, actor))
        described = self._wait_for_all([worker.actor.describe.remote() for worker in self._workers])
        self._description = described[0]
        self._hardware = [each.hardware for each in described]
        for number, other in enumerate(described):
            self._require_equal(number, other)

    def _wait_for_all(self, references: list[Any]) -> list[WorkerDescription]:
        left = references
        while left:
            done, left = self._ray.wait(left, num_returns=len(left), timeout=_REMIND_SECONDS)
            for reference in done:
                self._get(reference)  # raises what a worker has raised, while others still load
            if left:
                log.warning("%d of %d Ray workers have not started yet", len(left), len(references))
        return [self._get(reference) for reference in references]

    def _require_equal(self, number: int, other: WorkerDescription) -> None:
        ours = self._description
        mine = {"version": ours.version, **ours.models}
        theirs = {"version": other.version, **other.models}
        if differing := [name for name in mine if mine[name] != theirs.get(name)]:
            what = "; ".join(f"{name} {mine[name]} and {theirs.get(name)}" for name in differing)
            raise FatalError(f"Ray workers 0 and {number} differ, so that results would depend on the worker: {what}")

    def _get(self, reference: Any) -> Any:
        """The value behind a reference; an error raised by a worker is raised as it was there."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayActorError as error:
            raise EspalierError(f"a Ray worker ended while it was asked: {_first_line(error)}") from error

    def _require_workers(self) -> None:
        if any(worker.up for worker in self._workers):
            self._none_since = None
            return
        now = time.monotonic()
        if self._none_since is None:
            self._none_since = now
            log.warning("all Ray workers are lost; waiting for one to come back")
        if now - self._none_since > _LOST_SECONDS:
            raise FatalError(f"all Ray workers are lost, and none has come back within {_LOST_SECONDS:g} seconds")

    # ---- searches

    def _enqueue(self, search: _Search) -> None:
        length = -len(search.request.problem) if self._longest_first else 0
        order = search.suspect, -search.options.priority, length, search.arrival
        heapq.heappush(self._queue, (order, search))

    def _unqueue(self) -> None:
        """Remove cancelled and dropped searches from the queue."""
        gone = {search.name for search in self._cancelled}
        self._queue = [e for e in self._queue if e[1].name in self._searches and e[1].name not in gone]
        heapq.heapify(self._queue)

    def _end_cancelled(self) -> list[SearchResult]:
        """End the searches that were cancelled before they ran."""
        cancelled = [search for search in self._cancelled if search.name in self._searches]
        self._cancelled.clear()
        return [self._end_without(search, StopReason.CANCELLED) for search in cancelled]

    def _dispatch(self) -> None:
        """Give waiting searches to workers, the one with the fewest first; a suspect runs alone."""
        while self._queue:
            search = self._queue[0][1]
            free = [w for w in self._workers if w.up and not w.has_suspect and len(w.running) < self._limit]
            if search.suspect:
                free = [worker for worker in free if not worker.running]
            if not free:
                return
            heapq.heappop(self._queue)
            self._give(min(free, key=lambda worker: len(worker.running)), search)

    def _give(self, worker: _Worker, search: _Search) -> None:
        passed, options = time.monotonic() - search.submitted, search.options
        options = replace(options, waited=options.waited + passed, max_seconds=options.max_seconds - passed)
        if search.on_event:
            promise = worker.actor.events.options(num_returns="streaming").remote(search.name, search.request, options)
        else:
            promise = worker.actor.search.remote(search.name, search.request, options)
        worker.running[search.name] = search, promise

    def _collect(self) -> list[SearchResult]:
        promises = {promise: (w, search) for w in self._workers for search, promise in w.running.values()}
        waited = [*promises, *self._revivals]
        if not waited:
            time.sleep(_WAIT_SECONDS)
            return []
        ready, _ = self._ray.wait(waited, num_returns=1, timeout=_WAIT_SECONDS)
        if ready:
            ready, _ = self._ray.wait(waited, num_returns=len(waited), timeout=0)
        finished: list[SearchResult] = []
        for promise in ready:
            if promise in self._revivals:
                self._revive(self._revivals.pop(promise), promise)
            elif (owner := promises[promise]) and owner[1].name in owner[0].running:  # else its worker was just lost
                finished += self._take(*owner, promise)
        return finished

    def _take(self, worker: _Worker, search: _Search, promise: Any) -> list[SearchResult]:
        """Take what has arrived for a search: its next event, its result, or an error."""
        exceptions = self._ray.exceptions
        try:
            if search.on_event is None:
                return [self._end(worker, search, self._ray.get(promise))]
            event = self._ray.get(next(promise))
            search.on_event(event)
            return [self._end(worker, search, event.result)] if isinstance(event, Finished) else []
        except exceptions.RayTaskError as error:
            if not isinstance(error.cause, RequestTooLargeError | InvalidRequestError):
                raise error.cause from None
            if search.on_event:
                search.on_event(Rejected(search.name, error.cause))
                search.on_event = None
            elif isinstance(error.cause, InvalidRequestError) and not _is_of_problem(error.cause):
                raise error.cause from None
            del worker.running[search.name]
            return [self._end_without(search, StopReason.FAILED, str(error.cause))]
        except (exceptions.RayError, StopIteration) as error:
            return self._lose(worker, error)

    def _end(self, worker: _Worker, search: _Search, result: SearchResult) -> SearchResult:
        worker.running.pop(search.name, None)
        del self._searches[search.name]
        return result

    def _end_without(self, search: _Search, reason: StopReason, why: str = "") -> SearchResult:
        """End a search for which no worker has a result."""
        del self._searches[search.name]
        result = SearchResult(
            search_id=search.name,
            answer="",
            score=None,
            stop_reason=reason,
            best=None,
            candidates=(),
            nodes=(),
            usage=UsageMeter().close(),
            configuration=search.request,
            digests={},
            grader="",
            error=why,
        )
        if search.on_event:
            search.on_event(Finished(search.name, result))
        return result

    def _lose(self, worker: _Worker, error: Exception) -> list[SearchResult]:
        """Queue the searches of a worker that died; return the results of those that have been the cause."""
        log.warning(
            "Ray worker %d was lost, with %d searches: %s", worker.number, len(worker.running), _first_line(error)
        )
        worker.up = False
        lost = [search for search, _ in worker.running.values()]
        worker.running.clear()
        self._revivals[worker.actor.describe.options(max_task_retries=-1).remote()] = worker
        failed: list[SearchResult] = []
        for search in lost:
            if search.cancelled:
                self._cancelled.append(search)
                continue
            if search.suspect:  # it ran alone
                text = f"{search.deaths + 1} workers died while they ran this search, the last one with no other"
                failed.append(self._end_without(search, StopReason.FAILED, text))
                continue
            search.deaths += 1
            self._enqueue(search)
        return failed

    def _revive(self, worker: _Worker, described: Any) -> None:
        """Use a worker again that Ray has restarted; one that cannot load stays lost."""
        try:
            self._require_equal(worker.number, self._get(described))
        except EspalierError as error:
            log.warning("Ray worker %d did not come back: %s", worker.number, error)
        else:
            log.warning("Ray worker %d is back", worker.number)
            worker.up = True


def import_ray() -> Any:
    """Import Ray, which takes most of a second, with its reports of use to its makers switched off.

    Raises:
        EspalierError: it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray reports its use over the network
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # those of dropped searches
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise EspalierError("--executor ray needs Ray: pip install 'espalier[ray]'") from error
    return ray


def _absolute(name: str | Path | None) -> str | Path | None:
    return type(name)(Path(name).resolve()) if name and Path(name).exists() else name


def _require_listening(address: str) -> None:
    """Check that somebody listens at HOST:PORT, for whom Ray would wait for minutes.

    Raises:
        OSError: nobody does.
        ValueError: it is not HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    if not (port.isdecimal() and host and "/" not in host):
        raise ValueError("it must be auto or HOST:PORT")
    socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


def _is_of_problem(error: InvalidRequestError) -> bool:
    """Whether only this search's problem is invalid, and not what all searches have in common."""
    return all(violation.field == "problem" for violation in error.violations)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
