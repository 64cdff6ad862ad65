"""The endpoints of the OpenAI API that are offered."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from espalier.engine.errors import InvalidRequestError
from espalier.search.result import Event, Finished, Started, StepDone
from espalier.search.service.access.calls import Call
from espalier.search.service.http_api.body import json_response, read_json, to_json
from espalier.search.service.http_api.event_stream import event_stream, with_comments
from espalier.search.service.http_api.openai.chat_request import ChatCall, read_chat
from espalier.search.service.http_api.openai.completion import Completion, progress_line
from espalier.search.service.http_api.openai.model_names import ModelNames
from espalier.search.service.session import Session, finished


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
        if not chat.search.progress:
            async with self._search(chat, call) as events:
                result = (await finished(events)).result
            return json_response(Completion(result.search_id, chat.model, created).whole(result))

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            async with event_stream(send, call) as out, self._search(chat, call) as events:
                async for event in with_comments(events, out):
                    completion = Completion(event.search_id, chat.model, created, chat.include_usage)
                    for chunk in _chunks(event, completion):
                        await out.write(to_json(chunk))
                await out.write(b"[DONE]")

        return respond

    @asynccontextmanager
    async def _search(self, chat: ChatCall, call: Call) -> AsyncIterator[AsyncIterator[Event]]:
        """The session's search; violations of its fields are named by the places of the body that set them."""
        try:
            async with self._session.search(chat.search, call) as events:
                yield events
        except InvalidRequestError as error:
            raise InvalidRequestError(chat.in_body(error.violations)) from None


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
