"""The messages of a conversation around its problem."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.schema import text_violations, violations

MAX_PROBLEM_BYTES = 32 * 1024
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
class ToolCall:
    """A call that the generator made; `arguments` is the text of a JSON object, with the keys in the model's order."""

    name: str
    arguments: str

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by name."""
        return json.loads(self.arguments)


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

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        thought = self.reasoning_content
        thoughts = {"reasoning_content": thought, "thinking": thought} if thought else {}  # templates read either
        return {"role": str(self.role), "content": self.content, **thoughts, **self.fields}


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
    return turns_text([message.for_template() for message in whole_conversation(problem, history)])


def turns_text(messages: Iterable[Mapping[str, Any]]) -> str:
    """See `conversation_text`, of messages as chat templates read them."""
    turns = [message for message in messages if message["role"] != ChatRole.SYSTEM]
    if len(turns) == 1:
        return turns[0]["content"]
    return "\n\n".join(f"{turn['role'].capitalize()}: {_said(turn)}" for turn in turns)


def _said(turn: Mapping[str, Any]) -> str:
    """A message's text, and the tools that it calls."""
    calls = [call["function"] for call in turn.get("tool_calls") or ()]
    called = [f"{call['name']}({call.get('arguments') or ''})" for call in calls]
    return "\n".join(filter(None, [turn["content"], *called]))


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


class AboutProblem:
    """A request about a problem, with the messages around it."""

    __slots__ = ()

    problem: str
    history: tuple[ChatMessage, ...]
    checked_apart: ClassVar[Collection[str]] = ()
    """Fields that are not declared as in `schema`."""

    @property
    def problem_text(self) -> str:
        """The problem with the turns before it, as a verifier reads it; executors route by it."""
        return conversation_text(self.problem, self.history) if self.history else self.problem

    @property
    def size(self) -> int:
        """Characters of all that is to be read, for limits and shares."""
        return len(self.problem) + sum(len(message.content) for message in self.history) + sum(map(len, self.beside))

    @property
    def beside(self) -> Iterable[str]:
        """Texts to be read besides the problem and its history."""
        return ()

    def validate(self) -> None:
        """Check every field.

        Raises:
            InvalidRequestError: lists all violations.
        """
        if found := self.all_violations():
            raise InvalidRequestError(found)

    def all_violations(self) -> list[Violation]:
        """Violations of its problem, of the messages before that, and of its declared fields."""
        of_fields, found = violations(self, self.checked_apart), list[Violation]()
        wrong = {violation.field for violation in of_fields}
        if "problem" not in wrong:
            found += text_violations("problem", self.problem, MAX_PROBLEM_BYTES)
            found += [] if self.problem.strip() else [Violation("problem", "must not be empty")]
        if self.history and "history" not in wrong:
            found += history_violations(self.history)
        return found + of_fields
