"""Admission control: which calls may start a search, which wait, and which are refused. Runs on the event loop."""

import asyncio
import heapq
import itertools
import time
from collections import Counter

from espalier.search.service.errors import BusyError


class CallQueue:
    """A fixed number of slots with a bounded queue, ordered by priority and then by arrival.

    A call does not wait for slots held at lower priorities: it is admitted as if they were free, and the orchestrator
    suspends those searches. At most twice the number of slots is held in total.

    gRPC's `maximum_concurrent_rpcs` would also refuse health checks, so admission happens in the handler.
    """

    def __init__(self, slots: int, queue: int, wait_seconds: float) -> None:
        self._slots = slots
        self._held: Counter[int] = Counter()  # held slots by priority
        self._queue = queue
        self._wait_seconds = wait_seconds
        self._arrivals = itertools.count()
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []

    @property
    def waiting(self) -> int:
        """Number of queued calls."""
        return len(self._waiters)

    async def acquire(self, priority: int = 0, at_most: float | None = None) -> float:
        """Acquire a slot, waiting for one if necessary; the caller must call `release` once.

        Args:
            priority: calls of a larger priority are admitted first, and ignore slots held at smaller ones.
            at_most: maximum seconds to wait, if less than the queue's limit.

        Returns:
            Seconds waited.

        Raises:
            BusyError: the queue is full, or no slot became free in time.
        """
        if self._may_start(priority):
            self._held[priority] += 1
            return 0.0
        if len(self._waiters) >= self._queue:
            raise BusyError(f"the server is busy and its queue of {self._queue} is full; try again later")
        start = time.monotonic()
        seconds = self._wait_seconds if at_most is None else min(at_most, self._wait_seconds)
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (-priority, next(self._arrivals), slot)
        heapq.heappush(self._waiters, waiter)
        try:
            async with asyncio.timeout(seconds):
                await slot
        except BaseException as error:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                heapq.heapify(self._waiters)
            if slot.done() and not slot.cancelled():  # assigned at the same moment
                self.release(priority)
            if isinstance(error, TimeoutError):
                raise BusyError(f"the server stayed busy for {seconds:g} s; try again later") from None
            raise
        return time.monotonic() - start

    def release(self, priority: int = 0) -> None:
        """Release a slot acquired with `priority`, and admit the next waiting call."""
        self._held[priority] -= 1
        while self._waiters:
            minus_priority, _, slot = self._waiters[0]
            if not slot.done():
                if not self._may_start(-minus_priority):
                    return
                self._held[-minus_priority] += 1
                slot.set_result(None)
            heapq.heappop(self._waiters)

    def _may_start(self, priority: int) -> bool:
        before = sum(count for held, count in self._held.items() if held >= priority)
        return before < self._slots and self._held.total() < 2 * self._slots
