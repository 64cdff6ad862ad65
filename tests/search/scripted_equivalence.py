"""An equivalence of answers whose verdicts a test gives, when it wants to."""

import threading
from collections.abc import Callable

from espalier.search.fairness import NOBODY, Account
from espalier.search.voting.equivalence import Comparison


class ScriptedEquivalence:
    """Notes every question; with `at_once=False` each one waits until `let_go` or `close` is called.

    Attributes:
        asked: pairs in order of asking.
        accounts: who asked for each.
        closed: how often it was closed.
    """

    name = "script 1"

    def __init__(
        self,
        equal: Callable[[str, str], bool] = lambda one, other: False,
        at_once: bool = True,
        cpu_seconds: float = 0.0,
    ) -> None:
        self.asked: list[tuple[str, str]] = []
        self.accounts: list[Account] = []
        self.closed = 0
        self._equal = equal
        self._cpu_seconds = cpu_seconds
        self._free = threading.Event()
        if at_once:
            self._free.set()

    def compare(self, one: str, other: str, account: Account = NOBODY) -> Comparison:
        self.asked.append((one, other))
        self.accounts.append(account)
        self._free.wait(5)  # of a test that has ended nobody waits any more
        return Comparison(self._equal(one, other), self._cpu_seconds)

    def let_go(self) -> None:
        """Answer all questions from now on."""
        self._free.set()

    def close(self) -> None:
        self.closed += 1
        self._free.set()
