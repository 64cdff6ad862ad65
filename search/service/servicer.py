"""The methods of `SearchService`: validate, wait for a slot, follow the search, respond."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import Any

from espalier.search.request import SubmitOptions, estimated_tokens
from espalier.search.result import Event, Finished, SearchResult, StopReason
from espalier.search.service.call_queue import CallQueue, TimeLimitReachedError
from espalier.search.service.callers import Salts, caller_of
from espalier.search.service.convert import checked_request, event_to_wire, fit_event, fit_result, result_to_wire
from espalier.search.service.engine_thread import STOPPING, EngineThread, Search
from espalier.search.service.errors import NotReadyError, SearchFailedError, SearchTimeoutError
from espalier.search.service.settings import ServerSettings
from espalier.v1 import search_pb2 as pb
from espalier.v1.search_pb2_grpc import SearchServiceServicer

log = logging.getLogger("espalier.service")

_GRACE = 15.0
"""Seconds after a search's time limit in which it must have ended."""


def _nothing() -> None:
    """Give back no slot."""


class SolveServicer(SearchServiceServicer):
    """Handles calls on the event loop; errors are mapped by `errors.ErrorInterceptor`.

    Attributes:
        idle: set while no call is in progress.
    """

    def __init__(self, engine: EngineThread, settings: ServerSettings) -> None:
        self._engine_thread = engine
        self._settings = settings
        self._call_queue = CallQueue(settings.max_searches, settings.max_queue, settings.queue_seconds)
        self._salts = Salts(settings.share_prompts)
        self._asking = asyncio.Lock()
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

    async def GetServerInfo(  # noqa: N802 (the contract's name)
        self, request: pb.GetServerInfoRequest, context: Any
    ) -> pb.GetServerInfoResponse:
        """Tell what is served, and what is held now."""
        async with self._asking:
            models, memory, occupancy = await self._engine_thread.ask(
                lambda executor: (executor.describe_models(), executor.kv_memory_bytes, executor.occupancy())
            )
        return pb.GetServerInfoResponse(
            version=version("espalier"),
            models=models,
            kv_memory_bytes=memory,
            kv_blocks={role: pb.KvBlocks(**asdict(blocks)) for role, blocks in occupancy.kv_blocks.items()},
            running_searches=occupancy.running,
            waiting_searches=occupancy.waiting,
            admitted_calls=self._call_queue.held,
            waiting_calls=self._call_queue.waiting,
            max_searches=self._settings.max_searches,
            max_queue=self._settings.max_queue,
        )

    @asynccontextmanager
    async def _search(self, message: pb.SolveProblemRequest, context: Any, progress: bool) -> AsyncIterator[Search]:
        """Admit and start a search; cancel it on exit."""
        self._calls += 1
        self.idle.clear()
        try:
            search = await self._start(message, *caller_of(context), progress)
            try:
                async with asyncio.timeout(self._settings.search_seconds + _GRACE):
                    yield search
            except TimeoutError:
                raise SearchTimeoutError(
                    f"the search did not end at the server's limit of {self._settings.search_seconds:g} s; lower "
                    "beam_width, expansion, max_steps or max_step_tokens"
                ) from None
            finally:
                # Also reached when the client cancels, disconnects or times out. The search keeps its slot until the
                # orchestrator has finished it, so that slots reflect what the engine holds.
                self._engine_thread.cancel(search)
        finally:
            self._calls -= 1
            if self._calls == 0:
                self.idle.set()

    async def _start(self, message: pb.SolveProblemRequest, caller: str, login: bool, progress: bool) -> Search:
        """Check a request, wait for a slot and submit it; what is left of its time limit runs from here."""
        if self._draining:
            raise NotReadyError(STOPPING)
        request = checked_request(message, self._settings.max_priority)
        await self._engine_thread.check(request)
        priority = message.priority
        give_back = partial(self._call_queue.release, priority)
        try:
            cost = estimated_tokens(request)
            waited = await self._call_queue.acquire(priority, request.time_limit, caller, cost)
        except TimeLimitReachedError:
            assert request.time_limit is not None
            waited, give_back = request.time_limit, _nothing  # the orchestrator ends it at once, with an empty result
        try:
            salt = self._salts.of(caller, login)
            options = SubmitOptions(
                priority,
                salt,
                waited,
                max_seconds=self._settings.search_seconds,
                report_nodes=progress and message.include_nodes,
            )
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
