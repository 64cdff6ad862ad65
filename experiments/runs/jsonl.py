"""Files of JSON Lines that a process appends to, and may be killed at: a last line without its end does not count."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from espalier.engine.errors import EspalierError


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
        raise EspalierError(
            f"cannot write {stream.name}: {error.strerror}; what came before is kept, and running the command again "
            "goes on behind it"
        ) from error
