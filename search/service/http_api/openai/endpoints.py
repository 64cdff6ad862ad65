"""The endpoints of the OpenAI API that are offered."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from espalier.engine.errors import InvalidRequestError
from espalier.search.result import Event, Finished, Started, StepDone
from espalier.search.service.access.calls import Call
from espalier.search.service.http_api.body import read_json
from espalier.search.service.http_api.event_stream import ServerSentEvent, answer
from espalier.search.service.http_api.openai.chat_request import ChatCall, in_body, read_chat
from espalier.search.service.http_api.openai.completion import Completion, progress_line
from espalier.search.service.http_api.openai.model_names import ModelNames
from espalier.search.service.http_api.status import json_response, to_json
from espalier.search.service.session import Session


class OpenAiEndpoints:
    """`/v1/models` and `/v1/chat/completions`."""

    def __init__(self, session: Session, names: ModelNames) -> None:
        self._session = session
        self._names = names

    async def list_models(self, request: Request) -> Response:
        """List the served pair and its searches."""
        return json_response({"object": "list", "data": self._names.listed()})

    async def retrieve_model(self, request: Request) -> Response:
        """Describe one of them."""
        return json_response(self._names.model(request.path_params["model"]))

    async def create_completion(self, request: Request) -> Response | ASGIApp:
        """Answer the last message of a conversation."""
        call = request.state.call
        chat = await read_json(request, self._session, lambda body: read_chat(body, self._names))
        created = int(time.time())

        async def whole(end: Finished) -> dict[str, Any]:
            return Completion(end.search_id, chat.model, created).whole(end.result)

        async def parts(event: Event) -> list[ServerSentEvent]:
            chunks = _chunks(event, Completion(event.search_id, chat.model, created, chat.include_usage))
            done = [b"[DONE]"] if isinstance(event, Finished) else []
            return [(data, None) for data in (*map(to_json, chunks), *done)]

        return await answer(call, self._search(chat, call), chat.search.progress, whole, parts)

    @asynccontextmanager
    async def _search(self, chat: ChatCall, call: Call) -> AsyncIterator[AsyncIterator[Event]]:
        """The session's search; violations of its fields are named by the places of the body that set them."""
        try:
            async with self._session.search(chat.search, call) as events:
                yield events
        except InvalidRequestError as error:
            raise InvalidRequestError(in_body(error.violations, chat.places)) from None


def _chunks(event: Event, completion: Completion) -> list[dict[str, object]]:
    """The chunks of an event. Nothing but the selected path is ever content, as it could not be taken back."""
    match event:
        case Started():
            return [completion.chunk({"role": "assistant", "content": ""})]
        case StepDone():
            return [completion.reasoning(progress_line(event))]
        case Finished():
            return completion.last_chunks(event.result)
        case _:
            return []
