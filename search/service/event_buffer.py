"""Buffers the events of one search for its call. Used on the event loop."""

import asyncio
from collections import deque

from espalier.search.result import CandidateDone, Event, Finished, StepDone


class EventBuffer:
    """A bounded queue from one search to one call.

    gRPC would queue any number of messages for a client that does not read. Once `capacity` events wait here, the
    oldest step report is dropped, as later ones supersede it and take over its changes of the tree, or else the oldest
    candidate, as the result lists all. `Started` and `Finished` are never dropped; order is kept.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._events: deque[Event] = deque()
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return len(self._events)

    def push(self, event: Event) -> None:
        """Add an event; drops older progress if the buffer is full."""
        if len(self._events) >= self._capacity:
            event = self._make_room(event)
        self._events.append(event)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Make `next` raise `error` immediately; waiting events are discarded."""
        self._events.clear()
        self._error = error
        self._arrived.set()

    async def next(self) -> Event:
        """Wait for and return the next event.

        Raises:
            Exception: the error passed to `fail`.
        """
        await self._arrived.wait()
        if self._error is not None:
            raise self._error
        event = self._events.popleft()
        if not self._events:
            self._arrived.clear()
        return event

    def _make_room(self, arriving: Event) -> Event:
        """Drop an event if possible; returns `arriving` with what it takes over."""
        reports = [(index, event) for index, event in enumerate(self._events) if isinstance(event, StepDone)]
        if reports:
            oldest, report = reports.pop(0)
            if reports:
                index, later = reports[0]
                self._events[index] = later.including(report)
            elif isinstance(arriving, StepDone):
                arriving = arriving.including(report)
            if reports or not report.nodes or isinstance(arriving, StepDone | Finished):
                del self._events[oldest]
                return arriving
        for index, event in enumerate(self._events):
            if isinstance(event, CandidateDone):
                del self._events[index]
                break
        return arriving
