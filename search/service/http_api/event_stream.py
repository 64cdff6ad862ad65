"""Responses to searches: the result, or server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from espalier.search.run.executor import AnyEvent, LastEvent
from espalier.search.service.access.calls import Call
from espalier.search.service.http_api.status import answer_of, json_response
from espalier.search.service.session import finished

QUIET_SECONDS = 15.0
"""Silence after which a comment is sent, so that proxies keep the connection."""
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
    search: AbstractAsyncContextManager[AsyncIterator[Any]],
    stream: bool,
    whole: Callable[[Any], Awaitable[Any]],
    parts: Parts,
) -> Response | ASGIApp:
    """Run a search and answer its call.

    A stream begins with its first event: before, a failure is an ordinary response; after, it is an event `error`.

    Args:
        call: what is answered.
        search: see `Session.search`.
        stream: whether to answer by a stream of events.
        whole: makes the JSON of the last event, for an answer without events.
        parts: makes the events of the stream.
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
            await write(_written(bytes(answer_of(error, call).body), "error"))
        await write(b"", more=False)

    return respond


async def _stream(events: AsyncIterator[AnyEvent], parts: Parts) -> AsyncGenerator[bytes, None]:
    """The events of a search as they are written; where there are none for a while, comments, which clients ignore."""
    event: AnyEvent | None = None
    while not isinstance(event, LastEvent):
        waiting = asyncio.ensure_future(anext(events))
        try:
            while not (await asyncio.wait([waiting], timeout=QUIET_SECONDS))[0]:
                yield b": the search goes on\n\n"
        finally:
            waiting.cancel()
        event = waiting.result()
        for data, name in await parts(event):
            yield _written(data, name)


def _written(data: bytes, name: str | None) -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return b"%sdata: %s\n\n" % (head, data)
