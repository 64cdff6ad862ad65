"""`/v1/responses`: a body is read as a chat's, and a result is written as OpenAI's response object.

Nothing is stored, so a conversation is sent whole each time; what needs a stored response is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, InstanceOf, Strict, StrictBool

from espalier.engine.errors import InvalidRequestError
from espalier.search.completion import Choice
from espalier.search.service.http_api.body import validated
from espalier.search.service.http_api.openai import bodies
from espalier.search.service.http_api.openai.blocks import Block, BlockWriter, Events, Kind
from espalier.search.service.http_api.openai.completion import AnyCompletion, call_id, espalier_of, usage_of
from espalier.search.service.http_api.openai.spellings import FORM_PARAMETERS, THINKING_PARAMETERS
from espalier.search.service.model_names import ModelNames
from espalier.search.service.session import in_places

_PLACES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Parameters of chats by other names."""
_SAME = (
    *("model", *(name for name in bodies.SAMPLING if name != "max_tokens"), "stream", "espalier"),
    *("tools", "tool_choice", "parallel_tool_calls"),
    *sorted(THINKING_PARAMETERS | FORM_PARAMETERS - {"response_format"}),
)
"""Parameters that chats have by the same names."""
_STORED = "nothing is stored; send the whole conversation as `input`"
_NOT_OFFERED: dict[str, tuple[str, tuple[Any, ...]]] = {
    # parameter: why it is refused, and the values besides null that ask for nothing
    "previous_response_id": (_STORED, ()),
    "conversation": (_STORED, ()),
    "prompt": (_STORED, ()),
    "background": ("is not offered", (False,)),
    "include": ("is not offered", ([], ["reasoning.encrypted_content"])),  # thoughts are told, and read, as text
    "max_tool_calls": ("is not offered; the client runs its tools", ()),
    "top_logprobs": ("give `logprobs` to /v1/chat/completions", (0,)),
    "truncation": ("a conversation is never cut", ("disabled",)),
}


class _Item(BaseModel, extra="allow"):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: bodies.Content
    thought: InstanceOf[str] = ""
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: InstanceOf[str] | None = None

    def message(self) -> dict[str, Any]:
        content = "\n".join(part.text for part in self.content)
        of_tools = {"tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id}
        return {"role": self.role, "content": content, "reasoning_content": self.thought, **of_tools}


def _items(given: Any) -> Any:
    """The input as a list of messages.

    A thought that a client sends back is that of the message behind it, and calls of tools are one message.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        return given
    items, thought = list[Any](), ""
    for item in given:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "reasoning":
            thought = _thought(item.get("content"))
            continue
        if kind == "function_call":
            call = {"id": item.get("call_id"), "function": {each: item.get(each) for each in ("name", "arguments")}}
            if items and isinstance(items[-1], dict) and items[-1].get("tool_calls"):
                items[-1]["tool_calls"].append(call)
                continue
            item = {"role": "assistant", "content": "", "tool_calls": [call]}
        elif kind == "function_call_output":
            item = {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
        items.append({**item, "thought": thought} if isinstance(item, dict) else item)
        thought = ""
    return items


def _thought(content: Any) -> str:
    """The text of a thought that `_reasoning` has written; empty for those of others, which may be encrypted."""
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "reasoning_text"]
    return "".join(text for text in texts if isinstance(text, str))


class _Text(BaseModel, extra="allow"):
    format: dict[str, Any] | None = None


class ResponsesBody(BaseModel, extra="allow"):
    """The body; sampling parameters are checked with the request."""

    model: InstanceOf[str]
    input: Annotated[Annotated[list[_Item], Field(min_length=1, max_length=512)], BeforeValidator(_items)]
    instructions: InstanceOf[str] | None = None
    max_output_tokens: Annotated[int, Strict()] | None = None
    temperature: Any = None
    top_p: Any = None
    stream: StrictBool | None = None
    stream_options: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    text: _Text | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    metadata: dict[str, Any] | None = None
    espalier: dict[str, Any] | None = None


_TYPES: dict[Kind, tuple[str, str, str]] = {
    "thought": ("reasoning", "rs", "response.reasoning_text"),
    "text": ("message", "msg", "response.output_text"),
    "call": ("function_call", "fc", "response.function_call_arguments"),
}
"""Types of items, prefixes of their ids, and names of the events of their text."""


@dataclass(frozen=True, slots=True)
class ResponseCall:
    """A response that is asked for: the search or the plain sampling behind it, and what is told again of the body."""

    chat: bodies.SampledCall
    echoed: Mapping[str, Any]


def read_response(body: dict[str, Any], names: ModelNames) -> ResponseCall:
    """Read a body.

    Raises:
        UnknownModelError: there is no such model.
        InvalidRequestError: lists everything that is wrong and what cannot be honoured.
    """
    its = validated(ResponsesBody, body)
    found = list(bodies.not_honoured(body, {*ResponsesBody.model_fields, *_SAME}, refused=_NOT_OFFERED))
    messages = [item.message() for item in its.input]
    if its.instructions is not None:
        messages.insert(0, {"role": "system", "content": its.instructions})
    chat = {name: body[name] for name in _SAME if body.get(name) is not None}
    chat |= {"messages": messages, "max_tokens": its.max_output_tokens}
    if its.text and its.text.format is not None:  # whose schema stands beside its type
        chat["response_format"] = {**its.text.format, "json_schema": its.text.format}
    try:
        call = bodies.read_chat(chat, names)
    except InvalidRequestError as error:
        raise InvalidRequestError([*found, *in_places(error.violations, _PLACES)]) from None
    found += in_places(call.violations, _PLACES)
    places = {field: _PLACES.get(place, place) for field, place in call.places.items()}
    echoed = {
        "instructions": its.instructions,
        "max_output_tokens": its.max_output_tokens,
        "metadata": its.metadata or {},
        "reasoning": {"effort": (its.reasoning or {}).get("effort"), "summary": None},
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "tools": its.tools or [],
        "tool_choice": its.tool_choice or "auto",
        "parallel_tool_calls": its.parallel_tool_calls is not False,
    }
    return ResponseCall(replace(call, violations=found, places=places), echoed)


class ResponseObject(BlockWriter):
    """One response: whole, or as the events of a stream, which number themselves."""

    def __init__(self, search_id: str, call: ResponseCall, created: int) -> None:
        """Create one; `created` is in seconds since 1970."""
        super().__init__(search_id, call.chat)
        self._created, self._echoed = created, call.echoed
        self._number = 0

    def _beginning(self, prompt_tokens: int) -> Events:
        return [self._event(f"response.{name}", response=self._object([])) for name in ("created", "in_progress")]

    def _opening(self, block: Block) -> Events:
        item = self._item(block, "in_progress")
        item |= {"content": []} if "content" in item else {}
        made = [self._event("response.output_item.added", output_index=len(self._blocks), item=item)]
        if block.kind == "text":
            made.append(self._event("response.content_part.added", **self._place(block), part=_part("")))
        return made

    def _piece(self, block: Block, text: str) -> dict[str, Any]:
        more = {"logprobs": []} if block.kind == "text" else {}
        return self._event(f"{_TYPES[block.kind][2]}.delta", **self._place(block), delta=text, **more)

    def _closing(self, block: Block, cut: bool) -> Events:
        item, place = self._item(block, "incomplete" if cut and not block.call else "completed"), self._place(block)
        done = {"text": block.text, "logprobs": []} if block.kind == "text" else {"text": block.text}
        done = {"arguments": block.text, "name": block.call.name} if block.call else done
        made = [self._event(f"{_TYPES[block.kind][2]}.done", **place, **done)]
        if block.kind == "text":
            made.append(self._event("response.content_part.done", **place, part=item["content"][0]))
        made.append(self._event("response.output_item.done", output_index=len(self._blocks), item=item))
        self._blocks.append(item)
        return made

    def _ended(self, result: AnyCompletion, choice: Choice) -> Events:
        status = "incomplete" if choice.finish_reason in ("length", "abort") else "completed"
        usage = usage_of(result, self._call)
        self._result = {
            **self._object(self._blocks),
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
                "total_tokens": usage["total_tokens"],
            },
            "espalier": espalier_of(result, 1),
        }
        return [self._event(f"response.{status}", response=self._result)]

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._item(block)["id"], "output_index": len(self._blocks)}
        return place if block.call else {**place, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _item(self, block: Block, status: str = "completed") -> dict[str, Any]:
        """An item of the output."""
        kind, prefix, _ = _TYPES[block.kind]
        if block.kind == "thought":
            content = [{"type": "reasoning_text", "text": block.text}]
            return {"id": f"{prefix}_{self._id}", "type": kind, "summary": [], "content": content}
        if block.call:
            name = call_id(self._id, 0, sum(each["type"] == kind for each in self._blocks))
            of_call = {"call_id": name, "name": block.call.name, "arguments": block.text}
            return {"id": f"{prefix}_{name}", "type": kind, "status": status, **of_call}
        head = {"id": f"{prefix}_{self._id}", "type": kind, "role": "assistant", "status": status}
        return {**head, "content": [_part(block.text)]}

    def _object(self, output: Events) -> dict[str, Any]:
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": self._call.body.model,
            "output": output,
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "usage": None,
            **self._echoed,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
