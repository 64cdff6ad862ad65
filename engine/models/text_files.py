"""A checkpoint's small files, as text and as JSON; one that cannot be read or contradicts itself is named."""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from espalier.engine.errors import CheckpointError

MAX_BYTES = 256 * 2**20
"""Of one small file; the largest published tokenizers take a tenth of it."""
_MAX_SHOWN, _LISTED = 60, 5


def read_text(path: Path) -> str | None:
    """The text of a file, without a byte order mark; None when there is none of this name.

    Raises:
        CheckpointError: it is no regular file, cannot be read, is larger than `MAX_BYTES`, or is not text in UTF-8.
    """
    try:
        if not path.is_file():
            if os.path.lexists(path):
                raise CheckpointError(f"{path} is no file that could be read")
            return None
        if (size := path.stat().st_size) > MAX_BYTES:
            raise CheckpointError(f"{path} has {size:,} bytes; {MAX_BYTES:,} are read at most")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not text in UTF-8: {error}") from error


def parse_object(place: Path | str, text: str) -> dict[str, Any]:
    """The JSON object that `text` is.

    Args:
        place: the file that it is from, for errors.
        text: JSON.

    Raises:
        CheckpointError: it is not JSON or no object, gives one key two values, or holds NaN or an infinity.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        held = dict(pairs)  # of which JSON's readers would silently take the last
        for key, value in pairs if len(held) < len(pairs) else ():
            if value != held[key]:
                raise ValueError(f"{key} is given twice, as {shown(value)} and as {shown(held[key])}")
        return held

    def refuse(constant: str) -> None:
        raise ValueError(f"it holds {constant}, which is no number")

    try:
        read = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{place} is not valid JSON: {error}") from error
    if not isinstance(read, dict):
        raise CheckpointError(f"{place} holds no JSON object")
    return read


def shown(value: object) -> str:
    """A value for an error's text, cut short."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def some(names: Iterable[str]) -> str:
    """The first few names, in order, for an error's text."""
    listed = sorted(names)
    return ", ".join(listed[:_LISTED]) + (f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else "")


AN_OBJECT = "an object", lambda value: isinstance(value, dict)
A_LIST = "a list", lambda value: isinstance(value, list)
A_FLAG = "true or false", lambda value: isinstance(value, bool)
A_TEXT = "text", lambda value: isinstance(value, str)
"""Rules that fields have, for `require`."""


def require(place: str, name: str, value: Any, rule: str, holds: Callable[[Any], bool]) -> Any:
    """The value of a field, if it is as its rule says.

    Raises:
        CheckpointError: it is not; names the file, the field, the rule and the value.
    """
    if not holds(value):
        raise CheckpointError(f"{name} in {place} must be {rule}, is {shown(value)}")
    return value


def are_texts(value: object) -> bool:
    """True for a list of texts."""
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
