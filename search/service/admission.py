"""Who may start a search now, who waits, who is refused. Lives on the event loop."""

import asyncio
import time

from espalier.search.service.errors import BusyError


class Admission:
    """A bounded first-come-first-served queue in front of a fixed number of slots.

    gRPC's own `maximum_concurrent_rpcs` would refuse health checks too, hence admission in the handler.
    """

    def __init__(self, slots: int, queue: int, wait_seconds: float) -> None:
        self._slots = asyncio.Semaphore(slots)
        self._queue = queue
        self._wait_seconds = wait_seconds
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """Calls in the queue."""
        return self._waiting

    async def acquire(self) -> float:
        """Take a slot, waiting for one where needed; whoever takes it owes one `release`.

        Returns:
            Seconds waited.

        Raises:
            BusyError: the queue is full, or no slot came free in time.
        """
        if self._slots.locked() and self._waiting >= self._queue:
            raise BusyError(f"the server is busy and its queue of {self._queue} is full; try again later")
        start = time.monotonic()
        self._waiting += 1
        try:
            async with asyncio.timeout(self._wait_seconds):
                await self._slots.acquire()
        except TimeoutError:
            raise BusyError(f"the server stayed busy for {self._wait_seconds:g} s; try again later") from None
        finally:
            self._waiting -= 1
        return time.monotonic() - start

    def release(self) -> None:
        """Give a slot back."""
        self._slots.release()
