"""`/v1/messages`: a body is read as a chat's, and a result is written as Anthropic's message, whole or as its events.

Fields that are not known are ignored, as its clients send new ones all the time.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, InstanceOf, Strict, StrictBool

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.completion import Choice
from espalier.search.service.http_api.answers import HttpError
from espalier.search.service.http_api.body import validated
from espalier.search.service.http_api.openai import bodies
from espalier.search.service.http_api.openai.blocks import Block, BlockWriter, Events, Kind
from espalier.search.service.http_api.openai.completion import AnyCompletion, call_id, espalier_of, usage_of
from espalier.search.service.model_names import ModelNames
from espalier.search.service.session import in_places

_BILLING = "x-anthropic-billing-header"
"""Begins a block of the system's text that is another one with every call, so that no prefix would be cached."""
_MAX_TOKENS = 262_144
_PLACES = {"stop": "stop_sequences", "response_format": "output_config.format"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_DELTAS: dict[Kind, tuple[str, str]] = {
    "thought": ("thinking", "thinking"),
    "text": ("text", "text"),
    "call": ("input_json", "partial_json"),
}
"""Types of deltas, and names of their texts."""
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
    thread: dict[str, Any] | None = None
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
    """The body of a chat that says the same; what is wrong goes to `found`.

    Raises:
        HttpError: it goes on with a conversation that the server is to hold.
    """
    if its.thread is not None:  # sends a conversation's new messages alone; helpers of clients then send the whole
        text = "thread: nothing is stored; send the whole conversation"
        raise HttpError(400, text, code="thread_unsupported_request")
    system = [{"role": "system", "content": text}] if (text := _text(its.system or "", "system", found)) else []
    messages = [
        each
        for index, message in enumerate(its.messages)
        for each in _messages(message, f"messages[{index}].content", found)
    ]
    chat: dict[str, Any] = {"model": its.model, "messages": [*system, *messages], "tools": its.tools}
    if choice := its.tool_choice:
        named = {"type": "function", "name": choice.get("name")}
        chat["tool_choice"] = named if choice.get("type") == "tool" else _CHOICES.get(str(choice.get("type")), choice)
        chat["parallel_tool_calls"] = choice.get("disable_parallel_tool_use") is not True
    if thinking := its.thinking:  # a plain chat does not keep its budget, which is a limit
        kept = {name: value for name, value in thinking.items() if name != "budget_tokens" or not plain}
        chat["thinking"] = {**kept, **({"type": "auto"} if thinking.get("type") == "between_tools" else {})}
    if config := its.output_config:
        chat["reasoning_effort"] = config.get("effort")
        form = config.get("format")
        chat["response_format"] = {**form, "json_schema": form} if isinstance(form, dict) else form
    return chat


def _text(content: Any, place: str, found: list[Violation]) -> str:
    """A text, or that of blocks; others than text are refused."""
    if isinstance(content, str):
        return content
    texts = list[str]()
    for number, block in enumerate(content if isinstance(content, list) else [content]):
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
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


class MessageObject(BlockWriter):
    """One message: whole, or as the events of a stream."""

    def __init__(self, search_id: str, call: bodies.SampledCall, created: int) -> None:
        """Create one; `created` is not told."""
        super().__init__(search_id, call)

    def _beginning(self, prompt_tokens: int) -> Events:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        message = {**self._object([]), "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [{"type": "message_start", "message": message}]

    def _opening(self, block: Block) -> Events:
        empty = {"input": {}} if block.call else {"thinking": "", "signature": ""} if block.kind == "thought" else {}
        return [self._event("start", content_block={**self._content(block), **empty})]

    def _piece(self, block: Block, text: str) -> dict[str, Any]:
        kind, name = _DELTAS[block.kind]
        return self._event("delta", delta={"type": f"{kind}_delta", name: text})

    def _closing(self, block: Block, cut: bool) -> Events:
        signed = {"type": "signature_delta", "signature": _SIGNATURE}
        made = [self._event("delta", delta=signed)] if block.kind == "thought" else []
        made.append(self._event("stop"))
        self._blocks.append(self._content(block))
        return made

    def _ended(self, result: AnyCompletion, choice: Choice) -> Events:
        reason = "max_tokens" if choice.finish_reason in ("length", "abort") else "end_turn"
        if choice.stop_text is not None:
            reason = "stop_sequence"
        elif choice.calls and choice.finish_reason == "stop":
            reason = "tool_use"
        end, counts = {"stop_reason": reason, "stop_sequence": choice.stop_text}, usage_of(result, self._call)
        usage, own = {"output_tokens": counts["completion_tokens"]}, {"espalier": espalier_of(result, 1)}
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        whole = {"input_tokens": counts["prompt_tokens"], **usage, **cached}
        self._result = {**self._object(self._blocks), **end, "usage": whole, **own}
        return [{"type": "message_delta", "delta": end, "usage": usage, **own}, {"type": "message_stop"}]

    def _event(self, what: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"content_block_{what}", "index": len(self._blocks), **fields}

    def _content(self, block: Block) -> dict[str, Any]:
        """A block as it is so far."""
        if block.call:
            number = sum(each["type"] == "tool_use" for each in self._blocks)
            head = {"type": "tool_use", "id": call_id(self._id, 0, number), "name": block.call.name}
            return {**head, "input": block.call.values}
        if block.kind == "thought":
            return {"type": "thinking", "thinking": block.text, "signature": _SIGNATURE}
        return {"type": "text", "text": block.text}

    def _object(self, content: Events) -> dict[str, Any]:
        model = self._call.body.model
        return {"id": f"msg_{self._id}", "type": "message", "role": "assistant", "model": model, "content": content}


def message_error(message: str, status: int, code: str | None) -> dict[str, Any]:
    """An error as Anthropic's clients read it."""
    kinds = {401: "authentication", 403: "permission", 404: "not_found", 413: "request_too_large", 429: "rate_limit"}
    kind = kinds.get(status, "invalid_request" if status < 500 else "overloaded" if status == 503 else "api")
    told = kind if status == 413 else f"{kind}_error"
    return {"type": "error", "error": {"type": told, "message": message, "details": code and {"error_code": code}}}
