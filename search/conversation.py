"""The messages of a conversation before its problem."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from espalier.engine.errors import Violation
from espalier.search.schema import text_violations

MAX_HISTORY_BYTES = 128 * 1024
MAX_HISTORY_MESSAGES = 256


class ChatRole(StrEnum):
    """Role of the speaker of a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    Attributes:
        role: who speaks.
        content: what is said.
        reasoning_content: what the assistant thought before; whether a generator reads it again is up to its template.
    """

    role: ChatRole
    content: str
    reasoning_content: str = ""


def conversation_text(problem: str, history: Sequence[ChatMessage]) -> str:
    """Return a problem with the turns before it as plain text, without the system message.

    A problem without earlier turns stays as it is. Else each turn follows its speaker's name, and the problem is the
    last one:

        User: What is 6 * 7?

        Assistant: The answer is 42.

        User: And twice that?
    """
    turns = [message for message in history if message.role != ChatRole.SYSTEM]
    if not turns:
        return problem
    turns.append(ChatMessage(ChatRole.USER, problem))
    return "\n\n".join(f"{turn.role.capitalize()}: {turn.content}" for turn in turns)


def history_violations(history: Sequence[ChatMessage]) -> list[Violation]:
    """Return what is wrong with the messages before a problem."""
    texts = "".join(message.content + message.reasoning_content for message in history)
    found = text_violations("history", texts, MAX_HISTORY_BYTES)
    if len(history) > MAX_HISTORY_MESSAGES:
        what = f"must be at most {MAX_HISTORY_MESSAGES} messages, is {len(history)}"
        found.append(Violation("history", what))
    if any(message.role == ChatRole.SYSTEM for message in history[1:]):
        found.append(Violation("history", "only the first message may be the system's"))
    return found
