"""Failures as callers see them: a code, a text, and what to do.

Codes are those of google.rpc, which every transport translates. The text of an unexpected exception may contain paths
or prompts, so such an exception is logged under an id, and the caller gets only the id.
"""

import logging
import re
import uuid
from dataclasses import dataclass

from espalier.engine.errors import (
    EspalierError,
    InvalidRequestError,
    PoolExhaustedError,
    RequestTooLargeError,
    Violation,
)
from espalier.search.request import SearchRequest
from espalier.search.schema import declared

log = logging.getLogger("espalier.service")

_FIELDS = {
    flag: field.name for field in declared(SearchRequest) if field.option for flag in (field.flag, field.option.short)
}
_FLAG = re.compile(r"(?<![\w-])(?:--[a-z][a-z-]+|-[NM])(?![\w-])")

TEXT_BYTES = 1024
"""Largest size of a failure's text."""
_MAX_VIOLATIONS = 256
"""Fields that one failure names."""


class BindError(EspalierError):
    """The server cannot listen on one of its addresses."""


class BusyError(EspalierError):
    """All slots are taken and the queue is full, or no slot became free in time."""


class QuotaError(EspalierError):
    """The caller has used up what it may take.

    Attributes:
        retry_seconds: when there will be some again.
    """

    def __init__(self, text: str, retry_seconds: float) -> None:
        self.retry_seconds = retry_seconds
        super().__init__(text)


class UnauthenticatedError(EspalierError):
    """A call has no login where one is needed, or an unknown one."""


class NotAllowedError(EspalierError):
    """The caller may not do that."""


class NotReadyError(EspalierError):
    """The server cannot search: it is loading, shutting down, or its engine has died."""


class SearchTimeoutError(EspalierError):
    """A search did not end at the server's time limit."""


class UnreadableMessageError(EspalierError):
    """A message cannot be decoded."""


class MessageTooLargeError(EspalierError):
    """A message is larger than the server receives."""


class NotOfferedError(EspalierError):
    """A method that this server does not offer."""


class UnknownModelError(EspalierError):
    """A call names a model that is not served, or a search that there is not."""


class SearchFailedError(EspalierError):
    """A search failed because of an error in a model or in a call made for it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure as a caller sees it.

    Attributes:
        code: name of a google.rpc code.
        reason: one of `REASONS`; tells apart what has the same code.
        text: at most `TEXT_BYTES` bytes.
        violations: fields of the request that are wrong.
        retry_seconds: when to try again; None if that is of no use.
    """

    code: str
    reason: str
    text: str
    violations: tuple[Violation, ...] = ()
    retry_seconds: float | None = None


_CODES: tuple[tuple[type[EspalierError], str, float | None], ...] = (
    # error type, code, seconds after which to retry
    (InvalidRequestError, "INVALID_ARGUMENT", None),
    (RequestTooLargeError, "INVALID_ARGUMENT", None),
    (UnreadableMessageError, "INVALID_ARGUMENT", None),
    (MessageTooLargeError, "INVALID_ARGUMENT", None),
    (UnauthenticatedError, "UNAUTHENTICATED", None),
    (NotAllowedError, "PERMISSION_DENIED", None),
    (UnknownModelError, "NOT_FOUND", None),
    (NotOfferedError, "UNIMPLEMENTED", None),
    (BusyError, "RESOURCE_EXHAUSTED", 5.0),
    (QuotaError, "RESOURCE_EXHAUSTED", None),
    (PoolExhaustedError, "RESOURCE_EXHAUSTED", 5.0),
    (NotReadyError, "UNAVAILABLE", 5.0),
    (SearchTimeoutError, "DEADLINE_EXCEEDED", None),
    (SearchFailedError, "INTERNAL", None),
)

INTERNAL = "internal"
"""Reason of a failure that is a bug."""
REFUSED_BY_HTTP = "http"
"""Reason of a refusal that only HTTP has, such as an unknown path."""


def _reason(kind: type[EspalierError]) -> str:
    """`BusyError` is `busy`, `SearchFailedError` is `search_failed`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__.removesuffix("Error")).lower()


REASONS = (*(_reason(kind) for kind, _, _ in _CODES), REFUSED_BY_HTTP, INTERNAL)


def as_exception(error: BaseException) -> Exception:
    """Return `error` if a handler of exceptions catches it: a panic of a library in Rust is none."""
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


def failure_of(error: Exception) -> Failure:
    """Return `error` as a caller sees it.

    An unexpected type of error is a bug: it is logged under an id, and the caller gets only the id.
    """
    for kind, code, retry_seconds in _CODES:
        if isinstance(error, kind):
            retry = error.retry_seconds if isinstance(error, QuotaError) else retry_seconds
            named = getattr(error, "violations", ())[:_MAX_VIOLATIONS]
            if isinstance(error, RequestTooLargeError | MessageTooLargeError):  # no field: it is too large as a whole
                named = (Violation("request", str(error)),)
            violations = tuple(Violation(v.field, in_fields(v.description)) for v in named)
            text = cut(in_fields(cut(str(error), 2 * TEXT_BYTES)), TEXT_BYTES)
            return Failure(code, _reason(kind), text, violations, retry)
    name = uuid.uuid4().hex[:12]
    log.error("internal error, id=%s", name, exc_info=error)
    return Failure("INTERNAL", INTERNAL, f"internal error, id={name}")


def in_fields(text: str) -> str:
    """Replace command-line flags in `text` by the names of a request's fields; those of the server are called so."""

    def name(flag: re.Match[str]) -> str:
        return _FIELDS.get(flag[0]) or f"the server's {flag[0]}"

    return _FLAG.sub(name, text)


def cut(text: str, limit: int) -> str:
    """Truncate `text` to at most `limit` bytes of UTF-8, and mark the cut."""
    raw = text.encode(errors="replace")
    return text if len(raw) <= limit else raw[: limit - 3].decode(errors="ignore") + "..."
