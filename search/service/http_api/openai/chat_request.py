"""Reads the body of a chat completion: what is asked of the search, and what cannot be honoured."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.conversation import ChatRole
from espalier.search.request import SearchRequest
from espalier.search.schema import few, from_values
from espalier.search.service.http_api.body import take_flag, take_priority
from espalier.search.service.http_api.openai.model_names import ModelNames

_SAME = ("temperature", "top_p", "seed", "max_tokens")
"""Parameters that are fields of a search by the same name."""
_READ = {"model", "messages", "stream", "stream_options", "max_completion_tokens", "espalier", *_SAME}
_IGNORED = {
    "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "service_tier", "store", "user",
}  # fmt: skip
"""Parameters that do not change what is answered."""
_MOST_MESSAGES = _MOST_PARTS = 512
"""Most messages, and parts of one message, that are looked at; a search takes fewer messages still."""
_SEED_BITS = 53
"""Of a seed that the client leaves open: what every JSON parser reads exactly."""
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
_KNOWN = _READ | _IGNORED | _NOT_OFFERED.keys()
_FIELDS = {f.name for f in fields(SearchRequest)}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_OF_MESSAGES = {"role", "content", "name", "reasoning", "reasoning_content", "annotations"}
"""Entries of messages; only the first two are rendered, the others clients send back as they got them."""
_TOOLS_OF_MESSAGES = {"tool_calls", "function_call"}


@dataclass(frozen=True, slots=True)
class ChatCall:
    """What a chat completion asks for.

    Attributes:
        model: the name that the client used.
        request: the search.
        priority: calls of a larger priority go first.
        stream: whether to send chunks.
        include_usage: whether the last chunk tells the usage.
        violations: what is wrong with the body besides the fields of the request.
        places: where the body says a field of the request.
    """

    model: str
    request: SearchRequest
    priority: int
    stream: bool
    include_usage: bool
    violations: tuple[Violation, ...]
    places: dict[str, str]

    def in_body(self, violations: Iterable[Violation]) -> list[Violation]:
        """Return violations of the request's fields by the places of the body that say them."""
        return _renamed(violations, self.places)


@dataclass(slots=True)
class _Reader:
    """A body that is being read."""

    body: dict[str, Any]
    violations: list[Violation] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def say(self, place: str, field_name: str, value: Any) -> None:
        """Set a field of the request, said at a place of the body; null says nothing."""
        if value is not None:
            self.values[field_name] = value
            self.places[field_name] = place

    def refuse(self, place: str, why: str) -> None:
        self.violations.append(Violation(place, why))


def read_chat(body: dict[str, Any], names: ModelNames) -> ChatCall:
    """Read the body of a chat completion.

    Raises:
        HttpError: there is no such model.
        InvalidRequestError: lists everything that is wrong and what cannot be honoured.
    """
    reader = _Reader(body)
    model = body.get("model")
    if not isinstance(model, str):
        raise InvalidRequestError([Violation("model", "must be the name of a model, see GET /v1/models")])
    reader.places |= {"problem": "messages", "history": "messages"}
    for name, value in names.search_fields(model).items():
        reader.say("model", name, value)
    _read_parameters(reader)
    stream = take_flag(body, "stream", False, reader.violations)
    include_usage = _read_stream_options(reader, stream)
    priority = _read_espalier(reader)
    _read_messages(reader)
    try:
        request = from_values(SearchRequest, {"seed": secrets.randbits(_SEED_BITS), "problem": "-", **reader.values})
    except InvalidRequestError as error:
        raise InvalidRequestError([*reader.violations, *_renamed(error.violations, reader.places)]) from None
    return ChatCall(model, request, priority, stream, include_usage, tuple(reader.violations), reader.places)


def _read_parameters(reader: _Reader) -> None:
    body = reader.body
    for name in _SAME:
        reader.say(name, name, body.get(name))
    reader.say("max_completion_tokens", "generator_budget", body.get("max_completion_tokens"))
    for name, (why, harmless) in _NOT_OFFERED.items():
        if (value := body.get(name)) is not None and value not in harmless:
            reader.refuse(name, why)
    others = [name for name in body if name not in _KNOWN]
    for name in [name for name in others if name in _FIELDS]:
        reader.refuse(name, "is unknown; put it into `espalier`")
    reader.violations += few([Violation(name[:80], "is unknown") for name in others if name not in _FIELDS])


def _read_stream_options(reader: _Reader, stream: bool) -> bool:
    options = reader.body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or not stream:
        reader.refuse("stream_options", "must be an object, and needs `stream`")
        return False
    return take_flag(dict(options), "include_usage", False, reader.violations, "stream_options.")


def _read_espalier(reader: _Reader) -> int:
    own = reader.body.get("espalier")
    if own is None:
        return 0
    if not isinstance(own, dict):
        reader.refuse("espalier", "must be an object with fields of a search")
        return 0
    left = dict(own)
    priority = take_priority(left, reader.violations, "espalier.")
    reader.places["priority"] = "espalier.priority"
    for name, value in left.items():
        if name in ("problem", "history"):
            reader.refuse(f"espalier.{name}", "is said by `messages`")
        else:
            # Also null, which here means no limit or the algorithm's default.
            reader.values[name], reader.places[name] = value, f"espalier.{name[:80]}"
    return priority


def _read_messages(reader: _Reader) -> None:
    """The last message is the problem, the others are the history; the first ones may be the system's."""
    messages = reader.body.get("messages")
    if not isinstance(messages, list) or not messages:
        reader.refuse("messages", "must be a list of messages, the last one the user's")
        return
    if len(messages) > _MOST_MESSAGES:
        reader.refuse("messages", f"must be at most {_MOST_MESSAGES} messages, is {len(messages)}")
        return
    turns: list[dict[str, str]] = []
    system: list[str] = []
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        turn = _read_message(reader, place, message)
        if turn is None:
            continue
        if turn["role"] != ChatRole.SYSTEM:
            turns.append(turn)
        elif turns:
            reader.refuse(f"{place}.role", f"messages of the {message['role']} come first")
        else:
            system.append(turn["content"])
    if reader.violations:
        return
    if not turns or turns[-1]["role"] != ChatRole.USER:
        reader.refuse("messages", "the last message must be the user's")
        return
    said = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    reader.values |= {"problem": turns.pop()["content"], "history": [*said, *turns]}


def _read_message(reader: _Reader, place: str, message: Any) -> dict[str, str] | None:
    if not isinstance(message, dict):
        reader.refuse(place, "must be an object with role and content")
        return None
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(_ROLES)
        reader.refuse(f"{place}.role", _NO_TOOLS if role in ("tool", "function") else f"must be one of {known}")
        return None
    content = _read_content(reader, f"{place}.content", message.get("content"))
    left = [name for name in message if name not in _OF_MESSAGES and message[name] not in (None, [])]
    for name in [name for name in left if name in _TOOLS_OF_MESSAGES]:
        reader.refuse(f"{place}.{name}", _NO_TOOLS)
    unknown = [Violation(f"{place}.{name[:80]}", "is unknown") for name in left if name not in _TOOLS_OF_MESSAGES]
    reader.violations += few(unknown)
    return None if content is None else {"role": _ROLES[role], "content": content}


def _read_content(reader: _Reader, place: str, content: Any) -> str | None:
    """A message's text; its parts are joined by newlines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        reader.refuse(place, "must be text, or a list of parts of the type text")
        return None
    if len(content) > _MOST_PARTS:
        reader.refuse(place, f"must be at most {_MOST_PARTS} parts, is {len(content)}")
        return None
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text":
            reader.refuse(f"{place}[{index}].type", f"must be text, is {str(kind)[:80]}")
        elif not isinstance(text, str):
            reader.refuse(f"{place}[{index}].text", "must be text")
        else:
            texts.append(text)
    return "\n".join(texts)


def _renamed(violations: Iterable[Violation], places: dict[str, str]) -> list[Violation]:
    """Violations by the places of the body; `history[3]` is said where `history` is."""
    return [Violation(places.get(v.field.partition("[")[0], v.field), v.description) for v in violations]
