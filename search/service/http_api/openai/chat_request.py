"""Bodies of chat completions: the search or the plain sampling that one asks for, and what cannot be honoured."""

import json
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, InstanceOf, Strict, StrictBool

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.completion import ChatPrompt
from espalier.search.conversation import ChatMessage, ChatRole, split_conversation
from espalier.search.request import SearchRequest
from espalier.search.schema import few, from_values
from espalier.search.service.http_api.body import SearchBody, validated
from espalier.search.service.http_api.openai.guided import FORM_PARAMETERS, set_form
from espalier.search.service.http_api.openai.parameters import (
    PLAIN_PARAMETERS,
    SAMPLING,
    SEED_BITS,
    BodyCall,
    PlainCall,
    StreamOptions,
    in_body,
    not_honoured,
    plain_call,
    plain_fields,
    set_parameters,
    stop_texts,
)
from espalier.search.service.http_api.openai.thinking import (
    THINKING_PARAMETERS,
    AskedThinking,
    is_spelling,
    read_thinking_parameters,
)
from espalier.search.service.model_names import ModelNames
from espalier.search.service.session import SearchCall

_MAX_MESSAGES = _MAX_PARTS = 512
"""Messages, and parts of one message, that are looked at; a search takes fewer messages still."""
_PARAMETERS = {
    **SAMPLING,
    "max_completion_tokens": "max_tokens",
    "budget": "beam_width",
}
"""Fields of a search by the parameters that set them."""
_FIELDS = {f.name for f in fields(SearchRequest)}
_OF_PLAIN = "is offered by NAME@plain, which samples without a search"
_NO_BUDGET = "is kept by searches, and this is none; for one path ask the model NAME@greedy"


class _Part(BaseModel):
    type: Literal["text"]
    text: InstanceOf[str]  # also with an unpaired surrogate, which the problem's check reports


def _parts(content: Any) -> Any:
    """The content of a message as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Function(BaseModel):
    name: InstanceOf[str]
    arguments: InstanceOf[str] | dict[str, Any] | None = None


class _Call(BaseModel):
    id: InstanceOf[str] | None = None
    type: Literal["function"] = "function"
    function: _Function


_ROLES = {"developer": ChatRole.SYSTEM, "function": ChatRole.TOOL}
"""Roles by other names, an older one for tools."""


class _Message(BaseModel, extra="allow"):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Annotated[list[_Part], Field(max_length=_MAX_PARTS)] | None, BeforeValidator(_parts)] = None
    reasoning_content: InstanceOf[str] | None = None
    reasoning: InstanceOf[str] | None = None  # the same by its newer name
    tool_calls: Annotated[list[_Call], Field(max_length=_MAX_PARTS)] | None = None
    function_call: _Function | None = None  # the only one by its older name
    tool_call_id: InstanceOf[str] | None = None
    name: Any = None

    @property
    def read(self) -> ChatMessage:
        """The message of a conversation."""
        role = _ROLES.get(self.role) or ChatRole(self.role)
        thought = (self.reasoning_content or self.reasoning or "") if role == ChatRole.ASSISTANT else ""
        text, more = "\n".join(part.text for part in self.content or ()), self._more(role)
        return ChatMessage(role, text, thought, json.dumps(more, ensure_ascii=False) if more else "")

    def _more(self, role: ChatRole) -> dict[str, Any]:
        """Fields that templates read of turns of tools; other keys of messages are notes of clients to themselves."""
        if role == ChatRole.TOOL:
            named = {"tool_call_id": self.tool_call_id, "name": self.name if isinstance(self.name, str) else None}
            return {name: value for name, value in named.items() if value is not None}
        calls = self.tool_calls or ([_Call(function=self.function_call)] if self.function_call else [])
        called = [call.model_dump(exclude_none=True) for call in calls]
        return {"tool_calls": called} if called and role == ChatRole.ASSISTANT else {}


class Conversation(BaseModel, extra="allow"):
    """Messages, and how the chat template makes a prompt of them."""

    messages: Annotated[list[_Message], Field(min_length=1, max_length=_MAX_MESSAGES)]
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: InstanceOf[str] | None = None


class ChatBody(Conversation, extra="allow"):
    """The body; sampling parameters are checked with the request."""

    model: InstanceOf[str]
    n: Annotated[int, Strict(), Field(ge=1, le=128)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Any = None
    echo: Literal[False] | None = None
    include_stop_str_in_output: StrictBool | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: StrictBool | None = None
    return_tokens_as_token_ids: StrictBool | None = None
    budget: Annotated[int, Strict(), Field(ge=1, le=1000)] | None = None
    return_response_only: StrictBool | None = None
    espalier: dict[str, Any] | None = None


ITS_BUDGET = "x-its-budget"
_KNOWN = {*ChatBody.model_fields, *PLAIN_PARAMETERS, *FORM_PARAMETERS, *THINKING_PARAMETERS, "stop"}
_TOOLS = {"tools": "tool_choice", "functions": "function_call"}
"""Lists of tools with the parameter that says which to call."""
_PLAIN_ALONE = ("logprobs", "return_token_ids", "return_tokens_as_token_ids", "continue_final_message")
"""Parameters, true or false, that a search cannot honour."""


@dataclass(frozen=True, slots=True)
class ChatCall(BodyCall):
    """A chat completion that is asked for.

    Attributes:
        choices: candidates to return, the selected one first.
        stop: texts at which what is shown of a candidate is cut.
        include_stop: whether they are shown.
        metadata: whether all candidates are told as its_hub tells them.
    """

    choices: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    metadata: bool = False


def budget_of(header: str | None) -> dict[str, Any]:
    """The `budget` of its_hub's header, which wins over the body's; none without the header.

    Raises:
        InvalidRequestError: it is no number.
    """
    if header is None:
        return {}
    if not (header.isascii() and header.isdigit() and len(header) <= 4):
        raise InvalidRequestError([Violation(ITS_BUDGET, "must be a whole number between 1 and 1000")])
    return {"budget": int(header)}


def read_chat(body: dict[str, Any], names: ModelNames) -> ChatCall | PlainCall:
    """Read the body of a chat completion: a search, or plain sampling if the model's name says so.

    A last message of the assistant that is to be continued is never searched either, nor is what is asked for by its
    tokens' ids.

    Raises:
        UnknownModelError: there is no such model.
        InvalidRequestError: lists everything that is wrong and what cannot be honoured.
    """
    chat = validated(ChatBody, body)
    values = names.search_fields(chat.model)
    if names.is_plain(chat.model) or ((chat.continue_final_message or chat.return_token_ids) and not values):
        return _read_plain(chat, body)
    places = dict.fromkeys(values, "model") | {"problem": "messages", "history": "messages"}
    set_parameters(body, _PARAMETERS, values, places)
    violations = [*not_honoured(body, _known(body), _FIELDS), *few([*_not_of_search(chat)])]
    set_form(body, values, places, violations)
    stop = stop_texts(body.get("stop"), violations)
    thinking = read_thinking_parameters(body, violations)
    if thinking.field:
        values["thinking"], places["thinking"] = thinking.field, thinking.place
    for name, value in (chat.espalier or {}).items():
        if name in ("problem", "history"):
            violations.append(Violation(f"espalier.{name}", "set by `messages`; remove it"))
        else:  # also null, which here means no limit or the algorithm's default
            values[name], places[name] = value, f"espalier.{name[:80]}"
    values = {"seed": secrets.randbits(SEED_BITS), **values, **conversation(chat.messages, violations)}
    try:
        search = from_values(SearchBody, values)
    except InvalidRequestError as error:
        raise InvalidRequestError([*violations, *in_body(error.violations, places)]) from None
    if (chat.n or 1) > search.request.candidates:
        most = search.request.candidates
        violations.append(Violation("n", f"must be at most {most}, the candidates of this search"))
    stream, options = bool(chat.stream), chat.stream_options or StreamOptions()
    usage_so_far = bool(options.continuous_usage_stats)
    return ChatCall(
        chat.model,
        SearchCall(search.request, search.priority or 0, stream, stream and usage_so_far, violations),
        {"priority": "espalier.priority", **places},
        include_usage=bool(options.include_usage),
        usage_so_far=usage_so_far,
        thoughts=thinking.shown,
        choices=chat.n or 1,
        stop=stop,
        include_stop=bool(chat.include_stop_str_in_output),
        metadata=chat.return_response_only is False,
    )


def _known(body: dict[str, Any]) -> set[str]:
    """Parameters that are read here: tools among them where none is to be called."""
    uncalled = {tools for tools, choice in _TOOLS.items() if body.get(choice) == "none"}
    return _KNOWN | uncalled


def _read_plain(chat: ChatBody, body: dict[str, Any]) -> PlainCall:
    values, places, found = plain_fields(body)
    found += not_honoured(body, _known(body))
    if chat.budget is not None:
        found.append(Violation("budget", "is of a search, and this is none"))
    top = chat.top_logprobs
    if top and not chat.logprobs:
        found.append(Violation("top_logprobs", "needs `logprobs`"))
    values["logprobs"], places["logprobs"] = (top or 0) if chat.logprobs else None, "top_logprobs"
    thinking = read_thinking_parameters(body, found)
    if thinking.budget and thinking.on is not False:
        found.append(Violation(thinking.place, _NO_BUDGET))
    values["prompts"], places["prompts"] = (chat_prompt(chat, thinking, found),), "messages"
    return plain_call(chat.model, body, values, places, found, thinking.shown)


def chat_prompt(chat: Conversation, thinking: AskedThinking, found: list[Violation]) -> ChatPrompt:
    """The prompt of a conversation; what is wrong with it goes to `found`."""
    found += _not_read(chat.messages)
    continued = bool(chat.continue_final_message)
    if continued and chat.messages[-1].role != "assistant":
        found.append(Violation("continue_final_message", "needs a last message of the assistant"))
    if chat.add_generation_prompt is continued:
        found.append(Violation("add_generation_prompt", "must be true, or false with `continue_final_message`"))
    variables = {**thinking.variables, **(chat.chat_template_kwargs or {})}
    own = {"messages", "add_generation_prompt", "tools", "documents"} & variables.keys()
    found += (Violation(f"chat_template_kwargs.{name}", "is set by the server") for name in sorted(own))
    variables |= _tools_shown(chat, found)
    messages = tuple(_as_sent(message.read) for message in chat.messages)
    return ChatPrompt(messages, continued, variables)


def _as_sent(message: ChatMessage) -> dict[str, Any]:
    """A message for the chat template alone."""
    thought = {"reasoning_content": message.reasoning_content} if message.reasoning_content else {}
    return {"role": str(message.role), "content": message.content, **thought, **message.fields}


def _tools_shown(chat: Conversation, found: list[Violation]) -> dict[str, Any]:
    """Tools that are not to be called: what the template shows of them, as it may by vLLM's default."""
    given = chat.model_extra or {}
    functions, tools = given.get("functions") or [], given.get("tools") or []
    for name, each in (("functions", functions), ("tools", tools)):
        if not isinstance(each, list) or not all(isinstance(tool, dict) for tool in each):
            found.append(Violation(name, "must be a list of objects"))
            return {}
    tools = [*tools, *({"type": "function", "function": function} for function in functions)]
    return {"tools": tools} if tools else {}


def _not_of_search(chat: ChatBody) -> Iterator[Violation]:
    for name in _PLAIN_ALONE:
        if getattr(chat, name):
            yield Violation(name, _OF_PLAIN)
    if chat.top_logprobs:
        yield Violation("top_logprobs", _OF_PLAIN)
    if chat.add_generation_prompt is False:
        yield Violation("add_generation_prompt", _OF_PLAIN)
    for name, value in (chat.chat_template_kwargs or {}).items():
        if value is not None and not is_spelling(place := f"chat_template_kwargs.{name[:80]}", value):
            yield Violation(place, _OF_PLAIN)


def _not_read(messages: list[_Message]) -> Iterator[Violation]:
    """Messages without content, which only an assistant's may be, and calls of tools by others."""
    for index, message in enumerate(messages):
        if message.role == "assistant":
            continue
        if message.content is None:
            yield Violation(f"messages[{index}].content", "must be a text, or a list of parts")
        if message.tool_calls or message.function_call:
            yield Violation(f"messages[{index}].tool_calls", "are of the assistant")


def conversation(messages: list[_Message], found: list[Violation]) -> dict[str, Any]:
    """Return the fields of a request: what the user says last is the problem, all others are the history."""
    found += _not_read(messages)
    read = [message.read for message in messages]
    try:
        problem, history = split_conversation(read)
    except ValueError as error:
        found.append(Violation("messages", str(error)))
        problem, history = read[-1].content, ()
    return {"problem": problem, "history": [asdict(message) for message in history]}
