"""Answers to calls: JSON, failures with HTTP statuses and error objects as the OpenAI API has them, event streams."""

import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from espalier.engine.errors import EspalierError, PoolTooSmallError, RequestTooLargeError
from espalier.search.run.executor import AnyEvent
from espalier.search.service.access.calls import Call
from espalier.search.service.errors import REFUSED_BY_HTTP, UnknownModelError, cut, failure_of
from espalier.search.service.session import finished

_COMMENT = b": the search goes on\n\n"
"""Sent after some silence, so that proxies keep the connection; clients ignore it."""
_WRITE_BYTES = 64 * 1024
"""Size from which waiting events are not joined to one write."""
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events
)
ServerSentEvent = tuple[bytes, str | None]
"""The data, one line, and the name of an event."""
ErrorShape = Callable[[str, int, str | None], dict[str, Any]]
"""Makes the body of an error of its text, the HTTP status, and a word for programs."""
Parts = Callable[[Any], Awaitable[list[ServerSentEvent]]]
"""Makes the events of the stream of one of a search."""


class HttpError(EspalierError):
    """A failure that has an HTTP status of its own.

    Attributes:
        status: the HTTP status.
        code: a word for programs.
        headers: further headers of the response.
    """

    def __init__(
        self, status: int, text: str, *, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status = status
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


def answer_of(error: Exception, call: Call, shape: ErrorShape | None = None) -> Response:
    """Return the response to `error`, and record that the call has failed; see `errors.failure_of`.

    Args:
        error: what went wrong.
        call: the call that has failed.
        shape: writes the body, of the text, the status and the code; None for an error object of OpenAI's.
    """
    if isinstance(error, HttpError):
        call.fail(_RPC_CODES.get(error.status, "INVALID_ARGUMENT"), REFUSED_BY_HTTP)
        body = error_object(str(error), "invalid_request_error", None, error.code)
        shaped = shape(str(error), error.status, error.code) if shape else body
        return json_response(shaped, error.status, error.headers)
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
    body = shape(failure.text, status, code) if shape else error_object(failure.text, kind, param, code)
    return json_response(body, status, headers)


def error_object(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """Return an error as the OpenAI API writes it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_as_text(message: str, status: int, code: str | None) -> dict[str, Any]:
    """Return an error as the KServe protocol writes it."""
    return {"error": message}


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a value, or bytes that already are JSON."""
    content = value if isinstance(value, bytes) else to_json(value)
    return Response(content, status, {"cache-control": "no-store", **(headers or {})}, "application/json")


def to_json(value: Any) -> bytes:
    """Write a value as compact JSON, in ASCII."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


# ---- searches


async def answer(
    call: Call,
    search: AbstractAsyncContextManager[AsyncIterator[Sequence[Any]]],
    whole: Callable[[Any], Awaitable[Any]] | None,
    parts: Parts,
    shape: ErrorShape | None = None,
    error_event: str | None = "error",
) -> Response | ASGIApp:
    """Run a search and answer its call.

    A stream begins with its first event: before, a failure is an ordinary response; after, it is an event `error`.

    Args:
        call: what is answered.
        search: see `Session.search`.
        whole: makes the JSON of the last event, for an answer without events; None to answer by a stream of events.
        parts: makes the events of the stream.
        shape: of an error; see `answer_of`.
        error_event: name of an error's event.
    """
    if whole is not None:
        async with search as events:
            end = await finished(events)
        return json_response(await whole(end))

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def write(raw: bytes, more: bool = True) -> None:  # waits while the client does not read
            await send({"type": "http.response.body", "body": raw, "more_body": more})

        try:
            async with search as events, aclosing(_stream(events, parts)) as written:
                async for raw in written:
                    if not begun:
                        begun = True
                        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
                    await write(raw)
        except Exception as error:
            if not begun:
                raise
            await write(_written(bytes(answer_of(error, call, shape).body), error_event))
        await write(b"", more=False)

    return respond


async def _stream(search: AsyncIterator[Sequence[AnyEvent]], parts: Parts) -> AsyncGenerator[bytes, None]:
    """The events of a search as they are written, those that have come together in one piece."""
    async for events in search:
        raw = b"" if events else _COMMENT
        for event in events:
            raw += b"".join(_written(data, name) for data, name in await parts(event))
            if len(raw) >= _WRITE_BYTES:
                yield raw
                raw = b""
        if raw:
            yield raw


def _written(data: bytes, name: str | None) -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return b"%sdata: %s\n\n" % (head, data)
