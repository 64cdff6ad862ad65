"""Calls in progress of the blocking client, which other threads may end."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from espalier.search.client.errors import cancelled


class Cancellable(Protocol):
    """What can be ended from another thread: a call of gRPC, or `Calls`."""

    def cancel(self) -> object:
        """End it."""
        ...


class Calls:
    """Calls in progress, and the waits between their attempts; `cancel` ends all of them for good. Thread-safe."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._running: set[Cancellable] = set()

    @property
    def over(self) -> bool:
        """Whether they were cancelled."""
        return self._over.is_set()

    def cancel(self) -> None:
        """End every call in progress, every wait, and every later call."""
        with self._lock:
            self._over.set()
            running = list(self._running)
        for call in running:
            call.cancel()

    @contextmanager
    def running(self, call: Cancellable) -> Iterator[None]:
        """Count a call as in progress, and end it on leaving: no effect if it has finished."""
        with self._lock:
            self._running.add(call)
            over = self._over.is_set()
        try:
            if over:
                call.cancel()
            yield
        finally:
            with self._lock:
                self._running.discard(call)
            call.cancel()

    def wait(self, seconds: float) -> None:
        """Wait.

        Raises:
            ServiceError: CANCELLED, as soon as the calls are cancelled.
        """
        if self._over.wait(seconds):
            raise cancelled()
