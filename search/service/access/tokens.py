"""Makes tokens, and adds callers to the callers file."""

import fcntl
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from espalier.engine.errors import InvalidRequestError
from espalier.search.schema import violations
from espalier.search.service.access.callers import CallerEntry, CallersFileError, read_callers

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
_PREFIX = "espalier_"
"""Begins every token, so that tools that look for secrets in files can find them."""


def add_caller(file: Path, name: str, limits: CallerEntry, replace_existing: bool = False) -> str:
    """Add a caller with a new token to a callers file, which is created if it does not exist.

    The file holds the token's hash only. It is replaced in one step, so that a running server never reads half of it;
    its comments and other callers stay as they are. A new file is readable by its owner alone; an existing one keeps
    its owner and group, and whether the group may read it.

    Args:
        file: the callers file.
        name: the caller's name; letters, digits and `_.@-`, at most 64.
        limits: the caller's limits; its token is set here.
        replace_existing: whether the caller may exist; its token and limits are then replaced.

    Returns:
        The token.

    Raises:
        InvalidRequestError: a limit is out of range.
        CallersFileError: the name is taken or invalid, or the file cannot be read, written, or is invalid.
    """
    if not _NAME.fullmatch(name):
        raise CallersFileError(f"{name!r} is no name of a caller: use letters, digits and _.@-, at most 64")
    if wrong := violations(limits):
        raise InvalidRequestError(wrong)
    file = file.resolve()  # a link stays a link
    token = _PREFIX + secrets.token_urlsafe(32)
    try:
        with _locked(file.parent):
            document = _document(file)
            if name in document and not replace_existing:
                raise CallersFileError(f"--callers {file}: {name} exists; give another name, or --replace")
            entry = replace(limits, token_sha256=sha256(token.encode()).hexdigest())
            document[name] = {key: value for key, value in asdict(entry).items() if value not in (None, False)}
            _write(file, tomlkit.dumps(document))
    except OSError as error:
        raise CallersFileError(f"--callers {file}: cannot be written: {error}") from error
    return token


def _document(file: Path) -> Any:
    if not file.exists():
        return tomlkit.document()
    read_callers(file)  # says what is wrong with it as the server would
    try:
        return tomlkit.parse(file.read_text(encoding="utf-8"))
    except TOMLKitError as error:
        raise CallersFileError(f"--callers {file}: cannot be read: {error}") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time change a file in `folder`."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write(file: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)  # readable by this user only
    try:
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            if file.exists():
                old = file.stat()
                os.fchown(handle, old.st_uid, old.st_gid)
                os.fchmod(handle, 0o600 | old.st_mode & stat.S_IRGRP)
            os.fsync(handle)
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
