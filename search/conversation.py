"""The messages of a conversation before its problem."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from espalier.engine.errors import Violation

MAX_HISTORY_BYTES = 128 * 1024
MAX_HISTORY_MESSAGES = 256
NOT_UNICODE = "must be valid Unicode, has an unpaired surrogate"


class ChatRole(StrEnum):
    """Who speaks in a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: ChatRole
    content: str


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
    found: list[Violation] = []
    count, size = len(history), sum(byte_size(message.content) for message in history)
    if count > MAX_HISTORY_MESSAGES:
        found.append(Violation("history", f"must be at most {MAX_HISTORY_MESSAGES} messages, is {count}"))
    if size > MAX_HISTORY_BYTES:
        found.append(Violation("history", f"must be at most {MAX_HISTORY_BYTES} bytes, is {size}"))
    for index, message in enumerate(history):
        if not is_unicode(message.content):
            found.append(Violation(f"history[{index}]", NOT_UNICODE))
        if index and message.role == ChatRole.SYSTEM:
            found.append(Violation(f"history[{index}]", "only the first message may be the system's"))
    return found


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: it has no unpaired surrogate."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def byte_size(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text.encode(errors="replace"))
