"""Standard error as lines of JSON only: the log, and what libraries in any language write there."""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby

_ACCESS = "espalier.access"
"""Logger whose messages are JSON already."""
_PIECE = 2**16
_END = b"\0end of the log\0"
"""End for the reader: children may keep the pipe open, so that it has none of its own."""


class JsonFormatter(logging.Formatter):
    """One object a record: time in seconds, level, logger, message, and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        if record.name == _ACCESS:
            return record.getMessage()
        more = {"exception": self.formatException(record.exc_info)} if record.exc_info else {}
        return _line(record.created, record.levelname, record.name, record.getMessage(), **more)


def _line(seconds: float, level: str, logger: str, message: str, **more: str) -> str:
    return json.dumps({"time": seconds, "level": level, "logger": logger, "message": message, **more})


@contextmanager
def stderr_as_json() -> Iterator[Callable[[], None]]:
    """Turn whatever this process writes to its standard error into lines of JSON, and the log of all loggers.

    What is JSON stays; other lines become the message of an object, several that are written at once a single one.
    Yields a function that ends it early, before an exit that runs no `finally`.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[handler], force=True)
    sys.stderr.flush()
    before, (reading, writing) = os.dup(2), os.pipe()
    os.dup2(writing, 2)
    thread = threading.Thread(target=_copy, args=(reading, before), name="espalier-json-log", daemon=True)
    thread.start()

    def end() -> None:
        if thread.is_alive():
            sys.stderr.flush()
            os.dup2(before, 2)
            os.write(writing, _END)
            thread.join()
            for descriptor in (reading, writing, before):
                os.close(descriptor)

    try:
        yield end
    finally:
        end()


def _copy(reading: int, target: int) -> None:
    """Copy what comes, as JSON, until the end."""
    rest, ended = b"", b""
    with os.fdopen(target, "wb", closefd=False) as stream:
        while not ended:
            text, ended, _ = (rest + os.read(reading, _PIECE)).partition(_END)
            *lines, rest = text.split(b"\n")
            stream.write(_as_json([*lines, rest] if ended else lines))
            stream.flush()


def _as_json(lines: list[bytes]) -> bytes:
    """The lines that are JSON objects as they are, and what is between them as objects."""
    found: list[bytes] = []
    for is_object, group in groupby(lines, _is_object):
        if is_object:
            found += group
        elif text := "\n".join(line.decode(errors="backslashreplace").rstrip("\r") for line in group).strip():
            found.append(_line(time.time(), "WARNING", "stderr", text).encode())
    return b"".join(line + b"\n" for line in found)


def _is_object(line: bytes) -> bool:
    try:
        return line.startswith(b"{") and isinstance(json.loads(line), dict)
    except ValueError:
        return False
