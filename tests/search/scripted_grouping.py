"""A grouping whose answers a test gives, when it wants to."""

from collections.abc import Callable
from concurrent.futures import Future


class ScriptedGrouping:
    """Keeps every question and its future; `answer` completes those that wait.

    Attributes:
        asked: pairs in order of asking.
        closed: how often it was closed.
    """

    name = "script 1"

    def __init__(self, equal: Callable[[str, str], bool] = lambda one, other: False, at_once: bool = False) -> None:
        self.asked: list[tuple[str, str]] = []
        self.closed = 0
        self._equal = equal
        self._at_once = at_once
        self._open: dict[tuple[str, str], Future[bool]] = {}

    def ask(self, one: str, other: str) -> "Future[bool] | None":
        self.asked.append((one, other))
        future = self._open[one, other] = Future()
        if self._at_once:
            self.answer()
        return future

    def close(self) -> None:
        self.closed += 1

    def waiting(self) -> list[tuple[str, str]]:
        return list(self._open)

    def answer(self, *pairs: tuple[str, str]) -> None:
        """Answer those pairs; all that wait where none is named."""
        for pair in pairs or self.waiting():
            self._open.pop(pair).set_result(self._equal(*pair))

    def fail(self, error: Exception, *pairs: tuple[str, str]) -> None:
        for pair in pairs or self.waiting():
            self._open.pop(pair).set_exception(error)

    def drop(self) -> None:
        for pair in self.waiting():
            self._open.pop(pair).cancel()
