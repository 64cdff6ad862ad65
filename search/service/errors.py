"""Maps errors to gRPC statuses: a typed error becomes a status code with google.rpc details.

gRPC sends the text of any other exception to the client as UNKNOWN, and it may contain paths or prompts. The
interceptor here is therefore the outermost one and turns such an exception into INTERNAL with an id, under which it is
logged.
"""

import inspect
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from espalier.engine.errors import (
    EspalierError,
    InvalidRequestError,
    PoolExhaustedError,
    RequestTooLargeError,
    Violation,
)

log = logging.getLogger("espalier.service")

# Error metadata above 16 KiB would itself fail with RESOURCE_EXHAUSTED, so every part is limited.
TEXT_BYTES = 1024
VIOLATION_BYTES = 256
MAX_VIOLATIONS = 32


class BusyError(EspalierError):
    """All slots are taken and the queue is full, or no slot became free in time."""


class NotReadyError(EspalierError):
    """The server cannot search: it is loading, shutting down, or its engine has died."""


class SearchTimeoutError(EspalierError):
    """A search did not end at the server's time limit."""


class UnreadableMessageError(EspalierError):
    """A message cannot be decoded."""


class NotOfferedError(EspalierError):
    """A method that this server does not offer."""


class SearchFailedError(EspalierError):
    """A search failed because of an error in a model or in a call made for it."""


_CODES: tuple[tuple[type[EspalierError], int, float | None], ...] = (
    # error type, google.rpc code, seconds after which to retry
    (InvalidRequestError, code_pb2.INVALID_ARGUMENT, None),
    (RequestTooLargeError, code_pb2.INVALID_ARGUMENT, None),
    (UnreadableMessageError, code_pb2.INVALID_ARGUMENT, None),
    (NotOfferedError, code_pb2.UNIMPLEMENTED, None),
    (BusyError, code_pb2.RESOURCE_EXHAUSTED, 5.0),
    (PoolExhaustedError, code_pb2.RESOURCE_EXHAUSTED, 5.0),
    (NotReadyError, code_pb2.UNAVAILABLE, 5.0),
    (SearchTimeoutError, code_pb2.DEADLINE_EXCEEDED, None),
    (SearchFailedError, code_pb2.INTERNAL, None),
)


def status_of(error: Exception) -> status_pb2.Status:
    """Return the status that a client sees for `error`.

    An unexpected type of error is a bug: it is logged under an id, and the client sees only the id.
    """
    for kind, code, retry_seconds in _CODES:
        if isinstance(error, kind):
            return _status(code, str(error), _details(error, retry_seconds))
    name = uuid.uuid4().hex[:12]
    log.error("internal error, id=%s", name, exc_info=error)
    return _status(code_pb2.INTERNAL, f"internal error, id={name}", [])


def _details(error: EspalierError, retry_seconds: float | None) -> list[Message]:
    details: list[Message] = []
    if isinstance(error, InvalidRequestError):
        details.append(_bad_request(error.violations))
    elif isinstance(error, RequestTooLargeError):
        # No single field is wrong; the request as a whole is too large.
        details.append(_bad_request([Violation("request", str(error))]))
    if retry_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(retry_seconds * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details


def _bad_request(violations: list[Violation]) -> error_details_pb2.BadRequest:
    return error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(field=v.field, description=cut(v.description, VIOLATION_BYTES))
            for v in violations[:MAX_VIOLATIONS]
        ]
    )


def _status(code: int, text: str, details: list[Message]) -> status_pb2.Status:
    status = status_pb2.Status(code=code, message=cut(text, TEXT_BYTES))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def cut(text: str, limit: int) -> str:
    """Truncate `text` to at most `limit` bytes of UTF-8, and mark the cut."""
    raw = text.encode(errors="replace")
    return text if len(raw) <= limit else raw[: limit - 3].decode(errors="ignore") + "..."


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler, so that its exceptions become the status of `status_of`."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of one method."""
        handler = await continuation(handler_call_details)
        if handler is None:  # unknown method: gRPC answers UNIMPLEMENTED
            return handler
        codec = {
            "request_deserializer": _lenient(handler.request_deserializer),
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(_guarded(handler.unary_unary), **codec)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(_guarded(handler.unary_stream), **codec)
        return handler  # reflection alone streams requests


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """A deserializer whose error reaches the handler as a value: gRPC would log it with a stack and answer UNKNOWN."""

    def read(raw: bytes) -> Any:
        try:
            return deserialize(raw)
        except Exception as error:  # protobuf's DecodeError; anything else is no better a message
            return UnreadableMessageError(f"the message cannot be decoded: {cut(str(error), VIOLATION_BYTES)}")

    return read


def _guarded(behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    # A cancelled call closes async generators late; a coroutine that uses context.write is unwound immediately.
    if inspect.isasyncgenfunction(behaviour):
        raise NotImplementedError("a streaming handler must be a coroutine that uses context.write")

    async def guarded(request: Any, context: Any) -> Any:
        try:
            if isinstance(request, UnreadableMessageError):
                raise request
            return await behaviour(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            if context.cancelled() or context.done():
                log.debug("the client disconnected before its call failed", exc_info=error)
                return None
            if isinstance(error, NotImplementedError):  # of a generated class, such as the health service's List
                error = NotOfferedError("this server does not offer that method")
            status: Any = rpc_status.to_status(status_of(error))
            return await context.abort(status.code, status.details, status.trailing_metadata)

    return guarded
