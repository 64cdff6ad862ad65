"""The C library's heap while models load."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_MMAP_THRESHOLD = -3
"""glibc's name of the size from which blocks of memory are the system's own."""


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Have glibc give each large block back as it is freed; by default it keeps holes as large as a model."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_MMAP_THRESHOLD, 2**18)
    try:
        yield
    finally:
        if mallopt:
            mallopt(_MMAP_THRESHOLD, 2**25)  # what it comes to by itself
