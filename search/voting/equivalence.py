"""Answer equivalence for votes: whether two answers with different texts have the same value."""

import logging
import os
import threading
from importlib.util import find_spec
from typing import NamedTuple

from espalier.search.fairness import NOBODY, Account, Turns
from espalier.search.grading.math_verify import DEFAULT_MEMORY_BYTES, Grade, Grader
from espalier.search.request import AnswerEquivalence

_MAX_WORKERS = 4  # each imports sympy on first use and takes about 100 MB
_MAX_PROCESSES = 8
"""Processes of all callers together."""

log = logging.getLogger("espalier.search")


class Comparison(NamedTuple):
    """Verdict on whether two answers have the same value, and the CPU seconds that it took to compare them."""

    equal: bool
    cpu_seconds: float = 0.0


class MathVerify:
    """Answer equivalence by math-verify, in child processes started on first use; called by several threads.

    Attributes:
        name: name and version, for results.

    Each account that compares has processes of its own, which the system runs side by side, so that no comparison waits
    for one of somebody else's. Where those would be too many, accounts take turns at them.
    """

    def __init__(self, memory_bytes: int = DEFAULT_MEMORY_BYTES, workers: int = 1) -> None:
        """Set the number of processes of an account, and the memory limit of each in bytes; see `Grader`."""
        self._memory_bytes = memory_bytes
        places = max(_MAX_PROCESSES, workers + 1)
        self._turns = Turns(places, workers, max(1, places - 1))
        self._lock = threading.Lock()  # guards what follows
        self._graders: list[Grader] = []  # of one process each
        self._idle: list[Grader] = []  # the one to use next is the last
        self._closings = 0
        self.name = self._new_grader().name

    def _new_grader(self) -> Grader:
        return Grader(memory_bytes=self._memory_bytes)

    def compare(self, one: str, other: str, account: Account = NOBODY) -> Comparison:
        """Return whether `other` has the same value as `one`, which occurred earlier; charged to `account`.

        Takes CPU seconds at most, in a child process; not equal if that dies or exceeds a limit. What others compare
        may delay the verdict, but never changes it. May miss equal values but never equates different ones, so the
        order of the arguments can matter.
        """
        closings, grade = self._closings, Grade(False)
        self._turns.take(account)
        try:
            with self._lock:
                if closings != self._closings:
                    return Comparison(False)
                if not self._idle:
                    self._idle.append(self._new_grader())
                    self._graders.append(self._idle[-1])
                grader = self._idle.pop()
            grade = grader.resolve(grader.compare(one, other))
            self._put_back(grader, bool(grade.error), account)
        finally:
            self._turns.give_back(account, grade.cpu_seconds)
        return Comparison(grade.correct, grade.cpu_seconds)

    def _put_back(self, grader: Grader, restarts: bool, account: Account) -> None:
        """Make a grader the one to use next, but the last one if its process has ended and starts again."""
        with self._lock:
            self._idle.insert(0 if restarts else len(self._idle), grader)
            if len(self._graders) > 1 or account == NOBODY:
                return
            spare = self._new_grader()  # the next caller does not wait until one has started
            self._graders.append(spare)
            self._idle.insert(0, spare)
        spare.start()

    def close(self) -> None:
        """Stop the processes and running comparisons; using it again restarts it."""
        with self._lock:
            self._closings += 1
            graders = list(self._graders)
        for grader in graders:
            grader.stop()


def make_equivalence(name: AnswerEquivalence, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> MathVerify | None:
    """Create the equivalence of that name; None for exact match, or with a warning if math-verify is not installed."""
    if name is AnswerEquivalence.EXACT_MATCH:
        return None
    if find_spec("math_verify") is None:
        log.warning("math-verify is not installed: answers must match exactly; pip install math-verify")
        return None
    return MathVerify(memory_bytes, workers=max(1, min(_MAX_WORKERS, (os.cpu_count() or 1) // 4)))
