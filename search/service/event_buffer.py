"""Events of one search on their way to its call: buffered, and cut to the size that may be sent."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from espalier.search.completion import TextSampled
from espalier.search.result import CandidateDone, Event, Finished, StepDone
from espalier.search.run.executor import AnyEvent

T = TypeVar("T")


class EventBuffer:
    """A bounded queue from one search or completion to one call; any thread may `push`, the rest is the event loop's.

    gRPC would queue any number of messages for a client that does not read. Once `capacity` events wait here, the
    oldest step report is dropped, as later ones supersede it and take over its changes of the tree, or else the oldest
    candidate, as the result lists all. `Started` and the last event are never dropped; order is kept. Text is not
    either: it joins what waits of the same choice, so that a choice waits once at most.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._events: deque[AnyEvent] = deque()
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._woken = asyncio.Event()

    def __len__(self) -> int:
        return len(self._events)

    def push(self, event: AnyEvent) -> None:
        """Add an event; drops older progress if the buffer is full. Whoever waits for it must be woken, see `wake`."""
        with self._lock:
            if len(self._events) >= self._capacity:
                if isinstance(event, TextSampled) and self._join(event):
                    return
                event = self._make_room(event)
            self._events.append(event)

    def wake(self) -> None:
        """Let `take` look for events."""
        self._woken.set()

    def fail(self, error: Exception) -> None:
        """Make `take` raise `error` immediately; waiting events are discarded."""
        with self._lock:
            self._events.clear()
        self._error = error
        self.wake()

    async def take(self) -> list[AnyEvent]:
        """Wait for events, and return all that have arrived.

        Raises:
            Exception: the error passed to `fail`.
        """
        while self._error is None:
            with self._lock:
                events = [*self._events]
                self._events.clear()
            if events:
                return events
            self._woken.clear()  # what was pushed since is followed by a `wake` that is yet to come
            await self._woken.wait()
        raise self._error

    def _join(self, arriving: TextSampled) -> bool:
        """Add text to what waits of its choice; False if nothing does."""
        for index, event in enumerate(self._events):
            if isinstance(event, TextSampled) and event.index == arriving.index:
                self._events[index] = arriving.including(event)
                return True
        return False

    def _make_room(self, arriving: AnyEvent) -> AnyEvent:
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


def fitted(
    event: Event, encode: Callable[[Event, dict[str, int]], T], size: Callable[[T], int], limit: int
) -> T | None:
    """Encode an event within a size limit; None for progress that cannot be cut enough.

    A result loses its tree, then its last candidates, and is returned even if it is still too large. Progress, which
    the result repeats, loses its nodes and its steps.

    Args:
        event: what happened.
        encode: makes a message of an event and the numbers of what it lacks, by their fields `omitted_…`.
        size: of a message, in bytes.
        limit: largest size, in bytes.
    """
    message = None
    for smaller, omitted in _smaller(event):
        message = encode(smaller, omitted)
        if size(message) <= limit:
            return message
    return message if isinstance(event, Finished) else None


def _smaller(event: Event) -> Iterator[tuple[Event, dict[str, int]]]:
    """An event, and then with less and less, and how much of what is omitted."""
    yield event, {}
    match event:
        case Finished(result=result):
            whole, omitted = len(result.candidates), {"omitted_nodes": len(result.nodes)}
            result = replace(result, nodes=())
            yield replace(event, result=result), omitted
            while result.candidates:  # halved, because encoding takes as long as measuring
                result = replace(result, candidates=result.candidates[: len(result.candidates) // 2])
                yield replace(event, result=result), {**omitted, "omitted_candidates": whole - len(result.candidates)}
        case StepDone():
            best = event.best and replace(event.best, steps=())
            yield replace(event, kept=(), nodes=(), best=best), {"omitted_nodes": len(event.nodes)}
        case CandidateDone():
            yield replace(event, candidate=replace(event.candidate, steps=())), {}
        case _:
            pass
