"""What the fake device has still to do: copies that end when they are waited for, not before."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fake_cuda.tensors import HiddenSynchronisationError


class PinnedMemoryError(AssertionError):
    """Pinned memory was overwritten while a copy of it to the device may still have been waiting for its turn."""


@dataclass
class Queue:
    """The work of a device in order. It is done at the latest moment: when an event behind it is waited for.

    Attributes:
        waits: how often the host waited for an event or for everything.
    """

    waits: int = 0
    _last: int = 0
    _waiting: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    _pinned: dict[int, torch.Tensor] = field(default_factory=dict)  # by address: kept, so that no address comes again

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a tensor's memory pinned."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy from pinned memory. The source must hold these values until the copy has ended."""
        target.copy_(source)
        expected = source.numpy().tobytes()

        def check() -> None:
            if source.numpy().tobytes() != expected:
                raise PinnedMemoryError(f"{list(source.shape)} {source.dtype} changed before its copy had to be done")

        self.push(check)

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy to pinned memory, which holds garbage until the copy has been waited for."""
        values = source.clone()
        target.view(torch.uint8).fill_(0xEE)
        self.push(lambda: target.copy_(values))

    def push(self, work: Callable[[], Any]) -> None:
        self._last += 1
        self._waiting.append((self._last, work))

    @property
    def last(self) -> int:
        """The number of what was queued last."""
        return self._last

    def done(self, number: int) -> bool:
        return all(waiting > number for waiting, _ in self._waiting)

    def wait(self, number: int | None = None) -> None:
        """Do everything up to `number`, or all there is."""
        self.waits += 1
        until = self._last if number is None else number
        ready = [work for waiting, work in self._waiting if waiting <= until]
        self._waiting = [(waiting, work) for waiting, work in self._waiting if waiting > until]
        for work in ready:
            work()


class Stream:
    """A stream. All streams of the fake device are one queue.

    Attributes:
        behind: the streams that it has waited for.
        awaited: whether another one has waited for its last work.
    """

    def __init__(self, queue: Queue, index: int, capturing: Callable[[], bool]) -> None:
        self.queue, self.device_index, self._capturing = queue, index, capturing
        self.behind: set[Stream] = set()
        self.awaited = True

    def wait_stream(self, other: "Stream") -> None:
        """Note it: work is queued in order anyway."""
        self.behind.add(other)
        other.awaited = True

    def synchronize(self) -> None:
        if self._capturing():
            raise HiddenSynchronisationError("a stream is waited for while a graph is recorded")
        self.queue.wait()


class Event:
    """An event: a place in the queue."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._number: int | None = None

    def record(self, _: Stream | None = None) -> None:
        self._number = self._queue.last

    def query(self) -> bool:
        return self._number is None or self._queue.done(self._number)

    def synchronize(self) -> None:
        """Wait; an event that was never recorded is one that has been reached."""
        if self._number is not None:
            self._queue.wait(self._number)
