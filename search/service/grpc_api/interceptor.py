"""gRPC interceptor of every call: authentication, limits, errors, access log.

gRPC sends the text of an exception that leaves a handler to the client as UNKNOWN, and it may contain paths or
prompts. So this interceptor is the outermost one, and no exception leaves it.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from urllib.parse import unquote

import grpc
from grpc_health.v1 import health_pb2

from espalier.kserve import inference_pb2
from espalier.search.service.access.callers import Callers
from espalier.search.service.access.calls import REQUEST_ID, Call, request_id_of
from espalier.search.service.errors import (
    MessageTooLargeError,
    NotOfferedError,
    UnreadableMessageError,
    cut,
    failure_of,
)
from espalier.search.service.grpc_api.status import VIOLATION_BYTES, abort
from espalier.search.service.session import Session

log = logging.getLogger("espalier.service")

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
CALL: ContextVar[Call] = ContextVar("call")
"""The call that a handler works for."""
_FIRST_SECONDS = 30.0
"""Seconds in which the first message of a stream must have come."""
_Decode = Callable[[bytes], Any]
_OPEN = (
    f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/",
    *(f"/{INFERENCE.full_name}/{method}" for method in ("ServerLive", "ServerReady")),
)
"""Methods that need no login and are not logged: load balancers call them all the time."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handler of every method."""

    def __init__(self, session: Session, callers: Callers, max_receive_bytes: int) -> None:
        """Create an interceptor.

        Args:
            session: lets messages be decoded in turn, and is told of each call that is over.
            callers: tells who calls.
            max_receive_bytes: largest message that is decoded.
        """
        self._session = session
        self._callers = callers
        self._max_receive_bytes = max_receive_bytes

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of one method."""
        handler = await continuation(handler_call_details)
        if handler is None:  # unknown method: gRPC answers UNIMPLEMENTED
            return handler
        name: str = handler_call_details.method
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_stream
        # The handlers decode themselves: of a deserializer's error gRPC would log the stack and say UNKNOWN.
        wrapped = self._wrapped(behaviour, name, handler.request_deserializer)
        return make(wrapped, request_deserializer=None, response_serializer=handler.response_serializer)

    def _wrapped(self, behaviour: Callable[..., Any], method: str, decode: _Decode) -> Callable[..., Any]:
        if inspect.isasyncgenfunction(behaviour):
            return self._wrapped_generator(behaviour, method, decode)

        async def wrapped(raw: bytes | AsyncIterator[bytes], context: Any) -> Any:
            async with self._call(method, context) as call:
                if isinstance(raw, bytes):
                    self._identify(call, method, context)
                    return await behaviour(await self._decoded(call, raw, decode), context)
                messages = await _begun(raw)
                self._identify(call, method, context)
                return await behaviour(self._all_decoded(call, messages, decode), context)

        return wrapped

    def _wrapped_generator(
        self, behaviour: Callable[..., AsyncIterator[Any]], method: str, decode: _Decode
    ) -> Callable[..., Any]:
        # Of services that others wrote. Ours are coroutines that use context.write, as a cancelled call closes async
        # generators late.
        async def wrapped(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
            async with self._call(method, context) as call:
                self._identify(call, method, context)
                async for response in behaviour(self._all_decoded(call, messages, decode), context):
                    yield response

        return wrapped

    @asynccontextmanager
    async def _call(self, method: str, context: Any) -> AsyncIterator[Call]:
        request_id = request_id_of(_metadata(context, REQUEST_ID))
        call = Call(method.rpartition("/")[2], request_id, _metadata(context, "traceparent"), context.peer())
        CALL.set(call)
        context.set_trailing_metadata(((REQUEST_ID, call.request_id),))
        try:
            yield call
        except asyncio.CancelledError:
            call.code = "CANCELLED"
            raise
        except Exception as error:
            await self._fail(call, context, error)
        finally:
            call.end()
            if not method.startswith(_OPEN):
                self._session.call_ended(call)

    def _identify(self, call: Call, method: str, context: Any) -> None:
        if not method.startswith(_OPEN):
            login = _metadata(context, "authorization")
            call.caller = self._callers.identify(login, _host(context), _certificate(context))

    async def _fail(self, call: Call, context: Any, error: Exception) -> None:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if context.cancelled() or context.done():
            call.code = "CANCELLED"
            log.debug("the client disconnected before its call failed", exc_info=error)
            return
        if isinstance(error, NotImplementedError):  # of a generated class, such as the health service's List
            error = NotOfferedError("this server does not offer that method")
        failure = failure_of(error)
        call.fail(failure.code, failure.reason)
        await abort(context, failure, (REQUEST_ID, call.request_id))

    async def _decoded(self, call: Call, raw: bytes, decode: _Decode) -> Any:
        """The message of a call, decoded on a thread if it is large; see `Session.read`.

        Raises:
            MessageTooLargeError, UnreadableMessageError: it is too large, or no message.
            BusyError: see `Session.read`.
        """
        if len(raw) > self._max_receive_bytes:
            raise MessageTooLargeError(f"the message has {len(raw)} bytes, of at most {self._max_receive_bytes}")
        return await self._session.read(call, len(raw), partial(_message, raw, decode))

    async def _all_decoded(self, call: Call, messages: AsyncIterator[bytes], decode: _Decode) -> AsyncIterator[Any]:
        async for raw in messages:
            yield await self._decoded(call, raw, decode)


async def _begun(messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The messages of a call, once the first has come: a client whose write fails would not be told why it is refused.

    Raises:
        UnreadableMessageError: none has come for some time.
    """
    try:
        async with asyncio.timeout(_FIRST_SECONDS):
            first = await anext(aiter(messages), None)
    except TimeoutError:
        raise UnreadableMessageError(f"no message has come within {_FIRST_SECONDS:g} s") from None

    async def all_messages() -> AsyncIterator[bytes]:
        if first is not None:
            yield first
            async for raw in messages:
                yield raw

    return all_messages()


def _message(raw: bytes, decode: _Decode) -> Any:
    try:
        return decode(raw)
    except Exception as error:  # protobuf's DecodeError; anything else is no better a message
        text = f"the message cannot be decoded: {cut(str(error), VIOLATION_BYTES)}"
        raise UnreadableMessageError(text) from None


def _metadata(context: Any, wanted: str) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == wanted:
            return value if isinstance(value, str) else value.decode(errors="replace")
    return None


def _host(context: Any) -> str:
    """The address that a call comes from, as HTTP has it: of `ipv4:10.0.0.1:5000` and `ipv6:%5B::1%5D:5000`."""
    kind, _, address = unquote(context.peer()).partition(":")
    return address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else context.peer()


def _certificate(context: Any) -> str | None:
    """Common name of the client's certificate, which the handshake has verified."""
    names = context.auth_context().get("x509_common_name", ())
    return next((name.decode(errors="replace") for name in names), None)
