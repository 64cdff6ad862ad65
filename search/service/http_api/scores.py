"""Scores of given solutions over HTTP, in shapes that clients of vLLM and SGLang read.

`/v1/score` (and `/score`) give each solution one score, `/classify` its probability of being right, `/pooling` one
pair of probabilities a step. All three read the same bodies.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, StrictStr
from starlette.requests import Request
from starlette.responses import Response

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.engine.roles import VERIFIER
from espalier.search.schema import from_values
from espalier.search.scores import ScoreRequest, ScoreResult, SolutionScores
from espalier.search.service.http_api.body import read_json, validated
from espalier.search.service.http_api.openai.chat_request import Conversation, conversation
from espalier.search.service.http_api.openai.parameters import BodyCall, in_body, not_honoured, set_own, take_priority
from espalier.search.service.http_api.status import json_response
from espalier.search.service.model_names import ModelNames, short_name
from espalier.search.service.session import SearchCall, Session, finished

_STEP_BREAK = "\n\n"
_PROBLEM = ("problem", "query", "queries", "text_1", "data_1")
_SOLUTIONS = ("steps", "documents", "items", "text_2", "data_2")
_OWN = ("priority", "time_limit", "seed", "verifier_budget", "aggregation")
"""Fields of `espalier`."""
_WHY_NOT = "is not offered: a score is a probability of the verifier's"
_NOT_OFFERED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "use_activation": (_WHY_NOT, (True,)),
    "softmax": (_WHY_NOT, (True,)),
    "activation": (_WHY_NOT, (True,)),
    "apply_softmax": (_WHY_NOT, (True, False)),
    "item_first": (_WHY_NOT, (False,)),
    "label_token_ids": (_WHY_NOT, ([],)),
    "add_special_tokens": (_WHY_NOT, (True,)),
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


_KNOWN = {*ScoreBody.model_fields, *_PROBLEM, *_SOLUTIONS, *Conversation.model_fields}


class ScoreEndpoints:
    """`/v1/score`, `/score`, `/classify` and `/pooling`."""

    def __init__(self, session: Session, names: ModelNames) -> None:
        self._session = session
        self._names = names

    async def score(self, request: Request) -> Response:
        """Score the solutions of a problem: one score each, with those of its steps."""
        asked, result = await self._run(request)
        data = [
            {"index": i, "object": "score", "score": each.score, "step_scores": each.step_scores, "reason": each.reason}
            for i, each in enumerate(result.solutions)
        ]
        steps = [each.step_scores for each in result.solutions]
        return json_response({**_head("score", asked, result), "data": data, "scores": steps})

    async def classify(self, request: Request) -> Response:
        """Tell how probable it is that each solution is right."""
        asked, result = await self._run(request)
        data = [{"index": i, **_classes(each)} for i, each in enumerate(result.solutions)]
        return json_response({**_head("classify", asked, result), "data": data})

    async def pooling(self, request: Request) -> Response:
        """Tell of each step of each solution how probable it is to be wrong and to be right."""
        asked, result = await self._run(request)
        data = [
            {"index": i, "object": "pooling", "data": [_pair(score) for score in each.step_scores]}
            for i, each in enumerate(result.solutions)
        ]
        return json_response({**_head("pool", asked, result), "data": data})

    async def _run(self, request: Request) -> tuple[BodyCall, ScoreResult]:
        asked = await read_json(request, self._session, self._read)
        async with asked.run(self._session, request.state.call) as events:
            return asked, (await finished(events)).result

    def _read(self, body: dict[str, Any]) -> BodyCall:
        its, found = validated(ScoreBody, body), list[Violation]()
        model = its.model or self._names.listed()[0]["id"]
        verifier = self._session.model_names.get(VERIFIER)
        if not verifier or model not in (verifier, short_name(verifier)):
            self._names.search_fields(model)
        found += not_honoured(body, _KNOWN, refused=_NOT_OFFERED)
        values, places = self._solutions(its, body, found)
        set_own(its.espalier, _OWN, values, places, found)
        priority = take_priority(values, found)
        try:
            request = from_values(ScoreRequest, values)
        except InvalidRequestError as error:
            raise InvalidRequestError([*found, *in_body(error.violations, places)]) from None
        call = SearchCall(request, priority, violations=found)
        return BodyCall(model, call, {"priority": "espalier.priority", **places})

    def _solutions(
        self, its: ScoreBody, body: Mapping[str, Any], found: list[Violation]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """The problem and the solutions of a request, and the places that set them."""
        if its.messages is not None:
            read = validated(Conversation, dict(body))
            asked = read.messages[:-1]
            values = conversation(asked, found) if asked else {"problem": "", "history": ()}
            if read.messages[-1].role != "assistant" or its.steps is not None:
                found.append(Violation("messages", "the last message must be the assistant's, and is the solution"))
            values["solutions"] = (_split(read.messages[-1].read.content),)
            return values, {"problem": "messages", "history": "messages", "solutions": "messages"}
        problems = [name for name in _PROBLEM if body.get(name) is not None]
        solutions = [name for name in _SOLUTIONS if body.get(name) is not None]
        if len(problems) != 1 or len(solutions) != 1:
            what = f"give one of {', '.join(_PROBLEM)} and one of {', '.join(_SOLUTIONS)}, or messages"
            raise InvalidRequestError([*found, Violation("problem", what)])
        problem, given = body[problems[0]], body[solutions[0]]
        if isinstance(problem, list) and len(problem) == 1:
            problem = problem[0]
        places = {"problem": problems[0], "solutions": solutions[0]}
        if not isinstance(problem, str):
            found.append(Violation(problems[0], "must be one text"))
            problem = "-"
        return {"problem": problem, "solutions": _texts(solutions[0], given, found)}, places


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


def _classes(solution: SolutionScores) -> dict[str, Any]:
    probabilities = _pair(solution.score)
    label = None if solution.score is None else ("right" if solution.score >= 0.5 else "wrong")
    return {"label": label, "probs": probabilities or [], "num_classes": len(probabilities or [])}


def _head(name: str, asked: BodyCall, result: ScoreResult) -> dict[str, Any]:
    read, request = result.usage.verifier_tree_tokens, result.configuration
    assert isinstance(request, ScoreRequest)
    return {
        "id": f"{name}-{result.search_id}",
        "object": "list",
        "model": asked.model,
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
