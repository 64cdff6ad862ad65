"""Parameters of OpenAI's and vLLM's bodies that are the same for chats and for completions: ignored, set or refused."""

import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, StrictBool

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.completion import CompletionRequest
from espalier.search.schema import mapping_text, unknown_names
from espalier.search.service.access.calls import Call
from espalier.search.service.http_api.openai.guided import set_form
from espalier.search.service.session import SearchCall, Session

SEED_BITS = 53
"""Of a seed that the client leaves open: what every JSON parser reads exactly."""
PRIORITY, TIME_LIMIT = "priority", "time_limit"
_OF_PLAIN = (PRIORITY, TIME_LIMIT, "text_form")
"""Fields of `espalier` that sampling without a search has."""
IGNORED = {
    "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key",
    "prompt_cache_retention", "reasoning_effort", "request_id", "safety_identifier", "service_tier", "store",
    "user", "verbosity",
}  # fmt: skip
"""Parameters that do not change what is sampled; clients send them to every server."""
NO_TOOLS = "tools are not called; with `tool_choice` none a chat may list them, and its messages may tell of calls"
NOT_OFFERED: dict[str, tuple[str, tuple[Any, ...]]] = {
    # parameter: why it is refused, and the values besides null that ask for nothing
    "length_penalty": ("is of beam search by likelihood, which is not offered", (1,)),
    "modalities": ("only text is offered", (["text"],)),
    "audio": ("only text is offered", ()),
    "tools": (NO_TOOLS, ([],)),
    "tool_choice": (NO_TOOLS, ("none", "auto")),
    "functions": (NO_TOOLS, ([],)),
    "function_call": (NO_TOOLS, ("none", "auto")),
    "web_search_options": (NO_TOOLS, ()),
    "best_of": ("is not offered; choose a search by the model's name, such as NAME@best-of-8", (1,)),
    "use_beam_search": ("is not offered; choose a search by the model's name, such as NAME@beam-n4-m4", (False,)),
    "suffix": ("text cannot be filled in before a suffix", ("",)),
    "min_tokens": ("a least length is not offered", (0,)),
    "ignore_eos": ("a text ends at an end-of-sequence token", (False,)),
    "stop_token_ids": ("give texts to `stop`", ([],)),
    "bad_words": ("give tokens to `logit_bias`", ([],)),
    "allowed_token_ids": ("give tokens to `logit_bias`", ([],)),
    "prompt_logprobs": ("give `echo` and `logprobs` to /v1/completions", ()),
    "truncate_prompt_tokens": ("a prompt is never cut", (-1,)),
    "skip_special_tokens": ("texts have no special tokens", (True,)),
    "spaces_between_special_tokens": ("texts have no special tokens", (True, False)),
}


class StreamOptions(BaseModel, extra="forbid"):
    """`stream_options` of a body; padding against who listens is left out."""

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None
    include_obfuscation: StrictBool | None = None


@dataclass(frozen=True, slots=True)
class BodyCall:
    """The parameters of a body.

    Attributes:
        model: the name that the client used.
        search: the search, completion or request for scores; with progress if chunks are wanted.
        places: fields of the request by the places of the body that set them.
        include_usage: whether the last chunk tells the usage.
        usage_so_far: whether every chunk tells the usage until then.
        thoughts: whether thoughts are told.
    """

    model: str
    search: SearchCall
    places: Mapping[str, str]
    include_usage: bool = False
    usage_so_far: bool = False
    thoughts: bool = True

    @asynccontextmanager
    async def run(self, session: Session, call: Call) -> AsyncIterator[AsyncIterator[Sequence[Any]]]:
        """The session's events; violations of fields are named by the places of the body that set them."""
        try:
            async with session.search(self.search, call) as events:
                yield events
        except InvalidRequestError as error:
            raise InvalidRequestError(in_body(error.violations, self.places)) from None


@dataclass(frozen=True, slots=True)
class PlainCall(BodyCall):
    """Sampling without a search that a body asks for.

    Attributes:
        return_token_ids: whether choices have their tokens' ids.
        tokens_as_ids: whether tokens of log-probabilities are written `token_id:N`.
    """

    return_token_ids: bool = False
    tokens_as_ids: bool = False

    @property
    def request(self) -> CompletionRequest:
        """The completion."""
        assert isinstance(self.search.request, CompletionRequest)
        return self.search.request


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
SAMPLING = {
    "repeat_penalty": "repetition_penalty",  # as Ollama and llama.cpp have it
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", *PENALTIES, "seed", "max_tokens")},
}
"""Fields of a search and of a `CompletionRequest` by the parameters that set them."""
PLAIN_PARAMETERS = {
    "n": "samples",
    "include_stop_str_in_output": "include_stop",
    **SAMPLING,
    "max_completion_tokens": "max_tokens",
}
"""Fields of a `CompletionRequest` by the parameters that set them."""
_MINUS_ONE = {"top_k": 0, "seed": None}
"""Meanings of -1: vLLM's all tokens, and llama.cpp's any seed, which front ends send as their default."""


def plain_fields(body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str], list[Violation]]:
    """Fields of a `CompletionRequest` that a body sets, the places that set them, and what is wrong.

    The priority, which is the call's, is among them as `priority`.
    """
    values: dict[str, Any] = {"seed": secrets.randbits(SEED_BITS)}
    places: dict[str, str] = {}
    found: list[Violation] = []
    set_parameters(body, PLAIN_PARAMETERS, values, places)
    values["stop"], places["stop"] = stop_texts(body.get("stop"), found), "stop"
    set_form(body, values, places, found)
    set_own(body.get("espalier"), _OF_PLAIN, values, places, found)
    return values, places, found


def set_parameters(
    body: Mapping[str, Any], fields: Mapping[str, str], values: dict[str, Any], places: dict[str, str]
) -> None:
    """Set `fields` of a request to the parameters of a body that are there; of two limits the lower one holds."""
    for name, field in fields.items():
        if (value := body.get(name)) == -1 and name in _MINUS_ONE:
            value = _MINUS_ONE[name]
        if name == "logit_bias" and isinstance(value, dict):
            value = mapping_text(value)
        if value is not None:
            if field == "max_tokens" and isinstance(value, int) and isinstance(values.get(field), int):
                value = min(value, values[field])
            values[field], places[field] = value, name


def set_own(
    own: Any, names: Iterable[str], values: dict[str, Any], places: dict[str, str], found: list[Violation]
) -> None:
    """Set those of the fields `names` that a body's `espalier` has, where nothing is searched."""
    for name, value in (own if isinstance(own, dict) else {}).items():
        if name in names:
            values[name], places[name] = value, f"espalier.{name}"
        else:
            found.append(Violation(f"espalier.{name[:80]}", "is a field of searches, and this is none"))


def take_priority(values: dict[str, Any], found: list[Violation]) -> int:
    """Take the priority, which is the call's, out of the fields of a request."""
    priority = values.pop(PRIORITY, None)
    if priority is not None and (isinstance(priority, bool) or not isinstance(priority, int)):
        found.append(Violation("espalier.priority", "must be a whole number"))
        return 0
    return priority or 0


def plain_call(
    model: str,
    body: Mapping[str, Any],
    values: dict[str, Any],
    places: dict[str, str],
    found: list[Violation],
    thoughts: bool = True,
) -> PlainCall:
    """The call of a completion whose fields are `values`; `thoughts` says whether those are told."""
    priority = take_priority(values, found)
    options = StreamOptions.model_validate(body.get("stream_options") or {})
    stream = bool(body.get("stream"))
    call = SearchCall(CompletionRequest(**values), priority, stream, violations=in_body(found, places))
    return PlainCall(
        model,
        call,
        {PRIORITY: "espalier.priority", **places},
        bool(options.include_usage),
        bool(options.continuous_usage_stats),
        thoughts,
        bool(body.get("return_token_ids")),
        bool(body.get("return_tokens_as_token_ids")),
    )


def stop_texts(value: Any, found: list[Violation]) -> tuple[str, ...]:
    """The texts of `stop`: a text, a list of them, or null; an empty text, as some clients send, asks for nothing."""
    given = [value] if isinstance(value, str) else value
    if given is not None and not (isinstance(given, list) and all(isinstance(text, str) for text in given)):
        found.append(Violation("stop", "must be a text or a list of texts"))
        return ()
    return tuple(text for text in given or () if text)


def not_honoured(
    body: Mapping[str, Any],
    known: Iterable[str],
    of_search: Iterable[str] = (),
    refused: Mapping[str, tuple[str, tuple[Any, ...]]] = NOT_OFFERED,
) -> Iterator[Violation]:
    """Parameters of a body that are not offered; what it is silent about, or asks for by no effect, is left out.

    Args:
        body: all parameters.
        known: parameters that are read elsewhere.
        of_search: fields of a search, which belong into `espalier`.
        refused: parameters with why they are refused, and their values besides null that ask for nothing.
    """
    unknown: list[str] = []
    known, of_search = {*known, *IGNORED}, set(of_search)
    for name, value in body.items():
        if value is None or name in known:
            continue
        if name == "extra_body" and isinstance(value, dict) and all(body.get(k) == v for k, v in value.items()):
            continue  # as its_hub sends it: a copy of what stands beside it
        if name in refused:
            why, harmless = refused[name]
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in harmless):
                yield Violation(name, why)
        elif name in of_search:
            yield Violation(name, "is unknown; put it into `espalier`")
        else:
            unknown.append(name)
    yield from unknown_names(unknown, {*known, *refused, *of_search})
    if body.get("stream_options") and not body.get("stream"):
        yield Violation("stream_options", "needs `stream`")


def in_body(violations: Iterable[Violation], places: Mapping[str, str]) -> list[Violation]:
    """Return violations of fields by the places of the body that set them; `history[3]` has that of `history`."""
    return [Violation(places.get(v.field.partition("[")[0], v.field), v.description) for v in violations]
