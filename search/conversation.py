"""The messages of a conversation around its problem."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from espalier.engine.errors import Violation
from espalier.search.schema import text_violations

MAX_HISTORY_BYTES = 128 * 1024
MAX_HISTORY_MESSAGES = 256


class ChatRole(StrEnum):
    """Role of the speaker of a message.

    What a tool has returned is a message, too. `problem` is the place of the problem, an empty message, where others
    stand behind it: results of tools, or reminders of the system. Without one the problem stands behind all.
    """

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    Attributes:
        role: who speaks.
        content: what is said.
        reasoning_content: what the assistant thought before; whether a generator reads it again is up to its template.
        more: a JSON object of what else chat templates read: an assistant's `tool_calls`, a tool's `tool_call_id` and
            `name`; empty for nothing.
    """

    role: ChatRole
    content: str
    reasoning_content: str = ""
    more: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the object that `more` is."""
        return json.loads(self.more) if self.more else {}


def split_conversation(messages: Sequence[ChatMessage]) -> tuple[str, tuple[ChatMessage, ...]]:
    """The problem of a conversation, which is what the user says last, and the messages around it.

    Raises:
        ValueError: the user says nothing, or the assistant's is the last word.
    """
    last = max((at for at, message in enumerate(messages) if message.role == ChatRole.USER), default=None)
    spoken = [message for message in messages if message.role != ChatRole.SYSTEM]
    if last is None or spoken[-1].role == ChatRole.ASSISTANT:
        raise ValueError("the last message must be the user's, or what a tool returned to answer it")
    before, behind = messages[:last], messages[last + 1 :]
    place = [ChatMessage(ChatRole.PROBLEM, "")] if behind else []
    return messages[last].content, (*before, *place, *behind)


def whole_conversation(problem: str, history: Sequence[ChatMessage]) -> list[ChatMessage]:
    """All messages of a conversation in their order, the problem as what the user says."""
    asked = ChatMessage(ChatRole.USER, problem)
    places = [at for at, message in enumerate(history) if message.role == ChatRole.PROBLEM]
    at = places[0] if places else len(history)
    return [*history[:at], asked, *history[at + 1 :]]


def conversation_text(problem: str, history: Sequence[ChatMessage]) -> str:
    """Return a problem with the turns around it as plain text, without the system's messages.

    A problem without earlier turns stays as it is. Else each turn follows its speaker's name, and the problem is the
    last one:

        User: What is 6 * 7?

        Assistant: The answer is 42.

        User: And twice that?
    """
    turns = [message for message in whole_conversation(problem, history) if message.role != ChatRole.SYSTEM]
    if len(turns) == 1:
        return problem
    return "\n\n".join(f"{turn.role.capitalize()}: {_said(turn)}" for turn in turns)


def _said(turn: ChatMessage) -> str:
    """A message's text, and the tools that it calls."""
    calls = [call["function"] for call in turn.fields.get("tool_calls") or ()]
    called = [f"{call['name']}({call.get('arguments') or ''})" for call in calls]
    return "\n".join(filter(None, [turn.content, *called])) if called else turn.content


def history_violations(history: Sequence[ChatMessage]) -> list[Violation]:
    """Return what is wrong with the messages around a problem."""
    texts = "".join(message.content + message.reasoning_content + message.more for message in history)
    found = text_violations("history", texts, MAX_HISTORY_BYTES)
    if len(history) > MAX_HISTORY_MESSAGES:
        what = f"must be at most {MAX_HISTORY_MESSAGES} messages, is {len(history)}"
        found.append(Violation("history", what))
    roles = [message.role for message in history]
    if ChatRole.PROBLEM in roles:
        behind = [role for role in roles[roles.index(ChatRole.PROBLEM) + 1 :] if role != ChatRole.SYSTEM]
        if {ChatRole.PROBLEM, ChatRole.USER}.intersection(behind) or behind[-1:] == [ChatRole.ASSISTANT]:
            what = "behind the problem, the one of that role, stand messages of the system and turns of tools alone"
            found.append(Violation("history", what))
    if any(not _is_read(message) for message in history):
        found.append(
            Violation("history", "`more` of a message is no JSON object of tool calls, or has role or content")
        )
    return found


def _is_read(message: ChatMessage) -> bool:
    """Return whether `more` is an object that a template may read."""
    try:
        fields = message.fields
    except (ValueError, RecursionError):
        return False
    calls = fields.get("tool_calls", []) if isinstance(fields, dict) else None
    return (
        isinstance(calls, list)
        and not {"role", "content"} & fields.keys()
        and all(
            isinstance(call, dict)
            and isinstance(function := call.get("function"), dict)
            and isinstance(function.get("name"), str)
            and isinstance(function.get("arguments", ""), str | dict)
            for call in calls
        )
    )
