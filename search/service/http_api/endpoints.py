"""The base of all endpoints, and Espalier's own: searches with all their events, other weights, what is served."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, StrictStr
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from espalier.engine.roles import GENERATOR
from espalier.search.result import Event, Finished
from espalier.search.schema import from_values
from espalier.search.service.grpc_api.convert import EVENT_NAMES
from espalier.search.service.http_api.answers import HttpError, ServerSentEvent, answer, json_response, to_json
from espalier.search.service.http_api.body import SearchBody, parse_object, validated
from espalier.search.service.model_names import ModelNames
from espalier.search.service.page.files import fits_examples
from espalier.search.service.session import SearchCall, Session

T = TypeVar("T")


def reads(body: type[BaseModel]) -> Callable[[T], T]:
    """Say of an endpoint that it reads such a body, for `/openapi.json`."""

    def mark(endpoint: Any) -> Any:
        endpoint.body = body
        return endpoint

    return mark


class Endpoints:
    """Endpoints of one kind."""

    def __init__(self, session: Session, names: ModelNames) -> None:
        """Create them; `session` does what is asked for, and `names` are the models'."""
        self._session = session
        self._names = names

    async def _read_json(self, request: Request, read: Callable[[dict[str, Any]], T]) -> T:
        """Return what `read` makes of the JSON object that is a request's body; see `Session.read`.

        Raises:
            HttpError: it is none, or is not said to be one.
            Exception: what `read` raises.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HttpError(415, f"send `content-type: application/json`, not {kind[:80]!r}")
        return await self._read_body(request, lambda raw: read(parse_object(raw)))

    async def _read_body(self, request: Request, read: Callable[[bytes], T]) -> T:
        """Return what `read` makes of a request's body, whatever it is said to be; see `Session.read`.

        Raises:
            HttpError: it is compressed.
            Exception: what `read` raises.
        """
        if request.headers.get("content-encoding", "identity") != "identity":
            raise HttpError(415, "compressed bodies are not read")
        raw: bytes = request.state.body
        return await self._session.read(request.state.call, len(raw), partial(read, raw))

    async def ready(self, request: Request) -> Response:
        """Tell whether searches are accepted."""
        if self._session.ready:
            return json_response({"ready": True})
        return json_response({"ready": False}, 503, {"retry-after": "5"})


class ReloadBody(BaseModel, extra="forbid"):
    """The body of `/v1/reload`."""

    path: StrictStr


class OwnEndpoints(Endpoints):
    """`/healthz`, `/v1/searches`, `/v1/server` and `/v1/reload`."""

    async def alive(self, request: Request) -> Response:
        """Tell that the process lives."""
        return json_response({"alive": True})

    async def create_search(self, request: Request) -> Response | ASGIApp:
        """Run one search; the events come as they happen, or with `"stream": false` the result at the end."""
        call = request.state.call
        asked = await self._read_json(request, _read_search)

        async def whole(end: Finished) -> bytes | None:
            return await self._session.write(call, end, _result_json, len)

        async def parts(event: Event) -> list[ServerSentEvent]:
            data = await self._session.write(call, event, event_json, len)
            return [] if data is None else [(data, EVENT_NAMES[type(event)])]

        return await answer(call, self._session.search(asked, call), None if asked.progress else whole, parts)

    async def server_info(self, request: Request) -> Response:
        """Tell what is served, which searches run, and what is held now."""
        info, names = await self._session.info(), self._names
        offered = {"searches": names.searches, "default_search": names.default_search, "notice": names.notice}
        examples = fits_examples(info.model_names.get(GENERATOR, ""))
        return json_response({**asdict(info), **offered, "examples": examples})

    @reads(ReloadBody)
    async def reload(self, request: Request) -> Response:
        """Have the generator go on with the weights of a checkpoint below the folder of --reload-folder."""
        body = await self._read_json(request, partial(validated, ReloadBody))
        return json_response(asdict(await self._session.reload(request.state.call, body.path)))


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


@dataclass(frozen=True, slots=True)
class _StreamedBody(SearchBody):
    stream: bool | None = None


def _read_search(values: dict[str, Any]) -> SearchCall:
    body = from_values(_StreamedBody, values)
    stream = body.stream is not False
    return SearchCall(body.request, body.priority or 0, progress=stream, report_nodes=stream)
