"""Compares answers with math-verify in child processes with limits on CPU time and memory; they run `equality`.

math-verify parses LaTeX with sympy, which may use unbounded time and memory. Its own timeout uses SIGALRM and works on
the main thread only. Here, a child that exceeds its limit of CPU time is killed, wherever it is, and replaced, and one
that exceeds its memory limit gets a MemoryError. CPU time is what the child itself computes, so that no grade depends
on what else the machine does.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

from espalier.engine.child_processes import context_without_main, is_of_main
from espalier.engine.interrupts import interrupts_held

if TYPE_CHECKING:
    from pebble import ProcessPool

_CPU_SECONDS = 5.0
_WAITING = 24
"""Seconds after which a comparison that only waits is given up, for each second of CPU time that it may take."""
DEFAULT_MEMORY_BYTES = 2 * 2**30
"""Default memory limit of a grading process, in bytes."""

_LIMITS_CPU_TIME = hasattr(signal, "setitimer")
_WARMING = ("\\sqrt{8}", "2\\sqrt{2}"), ("x^2+x", "x(x+1)"), ("x<2", "(-\\infty,2)")
"""Pairs that a child compares first: what they import and set up is no later answer's CPU time."""
_LOOK_SECONDS = 1.0
"""Seconds between two looks whether the processes of an answer that is waited for are still there."""
_TASKS_PER_CHILD = 1000
"""Answers after which a child process is replaced, because sympy's caches grow."""


@dataclass(frozen=True, slots=True)
class Grade:
    """Verdict on an answer given the gold answer.

    Attributes:
        correct: whether it equals the gold answer.
        error: why it could not be decided, else empty.
        cpu_seconds: CPU time that it took.
    """

    correct: bool
    error: str = ""
    cpu_seconds: float = field(default=0.0, compare=False)


def is_right(gold: str, answer: str) -> bool:
    """See `equality.is_right`; only a child process imports that, as it loads sympy."""
    from espalier.search.grading import equality

    return equality.is_right(gold, answer)


def is_same_value(one: str, other: str) -> bool:
    """See `equality.is_same_value`."""
    from espalier.search.grading import equality

    return equality.is_same_value(one, other)


class Grader:
    """Grades answers in a child process, with math-verify or by another check; a context manager.

    The process is spawned with the first answer. It imports the main module only for a `check` of it; such a
    script needs the usual `if __name__ == "__main__":` guard.
    """

    def __init__(
        self,
        cpu_seconds: float = _CPU_SECONDS,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        check: Callable[[str, str], bool] = is_right,
        rule: str = "",
    ) -> None:
        """Create a grader; no child process is started yet.

        Args:
            cpu_seconds: CPU time that one answer may take. Where processes cannot limit it, as on Windows, seconds.
            memory_bytes: memory limit of a child beyond what it uses before its first answer; not enforced on systems
                without limits on the address space.
            check: whether an answer, its second argument, is right by the gold answer; it must be picklable.
            rule: name of the check, if it is not math-verify's.
        """
        self._check, self.rule = check, rule
        self._cpu_seconds = cpu_seconds
        self._timeout = cpu_seconds * (_WAITING if _LIMITS_CPU_TIME else 1)
        self._memory = memory_bytes
        self._pool = self._new_pool()
        self._asked: WeakSet[Future[Grade]] = WeakSet()
        self._lock = threading.Lock()  # guards the pool, which threads of several votes use

    def _new_pool(self) -> "ProcessPool":
        from pebble import ProcessPool  # not installed where nothing but a client is

        return ProcessPool(
            max_workers=1,
            max_tasks=_TASKS_PER_CHILD,
            initializer=_prepare,
            initargs=[self._memory],
            # Spawn, not fork: a fork would copy the locks of torch's and gRPC's threads in an arbitrary state.
            context=get_context("spawn") if is_of_main(self._check) else context_without_main(),
        )

    @property
    def name(self) -> str:
        """Name of the grader, and math-verify's version, for reports."""
        return self.rule or f"math-verify {version('math-verify')}"

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._pool.close()
            self._pool.join()
        self.stop()

    def start(self) -> None:
        """Start the child processes before the first answer."""
        self.compare(*_WARMING[0])

    def stop(self) -> None:
        """Stop the child processes and their comparisons now; the next answer starts new ones."""
        with self._lock:
            self._restart()

    def _restart(self) -> None:
        self._pool.stop()
        self._pool.join()
        self._pool = self._new_pool()
        for future in list(self._asked):  # the pool drops futures that it no longer resolves
            future.cancel()

    def submit(self, gold: str, answer: str, check: Callable[[str, str], bool] | None = None) -> "Future[Grade]":
        """Start grading; pass the future to `resolve`. An empty answer is wrong without a child process.

        Args:
            gold: the gold answer.
            answer: the answer.
            check: what to grade this answer by; None for the grader's own check.
        """
        future: Future[Grade] = Future()
        if not answer:
            future.set_result(Grade(False))
            return future
        return self._ask(check or self._check, gold, answer)

    def compare(self, one: str, other: str) -> "Future[Grade]":
        """Start comparing whether two answers have exactly the same value, for a vote; see `is_same_value`."""
        return self._ask(is_same_value, one, other)

    def _ask(self, question: Callable[[str, str], bool], one: str, other: str) -> "Future[Grade]":
        with self._lock:
            try:
                return self._schedule(question, one, other)
            except RuntimeError:  # raised by pebble if its children could not be started; retry once
                self._restart()
            try:
                return self._schedule(question, one, other)
            except RuntimeError as error:
                future: Future[Grade] = Future()
                future.set_exception(BrokenProcessPool(str(error)))
                return future

    def _schedule(self, question: Callable[[str, str], bool], one: str, other: str) -> "Future[Grade]":
        # A queue whose `put` is interrupted may not wake its readers any more, and `stop` would wait forever.
        with interrupts_held(), _unseen_by_children():
            asked = [question, one, other, self._cpu_seconds]
            future = self._pool.schedule(_answered, args=asked, timeout=self._timeout)
        self._asked.add(future)
        return future

    def resolve(self, future: "Future[Grade]") -> Grade:
        """Wait for a grade; if the process died or exceeded a limit, the grade is wrong and has an error."""
        from pebble import ProcessExpired

        try:
            return self._wait(future)
        except TimeoutError:
            return Grade(False, f"grading took more than {self._timeout:g} s", self._cpu_seconds)
        except MemoryError:
            return Grade(False, f"grading took more than {self._memory / 2**20:g} MiB of memory")
        except ProcessExpired as error:
            if _LIMITS_CPU_TIME and error.exitcode == -signal.SIGPROF:
                return Grade(False, f"grading took more than {self._cpu_seconds:g} s of CPU time", self._cpu_seconds)
            return Grade(False, f"the grading process died with exit code {error.exitcode}")
        except BrokenProcessPool as error:
            return Grade(False, f"grading processes cannot be kept running: {error}")
        except CancelledError:
            return Grade(False, "grading was stopped")
        except Exception as error:  # of a check that is somebody else's
            return Grade(False, f"grading failed: {type(error).__name__}: {error}")

    def _wait(self, future: "Future[Grade]") -> Grade:
        """The result of a future, which pebble forgets if it is handed over while pebble gives up a dead pool."""
        while True:
            with suppress(TimeoutError):
                return future.result(_LOOK_SECONDS)
            with self._lock:
                if future.done():
                    return future.result()
                if not self._pool.active:
                    self._restart()
                    raise BrokenProcessPool("all of them have ended")

    def grade(self, gold: str, answer: str) -> Grade:
        """Grade one answer."""
        return self.resolve(self.submit(gold, answer))


@contextmanager
def _unseen_by_children() -> Iterator[None]:
    """Block SIGINT in child processes: a terminal sends Ctrl-C to them too, but the pool must stop them."""
    if sys.platform == "win32":
        yield
        return
    ensure_running()  # starts the resource tracker first, which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _answered(question: Callable[[str, str], bool], one: str, other: str, cpu_seconds: float) -> Grade:
    """Answer a question in a child process, which SIGPROF ends once it has taken its CPU time."""
    start = time.process_time()
    if _LIMITS_CPU_TIME:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        same = bool(question(one, other))
    finally:
        if _LIMITS_CPU_TIME:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return Grade(same, cpu_seconds=time.process_time() - start)


def _prepare(memory_bytes: int) -> None:
    """Import sympy, which takes seconds, before the first answer's time limit starts; then limit the memory."""
    import logging

    import math_verify  # noqa: F401

    # It warns about its disabled timeout with every answer, and logs whole answers.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    for one, other in _WARMING:
        is_same_value(one, other)
    if sys.platform != "win32":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the pool's own handler prints an error in a process that ends
        _limit_memory(memory_bytes)


def _limit_memory(more: int) -> None:
    """Limit this process's address space to `more` bytes beyond its current size."""
    import resource

    statm = Path("/proc/self/statm")
    mapped = int(statm.read_text().split()[0]) * resource.getpagesize() if statm.is_file() else 0
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped + more if most == resource.RLIM_INFINITY else min(mapped + more, most)
    with suppress(OSError, ValueError):  # macOS may reject the limit
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
