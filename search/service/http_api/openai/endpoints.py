"""The endpoints of the OpenAI API that are offered."""

import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from espalier.search.result import Finished
from espalier.search.run.executor import AnyEvent
from espalier.search.service.access.calls import Call
from espalier.search.service.http_api.body import read_json
from espalier.search.service.http_api.event_stream import ServerSentEvent, answer
from espalier.search.service.http_api.openai.chat_request import ITS_BUDGET, budget_of, read_chat
from espalier.search.service.http_api.openai.completion import Completion
from espalier.search.service.http_api.openai.completion_request import read_completion
from espalier.search.service.http_api.openai.parameters import BodyCall, PlainCall
from espalier.search.service.http_api.openai.plain_completion import PlainCompletion
from espalier.search.service.http_api.openai.responses import ResponseObject, read_response
from espalier.search.service.http_api.status import json_response, to_json
from espalier.search.service.model_names import ModelNames
from espalier.search.service.session import Session

_DONE: tuple[ServerSentEvent, ...] = ((b"[DONE]", None),)
"""Behind the last chunk of a completion."""


class OpenAiEndpoints:
    """`/v1/models`, `/v1/chat/completions`, `/v1/completions` and `/v1/responses`."""

    def __init__(self, session: Session, names: ModelNames) -> None:
        self._session = session
        self._names = names

    async def list_models(self, request: Request) -> Response:
        """List the served pair and its searches."""
        data = [{**model, "digest": self._session.digest} for model in self._names.listed()]
        return json_response({"object": "list", "data": data})

    async def retrieve_model(self, request: Request) -> Response:
        """Describe one of them."""
        model = self._names.model(request.path_params["model"])
        return json_response({**model, "digest": self._session.digest})

    async def create_chat_completion(self, request: Request) -> Response | ASGIApp:
        """Answer the last message of a conversation, by a search or by plain sampling."""
        budget = budget_of(request.headers.get(ITS_BUDGET))
        asked = await read_json(request, self._session, lambda body: read_chat({**body, **budget}, self._names))
        make = partial(PlainCompletion, chat=True) if isinstance(asked, PlainCall) else Completion
        return await self._answer(request.state.call, asked, partial(make, call=asked))

    async def create_completion(self, request: Request) -> Response | ASGIApp:
        """Continue prompts by plain sampling."""
        asked = await read_json(request, self._session, lambda body: read_completion(body, self._names))
        return await self._answer(request.state.call, asked, partial(PlainCompletion, call=asked, chat=False))

    async def create_response(self, request: Request) -> Response | ASGIApp:
        """Answer a conversation, by a search or by plain sampling, as the Responses API does; nothing is stored."""
        asked = await read_json(request, self._session, lambda body: read_response(body, self._names))
        return await self._answer(request.state.call, asked.chat, partial(ResponseObject, call=asked), ends=())

    async def _answer(
        self, call: Call, asked: BodyCall, make: Callable[..., Any], ends: Iterable[ServerSentEvent] = _DONE
    ) -> Response | ASGIApp:
        """Answer by what `make` makes of the search's id, whole or by its events, and by `ends` behind the last one."""
        made = cache(partial(make, created=int(time.time())))

        async def whole(end: Finished[Any]) -> dict[str, Any]:
            return made(end.search_id).whole(end.result)

        async def parts(event: AnyEvent) -> list[ServerSentEvent]:
            told = [(to_json(each), each.get("type")) for each in made(event.search_id).events(event)]
            return [*told, *ends] if isinstance(event, Finished) else told

        return await answer(call, asked.run(self._session, call), asked.search.progress, whole, parts)
