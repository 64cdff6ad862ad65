"""Values that are read from files, and read again when the files change."""

import logging
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from espalier.engine.errors import EspalierError

T = TypeVar("T")

log = logging.getLogger("espalier.service")


class WatchedFiles(Generic[T]):
    """The value of files as they are. Thread-safe.

    Attributes:
        value: what was read last.
    """

    def __init__(self, files: Iterable[Path], read: Callable[[], T], kept: str) -> None:
        """Read the value.

        Args:
            files: what it is read from.
            read: reads it.
            kept: for the log, that the value read before stays.

        Raises:
            EspalierError: what `read` raises.
        """
        self._files, self._read, self._kept = tuple(files), read, kept
        self._lock = threading.Lock()
        self._seen = list(map(_version, self._files))
        self.value = read()

    def refresh(self) -> bool:
        """Read the value again if a file has changed; the value stays where that fails, which is logged.

        Returns:
            Whether there is a new value.
        """
        with self._lock:
            before, self._seen = self._seen, list(map(_version, self._files))
            if self._seen == before:
                return False
            try:
                self.value = self._read()
            except EspalierError as error:
                log.error("%s; %s", error, self._kept)
                return False
            return True


def _version(file: Path) -> tuple[int, int, int] | None:
    """Identity of a file's content: modification time, size and inode; None if it cannot be read."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
