"""Responses to searches: the result, or server-sent events."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from espalier.search.result import Event, Finished
from espalier.search.service.access.calls import Call
from espalier.search.service.http_api.body import json_response, to_json
from espalier.search.service.http_api.status import answer_of
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


class EventStream:
    """A response of server-sent events, which begins with the first of them.

    Attributes:
        begun: whether the response has begun; before, a failure is an ordinary response.
    """

    def __init__(self, send: Send) -> None:
        self.begun = False
        self._send = send

    async def write(self, data: bytes, event: str | None) -> None:
        """Write one event. Waits while the client does not read."""
        name = f"event: {event}\n".encode() if event else b""
        await self._write(b"%sdata: %s\n\n" % (name, data))

    async def comment(self) -> None:
        """Write what clients ignore."""
        await self._write(b": the search goes on\n\n")

    async def end(self) -> None:
        """End the response."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, raw: bytes) -> None:
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        await self._send({"type": "http.response.body", "body": raw, "more_body": True})


@asynccontextmanager
async def event_stream(send: Send, call: Call) -> AsyncIterator[EventStream]:
    """A stream that ends with an event `error` if what is written to it fails after it has begun."""
    stream = EventStream(send)
    try:
        yield stream
    except Exception as error:
        if not stream.begun:
            raise
        answer = answer_of(error)
        call.fail(answer.rpc_code, answer.reason)
        await stream.write(to_json(answer.body), "error")
    await stream.end()


async def with_comments(events: AsyncIterator[Event], stream: EventStream) -> AsyncIterator[Event]:
    """Yield the events of a search; where there are none for a while, comments are written to the stream."""
    event: Event | None = None
    while not isinstance(event, Finished):
        waiting = asyncio.ensure_future(anext(events))
        try:
            while not (await asyncio.wait([waiting], timeout=QUIET_SECONDS))[0]:
                await stream.comment()
        finally:
            waiting.cancel()
        event = waiting.result()
        yield event


async def answer(
    call: Call,
    search: AbstractAsyncContextManager[AsyncIterator[Event]],
    stream: bool,
    whole: Callable[[Finished], Awaitable[Any]],
    parts: Callable[[Event], Awaitable[list[ServerSentEvent]]],
) -> Response | ASGIApp:
    """Run a search and answer its call.

    Args:
        call: what is answered.
        search: see `Session.search`.
        stream: whether to answer by a stream of events.
        whole: makes the JSON of a result, for an answer without events.
        parts: makes the events of the stream of one of the search.
    """
    if not stream:
        async with search as events:
            end = await finished(events)
        return json_response(await whole(end))

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        async with event_stream(send, call) as out, search as events:
            async for event in with_comments(events, out):
                for data, name in await parts(event):
                    await out.write(data, name)

    return respond
