"""`/v1/responses`: a body is read as a chat's, and a result is written as OpenAI's response object.

Nothing is stored, so a conversation is sent whole each time; what needs a stored response is refused by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, InstanceOf, Strict, StrictBool

from espalier.engine.errors import InvalidRequestError
from espalier.search.completion import CompletionResult, TextSampled
from espalier.search.conversation import ToolCall
from espalier.search.result import Finished, SearchResult
from espalier.search.run.executor import AnyEvent
from espalier.search.service.http_api.body import validated
from espalier.search.service.http_api.openai import bodies
from espalier.search.service.http_api.openai.completion import AnyCompletion, call_id, choices_of, espalier_of, usage_of
from espalier.search.service.http_api.openai.spellings import FORM_PARAMETERS, THINKING_PARAMETERS
from espalier.search.service.model_names import ModelNames
from espalier.search.service.session import in_places
from espalier.search.service.shown import shown

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
    "include": ("is not offered", ([],)),
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


class ResponseObject:
    """One response: whole, or as the events of a stream, which number themselves."""

    def __init__(self, search_id: str, call: ResponseCall, created: int) -> None:
        """Create one; `created` is in seconds since 1970."""
        self._id = search_id
        self._call = call
        self._created = created
        self._number = 0
        self._items: list[dict[str, Any]] = []  # those that are done
        self._begun = ""  # type of the item that the stream writes, if it writes one
        self._text = ""  # of that item
        self._said = False  # whether the answer's text has begun
        self._called = 0  # calls that were told

    def whole(self, result: AnyCompletion) -> dict[str, Any]:
        """The response of a result."""
        return self._last(result)[-1]["response"]

    def events(self, event: AnyEvent) -> list[dict[str, Any]]:
        """The events of the stream that one of the search or the sampling makes."""
        made: list[dict[str, Any]] = []
        if not self._number:
            made += [self._event(f"response.{name}", response=self._object([])) for name in ("created", "in_progress")]
        match event:
            case TextSampled():
                made += self._thought(event.thought)
                made += self._delta("message", event.text) if event.text else []
                made += self._calls(event.calls)
            case Finished(result=SearchResult() | CompletionResult() as result):
                made += self._last(result)
            case _:
                pass
        return made

    def _last(self, result: AnyCompletion) -> list[dict[str, Any]]:
        """The events of what has ended: its thought if it is told, its text unless the stream had it, and the whole."""
        choice = choices_of(result, self._call.chat)[0]
        status = "incomplete" if choice.finish_reason in ("length", "abort") else "completed"
        streamed = bool(self._begun or self._items)
        made = self._thought(choice.thought) if not streamed else []
        if choice.text or not choice.calls:
            steps = shown(result).steps if isinstance(result, SearchResult) else (choice.text,)
            for step in () if self._said else steps or ("",):
                made += self._delta("message", step)
        made += self._calls(choice.calls[self._called :])
        made += self._end_of_item(status)
        usage = usage_of(result, self._call.chat)
        ended = {
            **self._object(self._items),
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
        return [*made, self._event(f"response.{status}", response=ended)]

    def _thought(self, text: str) -> list[dict[str, Any]]:
        return self._delta("reasoning", text) if text and self._call.chat.thoughts else []

    def _delta(self, kind: str, text: str) -> list[dict[str, Any]]:
        """The events of text in the item of this type, which begins behind the one before."""
        made: list[dict[str, Any]] = []
        if self._begun != kind:
            made += self._end_of_item("completed")
            self._begun, self._text, self._said = kind, "", self._said or kind == "message"
            item = {**self._item(kind, "", "in_progress"), "content": []}
            made.append(self._event("response.output_item.added", output_index=len(self._items), item=item))
            if kind == "message":
                made.append(self._event("response.content_part.added", **self._place, part=_part("")))
        if text:
            self._text += text
            made.append(self._text_event("delta", delta=text))
        return made

    def _calls(self, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
        """The events of new calls, each an item that is told whole."""
        made: list[dict[str, Any]] = []
        for call in calls:
            made += self._end_of_item("completed")
            name, place = call_id(self._id, 0, self._called), {"output_index": len(self._items)}
            item = {"id": f"fc_{name}", "type": "function_call", "call_id": name, "name": call.name}
            begun = {**item, "arguments": "", "status": "in_progress"}
            item |= {"arguments": call.arguments, "status": "completed"}
            of_item, arguments = {"item_id": item["id"], **place}, "response.function_call_arguments"
            made.append(self._event("response.output_item.added", **place, item=begun))
            made.append(self._event(f"{arguments}.delta", **of_item, delta=call.arguments))
            made.append(self._event(f"{arguments}.done", **of_item, arguments=call.arguments, name=call.name))
            made.append(self._event("response.output_item.done", **place, item=item))
            self._items.append(item)
            self._called += 1
        return made

    def _end_of_item(self, status: str) -> list[dict[str, Any]]:
        if not self._begun:
            return []
        item = self._item(self._begun, self._text, status)
        made = [self._text_event("done", text=self._text)]
        if self._begun == "message":
            made.append(self._event("response.content_part.done", **self._place, part=item["content"][0]))
        made.append(self._event("response.output_item.done", output_index=len(self._items), item=item))
        self._items.append(item)
        self._begun = ""
        return made

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item(self._begun, "")["id"], "output_index": len(self._items), "content_index": 0}

    def _text_event(self, what: str, **fields: Any) -> dict[str, Any]:
        if self._begun == "message":
            return self._event(f"response.output_text.{what}", **self._place, **fields, logprobs=[])
        return self._event(f"response.reasoning_text.{what}", **self._place, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _item(self, kind: str, text: str, status: str = "completed") -> dict[str, Any]:
        """A thought or a message of the output."""
        if kind == "reasoning":
            content = [{"type": "reasoning_text", "text": text}]
            return {"id": f"rs_{self._id}", "type": kind, "summary": [], "content": content}
        head = {"id": f"msg_{self._id}", "type": kind, "role": "assistant", "status": status}
        return {**head, "content": [_part(text)]}

    def _object(self, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": self._call.chat.body.model,
            "output": output,
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "usage": None,
            **self._call.echoed,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
