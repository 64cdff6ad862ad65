"""A Ray worker: an asynchronous actor with an engine of its own, which runs many searches at once."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from espalier.experiments.evaluation.provenance import hardware
from espalier.search.request import SearchRequest, SubmitOptions
from espalier.search.result import Event, Finished, SearchResult
from espalier.search.run.load import RuntimeSettings, load_orchestrator
from espalier.search.service.engine_thread import EngineThread, Search

if TYPE_CHECKING:
    from espalier.search.run.orchestrator import Orchestrator

_EVENTS_KEPT = 256
"""Events of a search that wait for the driver before older ones are dropped; see `EventBuffer`."""


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """What a worker is. Its version and models must be those of all others, for results not to depend on the worker."""

    version: str
    models: dict[str, str]
    kv_memory_bytes: int
    hardware: dict[str, Any]


class RayWorker:
    """Holds generator and verifier in one KV pool. Its process ends if its engine does, so that Ray makes a new one."""

    def __init__(self, runtime: RuntimeSettings, most_searches: int) -> None:
        """Create a worker that loads with the first call.

        Args:
            runtime: what to load.
            most_searches: searches that it is given at once, waiting ones included.
        """
        self._runtime = runtime
        self._most_searches = most_searches
        self._thread: EngineThread | None = None
        self._orchestrator: Orchestrator | None = None
        self._searches: dict[str, Search] = {}
        self._cancelled_early: deque[str] = deque(maxlen=_EVENTS_KEPT)  # calls may arrive out of order

    async def describe(self) -> WorkerDescription:
        """Load the models, if that was not done before, and return what they are."""
        await self._loaded()
        assert self._orchestrator is not None
        described = self._orchestrator.describe_models()
        return WorkerDescription(version("espalier"), described, self._orchestrator.kv_memory_bytes, hardware())

    async def effective(self, request: SearchRequest) -> SearchRequest:
        """Return the request with every default filled in."""
        await self._loaded()
        assert self._orchestrator is not None
        return self._orchestrator.effective(request)

    async def search(self, name: str, request: SearchRequest, options: SubmitOptions) -> SearchResult:
        """Run a search and return its result, without its rounds.

        Raises:
            InvalidRequestError, RequestTooLargeError: see `Orchestrator.submit`.
        """
        (event,) = [event async for event in self._events(name, request, options, progress=False)]
        assert isinstance(event, Finished)
        return event.result

    async def events(self, name: str, request: SearchRequest, options: SubmitOptions) -> AsyncIterator[Event]:
        """Run a search and yield its events; the last one has the result.

        Raises:
            InvalidRequestError, RequestTooLargeError: see `Orchestrator.submit`.
        """
        async for event in self._events(name, request, options, progress=True):
            yield event

    async def cancel(self, name: str) -> None:
        """Stop a search, which ends with its best answer so far."""
        if self._thread and (search := self._searches.get(name)):
            self._thread.cancel(search)
        else:
            self._cancelled_early.append(name)

    async def _loaded(self) -> EngineThread:
        if self._thread is None:
            self._thread = EngineThread(self._load, self._most_searches, _EVENTS_KEPT)
            self._thread.start()
        await self._thread.loaded
        return self._thread

    def _load(self) -> Orchestrator:
        self._orchestrator = load_orchestrator(self._runtime)
        return self._orchestrator

    async def _events(
        self, name: str, request: SearchRequest, options: SubmitOptions, progress: bool
    ) -> AsyncIterator[Event]:
        thread = await self._loaded()
        if thread.over.done():
            os._exit(1)
        self._searches[name] = search = thread.submit(request, lambda _: None, progress, options)
        if name in self._cancelled_early:
            thread.cancel(search)
        event: Event | None = None
        try:
            while not isinstance(event, Finished):
                event = await search.events.next()
                if isinstance(event, Finished):
                    event = Finished(name, replace(event.result, search_id=name, rounds=()))
                yield event if isinstance(event, Finished) else replace(event, search_id=name)
        except Exception:
            if thread.over.done():  # the engine failed, not this search
                os._exit(1)
            raise
        finally:
            thread.cancel(search)  # no effect once it has ended
            if self._searches.get(name) is search:
                del self._searches[name]
