"""Bodies of chats and of text completions: the search or the plain sampling that one asks for, what it cannot have.

Parameters of OpenAI's and vLLM's bodies that are the same for both are set, ignored or refused by one rule.
"""

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, InstanceOf, Strict, StrictBool

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.completion import MAX_PROMPTS, ChatPrompt, CompletionRequest, Prompt
from espalier.search.conversation import ChatMessage, ChatRole, split_conversation
from espalier.search.request import SearchRequest
from espalier.search.run.executor import AnyRequest
from espalier.search.schema import few, from_values, mapping_text, unknown_names
from espalier.search.service.http_api.body import validated
from espalier.search.service.http_api.openai import spellings
from espalier.search.service.model_names import ModelNames
from espalier.search.service.session import SearchCall, in_places
from espalier.search.tools.declared import read_tools

T = TypeVar("T")

SEED_BITS = 53
"""Of a seed that the client leaves open: what every JSON parser reads exactly."""
PRIORITY, TIME_LIMIT = "priority", "time_limit"
_OF_PLAIN = (PRIORITY, TIME_LIMIT, "text_form")
"""Fields of `espalier` that sampling without a search has."""
IGNORED = {
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "reasoning_effort", "request_id", "safety_identifier", "service_tier", "store",
    "user", "verbosity",
}  # fmt: skip
"""Parameters that do not change what is sampled; clients send them to every server."""
_OLDER = "is the older name of tools; give `tools` and `tool_choice`"
NOT_OFFERED: dict[str, tuple[str, tuple[Any, ...]]] = {
    # parameter: why it is refused, and the values besides null that ask for nothing
    "length_penalty": ("is of beam search by likelihood, which is not offered", (1,)),
    "modalities": ("only text is offered", (["text"],)),
    "audio": ("only text is offered", ()),
    "functions": (_OLDER, ([],)),
    "function_call": (_OLDER, ("none", "auto")),
    "web_search_options": ("the server has no tools of its own", ()),
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
    include_stop_str_in_output: StrictBool | None = None
    return_response_only: StrictBool | None = None  # false to be told all candidates as its_hub tells them
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
    """

    body: SamplingBody
    thoughts: bool = True
    choices: int = 1
    stop: tuple[str, ...] = ()

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
        if form := spellings.asked_form(self.body, self.found):
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

    def call(self, request: AnyRequest, priority: int, body: SamplingBody, thoughts: bool, **more: Any) -> SampledCall:
        """Return the call that asks for a request, with what was found; see `SampledCall`."""
        of_call = {"violations": self.found, "places": self.places, "body": body, "thoughts": thoughts, **more}
        return SampledCall(request, priority, bool(body.stream), **of_call)


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
    its.found = in_places(its.found, its.places)
    return its.call(CompletionRequest(**its.values), priority, body, thoughts)


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


# ---- chats and text completions

_MAX_MESSAGES = _MAX_PARTS = 512
"""Messages, and parts of one message, that are looked at; a search takes fewer messages still."""
_PARAMETERS = {
    **SAMPLING,
    "max_completion_tokens": "max_tokens",
    "budget": "beam_width",
}
"""Fields of a search by the parameters that set them."""
_FIELDS = {f.name for f in fields(SearchRequest)}
_BY_PLAIN = "is offered by NAME@plain, which samples without a search"
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
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None


class ChatBody(Conversation, SamplingBody, extra="allow"):
    """The body of a chat."""

    n: Annotated[int, Strict(), Field(ge=1, le=128)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Any = None
    echo: Literal[False] | None = None
    budget: Annotated[int, Strict(), Field(ge=1, le=1000)] | None = None


class CompletionBody(SamplingBody):
    """The body of a text completion."""

    prompt: Any
    echo: StrictBool | None = None
    logprobs: Any = None
    add_special_tokens: StrictBool | None = None


ITS_BUDGET = "x-its-budget"
_OF_BOTH = {*PLAIN_PARAMETERS, *spellings.FORM_PARAMETERS, "stop"}
_OF_CHATS = {*ChatBody.model_fields, *_OF_BOTH, *spellings.THINKING_PARAMETERS}
_OF_COMPLETIONS = {*CompletionBody.model_fields, *_OF_BOTH} - {"max_completion_tokens", "return_response_only"}
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
    body = _newer(body)
    chat = validated(ChatBody, body)
    named = names.search_fields(chat.model)
    if names.is_plain(chat.model) or ((chat.continue_final_message or chat.return_token_ids) and not named):
        return _read_plain(chat, body)
    places = {"priority": "espalier.priority", **dict.fromkeys(named, "model")}
    its = BodyFields(body, {"seed": secrets.randbits(SEED_BITS), **named}, places)
    its.found += [*not_honoured(body, _OF_CHATS, _FIELDS), *few([*_not_of_search(chat)])]
    its.set_sampling(_PARAMETERS)
    _set_tools(chat, its)
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
    priority = its.take_priority()
    request, choices = its.make(SearchRequest), chat.n or 1
    if choices > request.candidates:
        its.refuse("n", f"must be at most {request.candidates}, the candidates of this search")
    nodes = bool(chat.stream and chat.options.continuous_usage_stats)
    return its.call(request, priority, chat, thinking.shown, report_nodes=nodes, choices=choices, stop=stop)


def _read_plain(chat: ChatBody, body: dict[str, Any]) -> SampledCall:
    its = sampled_fields(body)
    its.found += not_honoured(body, _OF_CHATS)
    _set_tools(chat, its)
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
    return sampled_call(its, chat, thinking.shown)


def read_completion(body: dict[str, Any], names: ModelNames) -> SampledCall:
    """Read the body of a text completion, which is sampled without a search.

    Raises:
        UnknownModelError: there is no such model.
        InvalidRequestError: its name says a search; or lists everything that is wrong with the body itself.
    """
    completion = validated(CompletionBody, body)
    names.require_plain(completion.model)
    its = sampled_fields({**body, "max_completion_tokens": None})
    its.found += not_honoured(body, _OF_COMPLETIONS)
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
    return sampled_call(its, completion)


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
    variables |= {"tools": _shown_tools(chat, found)} if chat.tools else {}
    return ChatPrompt(tuple(_as_sent(message.read) for message in chat.messages), continued, variables)


def _as_sent(message: ChatMessage) -> dict[str, Any]:
    """A message for the chat template alone."""
    thought = {"reasoning_content": message.reasoning_content} if message.reasoning_content else {}
    return {"role": str(message.role), "content": message.content, **thought, **message.fields}


def _newer(body: dict[str, Any]) -> dict[str, Any]:
    """A body with functions that are not to be called, as they are listed by the older name, among its tools."""
    functions, tools = body.get("functions"), body.get("tools") or []
    if body.get("function_call") != "none" or not (isinstance(functions, list) and isinstance(tools, list)):
        return body
    rest = {name: value for name, value in body.items() if name not in ("functions", "function_call")}
    listed = [*tools, *({"type": "function", "function": each} for each in functions)]
    return {**rest, "tools": listed, "tool_choice": "none"}


def _functions(chat: Conversation) -> list[Any]:
    """The tools of a chat; where none is to be called, without those that are no functions."""
    tools = chat.tools or []
    if chat.tool_choice != "none":
        return tools
    return [tool for tool in tools if not isinstance(tool, dict) or tool.get("type", "function") == "function"]


def _shown_tools(chat: Conversation, found: list[Violation]) -> list[dict[str, Any]]:
    """The tools of a chat as templates list them, also where none is to be called."""
    try:
        return [tool.for_template for tool in read_tools(json.dumps(_functions(chat))).tools]
    except ValueError as error:
        found.append(Violation("tools", str(error)))
        return []


def _set_tools(chat: Conversation, its: BodyFields) -> None:
    """Set what tools a chat offers, and whether one must be called; without tools a choice says nothing."""
    if not (tools := _functions(chat)):
        if chat.tool_choice not in (None, "auto", "none"):
            its.refuse("tool_choice", "needs `tools`")
        return
    choice = chat.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)  # beside their type in /v1/responses
        listed = allowed.get("tools") if isinstance(allowed, dict) else None
        names = list(map(_named, listed)) if isinstance(listed, list) else []
        tools = [tool for tool in tools if isinstance(tool, dict) and _named(tool) in names]
        if not tools:
            its.refuse("tool_choice", "allows none of `tools`")
        choice = allowed.get("mode") if isinstance(allowed, dict) else None
    elif isinstance(choice, dict):
        choice = _named(choice)
        if choice not in map(_named, tools):
            its.refuse("tool_choice", f"names {str(choice)[:80]!r}, which is none of `tools`")
            return
    if choice is not None and not isinstance(choice, str):
        its.refuse("tool_choice", "must be auto, none, required, or an object that names a function")
        return
    its.set("tools", json.dumps(tools), "tools")
    its.set("tool_choice", choice or "auto", "tool_choice")
    its.set("parallel_tool_calls", chat.parallel_tool_calls is not False, "parallel_tool_calls")


def _named(tool: Any) -> Any:
    """The name in a tool, or in a choice of one; it stands in `function`, or beside the type."""
    its = tool.get("function", tool) if isinstance(tool, dict) else None
    return its.get("name") if isinstance(its, dict) else None


def _not_of_search(chat: ChatBody) -> Iterator[Violation]:
    for name in _PLAIN_ALONE:
        if getattr(chat, name):
            yield Violation(name, _BY_PLAIN)
    if chat.add_generation_prompt is False:
        yield Violation("add_generation_prompt", _BY_PLAIN)
    for name, value in (chat.chat_template_kwargs or {}).items():
        if value is not None and not spellings.is_spelling(place := f"chat_template_kwargs.{name[:80]}", value):
            yield Violation(place, _BY_PLAIN)


def _not_read(messages: list[_Message]) -> Iterator[Violation]:
    """Messages without content, which only an assistant's may be, calls of tools by others, and results of no call."""
    called = set[str | None]()
    for index, message in enumerate(messages):
        if message.role == "assistant":
            called.update(call.id for call in message.tool_calls or ())
            for number, call in enumerate(message.tool_calls or ()):
                if not _are_arguments(call.function.arguments):
                    place = f"messages[{index}].tool_calls[{number}].function.arguments"
                    yield Violation(place, "must be a JSON object, or the text of one")
            continue
        if message.role == "tool" and message.tool_call_id is not None and message.tool_call_id not in called:
            yield Violation(f"messages[{index}].tool_call_id", "must be the id of a call before it")
        if message.content is None:
            yield Violation(f"messages[{index}].content", "must be a text, or a list of parts")
        if message.tool_calls or message.function_call:
            yield Violation(f"messages[{index}].tool_calls", "are of the assistant")


def _are_arguments(given: str | dict[str, Any] | None) -> bool:
    """Return whether these are the arguments of a call; none, and an empty text, are those of a call without any."""
    try:
        return isinstance(json.loads(given or "{}") if not isinstance(given, dict) else given, dict)
    except (ValueError, RecursionError):
        return False


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
