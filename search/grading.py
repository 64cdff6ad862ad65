"""Whether an answer is right: math-verify, in child processes that can be killed.

math-verify parses LaTeX with sympy, which can run away in time and memory, and guards itself with SIGALRM, which works
on a process's main thread alone. In a child it has both; a child that overstays is killed and replaced.
"""

from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from types import TracebackType

from pebble import ProcessExpired, ProcessPool

_TIMEOUT_SECONDS = 5.0
_TASKS_PER_CHILD = 1000  # sympy's caches grow; a fresh child now and then keeps memory flat


@dataclass(frozen=True, slots=True)
class Grade:
    """Whether an answer equals the gold answer; `error` says why it could not be told, empty otherwise."""

    correct: bool
    error: str = ""


class Grader:
    """Grades answers with math-verify in a killable pool of child processes; a context manager."""

    def __init__(self, workers: int = 1, timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
        self._timeout = timeout_seconds
        # Spawned, not forked: a fork would copy the locks of torch's and grpc's threads as they happen to be.
        self._pool = ProcessPool(
            max_workers=workers, max_tasks=_TASKS_PER_CHILD, initializer=_warm_up, context=get_context("spawn")
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
        else:
            self._pool.stop()
        self._pool.join()

    def submit(self, gold: str, answer: str) -> "Future[bool]":
        """Start grading; give the future to `resolve`. An empty answer is wrong without asking a child."""
        if not answer:
            future: Future[bool] = Future()
            future.set_result(False)
            return future
        return self._pool.schedule(is_equivalent, args=[gold, answer], timeout=self._timeout)

    def resolve(self, future: "Future[bool]") -> Grade:
        """Wait for a grade; a grader that dies or overstays counts as wrong, and says so."""
        try:
            return Grade(future.result())
        except TimeoutError:
            return Grade(False, f"grading took more than {self._timeout:g} s")
        except ProcessExpired as error:
            return Grade(False, f"the grading process died with exit code {error.exitcode}")

    def grade(self, gold: str, answer: str) -> Grade:
        """Grade one answer."""
        return self.resolve(self.submit(gold, answer))


def is_equivalent(gold: str, answer: str) -> bool:
    """Whether `answer` means the same as `gold` by math-verify; both are LaTeX without dollars. Runs in a child."""
    from math_verify import parse, verify

    # Without limits of its own, whose end is a silent "wrong": the pool's limit kills, and says so.
    def read(text: str) -> list:
        return parse(f"${text}$", parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    return bool(verify(read(gold), read(answer), timeout_seconds=None))


def _warm_up() -> None:
    """Import sympy and all else, which takes seconds, before the first answer's time begins to run."""
    import logging

    import math_verify  # noqa: F401

    # It warns, for each answer, that a limit is off; and logs whole answers.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
