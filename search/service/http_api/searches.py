"""Searches with all that Espalier tells about them: the feed of the page."""

from dataclasses import asdict, dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from espalier.search.result import CandidateDone, Event, Finished, Started, StepDone
from espalier.search.schema import from_values
from espalier.search.service.http_api.body import SearchBody, read_json
from espalier.search.service.http_api.event_stream import ServerSentEvent, answer
from espalier.search.service.http_api.status import to_json
from espalier.search.service.session import SearchCall, Session

_NAMES: dict[type[Event], str] = {
    Started: "started",
    StepDone: "step",
    CandidateDone: "candidate",
    Finished: "result",
}


def event_json(event: Event, omitted: dict[str, int]) -> bytes:
    """Return an event as JSON, with the numbers of what it lacks."""
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

    def __init__(self, session: Session) -> None:
        self._session = session

    async def create_search(self, request: Request) -> Response | ASGIApp:
        """Run one search; the events come as they happen, or with `"stream": false` the result at the end."""
        call = request.state.call
        asked = await read_json(request, self._session, _read_search)

        async def whole(end: Finished) -> bytes | None:
            return await self._session.write(call, end, _result_json, len)

        async def parts(event: Event) -> list[ServerSentEvent]:
            data = await self._session.write(call, event, event_json, len)
            return [] if data is None else [(data, _NAMES[type(event)])]

        return await answer(call, self._session.search(asked, call), asked.progress, whole, parts)


@dataclass(frozen=True, slots=True)
class _StreamedBody(SearchBody):
    stream: bool | None = None


def _read_search(values: dict[str, Any]) -> SearchCall:
    body = from_values(_StreamedBody, values)
    stream = body.stream is not False
    return SearchCall(body.request, body.priority or 0, progress=stream, report_nodes=stream)
