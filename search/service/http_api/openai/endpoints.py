"""The endpoints of the OpenAI API that are offered, and vLLM's of the tokenizer, which clients ask to count tokens.

And scores of given solutions, in shapes that clients of vLLM and SGLang read: `/v1/score` (and `/score`) give each
solution one score, `/classify` its probability of being right, `/pooling` one pair of probabilities a step. All three
read the same bodies.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cache, partial
from typing import Any

from pydantic import BaseModel, StrictBool, StrictInt, StrictStr
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.search.completion import TokenizationRequest
from espalier.search.result import Finished
from espalier.search.run.executor import AnyEvent
from espalier.search.scores import ScoreRequest, ScoreResult, SolutionScores
from espalier.search.service.access.calls import Call
from espalier.search.service.http_api.answers import ErrorShape, ServerSentEvent, answer, json_response, to_json
from espalier.search.service.http_api.anthropic.messages import (
    CountBody,
    MessageObject,
    MessagesBody,
    chat_of,
    message_error,
    read_messages,
)
from espalier.search.service.http_api.body import Endpoints, reads, validated
from espalier.search.service.http_api.openai import bodies
from espalier.search.service.http_api.openai.completion import Completion
from espalier.search.service.http_api.openai.responses import ResponseObject, ResponsesBody, read_response
from espalier.search.service.http_api.openai.spellings import read_thinking_parameters
from espalier.search.service.model_names import short_name
from espalier.search.service.session import SearchCall

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
        return json_response({**self._names.model(request.path_params["model"]), "digest": self._digest})

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

    @reads(MessagesBody)
    async def create_message(self, request: Request) -> Response | ASGIApp:
        """Answer a conversation as Anthropic's Messages API does."""
        asked = await self._read_json(request, lambda body: read_messages(body, self._names))
        make = partial(MessageObject, call=asked)
        return await self._answer(request.state.call, asked, make, ends=(), shape=message_error)

    @reads(CountBody)
    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a conversation's prompt."""
        asked = await self._read_json(request, self._read_counted)
        found = await self._session.tokenize(request.state.call, asked)
        return json_response({"input_tokens": len(found.token_ids)})

    async def _answer(
        self,
        call: Call,
        asked: bodies.SampledCall,
        make: Callable[..., Any],
        ends: Iterable[ServerSentEvent] = _DONE,
        shape: ErrorShape | None = None,
    ) -> Response | ASGIApp:
        """Answer by what `make` makes of the search's id, whole or by its events, and by `ends` behind the last one."""
        made = cache(partial(make, created=int(time.time())))

        async def whole(end: Finished[Any]) -> dict[str, Any]:
            return made(end.search_id).whole(end.result)

        async def parts(event: AnyEvent) -> list[ServerSentEvent]:
            told = [(to_json(each), each.get("type")) for each in made(event.search_id).events(event)]
            return [*told, *ends] if isinstance(event, Finished) else told

        return await answer(call, self._session.search(asked, call), None if asked.progress else whole, parts, shape)

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

    def _read_counted(self, body: dict[str, Any]) -> TokenizationRequest:
        its, found = validated(CountBody, body), list[Violation]()
        self._require_model(its.model)
        chat = chat_of(its, found, plain=True)
        prompt = bodies.chat_prompt(validated(bodies.Conversation, chat), read_thinking_parameters(chat, found), found)
        if found:
            raise InvalidRequestError(found)
        return TokenizationRequest(prompt)

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


# ---- scores of given solutions

_STEP_BREAK = "\n\n"
_PROBLEM = ("problem", "query", "queries", "text_1", "data_1")
_SOLUTIONS = ("steps", "documents", "items", "text_2", "data_2")
_OWN = ("priority", "time_limit", "seed", "verifier_budget", "aggregation")
"""Fields of `espalier`."""
_WHY_NOT = "is not offered: a score is a probability of the verifier's"
_NOT_OFFERED: dict[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("use_activation", "softmax", "activation", "add_special_tokens"), (_WHY_NOT, (True,))),
    "apply_softmax": (_WHY_NOT, (True, False)),
    "item_first": (_WHY_NOT, (False,)),
    "label_token_ids": (_WHY_NOT, ([],)),
    "truncate_prompt_tokens": (_WHY_NOT, (-1,)),
    "encoding_format": (_WHY_NOT, ("float",)),
    "task": (_WHY_NOT, ("token_classify", "classify", "score")),
    "dimensions": (_WHY_NOT, ()),
}
"""Parameters of other servers: why they are refused, and their values that change nothing here."""


class ScoreBody(BaseModel, extra="allow"):
    """A problem with solutions, by the names of vLLM or SGLang, or a conversation that ends with the solution."""

    model: StrictStr | None = None
    problem: StrictStr | None = None
    messages: list[Any] | None = None
    steps: list[StrictStr] | list[list[StrictStr]] | None = None
    espalier: dict[str, Any] | None = None


_KNOWN = {*ScoreBody.model_fields, *_PROBLEM, *_SOLUTIONS, *bodies.Conversation.model_fields}


class ScoreEndpoints(Endpoints):
    """`/v1/score`, `/score`, `/classify` and `/pooling`."""

    @reads(ScoreBody)
    async def score(self, request: Request) -> Response:
        """Score the solutions of a problem: one score each, with those of its steps."""
        return await self._answer(request, "score", _scores)

    @reads(ScoreBody)
    async def classify(self, request: Request) -> Response:
        """Tell how probable it is that each solution is right."""
        return await self._answer(request, "classify", _classes)

    @reads(ScoreBody)
    async def pooling(self, request: Request) -> Response:
        """Tell of each step of each solution how probable it is to be wrong and to be right."""
        return await self._answer(request, "pool", _pairs)

    async def _answer(self, request: Request, name: str, told: Callable[[SolutionScores], dict[str, Any]]) -> Response:
        model, asked = await self._read_json(request, self._read)
        result: ScoreResult = (await self._session.finish(asked, request.state.call)).result
        body = {
            **_head(name, model, result),
            "data": [{"index": index, **told(each)} for index, each in enumerate(result.solutions)],
        }
        if told is _scores:  # as SGLang has them
            body["scores"] = [each.step_scores for each in result.solutions]
        return json_response(body)

    def _read(self, body: dict[str, Any]) -> tuple[str, SearchCall]:
        scored, its = validated(ScoreBody, body), bodies.BodyFields(body, places={"priority": "espalier.priority"})
        model = scored.model or self._names.listed()[0]["id"]
        verifier = self._session.engine.model_names.get(VERIFIER)
        if not verifier or model not in (verifier, short_name(verifier)):
            self._names.search_fields(model)
        its.found += bodies.not_honoured(body, _KNOWN, refused=_NOT_OFFERED)
        _set_solutions(scored, its)
        its.set_own(_OWN)
        priority = its.take_priority()
        return model, SearchCall(its.make(ScoreRequest), priority, violations=its.found, places=its.places)


def _set_solutions(scored: ScoreBody, its: bodies.BodyFields) -> None:
    """Set the problem and the solutions of a request."""
    if scored.messages is not None:
        *asked, last = validated(bodies.Conversation, dict(its.body)).messages
        its.set("problem", "", "messages")
        if asked:
            bodies.set_conversation(asked, its)
        if last.role != "assistant" or scored.steps is not None:
            its.refuse("messages", "the last message must be the assistant's, and is the solution")
        its.set("solutions", (_split(last.read.content),), "messages")
        return
    problems = [name for name in _PROBLEM if its.body.get(name) is not None]
    solutions = [name for name in _SOLUTIONS if its.body.get(name) is not None]
    if len(problems) != 1 or len(solutions) != 1:
        its.refuse("problem", f"give one of {', '.join(_PROBLEM)} and one of {', '.join(_SOLUTIONS)}, or messages")
        raise InvalidRequestError(its.found)
    problem = its.body[problems[0]]
    if isinstance(problem, list) and len(problem) == 1:
        problem = problem[0]
    if not isinstance(problem, str):
        its.refuse(problems[0], "must be one text")
        problem = "-"
    its.set("problem", problem, problems[0])
    its.set("solutions", _texts(solutions[0], its.body[solutions[0]], its.found), solutions[0])


def _texts(name: str, given: Any, found: list[Violation]) -> tuple[tuple[str, ...], ...]:
    """The steps of solutions: `steps` has them apart, others have texts that are split at blank lines."""
    given = [given] if isinstance(given, str) or (name == "steps" and given and isinstance(given[0], str)) else given
    if isinstance(given, list) and name == "steps":
        return tuple(map(tuple, given))
    if isinstance(given, list) and all(isinstance(text, str) for text in given):
        return tuple(map(_split, given))
    found.append(Violation(name, "must be a text or a list of texts"))
    return (("-",),)


def _split(text: str) -> tuple[str, ...]:
    return tuple(step for step in text.split(_STEP_BREAK) if step.strip())


def _pair(score: float | None) -> list[float] | None:
    return None if score is None else [1 - score, score]


def _scores(solution: SolutionScores) -> dict[str, Any]:
    scores = {"score": solution.score, "step_scores": solution.step_scores}
    return {"object": "score", **scores, "reason": solution.reason}


def _classes(solution: SolutionScores) -> dict[str, Any]:
    probabilities = _pair(solution.score)
    label = None if solution.score is None else ("right" if solution.score >= 0.5 else "wrong")
    return {"label": label, "probs": probabilities or [], "num_classes": len(probabilities or [])}


def _pairs(solution: SolutionScores) -> dict[str, Any]:
    return {"object": "pooling", "data": list(map(_pair, solution.step_scores))}


def _head(name: str, model: str, result: ScoreResult) -> dict[str, Any]:
    read, request = result.usage.verifier_tree_tokens, result.configuration
    assert isinstance(request, ScoreRequest)
    return {
        "id": f"{name}-{result.search_id}",
        "object": "list",
        "model": model,
        "usage": {"prompt_tokens": read, "total_tokens": read, "completion_tokens": 0},
        "espalier": {
            "search_id": result.search_id,
            "scorer": result.scorer,
            "aggregation": request.aggregation,
            "activation": "probability",
            "stop_reason": result.stop_reason,
            "usage": asdict(result.usage),
        },
    }
