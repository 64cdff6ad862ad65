"""Responses to searches: the result, or server-sent events."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from espalier.search.run.executor import AnyEvent
from espalier.search.service.access.calls import Call
from espalier.search.service.http_api.status import answer_of, json_response
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
Parts = Callable[[Any], Awaitable[list[ServerSentEvent]]]
"""Makes the events of the stream of one of a search."""


async def answer(
    call: Call,
    search: AbstractAsyncContextManager[AsyncIterator[Sequence[Any]]],
    stream: bool,
    whole: Callable[[Any], Awaitable[Any]],
    parts: Parts,
    errors_as_text: bool = False,
) -> Response | ASGIApp:
    """Run a search and answer its call.

    A stream begins with its first event: before, a failure is an ordinary response; after, it is an event `error`.

    Args:
        call: what is answered.
        search: see `Session.search`.
        stream: whether to answer by a stream of events.
        whole: makes the JSON of the last event, for an answer without events.
        parts: makes the events of the stream.
        errors_as_text: whether an error is a text, in an event without a name; see `status.answer_of`.
    """
    if not stream:
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
            told = bytes(answer_of(error, call, errors_as_text).body)
            await write(_written(told, None if errors_as_text else "error"))
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
