"""The endpoints of the OpenAI API that are offered, and vLLM's of the tokenizer, which clients ask to count tokens."""

import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

from pydantic import BaseModel, StrictBool, StrictInt, StrictStr
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.engine.roles import GENERATOR
from espalier.search.completion import TokenizationRequest
from espalier.search.result import Finished
from espalier.search.run.executor import AnyEvent
from espalier.search.service.access.calls import Call
from espalier.search.service.http_api.answers import ServerSentEvent, answer, json_response, to_json
from espalier.search.service.http_api.body import validated
from espalier.search.service.http_api.endpoints import Endpoints, reads
from espalier.search.service.http_api.openai import bodies
from espalier.search.service.http_api.openai.completion import Completion
from espalier.search.service.http_api.openai.parameters import SampledCall
from espalier.search.service.http_api.openai.responses import ResponseObject, ResponsesBody, read_response
from espalier.search.service.http_api.openai.spellings import read_thinking_parameters

_DONE: tuple[ServerSentEvent, ...] = ((b"[DONE]", None),)
"""Behind the last chunk of a completion."""


class TokenizeBody(BaseModel):
    """The body of `/tokenize`: a prompt, or the messages of a conversation."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: list[Any] | None = None
    add_special_tokens: StrictBool | None = None
    return_token_strs: StrictBool | None = None


class DetokenizeBody(BaseModel):
    """The body of `/detokenize`."""

    model: StrictStr | None = None
    tokens: list[StrictInt]


class OpenAiEndpoints(Endpoints):
    """`/v1/models`, `/v1/chat/completions`, `/v1/completions`, `/v1/responses`, and the generator's tokenizer."""

    async def list_models(self, request: Request) -> Response:
        """List the served pair and its searches."""
        data = [{**model, "digest": self._digest} for model in self._names.listed()]
        return json_response({"object": "list", "data": data})

    async def retrieve_model(self, request: Request) -> Response:
        """Describe one of them."""
        model = self._names.model(request.path_params["model"])
        return json_response({**model, "digest": self._digest})

    @property
    def _digest(self) -> str:
        """The digest of the generator's weights; empty until the engine has loaded."""
        return self._session.engine.models.get(GENERATOR, "")

    @reads(bodies.ChatBody)
    async def create_chat_completion(self, request: Request) -> Response | ASGIApp:
        """Answer the last message of a conversation, by a search or by plain sampling."""
        budget = bodies.budget_of(request.headers.get(bodies.ITS_BUDGET))
        asked = await self._read_json(request, lambda body: bodies.read_chat({**body, **budget}, self._names))
        return await self._answer(request.state.call, asked, partial(Completion, call=asked))

    @reads(bodies.CompletionBody)
    async def create_completion(self, request: Request) -> Response | ASGIApp:
        """Continue prompts by plain sampling."""
        asked = await self._read_json(request, lambda body: bodies.read_completion(body, self._names))
        return await self._answer(request.state.call, asked, partial(Completion, call=asked, chat=False))

    @reads(ResponsesBody)
    async def create_response(self, request: Request) -> Response | ASGIApp:
        """Answer a conversation, by a search or by plain sampling, as the Responses API does; nothing is stored."""
        asked = await self._read_json(request, lambda body: read_response(body, self._names))
        return await self._answer(request.state.call, asked.chat, partial(ResponseObject, call=asked), ends=())

    async def _answer(
        self, call: Call, asked: SampledCall, make: Callable[..., Any], ends: Iterable[ServerSentEvent] = _DONE
    ) -> Response | ASGIApp:
        """Answer by what `make` makes of the search's id, whole or by its events, and by `ends` behind the last one."""
        made = cache(partial(make, created=int(time.time())))

        async def whole(end: Finished[Any]) -> dict[str, Any]:
            return made(end.search_id).whole(end.result)

        async def parts(event: AnyEvent) -> list[ServerSentEvent]:
            told = [(to_json(each), each.get("type")) for each in made(event.search_id).events(event)]
            return [*told, *ends] if isinstance(event, Finished) else told

        return await answer(call, self._session.search(asked, call), None if asked.progress else whole, parts)

    @reads(TokenizeBody)
    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a prompt or a conversation."""
        asked, with_tokens = await self._read_json(request, self._read_prompt)
        found = await self._session.tokenize(request.state.call, asked)
        context, tokens = found.description["model_max_length"], found.tokens if with_tokens else None
        head = {"count": len(found.token_ids), "max_model_len": context}
        return json_response({**head, "tokens": found.token_ids, "token_strs": tokens})

    @reads(DetokenizeBody)
    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids, special tokens as they are written."""
        asked = await self._read_json(request, self._read_ids)
        return json_response({"prompt": (await self._session.tokenize(request.state.call, asked)).text})

    async def tokenizer_info(self, request: Request) -> Response:
        """Describe the tokenizer: special tokens, chat template, context."""
        found = await self._session.tokenize(request.state.call, TokenizationRequest(""))
        return json_response({"tokenizer_class": "PreTrainedTokenizerFast", **found.description})

    def _read_prompt(self, body: dict[str, Any]) -> tuple[TokenizationRequest, bool]:
        its, found = validated(TokenizeBody, body), list[Violation]()
        self._require_model(its.model)
        if (its.prompt is None) == (its.messages is None):
            raise InvalidRequestError([Violation("prompt", "give either `prompt` or `messages`")])
        prompt = its.prompt
        if prompt is None:
            prompt = bodies.chat_prompt(
                validated(bodies.Conversation, body), read_thinking_parameters(body, found), found
            )
        if found:
            raise InvalidRequestError(found)
        return TokenizationRequest(prompt, its.add_special_tokens is not False), bool(its.return_token_strs)

    def _read_ids(self, body: dict[str, Any]) -> TokenizationRequest:
        its = validated(DetokenizeBody, body)
        self._require_model(its.model)
        return TokenizationRequest(tuple(its.tokens))

    def _require_model(self, model: str | None) -> None:
        if model is not None:
            self._names.search_fields(model)
