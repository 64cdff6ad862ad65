"""Drivers of an executor: the loop of a thread that owns it, and an executor that whoever waits for a result steps."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

from espalier.engine.errors import MisuseError

if TYPE_CHECKING:
    from espalier.search.run.executor import Executor

E = TypeVar("E", bound="Executor")

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


class SharedExecutor(Generic[E]):
    """An executor that runs while somebody waits for it: one thread at a time."""

    def __init__(self, executor: E, owner: str) -> None:
        """Share `executor`; `owner` names what it belongs to, for messages."""
        self._executor: E | None = executor
        self._owner = owner
        self._lock = threading.RLock()

    @contextmanager
    def held(self) -> Iterator[E]:
        """The executor, for this thread alone.

        Raises:
            MisuseError: it is closed.
        """
        with self._lock:
            if self._executor is None:
                raise MisuseError(f"the {self._owner} is closed; create a new one")
            yield self._executor

    @contextmanager
    def stepped(self) -> Iterator[E]:
        """The same; an exception ends all that runs on it, and new work can be submitted afterwards."""
        with self.held() as executor:
            try:
                yield executor
            except BaseException:
                executor.close()
                raise

    def step_until(self, done: Callable[[], bool]) -> None:
        """Run until something is `done`."""
        with self.stepped() as executor:
            while not done():
                executor.step()

    def close(self) -> None:
        """Close the executor; closing twice is allowed."""
        with self._lock:
            if self._executor is not None:
                self._executor.close()
                self._executor = None
