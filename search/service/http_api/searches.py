"""Searches with all that Espalier tells about them: the feed of the page."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.request import SearchRequest
from espalier.search.result import CandidateDone, Event, Finished, SearchResult, Started, StepDone
from espalier.search.schema import from_values
from espalier.search.service.http_api.body import json_response, read_json, take_flag, take_priority, to_json
from espalier.search.service.http_api.event_stream import event_stream, with_comments
from espalier.search.service.session import Session, finished

_NAMES: dict[type[Event], str] = {
    Started: "started",
    StepDone: "step",
    CandidateDone: "candidate",
    Finished: "result",
}


class _Asked(NamedTuple):
    """What a body asks for, and what is wrong with it besides the fields of the request."""

    request: SearchRequest
    priority: int
    stream: bool
    violations: list[Violation]


class SearchEndpoints:
    """`POST /v1/searches`."""

    def __init__(self, session: Session, max_send_bytes: int) -> None:
        self._session = session
        self._max_send_bytes = max_send_bytes

    async def create_search(self, request: Request) -> Response | ASGIApp:
        """Run one search; the events come as they happen, or with `"stream": false` the result at the end."""
        call = request.state.call
        asked = await read_json(request, self._session, _read_search)
        if not asked.stream:
            async with self._session.search(asked.request, call, asked.priority, violations=asked.violations) as events:
                end = await finished(events)
            data = await self._session.write(call, end, lambda end: self._fitted_result(end.result))
            return json_response(data)

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            async with (
                event_stream(send, call) as out,
                self._session.search(
                    asked.request,
                    call,
                    asked.priority,
                    progress=True,
                    report_nodes=True,
                    violations=asked.violations,
                ) as events,
            ):
                async for event in with_comments(events, out):
                    if (data := await self._session.write(call, event, self._data)) is not None:
                        await out.write(data, _NAMES[type(event)])

        return respond

    def _data(self, event: Event) -> bytes | None:
        """An event as JSON within the size limit; None for progress that cannot be cut enough."""
        if isinstance(event, Finished):
            result = self._fitted_result(event.result)
            return b'{"search_id":%s,"result":%s}' % (to_json(event.search_id), result)
        written = (to_json(values) for values in _smaller(event))
        return next((data for data in written if len(data) <= self._max_send_bytes), None)

    def _fitted_result(self, result: SearchResult) -> bytes:
        """A result as JSON; over the size limit without its tree, then without its last candidates."""
        values = result.to_dict()
        del values["rounds"]  # of use to the process that searched alone
        data = to_json(values)
        if len(data) > self._max_send_bytes:
            values["omitted_nodes"], values["nodes"] = len(values["nodes"]), ()
            data = to_json(values)
        while len(data) > self._max_send_bytes and values["candidates"]:
            left = len(values["candidates"]) // 2  # halved, because writing it takes as long as measuring it
            values["omitted_candidates"] = len(result.candidates) - left
            values["candidates"] = values["candidates"][:left]
            data = to_json(values)
        return data


def _read_search(values: dict[str, Any]) -> _Asked:
    violations: list[Violation] = []
    priority = take_priority(values, violations)
    stream = take_flag(values, "stream", True, violations)
    try:
        request = from_values(SearchRequest, values)
    except InvalidRequestError as error:
        raise InvalidRequestError([*violations, *error.violations]) from None
    return _Asked(request, priority, stream, violations)


def _smaller(event: Event) -> Iterator[dict[str, Any]]:
    """An event's values, then with less and less of what the result will hold."""
    values = asdict(event)
    yield values
    if isinstance(event, StepDone):
        for node in (*values["kept"], *values["nodes"]):
            node["text"] = ""
        yield values
        values["kept"] = ()
        yield values
        values["omitted_nodes"], values["nodes"] = len(values["nodes"]), ()
        yield values
        if values["best"] is not None:
            values["best"]["steps"] = ()
        yield values
    elif isinstance(event, CandidateDone):
        values["candidate"]["steps"] = ()
        yield values
