"""`/v1/messages`: a body is read as a chat's, and a result is written as Anthropic's message, whole or as its events.

Fields that are not known are ignored, as its clients send new ones all the time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, InstanceOf, Strict, StrictBool

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.completion import Choice, CompletionResult, TextSampled
from espalier.search.conversation import ToolCall
from espalier.search.result import Finished, SearchResult, Started
from espalier.search.run.executor import AnyEvent
from espalier.search.service.http_api.body import validated
from espalier.search.service.http_api.openai import bodies
from espalier.search.service.http_api.openai.completion import (
    AnyCompletion,
    call_id,
    choices_of,
    espalier_of,
    usage_of,
)
from espalier.search.service.model_names import ModelNames
from espalier.search.service.session import in_places

_BILLING = "x-anthropic-billing-header"
"""Begins a block of the system's text that is another one with every call, so that no prefix would be cached."""
_MAX_TOKENS = 262_144
_PLACES = {"max_tokens": "max_tokens", "stop": "stop_sequences", "response_format": "output_config.format"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SIGNATURE = "espalier"
"""Of thoughts, which clients send back as they got them."""


class _Message(BaseModel, extra="allow"):
    role: Literal["user", "assistant", "system"]
    content: InstanceOf[str] | list[dict[str, Any]]


class CountBody(BaseModel, extra="allow"):
    """The body of `/v1/messages/count_tokens`."""

    model: InstanceOf[str]
    messages: Annotated[list[_Message], Field(min_length=1, max_length=512)]
    system: InstanceOf[str] | list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesBody(CountBody):
    """The body of `/v1/messages`; sampling parameters are checked with the request."""

    max_tokens: Annotated[int, Strict(), Field(ge=1)]
    stop_sequences: list[InstanceOf[str]] | None = None
    stream: StrictBool | None = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    espalier: dict[str, Any] | None = None


def read_messages(body: dict[str, Any], names: ModelNames) -> bodies.SampledCall:
    """Read a body.

    Raises:
        UnknownModelError: there is no such model.
        InvalidRequestError: lists everything that is wrong and what cannot be honoured.
    """
    its, found = validated(MessagesBody, body), list[Violation]()
    chat = chat_of(its, found, names.is_plain(its.model))
    chat |= {name: body.get(name) for name in ("stream", "temperature", "top_p", "top_k", "espalier")}
    chat |= {"max_tokens": min(its.max_tokens, _MAX_TOKENS), "stop": its.stop_sequences}
    try:
        call = bodies.read_chat(chat, names)
    except InvalidRequestError as error:
        raise InvalidRequestError([*found, *in_places(error.violations, _PLACES)]) from None
    return replace(call, violations=[*found, *in_places(call.violations, _PLACES)])


def chat_of(its: CountBody, found: list[Violation], plain: bool) -> dict[str, Any]:
    """The body of a chat that says the same; what is wrong goes to `found`."""
    system = [{"role": "system", "content": text}] if (text := _text(its.system or "", "system", found)) else []
    messages = [
        each
        for index, message in enumerate(its.messages)
        for each in _messages(message, f"messages[{index}].content", found)
    ]
    chat: dict[str, Any] = {"model": its.model, "messages": [*system, *messages], "tools": its.tools}
    if choice := its.tool_choice:
        named = {"type": "function", "name": choice.get("name")}
        chat["tool_choice"] = named if choice.get("type") == "tool" else _CHOICES.get(choice.get("type", ""), choice)
        chat["parallel_tool_calls"] = choice.get("disable_parallel_tool_use") is not True
    if thinking := its.thinking:  # a plain chat does not keep its budget, which is a limit
        kept = {name: value for name, value in thinking.items() if name != "budget_tokens" or not plain}
        chat["thinking"] = {**kept, **({"type": "auto"} if thinking.get("type") == "between_tools" else {})}
    if config := its.output_config:
        chat["reasoning_effort"] = config.get("effort")
        chat["response_format"] = (form := config.get("format")) and {**form, "json_schema": form}
    return chat


def _text(content: str | Sequence[dict[str, Any]], place: str, found: list[Violation]) -> str:
    """The text of blocks; others than text are refused."""
    if isinstance(content, str):
        return content
    texts = list[str]()
    for number, block in enumerate(content):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            found.append(Violation(f"{place}[{number}].type", "must be text"))
        elif not block["text"].startswith(_BILLING):
            texts.append(block["text"])
    return "\n".join(texts)


def _messages(message: _Message, place: str, found: list[Violation]) -> Iterator[dict[str, Any]]:
    """The messages of a chat that one of Anthropic's is: results of tools are messages of their own."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    own: dict[str, Any] = {"role": message.role, "content": ""}
    calls, rest, thoughts = list[dict[str, Any]](), list[dict[str, Any]](), list[str]()
    for number, block in enumerate(message.content):
        match block.get("type"):
            case "tool_use" if message.role == "assistant":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result" if message.role == "user":
                content = _text(block.get("content") or "", f"{place}[{number}].content", found)
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
            case "thinking" if message.role == "assistant":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                pass
            case _:
                rest.append(block)
    own |= {"content": _text(rest, place, found), "reasoning_content": "\n".join(thoughts) or None}
    if calls or rest or thoughts or message.role == "assistant":
        yield {**own, **({"tool_calls": calls} if calls else {})}


class MessageObject:
    """One message: whole, or as the events of a stream."""

    def __init__(self, search_id: str, call: bodies.SampledCall, created: int) -> None:
        """Create one; `created` is not told."""
        self._id, self._call = search_id, call
        self._begun = False
        self._block = ""  # the type of the block that is open
        self._blocks = 0  # those that have ended
        self._said: dict[str, int] = {"thinking": 0, "text": 0, "tool_use": 0}  # characters, or calls, of each type

    def whole(self, result: AnyCompletion) -> dict[str, Any]:
        """The message of a result."""
        choice, content = choices_of(result, self._call)[0], list[dict[str, Any]]()
        if choice.thought and self._call.thoughts:
            content.append({"type": "thinking", "thinking": choice.thought, "signature": _SIGNATURE})
        if choice.text or not choice.calls:
            content.append({"type": "text", "text": choice.text})
        content += [{**self._tool_use(number, call), "input": call.values} for number, call in enumerate(choice.calls)]
        own = {"espalier": espalier_of(result, 1)}
        return {**self._object(content), **self._end(choice), "usage": self._usage(result), **own}

    def events(self, event: AnyEvent) -> list[dict[str, Any]]:
        """The events of the stream that one of the search or the sampling makes."""
        match event:
            case Started():
                return self._start(event.prompt_tokens)
            case TextSampled():
                made = self._start(len(event.prompt.token_ids) if event.prompt else 0)
                made += self._delta("thinking", event.thought) if self._call.thoughts else []
                return [*made, *self._delta("text", event.text), *self._calls(event.calls)]
            case Finished(result=SearchResult() | CompletionResult() as result):
                choice = choices_of(result, self._call)[0]
                made = self._start(result.usage.prompt_tokens)
                made += self._delta("thinking", choice.thought[self._said["thinking"] :]) if self._call.thoughts else []
                made += self._delta("text", choice.text[self._said["text"] :])
                made += self._calls(choice.calls[self._said["tool_use"] :])
                usage = {"output_tokens": self._usage(result)["output_tokens"]}
                last = {"delta": self._end(choice), "usage": usage, "espalier": espalier_of(result, 1)}
                return [*made, *self._stop(), {"type": "message_delta", **last}, {"type": "message_stop"}]
            case _:
                return []

    def _start(self, prompt_tokens: int) -> list[dict[str, Any]]:
        if self._begun:
            return []
        self._begun = True
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        message = {**self._object([]), "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [{"type": "message_start", "message": message}]

    def _delta(self, kind: str, text: str) -> list[dict[str, Any]]:
        """The events of text in the block of this type, which begins behind the one before."""
        if not text:
            return []
        made = []
        if self._block != kind:
            made += self._stop()
            self._block, empty = kind, {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
            made.append(self._event("content_block_start", content_block={"type": kind, **empty}))
        self._said[kind] += len(text)
        return [*made, self._event("content_block_delta", delta={"type": f"{kind}_delta", kind: text})]

    def _calls(self, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
        made = list[dict[str, Any]]()
        for call in calls:
            made += self._stop()
            self._block, head = "tool_use", self._tool_use(self._said["tool_use"], call)
            self._said["tool_use"] += 1
            delta = {"type": "input_json_delta", "partial_json": call.arguments}
            made.append(self._event("content_block_start", content_block={**head, "input": {}}))
            made.append(self._event("content_block_delta", delta=delta))
        return made

    def _stop(self) -> list[dict[str, Any]]:
        """The events that end the block that is open."""
        if not self._block:
            return []
        signed = [self._event("content_block_delta", delta={"type": "signature_delta", "signature": _SIGNATURE})]
        made = [*(signed if self._block == "thinking" else []), self._event("content_block_stop")]
        self._block, self._blocks = "", self._blocks + 1
        return made

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": self._blocks, **fields}

    def _tool_use(self, number: int, call: ToolCall) -> dict[str, Any]:
        return {"type": "tool_use", "id": call_id(self._id, 0, number), "name": call.name}

    def _object(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        model = self._call.body.model
        return {"id": f"msg_{self._id}", "type": "message", "role": "assistant", "model": model, "content": content}

    def _end(self, choice: Choice) -> dict[str, Any]:
        reason = "max_tokens" if choice.finish_reason in ("length", "abort") else "end_turn"
        if choice.stop_text is not None:
            reason = "stop_sequence"
        elif choice.calls and choice.finish_reason == "stop":
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": choice.stop_text}

    def _usage(self, result: AnyCompletion) -> dict[str, int]:
        counts = usage_of(result, self._call)
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        return {"input_tokens": counts["prompt_tokens"], "output_tokens": counts["completion_tokens"], **cached}


def message_error(message: str, status: int) -> dict[str, Any]:
    """An error as Anthropic's clients read it."""
    kinds = {401: "authentication", 403: "permission", 404: "not_found", 413: "request_too_large", 429: "rate_limit"}
    kind = kinds.get(status, "invalid_request" if status < 500 else "overloaded" if status == 503 else "api")
    told = kind if status == 413 else f"{kind}_error"
    return {"type": "error", "error": {"type": told, "message": message}}
