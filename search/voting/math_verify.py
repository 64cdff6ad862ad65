"""Telling whether answers are equal in child processes that can be killed; `equality` is what they run.

math-verify parses LaTeX with sympy, which can run away in time and memory, and guards itself with SIGALRM, which works
on a process's main thread alone. A child has limits of both: one that overstays is killed and replaced, one that asks
for more memory than it may have is refused it.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from types import TracebackType
from weakref import WeakSet

from pebble import ProcessExpired, ProcessPool

from espalier.engine.interrupts import interrupts_held
from espalier.search.voting.equality import is_right, is_same_value

_TIMEOUT_SECONDS = 5.0
DEFAULT_MEMORY_BYTES = 2 * 2**30
"""What one grading process may take."""

_TASKS_PER_CHILD = 1000
"""Then a fresh one takes its place: sympy's caches grow."""


@dataclass(frozen=True, slots=True)
class Grade:
    """Whether an answer equals the gold answer; `error` says why it could not be told, empty otherwise."""

    correct: bool
    error: str = ""


class Grader:
    """Grades answers with math-verify in a killable pool of child processes; a context manager.

    Children are started when the first answer comes, by spawn: a script that grades needs the usual guard around what
    it does, `if __name__ == "__main__"`.
    """

    def __init__(
        self, workers: int = 1, timeout_seconds: float = _TIMEOUT_SECONDS, memory_bytes: int = DEFAULT_MEMORY_BYTES
    ) -> None:
        """Make a grader without children.

        Args:
            workers: child processes.
            timeout_seconds: for one answer.
            memory_bytes: what a child may take beyond what it holds before its first answer; not kept on systems that
                do not limit a process's address space.
        """
        self._workers = workers
        self._timeout = timeout_seconds
        self._memory = memory_bytes
        self._pool = self._new_pool()
        self._asked: WeakSet[Future[bool]] = WeakSet()
        self._lock = threading.Lock()  # of the pool: threads of several votes ask

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._workers,
            max_tasks=_TASKS_PER_CHILD,
            initializer=_prepare,
            initargs=[self._memory],
            # Spawned, not forked: a fork would copy the locks of torch's and grpc's threads as they happen to be.
            context=get_context("spawn"),
        )

    @property
    def name(self) -> str:
        """Name and version of the grader, for reports."""
        return f"math-verify {version('math-verify')}"

    def __enter__(self) -> "Grader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._pool.close()
            self._pool.join()
            self._pool = self._new_pool()
        else:
            self.stop()

    def stop(self) -> None:
        """End the children now, and what they were at with them; the next answer starts others."""
        with self._lock:
            self._restart()

    def _restart(self) -> None:
        self._pool.stop()
        self._pool.join()
        self._pool = self._new_pool()
        for future in list(self._asked):  # the pool forgets those that it does not answer any more
            future.cancel()

    def submit(self, gold: str, answer: str) -> "Future[bool]":
        """Start grading; give the future to `resolve`. An empty answer is wrong without asking a child."""
        future: Future[bool] = Future()
        if not answer:
            future.set_result(False)
            return future
        return self._ask(is_right, gold, answer)

    def compare(self, one: str, other: str) -> "Future[bool]":
        """Start telling whether two answers have exactly the same value, as a vote asks; see `is_same_value`."""
        return self._ask(is_same_value, one, other)

    def _ask(self, question: Callable[[str, str], bool], one: str, other: str) -> "Future[bool]":
        with self._lock:
            try:
                return self._schedule(question, one, other)
            except RuntimeError:  # pebble's, of a pool whose children could not be started; perhaps they can be now
                self._restart()
            try:
                return self._schedule(question, one, other)
            except RuntimeError as error:
                future: Future[bool] = Future()
                future.set_exception(BrokenProcessPool(str(error)))
                return future

    def _schedule(self, question: Callable[[str, str], bool], one: str, other: str) -> "Future[bool]":
        # A queue whose `put` is interrupted may wake nobody any more, and `stop` would wait for ever.
        with interrupts_held(), _unseen_by_children():
            future = self._pool.schedule(question, args=[one, other], timeout=self._timeout)
        self._asked.add(future)
        return future

    def resolve(self, future: "Future[bool]") -> Grade:
        """Wait for a grade; a grader that dies, overstays or runs out of memory counts as wrong, and says so."""
        try:
            return Grade(future.result())
        except TimeoutError:
            return Grade(False, f"grading took more than {self._timeout:g} s")
        except MemoryError:
            return Grade(False, f"grading took more than {self._memory / 2**20:g} MiB of memory")
        except ProcessExpired as error:
            return Grade(False, f"the grading process died with exit code {error.exitcode}")
        except BrokenProcessPool as error:
            return Grade(False, f"grading processes cannot be kept running: {error}")
        except CancelledError:
            return Grade(False, "grading was stopped")

    def grade(self, gold: str, answer: str) -> Grade:
        """Grade one answer."""
        return self.resolve(self.submit(gold, answer))


@contextmanager
def _unseen_by_children() -> Iterator[None]:
    """Block SIGINT in what is started within: a terminal sends Ctrl-C to children too, whose end is up to the pool."""
    if sys.platform == "win32":
        yield
        return
    ensure_running()  # it starts with the first child, and unblocks SIGINT when it does
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare(memory_bytes: int) -> None:
    """Import sympy and all else, which takes seconds, before the first answer's time begins to run; limit memory."""
    import logging

    import math_verify  # noqa: F401

    # It warns, for each answer, that a limit is off; and logs whole answers.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    if sys.platform != "win32":
        _limit_memory(memory_bytes)


def _limit_memory(more: int) -> None:
    """Refuse this process any more than `more` bytes of address space beyond what it has."""
    import resource

    statm = Path("/proc/self/statm")
    mapped = int(statm.read_text().split()[0]) * resource.getpagesize() if statm.is_file() else 0
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped + more if most == resource.RLIM_INFINITY else min(mapped + more, most)
    with suppress(OSError, ValueError):  # macOS has the limit and may not let it be set
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
