"""A worker as an asynchronous Ray actor."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator

from espalier.experiments.executors.transport import Loaded, Lost, Order, PrepareReload, Question, Report
from espalier.experiments.executors.worker import Worker
from espalier.search.run.executor import Resolved
from espalier.search.run.settings import RuntimeSettings
from espalier.search.tokenization import Tokenization


class RayWorker:
    """Holds generator and verifier in one KV pool. Its process ends if its engine does, so that Ray makes a new one."""

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
            threading.Thread(target=self._worker.run, name="espalier-engine", daemon=True).start()
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
        """Resolve a request; see `Worker.check`."""
        if isinstance(request, PrepareReload):  # takes as long as loading does
            return await asyncio.to_thread(self._worker.check, request)
        return self._worker.check(request)

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
