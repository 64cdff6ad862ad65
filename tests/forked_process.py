"""Forks of a test's process, none of which outlives its test."""

import os
import signal
import time
from collections.abc import Callable

_SECONDS = 60.0


def is_true_when_forked(work: Callable[[], bool]) -> bool:
    """Call `work` in a fork of this process; false where it raises, or waits for a lock that another thread held."""
    child = os.fork()
    if not child:
        try:
            os._exit(0 if work() else 1)
        finally:  # or it would go on with the tests
            os._exit(2)
    end = time.monotonic() + _SECONDS
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    return ended[1] == 0
