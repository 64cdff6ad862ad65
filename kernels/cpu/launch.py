"""Launching compiled functions that use several threads."""

import threading
from collections.abc import Callable
from typing import Any

_lock = threading.Lock()


def launch(function: Callable[..., None], *args: Any) -> None:
    """Call `function`, one at a time in this process.

    numba's fallback threading layer aborts when two Python threads launch at once; launches are short.
    """
    with _lock:
        function(*args)
