"""Notices that files have changed."""

import os
from collections.abc import Iterable
from pathlib import Path


class WatchedFiles:
    """Compares what identifies the content of files with what it was before."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = tuple(files)
        self._seen: tuple[object, ...] = ()

    def changed(self) -> bool:
        """Return whether any file has changed since the last call; true for the first call if there are files."""
        now = tuple(_version(file) for file in self._files)
        changed, self._seen = now != self._seen, now
        return changed


def _version(file: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
