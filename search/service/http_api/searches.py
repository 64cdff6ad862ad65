"""Searches with all that Espalier tells about them: the feed of the page."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.request import SearchRequest
from espalier.search.result import CandidateDone, Event, Finished, Started, StepDone
from espalier.search.schema import from_values
from espalier.search.service.event_buffer import fitted
from espalier.search.service.http_api.body import json_response, read_json, take_flag, take_priority, to_json
from espalier.search.service.http_api.event_stream import event_stream, with_comments
from espalier.search.service.session import SearchCall, Session, finished

_NAMES: dict[type[Event], str] = {
    Started: "started",
    StepDone: "step",
    CandidateDone: "candidate",
    Finished: "result",
}


def _event_json(event: Event, omitted: dict[str, int]) -> bytes:
    if isinstance(event, Finished):
        return b'{"search_id":%s,"result":%s}' % (to_json(event.search_id), _result_json(event, omitted))
    return to_json(asdict(event) | omitted)


def _result_json(event: Event, omitted: dict[str, int]) -> bytes:
    assert isinstance(event, Finished)
    values = event.result.to_dict()
    del values["rounds"]  # of use to the process that searched alone
    return to_json(values | omitted)


class SearchEndpoints:
    """`POST /v1/searches`."""

    def __init__(self, session: Session, max_send_bytes: int) -> None:
        self._session = session
        self._max_send_bytes = max_send_bytes

    async def create_search(self, request: Request) -> Response | ASGIApp:
        """Run one search; the events come as they happen, or with `"stream": false` the result at the end."""
        call = request.state.call
        asked = await read_json(request, self._session, _read_search)
        if not asked.progress:
            async with self._session.search(asked, call) as events:
                end = await finished(events)
            return json_response(await self._session.write(call, end, partial(self._data, encode=_result_json)))

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            async with event_stream(send, call) as out, self._session.search(asked, call) as events:
                async for event in with_comments(events, out):
                    if (data := await self._session.write(call, event, self._data)) is not None:
                        await out.write(data, _NAMES[type(event)])

        return respond

    def _data(self, event: Event, encode: Callable[[Event, dict[str, int]], bytes] = _event_json) -> bytes | None:
        """An event as JSON within the size limit; None for progress that cannot be cut enough."""
        return fitted(event, encode, len, self._max_send_bytes)


def _read_search(values: dict[str, Any]) -> SearchCall:
    violations: list[Violation] = []
    priority = take_priority(values, violations)
    stream = take_flag(values, "stream", True, violations)
    try:
        request = from_values(SearchRequest, values)
    except InvalidRequestError as error:
        raise InvalidRequestError([*violations, *error.violations]) from None
    return SearchCall(request, priority, progress=stream, report_nodes=stream, violations=violations)
