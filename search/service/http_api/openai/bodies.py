"""Bodies of chats and of text completions: the search or the plain sampling that one asks for, what it cannot have."""

import json
import secrets
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, InstanceOf, Strict, StrictBool

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.completion import MAX_PROMPTS, ChatPrompt, Prompt
from espalier.search.conversation import ChatMessage, ChatRole, split_conversation
from espalier.search.request import SearchRequest
from espalier.search.schema import few
from espalier.search.service.http_api.body import SearchBody, validated
from espalier.search.service.http_api.openai import parameters, spellings
from espalier.search.service.http_api.openai.parameters import BodyFields, SampledCall, SamplingBody
from espalier.search.service.model_names import ModelNames

_MAX_MESSAGES = _MAX_PARTS = 512
"""Messages, and parts of one message, that are looked at; a search takes fewer messages still."""
_PARAMETERS = {
    **parameters.SAMPLING,
    "max_completion_tokens": "max_tokens",
    "budget": "beam_width",
}
"""Fields of a search by the parameters that set them."""
_FIELDS = {f.name for f in fields(SearchRequest)}
_OF_PLAIN = "is offered by NAME@plain, which samples without a search"
_DEFAULT_TOKENS = 16
"""`max_tokens` of the OpenAI API for text completions."""
_NO_BUDGET = "is kept by searches, and this is none; for one path ask the model NAME@greedy"


class _Part(BaseModel):
    type: Literal["text", "input_text", "output_text"]  # the last two are names of /v1/responses
    text: InstanceOf[str]  # also with an unpaired surrogate, which the problem's check reports


def _parts(content: Any) -> Any:
    """The content of a message as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Content = Annotated[Annotated[list[_Part], Field(max_length=_MAX_PARTS)], BeforeValidator(_parts)]


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
    content: Content | None = None
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


class ChatBody(Conversation, SamplingBody, extra="allow"):
    """The body of a chat."""

    n: Annotated[int, Strict(), Field(ge=1, le=128)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Any = None
    echo: Literal[False] | None = None
    include_stop_str_in_output: StrictBool | None = None
    budget: Annotated[int, Strict(), Field(ge=1, le=1000)] | None = None
    return_response_only: StrictBool | None = None


class CompletionBody(SamplingBody):
    """The body of a text completion."""

    prompt: Any
    echo: StrictBool | None = None
    logprobs: Any = None
    add_special_tokens: StrictBool | None = None


ITS_BUDGET = "x-its-budget"
_OF_BOTH = {*parameters.PLAIN_PARAMETERS, *spellings.FORM_PARAMETERS, "stop"}
_OF_CHATS = {*ChatBody.model_fields, *_OF_BOTH, *spellings.THINKING_PARAMETERS}
_OF_COMPLETIONS = {*CompletionBody.model_fields, *_OF_BOTH} - {"max_completion_tokens"}
_TOOLS = {"tools": "tool_choice", "functions": "function_call"}
"""Lists of tools with the parameter that says which to call."""
_PLAIN_ALONE = ("logprobs", "return_token_ids", "return_tokens_as_token_ids", "continue_final_message", "top_logprobs")
"""Parameters that a search cannot honour."""


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


def read_chat(body: dict[str, Any], names: ModelNames) -> SampledCall:
    """Read the body of a chat completion: a search, or plain sampling if the model's name says so.

    A last message of the assistant that is to be continued is never searched either, nor is what is asked for by its
    tokens' ids.

    Raises:
        UnknownModelError: there is no such model.
        InvalidRequestError: lists everything that is wrong and what cannot be honoured.
    """
    chat = validated(ChatBody, body)
    named = names.search_fields(chat.model)
    if names.is_plain(chat.model) or ((chat.continue_final_message or chat.return_token_ids) and not named):
        return _read_plain(chat, body)
    places = {"priority": "espalier.priority", **dict.fromkeys(named, "model")}
    its = BodyFields(body, {"seed": secrets.randbits(parameters.SEED_BITS), **named}, places)
    its.found += [*parameters.not_honoured(body, _known(body), _FIELDS), *few([*_not_of_search(chat)])]
    its.set_sampling(_PARAMETERS)
    stop = its.stop_texts()
    thinking = spellings.read_thinking_parameters(body, its.found)
    if thinking.field:
        its.set("thinking", thinking.field, thinking.place)
    for name, value in (chat.espalier or {}).items():
        if name in ("problem", "history"):
            its.refuse(f"espalier.{name}", "set by `messages`; remove it")
        else:  # also null, which here means no limit or the algorithm's default
            its.set(name, value, f"espalier.{name[:80]}")
    set_conversation(chat.messages, its)
    search = its.make(SearchBody)
    request, choices = search.request, chat.n or 1
    if choices > request.candidates:
        its.refuse("n", f"must be at most {request.candidates}, the candidates of this search")
    stream = bool(chat.stream)
    nodes = stream and bool(chat.options.continuous_usage_stats)
    return SampledCall(
        request,
        search.priority or 0,
        stream,
        nodes,
        its.found,
        places=its.places,
        body=chat,
        thoughts=thinking.shown,
        choices=choices,
        stop=stop,
        include_stop=bool(chat.include_stop_str_in_output),
        metadata=chat.return_response_only is False,
    )


def _known(body: dict[str, Any]) -> set[str]:
    """Parameters that are read here: tools among them where none is to be called."""
    uncalled = {tools for tools, choice in _TOOLS.items() if body.get(choice) == "none"}
    return _OF_CHATS | uncalled


def _read_plain(chat: ChatBody, body: dict[str, Any]) -> SampledCall:
    its = parameters.sampled_fields(body)
    its.found += parameters.not_honoured(body, _known(body))
    if chat.budget is not None:
        its.refuse("budget", "is of a search, and this is none")
    top = chat.top_logprobs
    if top and not chat.logprobs:
        its.refuse("top_logprobs", "needs `logprobs`")
    its.set("logprobs", (top or 0) if chat.logprobs else None, "top_logprobs")
    thinking = spellings.read_thinking_parameters(body, its.found)
    if thinking.budget and thinking.on is not False:
        its.refuse(thinking.place, _NO_BUDGET)
    its.set("prompts", (chat_prompt(chat, thinking, its.found),), "messages")
    return parameters.sampled_call(its, chat, thinking.shown)


def read_completion(body: dict[str, Any], names: ModelNames) -> SampledCall:
    """Read the body of a text completion, which is sampled without a search.

    Raises:
        UnknownModelError: there is no such model.
        InvalidRequestError: its name says a search; or lists everything that is wrong with the body itself.
    """
    completion = validated(CompletionBody, body)
    names.require_plain(completion.model)
    its = parameters.sampled_fields({**body, "max_completion_tokens": None})
    its.found += parameters.not_honoured(body, _OF_COMPLETIONS)
    logprobs = completion.logprobs
    if isinstance(logprobs, bool):  # some clients send the chat's parameter
        logprobs = 0 if logprobs else None
    its.values |= {
        "max_tokens": its.values.get("max_tokens", _DEFAULT_TOKENS),
        "echo": bool(completion.echo),
        "add_special_tokens": completion.add_special_tokens is not False,
        "logprobs": logprobs,
    }
    its.set("prompts", _prompts(completion.prompt, its.found), "prompt")
    return parameters.sampled_call(its, completion)


def _prompts(value: Any, found: list[Violation]) -> tuple[Prompt, ...]:
    """A text, token ids, or a list of several of either."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and len(value) >= 1:
        if all(map(_is_id, value)):
            return (tuple(value),)
        if len(value) > MAX_PROMPTS:
            found.append(Violation("prompts", f"must be at most {MAX_PROMPTS} prompts, are {len(value)}"))
            return ("-",)
        if all(isinstance(each, str) for each in value):
            return tuple(value)
        if all(isinstance(each, list) and all(map(_is_id, each)) for each in value):
            return tuple(map(tuple, value))
    found.append(Violation("prompts", "must be a text, a list of token ids, or a list of several of either"))
    return ("-",)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def chat_prompt(chat: Conversation, thinking: spellings.AskedThinking, found: list[Violation]) -> ChatPrompt:
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
    if chat.add_generation_prompt is False:
        yield Violation("add_generation_prompt", _OF_PLAIN)
    for name, value in (chat.chat_template_kwargs or {}).items():
        if value is not None and not spellings.is_spelling(place := f"chat_template_kwargs.{name[:80]}", value):
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


def set_conversation(messages: list[_Message], its: BodyFields) -> None:
    """Set the fields of a conversation: what the user says last is the problem, all others are the history."""
    its.found += _not_read(messages)
    read = [message.read for message in messages]
    try:
        problem, history = split_conversation(read)
    except ValueError as error:
        its.refuse("messages", str(error))
        problem, history = read[-1].content, ()
    its.set("problem", problem, "messages")
    its.set("history", [asdict(message) for message in history], "messages")
