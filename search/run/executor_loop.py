"""The loop of a thread that owns an executor: steps it, and between steps does what other threads ask."""

from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from espalier.search.run.executor import Executor

E = TypeVar("E", bound=Executor)

_IDLE_SECONDS = 1.0
"""Seconds that an executor whose searches all wait for their callers is left alone; time limits are met so late."""


class ExecutorLoop(Generic[E]):
    """Runs an executor on one thread; `call` and `stop` may be called on any thread."""

    def __init__(self) -> None:
        self._commands: SimpleQueue[Callable[[E], object]] = SimpleQueue()
        self._stopped = False

    def call(self, command: Callable[[E], object]) -> None:
        """Call `command` with the executor before its next step."""
        self._commands.put(command)

    def stop(self) -> None:
        """Make `run` return after the current step."""
        self._stopped = True
        self.call(lambda _: None)  # an idle loop waits for a command

    def run(self, executor: E, after_turn: Callable[[E], object] = lambda _: None) -> None:
        """Carry out commands and step the executor while it is busy, until `stop`; raises what either raises.

        Args:
            executor: used on this thread only.
            after_turn: called each time after the commands and the step.
        """
        while not self._stopped:
            wait, seconds = executor.idle, _IDLE_SECONDS if executor.busy else None
            with suppress(Empty):
                while True:
                    self._commands.get(wait, seconds)(executor)
                    wait = False
            if executor.busy and not self._stopped:
                executor.step()
            after_turn(executor)
