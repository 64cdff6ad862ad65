"""Parameters of OpenAI's and vLLM's bodies that are the same for chats and for completions: ignored, set or refused."""

import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, InstanceOf, StrictBool

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.completion import CompletionRequest
from espalier.search.schema import from_values, mapping_text, unknown_names
from espalier.search.service.http_api.openai.spellings import asked_form
from espalier.search.service.session import SearchCall, in_places

T = TypeVar("T")

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


class SamplingBody(BaseModel, extra="allow"):
    """Fields of the bodies of both chats and text completions; sampling parameters are checked with the request."""

    model: InstanceOf[str]
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: StrictBool | None = None
    return_tokens_as_token_ids: StrictBool | None = None
    espalier: dict[str, Any] | None = None

    @property
    def options(self) -> StreamOptions:
        """Options of its stream."""
        return self.stream_options or StreamOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledCall(SearchCall):
    """A chat or a completion that is asked for: searched or sampled; with progress if chunks are wanted.

    Attributes:
        body: the parameters.
        thoughts: whether thoughts are told.
        choices: candidates of a search to return, the selected one first.
        stop: texts at which what is shown of a candidate is cut.
        include_stop: whether they are shown.
        metadata: whether all candidates are told as its_hub tells them.
    """

    body: SamplingBody
    thoughts: bool = True
    choices: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    metadata: bool = False

    @property
    def sampled(self) -> CompletionRequest:
        """The request, where nothing is searched."""
        assert isinstance(self.request, CompletionRequest)
        return self.request


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


@dataclass(slots=True)
class BodyFields:
    """The fields of a request as a body sets them.

    Attributes:
        body: its parameters.
        values: of the fields.
        places: of the body, that set them.
        found: what is wrong.
    """

    body: Mapping[str, Any]
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    places: dict[str, str] = field(default_factory=dict[str, str])
    found: list[Violation] = field(default_factory=list[Violation])

    def set(self, name: str, value: Any, place: str) -> None:
        """Set a field to the value at a place of the body."""
        self.values[name], self.places[name] = value, place

    def refuse(self, place: str, rule: str) -> None:
        """Note what is wrong at a place of the body."""
        self.found.append(Violation(place, rule))

    def set_sampling(self, fields: Mapping[str, str]) -> None:
        """Set `fields` to the parameters that are there, of two limits to the lower one, and the form of the text."""
        for name, set_field in fields.items():
            if (value := self.body.get(name)) == -1 and name in _MINUS_ONE:
                value = _MINUS_ONE[name]
            if name == "logit_bias" and isinstance(value, dict):
                value = mapping_text(value)
            if value is not None:
                if set_field == "max_tokens" and isinstance(value, int) and isinstance(self.values.get(set_field), int):
                    value = min(value, self.values[set_field])
                self.set(set_field, value, name)
        if form := asked_form(self.body, self.found):
            self.set("text_form", *form)

    def set_own(self, names: Iterable[str]) -> None:
        """Set those of the fields `names` that the body's `espalier` has, where nothing is searched."""
        own = self.body.get("espalier")
        for name, value in (own if isinstance(own, dict) else {}).items():
            if name in names:
                self.set(name, value, f"espalier.{name}")
            else:
                self.refuse(f"espalier.{name[:80]}", "is a field of searches, and this is none")

    def stop_texts(self) -> tuple[str, ...]:
        """The texts of `stop`: a text, a list of them, or null; an empty text asks for nothing."""
        value = self.body.get("stop")
        given = [value] if isinstance(value, str) else value
        if given is not None and not (isinstance(given, list) and all(isinstance(text, str) for text in given)):
            self.refuse("stop", "must be a text or a list of texts")
            return ()
        return tuple(text for text in given or () if text)

    def take_priority(self) -> int:
        """Take the priority, which is the call's, out of the fields."""
        priority = self.values.pop(PRIORITY, None)
        if priority is not None and (isinstance(priority, bool) or not isinstance(priority, int)):
            self.refuse("espalier.priority", "must be a whole number")
            return 0
        return priority or 0

    def make(self, kind: type[T]) -> T:
        """Make the request.

        Raises:
            InvalidRequestError: a value is wrong; lists everything that was found before, too.
        """
        try:
            return from_values(kind, self.values)
        except InvalidRequestError as error:
            raise InvalidRequestError([*self.found, *in_places(error.violations, self.places)]) from None


def sampled_fields(body: Mapping[str, Any]) -> BodyFields:
    """The fields of a `CompletionRequest` that every body can set, and the call's priority."""
    its = BodyFields(body, {"seed": secrets.randbits(SEED_BITS)}, {PRIORITY: "espalier.priority"})
    its.set_sampling(PLAIN_PARAMETERS)
    its.set("stop", its.stop_texts(), "stop")
    its.set_own(_OF_PLAIN)
    return its


def sampled_call(its: BodyFields, body: SamplingBody, thoughts: bool = True) -> SampledCall:
    """The call of a completion with these fields; `thoughts` says whether those are told."""
    priority = its.take_priority()
    found = in_places(its.found, its.places)
    request = CompletionRequest(**its.values)
    stream = bool(body.stream)
    return SampledCall(request, priority, stream, False, found, places=its.places, body=body, thoughts=thoughts)


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
