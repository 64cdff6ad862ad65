"""`/v1/responses` for plain text: a body is read as a chat's, and a result is written as OpenAI's response object.

Nothing is stored, so a conversation is sent whole each time; what needs a stored response or a tool is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, InstanceOf, Strict, StrictBool

from espalier.engine.errors import InvalidRequestError
from espalier.search.completion import CompletionResult, TextSampled
from espalier.search.result import Finished, SearchResult
from espalier.search.run.executor import AnyEvent
from espalier.search.service.http_api.body import validated
from espalier.search.service.http_api.openai import completion, plain_completion
from espalier.search.service.http_api.openai.chat_request import ChatCall, read_chat
from espalier.search.service.http_api.openai.guided import FORM_PARAMETERS
from espalier.search.service.http_api.openai.parameters import NO_TOOLS, SAMPLING, PlainCall, in_body, not_honoured
from espalier.search.service.http_api.openai.thinking import THINKING_PARAMETERS
from espalier.search.service.model_names import ModelNames
from espalier.search.service.shown import shown, shown_paths

_PLACES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Parameters of chats by other names."""
_SAME = (
    *("model", *(name for name in SAMPLING if name != "max_tokens"), "stream", "espalier"),
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
    "tools": (NO_TOOLS, ([],)),
    "tool_choice": (NO_TOOLS, ("none", "auto")),
    "max_tool_calls": (NO_TOOLS, ()),
    "top_logprobs": ("give `logprobs` to /v1/chat/completions", (0,)),
    "truncation": ("a conversation is never cut", ("disabled",)),
}


class _Part(BaseModel):
    type: Literal["input_text", "output_text", "text"]
    text: InstanceOf[str]


def _parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


class _Item(BaseModel, extra="allow"):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Annotated[list[_Part], Field(max_length=512)], BeforeValidator(_parts)]
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


def _tools(given: Any) -> Any:
    """Functions as chats list them; what else can be called is left out, as nothing is."""
    if not isinstance(given, list):
        return given
    functions = [tool for tool in given if isinstance(tool, dict) and tool.get("type") == "function"]
    return [{"type": "function", "function": {k: v for k, v in each.items() if k != "type"}} for each in functions]


def _thought(content: Any) -> str:
    """The text of a thought that `_reasoning` has written; empty for those of others, which may be encrypted."""
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "reasoning_text"]
    return "".join(text for text in texts if isinstance(text, str))


class _Reasoning(BaseModel, extra="allow"):
    effort: InstanceOf[str] | None = None


class _Text(BaseModel, extra="allow"):
    format: dict[str, Any] | None = None


class _StreamOptions(BaseModel):
    include_obfuscation: StrictBool | None = None


class ResponsesBody(BaseModel, extra="allow"):
    """The body; sampling parameters are checked with the request."""

    model: InstanceOf[str]
    input: Annotated[Annotated[list[_Item], Field(min_length=1, max_length=512)], BeforeValidator(_items)]
    instructions: InstanceOf[str] | None = None
    max_output_tokens: Annotated[int, Strict()] | None = None
    temperature: Any = None
    top_p: Any = None
    stream: StrictBool | None = None
    stream_options: _StreamOptions | None = None
    reasoning: _Reasoning | None = None
    text: _Text | None = None
    metadata: dict[str, Any] | None = None
    espalier: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ResponseCall:
    """A response that is asked for: the search or the plain sampling behind it, and what is told again of the body."""

    chat: ChatCall | PlainCall
    echoed: Mapping[str, Any]


def read_response(body: dict[str, Any], names: ModelNames) -> ResponseCall:
    """Read a body.

    Raises:
        UnknownModelError: there is no such model.
        InvalidRequestError: lists everything that is wrong and what cannot be honoured.
    """
    its = validated(ResponsesBody, body)
    uncalled = {"tools"} if body.get("tool_choice") == "none" else set[str]()
    found = list(not_honoured(body, {*ResponsesBody.model_fields, *_SAME, *uncalled}, refused=_NOT_OFFERED))
    messages = [item.message() for item in its.input]
    if its.instructions is not None:
        messages.insert(0, {"role": "system", "content": its.instructions})
    chat = {name: body[name] for name in _SAME if body.get(name) is not None}
    chat |= {"messages": messages, "max_tokens": its.max_output_tokens}
    if uncalled and body.get("tools"):
        chat |= {"tools": _tools(body["tools"]), "tool_choice": "none"}
    if its.text and its.text.format is not None:  # whose schema stands beside its type
        chat["response_format"] = {**its.text.format, "json_schema": its.text.format}
    try:
        call = read_chat(chat, names)
    except InvalidRequestError as error:
        raise InvalidRequestError([*found, *in_body(error.violations, _PLACES)]) from None
    search = replace(call.search, violations=[*found, *in_body(call.search.violations, _PLACES)])
    places = {field: _PLACES.get(place, place) for field, place in call.places.items()}
    echoed = {
        "instructions": its.instructions,
        "max_output_tokens": its.max_output_tokens,
        "metadata": its.metadata or {},
        "reasoning": {"effort": its.reasoning and its.reasoning.effort, "summary": None},
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
    }
    return ResponseCall(replace(call, search=search, places=places), echoed)


class ResponseObject:
    """One response: whole, or as the events of a stream, which number themselves."""

    def __init__(self, search_id: str, call: ResponseCall, created: int) -> None:
        """Create one; `created` is in seconds since 1970."""
        self._id = search_id
        self._call = call
        self._created = created
        self._number = 0
        self._items: list[dict[str, Any]] = []  # those of the stream that are done
        self._thought = ""  # of the stream
        self._text: str | None = None  # of the message that the stream writes; None before it

    def whole(self, result: SearchResult | CompletionResult) -> dict[str, Any]:
        """The response of a result."""
        thought, text, _, cut = self._contents(result)
        items = [self._reasoning(thought)] if thought else []
        return self._ended(result, [*items, self._message(text, "incomplete" if cut else "completed")])

    def events(self, event: AnyEvent) -> list[dict[str, Any]]:
        """The events of the stream that one of the search or the sampling makes."""
        made: list[dict[str, Any]] = []
        if not self._number:
            made += [self._event(f"response.{name}", response=self._object([])) for name in ("created", "in_progress")]
        if isinstance(event, TextSampled):
            made += self._thought_delta(event.thought) if event.thought and self._call.chat.thoughts else []
            made += self._delta(event.text) if event.text else []
        elif isinstance(event, Finished):
            result: Any = event.result
            made += self._last(result)
        return made

    def _contents(self, result: SearchResult | CompletionResult) -> tuple[str, str, tuple[str, ...], bool]:
        """The thought if it is told, the text, its steps, and whether a limit cut it."""
        told = self._call.chat.thoughts
        if isinstance(result, SearchResult):
            path = shown(result)
            return path.thought * told, "".join(path.steps), path.steps, path.finish_reason == "length"
        (choice,) = result.choices
        return choice.thought * told, choice.text, (choice.text,), choice.finish_reason in ("length", "abort")

    def _last(self, result: SearchResult | CompletionResult) -> list[dict[str, Any]]:
        thought, text, steps, cut = self._contents(result)
        made: list[dict[str, Any]] = []
        if thought and not self._thought:
            made += self._thought_delta(thought)
        for step in steps if self._text is None else ():
            made += self._delta(step)
        made += self._delta("")  # begins an empty message
        index, status = len(self._items), "incomplete" if cut else "completed"
        message = self._message(text, status)
        place = self._place(index)
        made.append(self._event("response.output_text.done", **place, text=text, logprobs=[]))
        made.append(self._event("response.content_part.done", **place, part=message["content"][0]))
        made.append(self._event("response.output_item.done", output_index=index, item=message))
        ended = self._ended(result, [*self._items, message])
        return [*made, self._event(f"response.{ended['status']}", response=ended)]

    def _thought_delta(self, thought: str) -> list[dict[str, Any]]:
        item, made = self._reasoning(""), list[dict[str, Any]]()
        if not self._thought:
            made.append(self._event("response.output_item.added", output_index=0, item={**item, "content": []}))
        self._thought += thought
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        return [*made, self._event("response.reasoning_text.delta", **place, delta=thought)]

    def _end_of_thought(self) -> list[dict[str, Any]]:
        if not self._thought or self._items:
            return []
        item = self._reasoning(self._thought)
        self._items.append(item)
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        return [
            self._event("response.reasoning_text.done", **place, text=self._thought),
            self._event("response.output_item.done", output_index=0, item=item),
        ]

    def _delta(self, text: str) -> list[dict[str, Any]]:
        made = self._end_of_thought()
        index = len(self._items)
        place = self._place(index)
        if self._text is None:
            self._text = ""
            item = {**self._message("", "in_progress"), "content": []}
            made.append(self._event("response.output_item.added", output_index=index, item=item))
            made.append(self._event("response.content_part.added", **place, part=_part("")))
        if text:
            self._text += text
            made.append(self._event("response.output_text.delta", **place, delta=text, logprobs=[]))
        return made

    def _place(self, index: int) -> dict[str, Any]:
        return {"item_id": f"msg_{self._id}", "output_index": index, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _reasoning(self, thought: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": thought}]
        return {"id": f"rs_{self._id}", "type": "reasoning", "summary": [], "content": content}

    def _message(self, text: str, status: str) -> dict[str, Any]:
        head = {"id": f"msg_{self._id}", "type": "message", "role": "assistant", "status": status}
        return {**head, "content": [_part(text)]}

    def _ended(self, result: SearchResult | CompletionResult, output: list[dict[str, Any]]) -> dict[str, Any]:
        _, _, _, cut = self._contents(result)
        if isinstance(result, SearchResult):
            usage = completion.usage_of(result, shown_paths(result, 1))
            own = completion.espalier_of(result, 1)
        else:
            usage, own = plain_completion.usage_of(result), plain_completion.espalier_of(result)
        thought = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        return {
            **self._object(output),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": thought},
                "total_tokens": usage["total_tokens"],
            },
            "espalier": own,
        }

    def _object(self, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": self._call.chat.model,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "truncation": "disabled",
            "usage": None,
            **self._call.echoed,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
