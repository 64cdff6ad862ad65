"""The methods of `SearchService`, and what every gRPC call passes: authentication, limits, errors, access log.

gRPC sends the text of an exception that leaves a handler to the client as UNKNOWN, and it may contain paths or
prompts. So the interceptor is the outermost one, and no exception leaves it.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import unquote

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.kserve import inference_pb2
from espalier.search.result import Event, Finished
from espalier.search.scores import SessionTurn
from espalier.search.service import errors
from espalier.search.service.access.callers import Callers
from espalier.search.service.access.calls import REQUEST_ID, Call, recorded, request_id_of
from espalier.search.service.grpc_api import convert
from espalier.search.service.session import SearchCall, Session, finished
from espalier.v1 import search_pb2 as pb
from espalier.v1.search_pb2_grpc import SearchServiceServicer

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

# Error metadata above 16 KiB would itself fail with RESOURCE_EXHAUSTED, so every part is limited.
_VIOLATION_BYTES = 256
_MAX_VIOLATIONS = 32


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handler of every method."""

    def __init__(self, session: Session, callers: Callers) -> None:
        """Create an interceptor.

        Args:
            session: lets messages be decoded in turn, and is told of each call that is over.
            callers: tells who calls.
        """
        self._session = session
        self._callers = callers

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
        kind = next(kind for kind in ("unary_unary", "unary_stream", "stream_stream") if getattr(handler, kind))
        # The handlers decode themselves: of a deserializer's error gRPC would log the stack and say UNKNOWN.
        wrapped = self._wrapped(getattr(handler, kind), name, handler.request_deserializer)
        return handler._replace(**{kind: wrapped}, request_deserializer=None)

    def _wrapped(self, behaviour: Callable[..., Any], method: str, decode: _Decode) -> Callable[..., Any]:
        async def wrapped(raw: bytes | AsyncIterator[bytes], context: Any) -> Any:
            async with self._call(method, context) as call:
                messages = raw if isinstance(raw, bytes) else await _begun(raw)
                if not method.startswith(_OPEN):
                    login = _metadata(context, "authorization")
                    call.caller = self._callers.identify(login, _host(context), _certificate(context))
                if isinstance(messages, bytes):
                    given = await self._decoded(call, messages, decode)
                else:
                    given = self._decoded_each(call, messages, decode)
                answered = behaviour(given, context)
                if inspect.isasyncgen(answered):  # of services that others wrote: a cancelled call closes one late
                    async for response in answered:
                        await context.write(response)
                    return None
                return await answered

        return wrapped

    @asynccontextmanager
    async def _call(self, method: str, context: Any) -> AsyncIterator[Call]:
        request_id = request_id_of(_metadata(context, REQUEST_ID))
        call = Call(method.rpartition("/")[2], request_id, _metadata(context, "traceparent"), context.peer())
        CALL.set(call)
        context.set_trailing_metadata(((REQUEST_ID, call.request_id),))
        with recorded(call, None if method.startswith(_OPEN) else self._session.call_ended):
            try:
                yield call
            except Exception as error:
                await self._fail(call, context, error)

    async def _fail(self, call: Call, context: Any, error: Exception) -> None:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if context.cancelled() or context.done():
            call.code = "CANCELLED"
            log.debug("the client disconnected before its call failed", exc_info=error)
            return
        if isinstance(error, NotImplementedError):  # of a generated class, such as the health service's List
            error = errors.NotOfferedError("this server does not offer that method")
        failure = errors.failure_of(error)
        call.fail(failure.code, failure.reason)
        status: Any = rpc_status.to_status(status_of(failure))
        await context.abort(status.code, status.details, (*status.trailing_metadata, (REQUEST_ID, call.request_id)))

    async def _decoded(self, call: Call, raw: bytes, decode: _Decode) -> Any:
        """The message of a call, decoded on a thread if it is large; see `Session.read`.

        Raises:
            MessageTooLargeError, UnreadableMessageError: it is too large, or no message.
            BusyError: see `Session.read`.
        """
        if len(raw) > (most := self._session.settings.max_receive_bytes):
            raise errors.MessageTooLargeError(f"the message has {len(raw)} bytes, of at most {most}")
        return await self._session.read(call, len(raw), partial(_message, raw, decode))

    async def _decoded_each(self, call: Call, messages: AsyncIterator[bytes], decode: _Decode) -> AsyncIterator[Any]:
        async for raw in messages:
            yield await self._decoded(call, raw, decode)


def status_of(failure: errors.Failure) -> status_pb2.Status:
    """Return the status that a client sees."""
    status = status_pb2.Status(code=code_pb2.Code.Value(failure.code), message=failure.text)
    if failure.violations:
        bad = error_details_pb2.BadRequest()
        for each in failure.violations[:_MAX_VIOLATIONS]:
            bad.field_violations.add(field=each.field, description=errors.cut(each.description, _VIOLATION_BYTES))
        status.details.add().Pack(bad)
    if failure.retry_seconds is not None:
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=convert.duration(failure.retry_seconds)))
    return status


async def _begun(messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The messages of a call, once the first has come: a client whose write fails would not be told why it is refused.

    Raises:
        UnreadableMessageError: none has come for some time.
    """
    try:
        async with asyncio.timeout(_FIRST_SECONDS):
            first = await anext(aiter(messages), None)
    except TimeoutError:
        raise errors.UnreadableMessageError(f"no message has come within {_FIRST_SECONDS:g} s") from None

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
        text = f"the message cannot be decoded: {errors.cut(str(error), _VIOLATION_BYTES)}"
        raise errors.UnreadableMessageError(text) from None


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
    return next((name.decode(errors="replace") for name in context.auth_context().get("x509_common_name", ())), None)


# ---- the methods

_CANCELLATION_SECONDS = 0.01
"""Seconds for which the end of a session's messages is not believed."""


class SolveServicer(SearchServiceServicer):
    """Translates between messages and the session; `CallInterceptor` maps errors."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def SolveProblem(self, request: pb.SolveProblemRequest, context: Any) -> pb.SolveProblemResponse:  # noqa: N802 (the contract's)
        """Run one search and return its result."""
        message = await self._message(await self._session.finish(*await self._read(request)), request.include_nodes)
        return pb.SolveProblemResponse(result=message and message.result)

    async def SolveProblemStream(self, request: pb.SolveProblemStreamRequest, context: Any) -> None:  # noqa: N802 (the contract's)
        """Run one search and write its events as they arrive."""
        nodes = request.request.include_nodes
        async with self._session.search(*await self._read(request.request, True, nodes)) as search:
            async for events in search:
                for event in events:
                    if (message := await self._message(event, nodes)) is not None:
                        await context.write(message)

    async def ScoreSolution(self, request: pb.ScoreSolutionRequest, context: Any) -> pb.ScoreSolutionResponse:  # noqa: N802 (the contract's)
        """Score the steps of given solutions."""
        return convert.to_wire((await self._session.finish(*await self._read(request))).result)

    async def ScoreSteps(self, request_iterator: AsyncIterator[pb.ScoreStepsRequest], context: Any) -> None:  # noqa: N802 (the contract's)
        """Score steps that come one after another."""
        opening = await anext(aiter(request_iterator), pb.ScoreStepsRequest())
        if not opening.HasField("open"):
            raise InvalidRequestError([Violation("open", "is required in the first message")])
        turns = _turns(opening, request_iterator)
        async with self._session.search(*await self._read(opening.open, True, True, turns)) as session:
            await context.send_initial_metadata((convert.SESSION_OPEN,))
            async for events in session:
                for event in events:
                    await context.write(convert.event_to_wire(event, kind=pb.ScoreStepsResponse))

    async def Rollout(self, request: pb.RolloutRequest, context: Any) -> None:  # noqa: N802 (the contract's)
        """Sample solutions of a problem as a tree, and write it in pieces."""
        async with self._session.search(*await self._read(request)) as events:
            end = await finished(events)
            for message in convert.rollout_to_wire(end.result):
                await context.write(message)

    async def Reload(self, request: pb.ReloadRequest, context: Any) -> pb.ReloadResponse:  # noqa: N802 (the contract's)
        """Have the generator go on with other weights."""
        return convert.to_wire(await self._session.reload(CALL.get(), request.path))

    async def GetServerInfo(  # noqa: N802 (the contract's name)
        self, request: pb.GetServerInfoRequest, context: Any
    ) -> pb.GetServerInfoResponse:
        """Tell what is served, and what is held now."""
        return convert.info_to_wire(await self._session.info())

    async def _read(
        self, message: Any, progress: bool = False, nodes: bool = False, turns: AsyncIterator[SessionTurn] | None = None
    ) -> tuple[SearchCall, Call]:
        """The search that a message asks for, and the call that it came with; see `SearchCall`."""
        call = CALL.get()
        asked, violations = await self._session.read(
            call, message.ByteSize(), partial(convert.request_from_wire, message)
        )
        return SearchCall(asked, message.priority, progress, nodes, violations, turns), call

    async def _message(self, event: Event, include_nodes: bool) -> pb.SolveProblemStreamResponse | None:
        """Convert an event to a message within the size limit; None for progress that cannot be cut enough."""
        if isinstance(event, Finished) and not include_nodes:
            event = replace(event, result=replace(event.result, nodes=()))
        return await self._session.write(
            CALL.get(), event, convert.event_to_wire, pb.SolveProblemStreamResponse.ByteSize
        )


async def _turns(
    opening: pb.ScoreStepsRequest, messages: AsyncIterator[pb.ScoreStepsRequest]
) -> AsyncIterator[SessionTurn]:
    """Messages to a session, the steps of its first one included."""
    yield convert.from_wire(opening)
    async for message in messages:
        if message.HasField("open"):
            raise InvalidRequestError([Violation("open", "is for the first message only")])
        yield convert.from_wire(message)
    # The messages of a call that was cancelled or ran out of time end, too; that it was is told a moment later.
    await asyncio.sleep(_CANCELLATION_SECONDS)
