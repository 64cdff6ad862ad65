"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as vLLM has them: clients ask them to count tokens."""

from typing import Any

from pydantic import BaseModel, StrictBool, StrictInt, StrictStr
from starlette.requests import Request
from starlette.responses import Response

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.service.http_api.body import read_json, validated
from espalier.search.service.http_api.openai.chat_request import Conversation, chat_prompt
from espalier.search.service.http_api.openai.thinking import read_thinking_parameters
from espalier.search.service.http_api.status import json_response
from espalier.search.service.model_names import ModelNames
from espalier.search.service.session import Session
from espalier.search.tokenization import TokenizationRequest


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


class TokenEndpoints:
    """The generator's tokenizer, for every strategy of the served pair."""

    def __init__(self, session: Session, names: ModelNames) -> None:
        self._session = session
        self._names = names

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a prompt or a conversation."""
        asked, with_tokens = await read_json(request, self._session, self._read)
        found = await self._session.tokenize(request.state.call, asked)
        context, tokens = found.description["model_max_length"], found.tokens if with_tokens else None
        head = {"count": len(found.token_ids), "max_model_len": context}
        return json_response({**head, "tokens": found.token_ids, "token_strs": tokens})

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids, special tokens as they are written."""
        asked = await read_json(request, self._session, self._read_ids)
        return json_response({"prompt": (await self._session.tokenize(request.state.call, asked)).text})

    async def info(self, request: Request) -> Response:
        """Describe the tokenizer: special tokens, chat template, context."""
        found = await self._session.tokenize(request.state.call, TokenizationRequest(""))
        return json_response({"tokenizer_class": "PreTrainedTokenizerFast", **found.description})

    def _read(self, body: dict[str, Any]) -> tuple[TokenizationRequest, bool]:
        its, found = validated(TokenizeBody, body), list[Violation]()
        self._require_model(its.model)
        if (its.prompt is None) == (its.messages is None):
            raise InvalidRequestError([Violation("prompt", "give either `prompt` or `messages`")])
        prompt = its.prompt
        if prompt is None:
            prompt = chat_prompt(validated(Conversation, body), read_thinking_parameters(body, found), found)
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
