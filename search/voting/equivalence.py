"""Answer equivalence for votes: whether two answers with different texts have the same value."""

import logging
import os
from importlib.util import find_spec
from typing import Protocol

from espalier.search.request import AnswerEquivalence
from espalier.search.voting.math_verify import DEFAULT_MEMORY_BYTES, Grader

_MOST_WORKERS = 4  # each imports sympy on first use and takes about 100 MB

log = logging.getLogger("espalier.search")


class Equivalence(Protocol):
    """Decides whether two answers have the same value; called by several threads at once."""

    @property
    def name(self) -> str:
        """Name and version, for results."""
        ...

    def equal(self, one: str, other: str) -> bool:
        """Whether `other` has the same value as `one`, which occurred earlier. Returns within seconds.

        May miss equal values but never equates different ones, so the order of the arguments can matter.
        """
        ...

    def close(self) -> None:
        """Release resources and end running comparisons; using it again restarts it."""
        ...


class MathVerify:
    """Answer equivalence by math-verify, in child processes started on first use."""

    def __init__(self, memory_bytes: int = DEFAULT_MEMORY_BYTES, workers: int = 1) -> None:
        """Set the number of processes, and the memory limit of each in bytes; see `Grader`."""
        self._grader = Grader(workers, memory_bytes=memory_bytes)
        self.name = self._grader.name

    def equal(self, one: str, other: str) -> bool:
        """Compare in a child process; False if it dies or exceeds its time limit."""
        return self._grader.resolve(self._grader.compare(one, other)).correct

    def close(self) -> None:
        """Stop the processes and running comparisons."""
        self._grader.stop()


def make_equivalence(name: AnswerEquivalence, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> Equivalence | None:
    """Create the equivalence of that name; None for exact match, or with a warning if math-verify is not installed."""
    if name is AnswerEquivalence.EXACT_MATCH:
        return None
    if find_spec("math_verify") is None:
        log.warning("math-verify is not installed: answers must match exactly; pip install math-verify")
        return None
    return MathVerify(memory_bytes, workers=max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) // 4)))
