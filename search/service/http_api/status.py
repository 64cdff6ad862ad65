"""Translates failures to HTTP statuses with error objects as the OpenAI API has them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from espalier.engine.errors import EspalierError
from espalier.search.service.errors import REFUSED_BY_HTTP, cut, failure_of


class HttpError(EspalierError):
    """A failure that has an HTTP status of its own.

    Attributes:
        status: the HTTP status.
        param: what of the request is wrong.
        code: a word for programs.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        text: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        super().__init__(text)


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """The HTTP response to a failure.

    Attributes:
        status: the HTTP status.
        rpc_code: name of the google.rpc code, for the log.
        reason: why, for the metrics; one of `errors.REASONS`.
        body: the error object.
        headers: of the response.
    """

    status: int
    rpc_code: str
    reason: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


_STATUSES: dict[str, tuple[int, str, str | None]] = {
    # google.rpc code: status, type and code of the error object
    "INVALID_ARGUMENT": (400, "invalid_request_error", None),
    "UNAUTHENTICATED": (401, "invalid_request_error", "invalid_api_key"),
    "PERMISSION_DENIED": (403, "invalid_request_error", "permission_denied"),
    "NOT_FOUND": (404, "invalid_request_error", "not_found"),
    "UNIMPLEMENTED": (405, "invalid_request_error", "not_offered"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error", "rate_limit_exceeded"),
    "INTERNAL": (500, "server_error", "internal_error"),
    "UNAVAILABLE": (503, "server_error", "service_unavailable"),
    "DEADLINE_EXCEEDED": (504, "server_error", "timeout"),
}
_RPC_CODES = {status: code for code, (status, _, _) in _STATUSES.items()}
_PARAM_BYTES = 256
_NO_RETRY = ("INTERNAL", "DEADLINE_EXCEEDED")
"""Failures that would come again; OpenAI's clients repeat every 5xx unless a header says no."""


def answer_of(error: Exception) -> ErrorAnswer:
    """Return the response to `error`; see `errors.failure_of`."""
    if isinstance(error, HttpError):
        rpc_code = _RPC_CODES.get(error.status, "INVALID_ARGUMENT")
        body = error_object(str(error), "invalid_request_error", error.param, error.code)
        return ErrorAnswer(error.status, rpc_code, REFUSED_BY_HTTP, body, error.headers)
    failure = failure_of(error)
    status, kind, code = _STATUSES[failure.code]
    headers: dict[str, str] = {}
    if failure.retry_seconds is not None:
        headers["retry-after"] = str(math.ceil(failure.retry_seconds))
    if failure.code == "UNAUTHENTICATED":
        headers["www-authenticate"] = "Bearer"
    if failure.code in _NO_RETRY:
        headers["x-should-retry"] = "false"
    param = cut(failure.violations[0].field, _PARAM_BYTES) if failure.violations else None
    body = error_object(failure.text, kind, param, code)
    return ErrorAnswer(status, failure.code, failure.reason, body, headers)


def error_object(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """Return an error as the OpenAI API writes it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
