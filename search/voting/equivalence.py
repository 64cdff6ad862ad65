"""What the vote asks whether two answers that are spelled differently mean the same."""

import logging
import os
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Protocol

from espalier.search.request import SPELLING, GroupingName
from espalier.search.voting.math_verify import DEFAULT_MEMORY_BYTES, Grader

_MOST_WORKERS = 4  # each imports sympy when the first question comes, and holds some 100 MB

log = logging.getLogger("espalier.search")


class Grouping(Protocol):
    """Tells whether answers mean the same, without making anybody wait; asked on one thread."""

    @property
    def name(self) -> str:
        """Name and version, for results."""
        ...

    def ask(self, one: str, other: str) -> "Future[bool] | None":
        """Begin to tell whether `other` has the value of `one`, which was given earlier; None: it does not.

        The future may end in an error, which counts as a different answer.
        """
        ...

    def close(self) -> None:
        """Let go of what it holds; asked again, it takes it up again."""
        ...


class BySpelling:
    """Answers spelled differently are different."""

    name = SPELLING

    def ask(self, one: str, other: str) -> "Future[bool] | None":
        """None."""
        return None

    def close(self) -> None:
        """Nothing to let go of."""


class ByMathVerify:
    """Answers are the same where math-verify says so, in a pool of processes that starts with the first question."""

    def __init__(self, memory_bytes: int = DEFAULT_MEMORY_BYTES, workers: int = 1) -> None:
        """Use so many processes, and for each that much memory at most; see `Grader`."""
        self._grader = Grader(workers, memory_bytes=memory_bytes)
        self._name = self._grader.name

    @property
    def name(self) -> str:
        """`math-verify` and its version."""
        return self._name

    def ask(self, one: str, other: str) -> "Future[bool] | None":
        """Ask a child process; one that dies or overstays ends the future in an error."""
        return self._grader.compare(one, other)

    def close(self) -> None:
        """End the processes, with what they are at."""
        self._grader.stop()


def make_grouping(name: GroupingName, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> Grouping:
    """The grouping of that name; by spelling, with a warning, where math-verify is not installed."""
    if name is GroupingName.MATH_VERIFY and find_spec("math_verify") is None:
        log.warning("math-verify is not installed: answers are told apart by spelling; pip install math-verify")
        return BySpelling()
    workers = max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) // 4))
    return BySpelling() if name is GroupingName.SPELLING else ByMathVerify(memory_bytes, workers)
