"""What a vote asks whether two answers whose texts differ have the same value."""

import logging
import os
from importlib.util import find_spec
from typing import Protocol

from espalier.search.request import AnswerEquivalence
from espalier.search.voting.math_verify import DEFAULT_MEMORY_BYTES, Grader

_MOST_WORKERS = 4  # each imports sympy when the first question comes, and holds some 100 MB

log = logging.getLogger("espalier.search")


class Equivalence(Protocol):
    """Tells whether two answers have the same value; asked by several threads at once."""

    @property
    def name(self) -> str:
        """Name and version, for results."""
        ...

    def equal(self, one: str, other: str) -> bool:
        """Whether `other` has the value of `one`, which was given earlier. Returns within seconds.

        It says yes only to equal values and may miss some: so the order may matter.
        """
        ...

    def close(self) -> None:
        """Let go of what it holds, and end what is being asked; asked again, it starts again."""
        ...


class MathVerify:
    """Equivalence by math-verify, in child processes that start with the first question."""

    def __init__(self, memory_bytes: int = DEFAULT_MEMORY_BYTES, workers: int = 1) -> None:
        """Use so many processes, and for each that much memory at most; see `Grader`."""
        self._grader = Grader(workers, memory_bytes=memory_bytes)
        self.name = self._grader.name

    def equal(self, one: str, other: str) -> bool:
        """Ask a child process; one that dies or takes longer than its time limit says no."""
        return self._grader.resolve(self._grader.compare(one, other)).correct

    def close(self) -> None:
        """End the processes, with what they are at."""
        self._grader.stop()


def make_equivalence(name: AnswerEquivalence, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> Equivalence | None:
    """The equivalence of that name; None for exact match, and with a warning where math-verify is not installed."""
    if name is AnswerEquivalence.EXACT_MATCH:
        return None
    if find_spec("math_verify") is None:
        log.warning("math-verify is not installed: answers must match exactly; pip install math-verify")
        return None
    return MathVerify(memory_bytes, workers=max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) // 4)))
