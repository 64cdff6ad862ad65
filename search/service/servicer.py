"""The methods of `SearchService`: validate, wait for a slot, follow the search, respond."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from espalier.search.request import SubmitOptions
from espalier.search.result import Event, Finished, SearchResult, StopReason
from espalier.search.service.call_queue import CallQueue
from espalier.search.service.callers import Salts, caller_of
from espalier.search.service.convert import checked_request, event_to_wire, fit_event, fit_result, result_to_wire
from espalier.search.service.engine_thread import STOPPING, EngineThread, Search
from espalier.search.service.errors import NotReadyError, SearchFailedError, SearchTimeoutError
from espalier.search.service.settings import ServerSettings
from espalier.v1 import search_pb2 as pb
from espalier.v1.search_pb2_grpc import SearchServiceServicer

log = logging.getLogger("espalier.service")


class SolveServicer(SearchServiceServicer):
    """Handles calls on the event loop; errors are mapped by `errors.ErrorInterceptor`.

    Attributes:
        idle: set while no call is in progress.
    """

    def __init__(self, engine: EngineThread, settings: ServerSettings) -> None:
        self._engine_thread = engine
        self._settings = settings
        self._call_queue = CallQueue(settings.max_searches, settings.max_queue, settings.queue_seconds)
        self._salts = Salts()
        self._calls = 0
        self._draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    def refuse_new(self) -> None:
        """Refuse all further calls; calls in progress continue."""
        self._draining = True

    async def SolveProblem(self, request: pb.SolveProblemRequest, context: Any) -> pb.SolveProblemResponse:  # noqa: N802 (the contract's)
        """Run one search and return its result."""
        async with self._search(request, context, progress=False) as search:
            event = await search.events.next()
            while not isinstance(event, Finished):
                event = await search.events.next()
            return pb.SolveProblemResponse(result=self._result(event, request.include_nodes))

    async def SolveProblemStream(self, request: pb.SolveProblemStreamRequest, context: Any) -> None:  # noqa: N802 (the contract's)
        """Run one search and write its events as they arrive."""
        async with self._search(request.request, context, progress=True) as search:
            event: Event | None = None
            while not isinstance(event, Finished):
                event = await search.events.next()
                if (message := self._message(event, request.request.include_nodes)) is not None:
                    await context.write(message)

    @asynccontextmanager
    async def _search(self, message: pb.SolveProblemRequest, context: Any, progress: bool) -> AsyncIterator[Search]:
        """Admit and start a search; cancel it on exit."""
        self._calls += 1
        self.idle.clear()
        try:
            search = await self._start(message, self._salts.of(caller_of(context)), progress)
            try:
                async with asyncio.timeout(self._settings.search_seconds):
                    yield search
            except TimeoutError:
                raise SearchTimeoutError(
                    f"the search ran longer than the server's limit of {self._settings.search_seconds:g} s; "
                    f"lower -N, -M, --max-steps or --max-step-tokens"
                ) from None
            finally:
                # Also reached when the client cancels, disconnects or times out. The search keeps its slot until the
                # orchestrator has finished it, so that slots reflect what the engine holds.
                self._engine_thread.cancel(search)
        finally:
            self._calls -= 1
            if self._calls == 0:
                self.idle.set()

    async def _start(self, message: pb.SolveProblemRequest, salt: bytes, progress: bool) -> Search:
        if self._draining:
            raise NotReadyError(STOPPING)
        self._engine_thread.require_ready()
        request = checked_request(message)
        waited = await self._call_queue.acquire(message.priority, request.time_limit)
        options = SubmitOptions(message.priority, salt, waited)
        give_back = partial(self._call_queue.release, message.priority)
        try:
            return self._engine_thread.submit(request, give_back, progress, options)
        except BaseException:
            give_back()
            raise

    def _message(self, event: Event, include_nodes: bool) -> pb.SolveProblemStreamResponse | None:
        """Convert an event to a message within the size limit; None for progress that cannot be shrunk enough."""
        if isinstance(event, Finished):
            return pb.SolveProblemStreamResponse(result=self._result(event, include_nodes))
        return fit_event(event_to_wire(event, include_nodes), self._settings.max_send_bytes)

    def _result(self, event: Finished, include_nodes: bool) -> pb.SearchResult:
        """Convert the result to a message within the size limit."""
        self._require_ended_well(event.result)
        # Leave room for the enclosing message.
        return fit_result(result_to_wire(event.result, include_nodes), self._settings.max_send_bytes - 64)

    def _require_ended_well(self, result: SearchResult) -> None:
        if result.stop_reason is StopReason.FAILED:
            log.error("search %s failed: %s", result.search_id, result.error)
            raise SearchFailedError(result.error)
        if result.stop_reason is StopReason.CANCELLED:
            # Not by this call, which is still waiting: only a server shutdown cancels others.
            raise NotReadyError(STOPPING)
