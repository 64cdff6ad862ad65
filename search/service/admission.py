"""Who may start a search now, who waits, who is refused. Lives on the event loop."""

import asyncio
import heapq
import itertools
import time

from espalier.search.service.errors import BusyError


class Admission:
    """A bounded queue in front of a fixed number of slots: by priority, and of equals who came first.

    gRPC's own `maximum_concurrent_rpcs` would refuse health checks too, hence admission in the handler.
    """

    def __init__(self, slots: int, queue: int, wait_seconds: float) -> None:
        self._free = slots
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
            priority: a larger one waits in front.
            at_most: seconds to wait, if these are fewer than the queue's own.

        Returns:
            Seconds waited.

        Raises:
            BusyError: the queue is full, or no slot came free in time.
        """
        if self._free:
            self._free -= 1
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
                self.release()
            if isinstance(error, TimeoutError):
                raise BusyError(f"the server stayed busy for {seconds:g} s; try again later") from None
            raise
        return time.monotonic() - start

    def release(self) -> None:
        """Give a slot back: to the first who still waits, if anybody does."""
        while self._waiters:
            slot = heapq.heappop(self._waiters)[2]
            if not slot.done():
                slot.set_result(None)
                return
        self._free += 1
