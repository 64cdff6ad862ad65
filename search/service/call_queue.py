"""Who may start a search now, who waits, who is refused. Lives on the event loop."""

import asyncio
import heapq
import itertools
import time
from collections import Counter

from espalier.search.service.errors import BusyError


class CallQueue:
    """A bounded queue in front of a fixed number of slots: by priority, and of equals who came first.

    Who goes before somebody who holds a slot does not wait for them: it is let in as if they were not there, and the
    orchestrator makes them give way until it is done. Twice the slots are held at most.

    gRPC's own `maximum_concurrent_rpcs` would refuse health checks too, hence admission in the handler.
    """

    def __init__(self, slots: int, queue: int, wait_seconds: float) -> None:
        self._slots = slots
        self._held: Counter[int] = Counter()  # slots by the priority of who holds them
        self._queue = queue
        self._wait_seconds = wait_seconds
        self._arrivals = itertools.count()
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []

    @property
    def waiting(self) -> int:
        """Calls in the queue."""
        return len(self._waiters)

    async def acquire(self, priority: int = 0, at_most: float | None = None) -> float:
        """Take a slot, waiting for one where needed; whoever takes it owes one `release`.

        Args:
            priority: a larger one waits in front, and for no slot that a smaller one holds.
            at_most: seconds to wait, if these are fewer than the queue's own.

        Returns:
            Seconds waited.

        Raises:
            BusyError: the queue is full, or no slot came free in time.
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
            if slot.done() and not slot.cancelled():  # given at that very moment
                self.release(priority)
            if isinstance(error, TimeoutError):
                raise BusyError(f"the server stayed busy for {seconds:g} s; try again later") from None
            raise
        return time.monotonic() - start

    def release(self, priority: int = 0) -> None:
        """Give back a slot that was taken with `priority`: to the first who still waits, if anybody does."""
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
