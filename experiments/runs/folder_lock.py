"""Locks on output folders and files, so that two processes never write to the same one.

They are locks of the operating system on a file beside the output, and vanish with the process that holds them, however
it ends. A process that only reads, such as a report, takes none.
"""

import errno
import fcntl
import json
import logging
import os
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from espalier.engine.errors import EspalierError

LOCK = ".lock"
"""Name of the lock file of a folder. A process that is killed leaves it behind, where it locks nothing."""
_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of file systems without locks."""
_MAX_COMMAND = 100
_log = logging.getLogger("espalier.runs")


class _Held(threading.local):
    """Locks that this thread holds: a command locks its folder, and what it calls does so again."""

    def __init__(self) -> None:
        self.keys: set[str] = set()


_held = _Held()


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Keep other processes and threads from writing to `folder`, which is created, and removed if it stays empty.

    Raises:
        EspalierError: another one has the lock, and is named; or the folder cannot be written to.
    """
    made = not folder.exists()
    _make(folder)
    try:
        with _lock(folder / LOCK, folder):
            yield
    finally:
        if made:
            with suppress(OSError):  # there is something in it
                folder.rmdir()


@contextmanager
def file_lock(file: Path) -> Iterator[None]:
    """Keep other processes and threads from writing to `file`; its folder is created.

    Raises:
        EspalierError: see `folder_lock`.
    """
    _make(file.parent)
    with _lock(file.with_name(f".{file.name}{LOCK}"), file):
        yield


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EspalierError(f"cannot use {folder}: {error.strerror}; name another --out") from error


@contextmanager
def _lock(path: Path, place: Path) -> Iterator[None]:
    """Hold the lock file `path` of the output `place`."""
    key = os.path.realpath(path)
    if key in _held.keys:
        yield
        return
    descriptor = _acquired(path, place)
    _held.keys.add(key)
    try:
        yield
    finally:
        _held.keys.remove(key)
        if descriptor is not None:
            path.unlink(missing_ok=True)  # before the lock ends, so that nobody else's file is removed
            os.close(descriptor)


def _acquired(path: Path, place: Path) -> int | None:
    """A descriptor that holds the lock, in a file that says who does; None where the file system has no locks."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise EspalierError(f"cannot write to {place}: {error.strerror}; name another --out") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise EspalierError(
                f"{place} is in use by {holder}: wait until it has ended, or name another --out"
            ) from None
        except OSError as error:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            if error.errno not in _UNSUPPORTED:
                raise EspalierError(f"cannot lock {place}: {error.strerror}; name another --out") from error
            _log.warning("%s is on a file system without locks: run no other command with this --out", place)
            return None
        if os.fstat(descriptor).st_nlink:
            command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
            said = {"process": os.getpid(), "host": socket.gethostname(), "command": command}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(said).encode(), 0)
            return descriptor
        os.close(descriptor)  # of a file that its holder has just removed


def _holder(descriptor: int) -> str:
    """The process that holds the lock, as the file says."""
    try:
        said = json.loads(os.pread(descriptor, 2**16, 0))
        elsewhere = f" on {said['host']}" * (said["host"] != socket.gethostname())
        command = str(said["command"])
        shown = command if len(command) <= _MAX_COMMAND else command[:_MAX_COMMAND] + "…"
        return f"process {said['process']}{elsewhere} ({shown})"
    except (ValueError, TypeError, KeyError, OSError):
        return "another process"
