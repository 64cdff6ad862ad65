"""Bodies of chat completions: the search that one asks for, and what of it cannot be honoured."""

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, InstanceOf, StrictBool

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.request import SearchRequest
from espalier.search.schema import few, from_values
from espalier.search.service.http_api.body import SearchBody, validated
from espalier.search.service.http_api.openai.model_names import ModelNames
from espalier.search.service.session import SearchCall

_MAX_MESSAGES = _MAX_PARTS = 512
"""Messages, and parts of one message, that are looked at; a search takes fewer messages still."""
_SEED_BITS = 53
"""Of a seed that the client leaves open: what every JSON parser reads exactly."""
_PARAMETERS = {
    **{name: name for name in ("temperature", "top_p", "seed", "max_tokens")},
    "max_completion_tokens": "generator_budget",
}
"""Fields of a search by the parameters that set them."""
_IGNORED = {
    "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "service_tier", "store", "user",
}  # fmt: skip
"""Parameters that do not change what is answered."""
_NO_TOOLS = "tools are not offered"
_NOT_OFFERED: dict[str, tuple[str, tuple[Any, ...]]] = {
    # parameter: why it is refused, and the values besides null that ask for nothing
    "n": ("must be 1: a search selects one answer; POST /v1/searches returns all its candidates", (1,)),
    "stop": ("stop sequences are not offered: a step ends at a blank line", ("", [])),
    "logprobs": ("log-probabilities are not offered", (False,)),
    "top_logprobs": ("log-probabilities are not offered", (0,)),
    "frequency_penalty": ("penalties are not offered", (0,)),
    "presence_penalty": ("penalties are not offered", (0,)),
    "logit_bias": ("a bias is not offered", ({},)),
    "response_format": ("only text is offered", ({"type": "text"},)),
    "modalities": ("only text is offered", (["text"],)),
    "audio": ("only text is offered", ()),
    "tools": (_NO_TOOLS, ([],)),
    "tool_choice": (_NO_TOOLS, ("none", "auto")),
    "functions": (_NO_TOOLS, ([],)),
    "function_call": (_NO_TOOLS, ("none", "auto")),
    "web_search_options": (_NO_TOOLS, ()),
    "reasoning_effort": ("choose a search by the model's name or in `espalier`", ()),
    "verbosity": ("is not offered", ()),
}
_FIELDS = {f.name for f in fields(SearchRequest)}


class _Part(BaseModel):
    type: Literal["text"]
    text: InstanceOf[str]  # also with an unpaired surrogate, which the problem's check reports


class _Message(BaseModel, extra="allow"):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[_Part],
        Field(max_length=_MAX_PARTS),
        BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value),
    ]
    # Clients send the following back as they got them.
    name: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    annotations: Any = None

    @property
    def of_system(self) -> bool:
        return self.role in ("system", "developer")

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content)


class _StreamOptions(BaseModel):
    include_usage: StrictBool | None = None


class _Chat(BaseModel, extra="allow"):
    model: InstanceOf[str]
    messages: Annotated[list[_Message], Field(min_length=1, max_length=_MAX_MESSAGES)]
    stream: StrictBool | None = None
    stream_options: _StreamOptions | None = None
    espalier: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A chat completion that is asked for.

    Attributes:
        model: the name that the client used.
        search: the search; with progress if chunks are wanted.
        include_usage: whether the last chunk tells the usage.
        places: fields of the request by the places of the body that set them.
    """

    model: str
    search: SearchCall
    include_usage: bool
    places: dict[str, str]


def read_chat(body: dict[str, Any], names: ModelNames) -> ChatCall:
    """Read the body of a chat completion.

    Raises:
        HttpError: there is no such model.
        InvalidRequestError: lists everything that is wrong and what cannot be honoured.
    """
    chat = validated(_Chat, body)
    values = names.search_fields(chat.model)
    places = dict.fromkeys(values, "model") | {"problem": "messages", "history": "messages"}
    for name, field in _PARAMETERS.items():
        if (value := body.get(name)) is not None:
            values[field], places[field] = value, name
    violations = [*_not_honoured(chat), *_wrong_messages(chat.messages)]
    for name, value in (chat.espalier or {}).items():
        if name in ("problem", "history"):
            violations.append(Violation(f"espalier.{name}", "set by `messages`; remove it"))
        else:  # also null, which here means no limit or the algorithm's default
            values[name], places[name] = value, f"espalier.{name[:80]}"
    values = {"seed": secrets.randbits(_SEED_BITS), **values, **_conversation(chat.messages)}
    try:
        search = from_values(SearchBody, values)
    except InvalidRequestError as error:
        raise InvalidRequestError([*violations, *in_body(error.violations, places)]) from None
    include_usage = bool(chat.stream_options and chat.stream_options.include_usage)
    call = SearchCall(search.request, search.priority or 0, bool(chat.stream), violations=violations)
    return ChatCall(chat.model, call, include_usage, {"priority": "espalier.priority", **places})


def _not_honoured(chat: _Chat) -> Iterator[Violation]:
    unknown = []
    for name, value in (chat.model_extra or {}).items():
        if name in _NOT_OFFERED:
            why, harmless = _NOT_OFFERED[name]
            if value is not None and value not in harmless:
                yield Violation(name, why)
        elif name in _IGNORED | _PARAMETERS.keys():
            continue
        elif name in _FIELDS:
            yield Violation(name, "is unknown; put it into `espalier`")
        else:
            unknown.append(Violation(name[:80], "is unknown"))
    yield from few(unknown)
    if chat.stream_options and not chat.stream:
        yield Violation("stream_options", "needs `stream`")


def _wrong_messages(messages: list[_Message]) -> Iterator[Violation]:
    turns = 0
    for index, message in enumerate(messages):
        if message.of_system and turns:
            yield Violation(f"messages[{index}].role", f"messages of the {message.role} come first")
        turns += not message.of_system
        given = [name for name, value in (message.model_extra or {}).items() if value not in (None, [])]
        tools = [name for name in given if name in ("tool_calls", "function_call")]
        yield from (Violation(f"messages[{index}].{name}", _NO_TOOLS) for name in tools)
        unknown = (name for name in given if name not in tools)
        yield from few([Violation(f"messages[{index}].{name[:80]}", "is unknown") for name in unknown])
    if messages[-1].role != "user":
        yield Violation("messages", "the last message must be the user's")


def _conversation(messages: list[_Message]) -> dict[str, Any]:
    """The last message is the problem, the others are the history; those of the system are one."""
    *turns, last = messages
    system = "\n\n".join(message.text for message in turns if message.of_system)
    history = [{"role": "system", "content": system}] if any(message.of_system for message in turns) else []
    history += [{"role": turn.role, "content": turn.text} for turn in turns if not turn.of_system]
    return {"problem": last.text, "history": history}


def in_body(violations: Iterable[Violation], places: dict[str, str]) -> list[Violation]:
    """Return violations of fields by the places of the body that set them; `history[3]` has that of `history`."""
    return [Violation(places.get(v.field.partition("[")[0], v.field), v.description) for v in violations]
