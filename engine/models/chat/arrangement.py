"""Chats rendered as text, and one rule for what their templates do not take: messages of the system, turns of tools.

What the template takes is rendered as it stands, wherever it stands. Where the template refuses it, or shows nothing of
it, the same is said in a way that templates take:

    messages of the system   those in front as one; those behind the first turn in the message of the user that
                             they stand beside; and where none is taken, all of them so
    calls of tools           an assistant's content as empty or null, arguments as objects or text; then as JSON in
                             the content
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from espalier.engine.errors import CheckpointError, TemplateLimitError
from espalier.engine.models.chat.template import TemplateFailedError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.text_files import A_TEXT, require
from espalier.engine.models.tokenizer import TextTokenizer

Messages = list[dict[str, Any]]

STEP_SYSTEM_PROMPT = (
    "Solve the following math problem step by step. For a short problem, use few steps. Start each step with "
    '"## Step k: " and a short title, and leave one blank line between steps. End with one line that says '
    r'"Therefore, the final answer is: $\boxed{answer}$."'
)
"""Default system prompt for instruction-tuned models: asks for steps separated by blank lines."""
FOLDED = (
    "The chat template does not take messages of the system where they stand: they were written into the messages of "
    "the user beside them."
)
DROPPED = "The chat template shows no messages of the system."
CALLS_AS_TEXT = (
    "The chat template does not show calls of tools: they were written as JSON into what the assistant said."
)
_NOT_SHOWN = "it does not show what tools return"
_WITHOUT_TOOLS = "write what tools were asked and returned into messages of the assistant and the user"
_MARK = "Zq{}xkw"
"""A text that stands for another one, to find out whether a template shows that."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as text.

    Attributes:
        text: the prompt.
        warnings: what the template did not take as it stood, whole sentences.
    """

    text: str
    warnings: tuple[str, ...] = ()


def render_conversation(
    tokenizer: TextTokenizer,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    /,
    **variables: Any,
) -> RenderedChat:
    """Render messages by the chat template; see the module.

    Args:
        tokenizer: has the chat template.
        messages: each with `role` and `content`; an assistant's may have `tool_calls` as OpenAI's clients send them.
        add_generation_prompt: end with the text that opens the assistant's turn.
        variables: further variables of the template.

    Raises:
        TemplateLimitError: the template takes too much time or memory.
        CheckpointError: the template refuses the messages however they are arranged, or shows no results of tools.
    """

    def render(arranged: Messages) -> str:
        return tokenizer.render_chat(arranged, add_generation_prompt, **variables)

    given = [dict(message) for message in messages]
    with_tools = any(message["role"] == "tool" or message.get("tool_calls") for message in given)
    refused: CheckpointError | None = None
    rendered: RenderedChat | None = None
    for of_system, folded in _arrangements_of_system(given):
        for arranged, as_text in _arrangements_of_calls(of_system):
            try:
                text = render(arranged)
                lost = _lost(arranged, given, text, render)
            except TemplateLimitError:
                raise
            except CheckpointError as error:
                refused = error
                continue
            warnings = (*([FOLDED] if folded else []), *([CALLS_AS_TEXT] if as_text else []))
            if not lost:
                return RenderedChat(text, warnings)
            refused = None  # what the last arrangement lacks is what the template has against all of them
            if lost == {"system"} and rendered is None:  # it may show what the system says in no arrangement
                rendered = RenderedChat(text, (*warnings, DROPPED))
    if rendered:
        return rendered
    if with_tools:
        why = f"{refused.__cause__ if refused else _NOT_SHOWN}; {_WITHOUT_TOOLS}"
        raise CheckpointError(f"the chat template failed: {why}") from TemplateFailedError(why)
    assert refused, "a template that refuses nothing loses what the system says, and that is rendered"
    raise refused


def system_prompt_of(checkpoint: Checkpoint) -> str:
    """The system prompt that a checkpoint asks for, or `STEP_SYSTEM_PROMPT`.

    Raises:
        CheckpointError: `system_prompt` in its config.json is no text.
    """
    found = checkpoint.config.get("system_prompt", STEP_SYSTEM_PROMPT)
    place = checkpoint.files.place("config.json")
    return require(place, "system_prompt", found, *A_TEXT)


def render_with_system(
    tokenizer: TextTokenizer, system_prompt: str, messages: Sequence[Mapping[str, Any]], **switches: bool
) -> str:
    """Render messages through the chat template, behind a system message unless `system_prompt` is empty.

    If the template takes no system message (Mistral, Gemma), the system prompt is put before the first thing that the
    user says; see the module.

    Args:
        tokenizer: has the chat template.
        system_prompt: text of the system message.
        messages: with a role and content each; one at least is the user's.
        switches: variables of the template.

    Raises:
        TemplateLimitError: the template takes too much time or memory.
        CheckpointError: the template rejects the messages without a system message too.
    """
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return render_conversation(tokenizer, [*system, *messages], **switches).text


def leading(messages: Messages) -> Messages:
    """The messages of the system before the first turn."""
    return list(takewhile(lambda message: message["role"] == "system", messages))


def folded(messages: Messages, keep: int = 0) -> Messages:
    """Write messages of the system, but for the first `keep`, into those of the user beside them.

    Each goes before the message of the user that follows it, and behind an earlier one where none follows directly.
    """
    arranged, waiting = list[dict[str, Any]](), list[str]()
    for message in messages[keep:]:
        users = [each for each in arranged if each["role"] == "user"]
        if message["role"] == "system":
            waiting.append(message["content"])
        elif message["role"] == "user":
            arranged.append({**message, "content": _joined([*waiting, message["content"]])})
            waiting = []
        else:
            if users and waiting:
                users[-1]["content"], waiting = _joined([users[-1]["content"], *waiting]), []
            arranged.append(message)
    users = [each for each in arranged if each["role"] == "user"]
    if waiting and users:
        users[-1]["content"] = _joined([users[-1]["content"], *waiting])
    elif waiting:
        arranged.append({"role": "user", "content": _joined(waiting)})
    return [*messages[:keep], *arranged]


def _joined(texts: Sequence[str]) -> str:
    return "\n\n".join(filter(None, texts))


def _arrangements_of_system(messages: Messages) -> Iterator[tuple[Messages, bool]]:
    """Ways to say what the system says, and whether it is written into messages of the user."""
    yield messages, False
    front = leading(messages)
    joined = [{**front[0], "content": _joined([each["content"] for each in front])}] if front else []
    behind = [*joined, *messages[len(front) :]]
    if front and (len(front) > 1 or len(folded(behind, 1)) < len(behind)):
        yield folded(behind, keep=1), len(folded(behind, 1)) < len(behind)
    if any(message["role"] == "system" for message in messages):
        yield folded(messages), True


def _arrangements_of_calls(messages: Messages) -> Iterator[tuple[Messages, bool]]:
    """Ways to say what tools were called, and whether as text."""
    if not any(message.get("tool_calls") for message in messages):
        yield messages, False
        return
    for read in (_as_object, _as_text):
        for empty in ("", None):
            yield [_with_calls(message, read, empty) for message in messages], False
    yield [_calls_as_content(message) for message in messages], True


def _with_calls(message: dict[str, Any], read: Callable[[Any], Any], empty: str | None) -> dict[str, Any]:
    if not (calls := message.get("tool_calls")):
        return message
    calls = [{**call, "function": {**call["function"], "arguments": read(_arguments(call))}} for call in calls]
    return {**message, "content": message["content"] or empty, "tool_calls": calls}


def _calls_as_content(message: dict[str, Any]) -> dict[str, Any]:
    if not (calls := message.get("tool_calls")):
        return message
    told = [{"name": call["function"]["name"], "arguments": _as_object(_arguments(call))} for call in calls]
    content = "\n".join([message["content"] or "", *(json.dumps(call, ensure_ascii=False) for call in told)])
    return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": content.strip()}


def _arguments(call: Mapping[str, Any]) -> Any:
    return call["function"].get("arguments") or {}


def _as_object(arguments: Any) -> Any:
    """Arguments as templates that write them by `tojson` take them; text that is no object stays text."""
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _lost(messages: Messages, given: Messages, text: str, render: Callable[[Messages], str]) -> set[str]:
    """Parts that a rendered text does not show: `system` and `tool` for what they say, `call` for a tool's call.

    Messages of the user that are not `given` say what the system does. A text that stands in the prompt as often as in
    the messages is shown. What a template has changed, and names of tools, which may stand elsewhere, are looked for by
    marks in their places.
    """
    said = "\0".join(message["content"] or "" for message in messages)

    def unseen(content: str) -> bool:
        return bool(content) and text.count(content) < said.count(content)

    marked, marks = [dict(message) for message in messages], dict[str, str]()
    for message in marked:
        role = "system" if message["role"] == "user" and message not in given else message["role"]
        if role in ("system", "tool") and unseen((message["content"] or "").strip()):
            marks[mark := _MARK.format(len(marks))] = role
            message["content"] = mark
        calls = list[dict[str, Any]]()
        for call in message.get("tool_calls") or ():
            marks[mark := _MARK.format(len(marks))] = "call"
            calls.append({**call, "function": {**call["function"], "name": mark}})
        if calls:
            message["tool_calls"] = calls
    try:
        shown = render(marked) if marks else ""
    except TemplateLimitError:
        raise
    except CheckpointError:  # it looks into what it shows
        return set()
    return {what for mark, what in marks.items() if mark not in shown}
