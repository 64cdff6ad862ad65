"""Responses in JSON, and those to failures: HTTP statuses with error objects as the OpenAI API has them."""

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from espalier.engine.errors import EspalierError, PoolTooSmallError, RequestTooLargeError
from espalier.search.service.access.calls import Call
from espalier.search.service.errors import REFUSED_BY_HTTP, UnknownModelError, cut, failure_of


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


def answer_of(error: Exception, call: Call, as_text: bool = False) -> Response:
    """Return the response to `error`, and record that the call has failed; see `errors.failure_of`.

    Args:
        error: what went wrong.
        call: the call that has failed.
        as_text: whether the error object is a text alone, as the KServe protocol has it.
    """
    if isinstance(error, HttpError):
        call.fail(_RPC_CODES.get(error.status, "INVALID_ARGUMENT"), REFUSED_BY_HTTP)
        body = error_object(str(error), "invalid_request_error", error.param, error.code)
        return json_response({"error": str(error)} if as_text else body, error.status, error.headers)
    failure = failure_of(error)
    call.fail(failure.code, failure.reason)
    status, kind, code = _STATUSES[failure.code]
    headers: dict[str, str] = {}
    if failure.retry_seconds is not None:
        headers["retry-after"] = str(math.ceil(failure.retry_seconds))
    if failure.code == "UNAUTHENTICATED":
        headers["www-authenticate"] = "Bearer"
    if failure.code in _NO_RETRY:
        headers["x-should-retry"] = "false"
    if isinstance(error, RequestTooLargeError) and not isinstance(error, PoolTooSmallError):
        code = "context_length_exceeded"
    param = cut(failure.violations[0].field, _PARAM_BYTES) if failure.violations else None
    if isinstance(error, UnknownModelError):
        param, code = "model", "model_not_found"
    body = {"error": failure.text} if as_text else error_object(failure.text, kind, param, code)
    return json_response(body, status, headers)


def error_object(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """Return an error as the OpenAI API writes it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a value, or bytes that already are JSON."""
    content = value if isinstance(value, bytes) else to_json(value)
    return Response(content, status, {"cache-control": "no-store", **(headers or {})}, "application/json")


def to_json(value: Any) -> bytes:
    """Write a value as compact JSON, in ASCII."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
