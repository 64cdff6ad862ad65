"""The contract between the engine and what guides its draws, and the thread that asks for a step's allowed tokens.

The thread is left behind where a matcher takes too long.
"""

import math
import threading
import time
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Protocol

import numpy as np

MAX_SECONDS = 0.2
"""CPU time that a matcher may take for one token: all searches wait for it."""
_LOOK_SECONDS = 0.05


class Matcher(Protocol):
    """A state of one path: the tokens that may come next. Used by one thread at a time, see `MaskThread`.

    A matcher that cannot go on has an `error` from then on, and allows an end-of-sequence token at most; the branch
    ends with `StopCause.ERROR`.
    """

    @property
    def error(self) -> str:
        """The reason why it cannot go on; empty while it can."""
        ...

    @property
    def ended(self) -> bool:
        """True if no text may follow."""
        ...

    def allow(self, bits: np.ndarray) -> None:
        """Write the allowed tokens to `bits`, uint8 `[ceil(vocabulary / 8)]`: a bit for each, the lowest one first."""
        ...

    def advance(self, token_id: int) -> None:
        """Take the token that was drawn."""
        ...

    def give_up(self) -> None:
        """Have an error from now on, without a look at what another thread may still compute in it."""
        ...

    def copy(self) -> "Matcher":
        """A matcher in the same state, which goes its own way."""
        ...


class _Fill:
    """The matchers of one step, and how far the thread is with them."""

    def __init__(self, matchers: Mapping[int, Matcher], width: int) -> None:
        self.matchers = list(matchers.items())
        self.bits = np.empty((len(self.matchers), width), dtype=np.uint8)  # left to a thread that is left behind
        self.at: tuple[int, float] = 0, math.inf  # of a matcher, and the CPU time when it began
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._left_behind = False

    def begin(self, number: int) -> bool:
        """Take note that the thread begins with a matcher; False if it was left behind, and may touch no more."""
        with self._lock:
            self.at = number, time.thread_time()
            return not self._left_behind

    def leave_behind(self, number: int) -> bool:
        """Leave the thread behind, if it is still at that matcher."""
        with self._lock:
            self._left_behind = self.at[0] == number and not self.ended.is_set()
            return self._left_behind


class MaskThread:
    """A thread that asks matchers for the allowed tokens, begun with the first of them."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._fills: SimpleQueue[_Fill | None] = SimpleQueue()

    def fill(self, matchers: Mapping[int, Matcher], bits: np.ndarray) -> None:
        """Write the allowed tokens of matchers; one that takes too long is given up, and allows the end alone.

        Args:
            matchers: by the row of `bits`.
            bits: uint8 `[rows, ceil(vocabulary / 8)]`, see `Matcher`.
        """
        left = dict(matchers)
        while left:
            fill = _Fill(left, bits.shape[1])
            thread, number = self._running(), len(fill.matchers)
            self._fills.put(fill)
            while not fill.ended.wait(_LOOK_SECONDS):
                at, begun = fill.at
                if _cpu_seconds(thread) - begun > MAX_SECONDS and fill.leave_behind(at):
                    self.close()
                    number = at
                    break
            if number == len(fill.matchers) and fill.error:
                raise fill.error
            for (row, _), mine in zip(fill.matchers[:number], fill.bits, strict=False):
                bits[row] = mine
                del left[row]
            if number < len(fill.matchers):
                row, matcher = fill.matchers[number]
                matcher.give_up()
                matcher.allow(bits[row])
                del left[row]

    def close(self) -> None:
        """Let the thread end, once it is free."""
        self._fills.put(None)
        self._thread, self._fills = None, SimpleQueue()

    def _running(self) -> threading.Thread:
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._fills,), name="espalier-masks", daemon=True)
            self._thread.start()
        return self._thread


def _work(fills: "SimpleQueue[_Fill | None]") -> None:
    while fill := fills.get():
        try:
            for number, (_, matcher) in enumerate(fill.matchers):
                if not fill.begin(number):
                    break
                matcher.allow(fill.bits[number])
        except BaseException as error:  # of the thread that waits
            fill.error = error
        fill.ended.set()


def _cpu_seconds(thread: threading.Thread) -> float:
    """Seconds that a running thread has computed; of all threads where the system does not tell them apart."""
    if thread.ident is None or not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time()
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
