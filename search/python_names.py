"""Errors and warnings of the Python interface, in Python's words: arguments stand where the command has flags."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

from espalier.engine.errors import EspalierError, InvalidRequestError
from espalier.search.request import SearchRequest
from espalier.search.run.settings import RuntimeSettings
from espalier.search.schema import declared

_FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z-]*[a-z]|-[A-Za-z])(?![\w-])")


@cache
def _arguments() -> dict[str, str]:
    """Names of arguments by the long and short flags of the same fields."""
    fields = [field for kind in (RuntimeSettings, SearchRequest) for field in declared(kind) if field.option]
    return {flag: f.name for f in fields for flag in (f.flag, f.option.short if f.option else "") if flag}


def in_python(text: str) -> str:
    """A message with the names of arguments for the flags of the same fields."""
    return _FLAG.sub(lambda match: _arguments().get(match[0], match[0]), text)


@contextmanager
def python_names() -> Iterator[None]:
    """Raise the errors of the block with the names of arguments for flags."""
    try:
        yield
    except EspalierError as error:
        error.args = tuple(in_python(value) if isinstance(value, str) else value for value in error.args)
        if isinstance(error, InvalidRequestError):
            error.violations = [replace(v, description=in_python(v.description)) for v in error.violations]
        raise
