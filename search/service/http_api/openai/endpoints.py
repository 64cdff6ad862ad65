"""The endpoints of the OpenAI API that are offered."""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from espalier.engine.errors import InvalidRequestError
from espalier.search.completion import CompletionResult, TextSampled
from espalier.search.result import Event, Finished, SearchResult, Started, StepDone
from espalier.search.run.executor import AnyEvent
from espalier.search.service.access.calls import Call
from espalier.search.service.http_api.body import read_json
from espalier.search.service.http_api.event_stream import ServerSentEvent, answer
from espalier.search.service.http_api.openai.chat_request import ITS_BUDGET, ChatCall, budget_of, read_chat
from espalier.search.service.http_api.openai.completion import Completion, progress_line
from espalier.search.service.http_api.openai.completion_request import read_completion
from espalier.search.service.http_api.openai.model_names import ModelNames
from espalier.search.service.http_api.openai.parameters import PlainCall, in_body
from espalier.search.service.http_api.openai.plain_completion import PlainCompletion
from espalier.search.service.http_api.openai.responses import ResponseObject, read_response
from espalier.search.service.http_api.status import json_response, to_json
from espalier.search.service.session import SearchCall, Session


class OpenAiEndpoints:
    """`/v1/models`, `/v1/chat/completions`, `/v1/completions` and `/v1/responses`."""

    def __init__(self, session: Session, names: ModelNames) -> None:
        self._session = session
        self._names = names

    async def list_models(self, request: Request) -> Response:
        """List the served pair and its searches."""
        return json_response({"object": "list", "data": self._names.listed()})

    async def retrieve_model(self, request: Request) -> Response:
        """Describe one of them."""
        return json_response(self._names.model(request.path_params["model"]))

    async def create_chat_completion(self, request: Request) -> Response | ASGIApp:
        """Answer the last message of a conversation, by a search or by plain sampling."""
        budget = budget_of(request.headers.get(ITS_BUDGET))
        asked = await read_json(request, self._session, lambda body: read_chat({**body, **budget}, self._names))
        if isinstance(asked, PlainCall):
            return await self._sample(request.state.call, asked, chat=True)
        return await self._search(request.state.call, asked)

    async def create_completion(self, request: Request) -> Response | ASGIApp:
        """Continue prompts by plain sampling."""
        asked = await read_json(request, self._session, lambda body: read_completion(body, self._names))
        return await self._sample(request.state.call, asked, chat=False)

    async def create_response(self, request: Request) -> Response | ASGIApp:
        """Answer a conversation, by a search or by plain sampling, as the Responses API does; nothing is stored."""
        asked = await read_json(request, self._session, lambda body: read_response(body, self._names))
        created, response = int(time.time()), None

        async def whole(end: Finished[Any]) -> dict[str, Any]:
            return ResponseObject(end.search_id, asked, created).whole(end.result)

        async def parts(event: AnyEvent) -> list[ServerSentEvent]:
            nonlocal response
            response = response or ResponseObject(event.search_id, asked, created)
            return [(to_json(each), each["type"]) for each in response.events(event)]

        call, chat = request.state.call, asked.chat
        return await answer(call, self._events_of(chat.search, chat.places, call), chat.search.progress, whole, parts)

    async def _search(self, call: Call, chat: ChatCall) -> Response | ASGIApp:
        created = int(time.time())
        shown = chat.include_usage, chat.choices, chat.stop, chat.include_stop, chat.metadata

        async def whole(end: Finished[SearchResult]) -> dict[str, Any]:
            return Completion(end.search_id, chat.model, created, *shown).whole(end.result)

        async def parts(event: Event) -> list[ServerSentEvent]:
            chunks = _chunks(event, Completion(event.search_id, chat.model, created, *shown))
            return _events(chunks, event)

        events = self._events_of(chat.search, chat.places, call)
        return await answer(call, events, chat.search.progress, whole, parts)

    async def _sample(self, call: Call, asked: PlainCall, chat: bool) -> Response | ASGIApp:
        created, completion = int(time.time()), None

        async def whole(end: Finished[CompletionResult]) -> dict[str, Any]:
            return PlainCompletion(end.search_id, asked, created, chat).whole(end.result)

        async def parts(event: TextSampled | Finished[CompletionResult]) -> list[ServerSentEvent]:
            nonlocal completion
            completion = completion or PlainCompletion(event.search_id, asked, created, chat)
            sampled = isinstance(event, TextSampled)
            return _events(completion.chunks(event) if sampled else completion.last_chunk(event.result), event)

        events = self._events_of(asked.search, asked.places, call)
        return await answer(call, events, asked.search.progress, whole, parts)

    @asynccontextmanager
    async def _events_of(
        self, asked: SearchCall, places: Mapping[str, str], call: Call
    ) -> AsyncIterator[AsyncIterator[Sequence[AnyEvent]]]:
        """The session's events; violations of fields are named by the places of the body that set them."""
        try:
            async with self._session.search(asked, call) as events:
                yield events
        except InvalidRequestError as error:
            raise InvalidRequestError(in_body(error.violations, places)) from None


def _events(chunks: list[dict[str, Any]], event: AnyEvent) -> list[ServerSentEvent]:
    done = [b"[DONE]"] if isinstance(event, Finished) else []
    return [(data, None) for data in (*map(to_json, chunks), *done)]


def _chunks(event: Event, completion: Completion) -> list[dict[str, Any]]:
    """The chunks of an event. Nothing but the selected path is ever content, as it could not be taken back."""
    match event:
        case Started():
            return [completion.chunk({"role": "assistant", "content": ""})]
        case StepDone():
            return [completion.progress(progress_line(event))]
        case Finished():
            return completion.last_chunks(event.result)
        case _:
            return []
