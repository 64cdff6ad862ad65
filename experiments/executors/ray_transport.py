"""Workers as actors on a Ray cluster, which restarts them wherever there is room: both ends."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

from espalier.engine.errors import EspalierError, FatalError, first_line
from espalier.experiments.executors.settings import ExecutorSettings
from espalier.experiments.executors.worker import Loaded, Lost, NoAnswerError, Order, Question, Report, Worker
from espalier.search.completion import Tokenization
from espalier.search.run.executor import Resolved
from espalier.search.run.settings import RuntimeSettings

_CONNECT_SECONDS = 10.0
_PATHS = ("generator", "verifier", "verifier_family", "verifier_reference", "cache_dir", "load_cache")
"""Settings that may name files, relative to the folder of this process."""


class RayTransport:
    """A `Transport` to Ray actors.

    Each worker's `load` is followed to its end, and then its stream of `reports`, which ends with the actor.
    """

    def __init__(self, runtime: RuntimeSettings, settings: ExecutorSettings) -> None:
        """Join or start a cluster, and start the workers.

        Args:
            runtime: what each worker loads.
            settings: the cluster and the workers.

        Raises:
            EspalierError: Ray is not installed, there is no such cluster, or it is too small.
        """
        self.workers = settings.workers
        self._ray = import_ray()
        self._actors: list[Any] = []
        self._sent = [0] * self.workers  # orders, by worker
        self._calls: dict[Any, tuple[int, str]] = {}  # the worker and the method of each that has not ended
        self._started_ray = not self._ray.is_initialized()
        if self._started_ray:
            self._join(settings, runtime)
        try:
            self._start(runtime, settings)
        except BaseException:
            self.close()
            raise

    def send(self, worker: int, order: Order) -> None:
        """Send an order."""
        self._calls[self._actors[worker].tell.remote(self._sent[worker], order)] = worker, "tell"
        self._sent[worker] += 1

    def check(self, worker: int, request: Question, seconds: float) -> Any:
        """Have a worker resolve a request."""
        try:
            return self._ray.get(self._actors[worker].check.remote(request), timeout=seconds)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            raise NoAnswerError(f"worker {worker} did not answer: {first_line(error)}") from error

    def restart(self, worker: int) -> None:
        """End a worker that hangs."""
        self._ray.kill(self._actors[worker], no_restart=False)

    def poll(self, seconds: float) -> list[tuple[int, Report]]:
        """Return what workers have reported."""
        found: list[tuple[int, Report]] = []
        end = time.monotonic() + seconds
        while waited := list(self._calls):
            left = 0.0 if found else max(0.0, end - time.monotonic())
            ready, _ = self._ray.wait(waited, num_returns=1, timeout=left)
            if not ready:
                return found
            ready, _ = self._ray.wait(waited, num_returns=len(waited), timeout=0)
            for each in ready:
                found += self._take(each)
        if not found:
            time.sleep(seconds)
        return found

    def close(self) -> None:
        """End all workers, and the cluster if this transport has started it."""
        self._calls.clear()
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors.clear()
        if self._started_ray:
            self._ray.shutdown()

    # ---- the cluster

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
        options = {"num_cpus": threads, "num_gpus": gpus, "max_restarts": -1, "scheduling_strategy": "SPREAD"}
        for number in range(settings.workers):
            actor = self._ray.remote(RayWorker).options(**options).remote(runtime)
            self._actors.append(actor)
            self._calls[actor.load.remote()] = number, "load"

    # ---- what arrives

    def _take(self, ready: Any) -> list[tuple[int, Report]]:
        """Take what has arrived: that an order was taken, that a worker has loaded, its next report, or its end."""
        if ready not in self._calls:
            return []  # it was just lost
        number, method = self._calls[ready]
        try:
            if method == "reports":
                return [(number, self._ray.get(next(ready)))]
            self._ray.get(ready)
        except self._ray.exceptions.RayTaskError as error:
            return self._lose(number, error.cause)
        except (self._ray.exceptions.RayError, StopIteration) as error:
            return self._lose(number, FatalError(first_line(error)))
        del self._calls[ready]
        if method == "load":
            reports = self._actors[number].reports.options(num_returns="streaming")
            self._calls[reports.remote(self._sent[number])] = number, "reports"
        return []

    def _lose(self, number: int, error: Exception) -> list[tuple[int, Report]]:
        """Follow a worker from its next start on, which Ray sees to when its process ends."""
        self._calls = {call: owner for call, owner in self._calls.items() if owner[0] != number}
        # Ray repeats this call until it has started the actor again.
        self._calls[self._actors[number].load.options(max_task_retries=-1).remote()] = number, "load"
        return [(number, Lost(error))]


class RayWorker:
    """An actor with both models in one KV pool. Its process ends if its engine does, so that Ray makes a new one."""

    def __init__(self, runtime: RuntimeSettings) -> None:
        """Create a worker that loads with the first call of `load`."""
        self._worker = Worker(runtime, self._send)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded: asyncio.Future[Loaded] | None = None
        self._reports: asyncio.Queue[Report] = asyncio.Queue()
        self._failed = False
        self._early: dict[int, Order] = {}  # by number: Ray may take calls of an asynchronous actor in another order
        self._next = 0

    async def load(self) -> None:
        """Load the models, if that was not done before.

        Raises:
            EspalierError: they cannot be loaded.
        """
        if self._loaded is None:
            self._loop = asyncio.get_running_loop()
            self._loaded = self._loop.create_future()
            Thread(target=self._worker.run, name="espalier-engine", daemon=True).start()
        if self._failed:
            os._exit(1)
        await asyncio.shield(self._loaded)

    async def reports(self, first: int) -> AsyncIterator[Report]:
        """Yield what it is, and then its reports, to an executor that takes it for new.

        Args:
            first: number of the first order that it is to carry out.

        Raises:
            EspalierError: its engine has failed.
        """
        assert self._loaded
        self._worker.forget()
        self._early, self._next = {}, first
        self._reports = reports = asyncio.Queue()  # an earlier caller gets no more
        yield self._loaded.result()
        while not isinstance(report := await reports.get(), Lost):
            yield report
        raise report.error

    async def tell(self, number: int, order: Order) -> None:
        """Take an order, which is carried out after those of smaller numbers."""
        self._early[number] = order
        while due := self._early.pop(self._next, None):
            self._next += 1
            self._worker.tell(due)

    async def check(self, request: Question) -> Resolved | Tokenization | str:
        """Resolve a request; see `Worker.check`. Loading weights for a reload takes its time."""
        return await asyncio.to_thread(self._worker.check, request)

    def _send(self, report: Report) -> None:
        """Pass on a report of the worker's thread."""
        assert self._loop
        self._loop.call_soon_threadsafe(self._report, report)

    def _report(self, report: Report) -> None:
        assert self._loaded
        self._failed = self._failed or isinstance(report, Lost)
        if self._loaded.done():
            self._reports.put_nowait(report)
        elif isinstance(report, Lost):
            self._loaded.set_exception(report.error)
        else:
            assert isinstance(report, Loaded)
            self._loaded.set_result(report)


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
        raise EspalierError("--executor ray needs Ray: pip install 'espalier-search[ray]'") from error
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
