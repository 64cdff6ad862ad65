"""Files of commands that may be killed at any moment, or find another command at the same output.

Lines of JSON are appended, and a last one without its end does not count; other files are replaced as a whole. Locks
are those of the operating system on a file beside the output, and vanish with the process that holds them, however it
ends. A process that only reads, such as a report, takes none.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from espalier.engine.errors import EspalierError, first_line

LOCK = ".lock"
"""Name of the lock file of a folder. A process that is killed leaves it behind, where it locks nothing."""
_PARTIAL = ".partial"
"""Suffix of a file that is being written; the id of the process that writes it comes before."""
_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of file systems without locks."""
_MAX_COMMAND = 100
_log = logging.getLogger("espalier.runs")
_held = threading.local()
"""Lock files that a thread holds, as its `keys`: a command locks its folder, and what it calls does so again."""


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location and the object of each line; nothing for a file that is not there.

    Raises:
        EspalierError: the file cannot be read, or a line is damaged.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                if line.strip() and line.endswith("\n"):
                    with damage_named(f"{path}:{number}"):
                        record = json.loads(line)
                        if not isinstance(record, dict):
                            raise ValueError("it is not a JSON object")
                    yield f"{path}:{number}", record
    except FileNotFoundError:
        return
    except OSError as error:
        raise EspalierError(f"cannot read {path}: {error.strerror}") from error


@contextmanager
def damage_named(place: str) -> Iterator[None]:
    """Turn errors of what is read from a line into one that names the line."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise EspalierError(f"{place} is damaged: {what}; repair or remove the line") from error


def open_lines(path: Path) -> FileIO:
    """Open a file for appending, after removing a last line without its end.

    It has no buffer: what could not be written is not tried again when it is closed.
    """
    stream = path.open("ab+", buffering=0)
    stream.seek(0)
    stream.truncate(stream.readall().rfind(b"\n") + 1)
    return stream


def append(stream: FileIO, record: Mapping[str, Any], ensure_ascii: bool = True) -> None:
    """Append a line, which another process can read from then on.

    Raises:
        EspalierError: it cannot be written; the lines before are kept.
    """
    line = json.dumps(record, ensure_ascii=ensure_ascii).encode() + b"\n"
    try:
        while line:
            line = line[stream.write(line) :]
    except OSError as error:
        kept = "what came before is kept, and running the command again goes on behind it"
        raise EspalierError(f"cannot write {stream.name}: {error.strerror}; {kept}") from error


def write_whole(path: Path, value: Any) -> None:
    """Write `value` to `path` atomically, a string as text and anything else as JSON."""
    with replacing(path) as partial:
        partial.write_text(value if isinstance(value, str) else json.dumps(value, indent=2) + "\n", encoding="utf-8")


def remove_partial_files(folder: Path) -> None:
    """Remove files that processes were writing to `folder` when they were killed."""
    for path in folder.glob(f"*{_PARTIAL}"):
        writer = path.name.removesuffix(_PARTIAL).rpartition(".")[2]
        if writer.isdecimal() and (int(writer) == os.getpid() or not _is_running(int(writer))):
            path.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # not ours, but there
        pass
    return True


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write a file at, which takes the place of `path` once it is whole; else nothing is left of it.

    Raises:
        EspalierError: it cannot be written; on a full disk, libraries that write tensors raise what they like.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}{_PARTIAL}")
    try:
        yield partial
        partial.replace(path)
    except EspalierError:
        raise
    except Exception as error:
        why = error.strerror if isinstance(error, OSError) else f"{first_line(error)}; is the disk full?"
        raise EspalierError(f"cannot write {path}: {why}") from error
    finally:
        partial.unlink(missing_ok=True)


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
    key, keys = os.path.realpath(path), _held.__dict__.setdefault("keys", set[str]())
    if key in keys:
        yield
        return
    descriptor = _acquired(path, place)
    keys.add(key)
    try:
        yield
    finally:
        keys.remove(key)
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
            raise EspalierError(f"{place} is in use by {holder}: wait for its end, or name another --out") from None
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
