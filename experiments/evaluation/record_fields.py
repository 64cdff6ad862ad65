"""Values of a record: fields within fields, prompts that are conversations, lists written as text, unique ids."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from espalier.search.conversation import ChatMessage, ChatRole

_TEXT_PART = "text"
"""Type of those parts of a message's content that are text, in OpenAI's form."""


def value_at(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a field; None without it.

    Args:
        fields: the record.
        name: the field's name, or the way to one within it, as in `reward_model.ground_truth` and `prompt.0.content`.
    """
    if name in fields:
        return fields[name]
    found: Any = fields
    for part in name.split("."):
        if isinstance(found, Mapping):
            found = found.get(part)
        elif isinstance(found, list) and part.isascii() and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    return found


def names_in(fields: Mapping[str, Any]) -> list[str]:
    """Names of a record's fields; of an object, the names that `value_at` takes for what it holds."""
    return [
        name
        for outer, value in fields.items()
        for name in ([f"{outer}.{inner}" for inner in value] if isinstance(value, Mapping) and value else [outer])
    ]


def read_chat(messages: Sequence[Any]) -> tuple[str, tuple[ChatMessage, ...]]:
    """The last message of a conversation, which is the user's, and the messages before it.

    Args:
        messages: objects with a `role` and a `content`: a text, or a list of OpenAI's parts of text.

    Raises:
        ValueError: they are not; says what is wrong with which message.
    """
    read = [_message(number, message) for number, message in enumerate(messages, start=1)]
    if not read or read[-1].role is not ChatRole.USER:
        last = f"the last of its {len(read)} messages is the {read[-1].role}'s" if read else "it has no messages"
        raise ValueError(f"{last}, and a problem is a message of the user")
    return read[-1].content, tuple(read[:-1])


def _message(number: int, message: Any) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise ValueError(f"message {number} is no object with a role and a content")
    role, content = message.get("role"), message.get("content")
    if role not in list(ChatRole):
        raise ValueError(f"the role of message {number} is {role!r}, none of {', '.join(ChatRole)}")
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == _TEXT_PART and isinstance(part.get("text"), str)
        for part in content
    ):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"the content of message {number} is no text")
    return ChatMessage(ChatRole(role), content)


def as_listed(value: Any) -> Any:
    """The texts of a list that is itself written as a text, as in `["1", "2"]`; anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith('["'):
        return value
    try:
        listed = json.loads(value)
    except ValueError:
        return value
    return listed if all(isinstance(each, str) for each in listed) else value


class UniqueIds:
    """Gives each record an id of its own.

    The second record of an id gets `ID#2`, and so on. Only the records before it count, so that an id does not depend
    on how many are read, and a run goes on with the ids that it began with.

    Attributes:
        repeats: how many records had an id that was taken.
        first: the first of them: its place, its id, and the one it got instead.
    """

    def __init__(self) -> None:
        self.repeats = 0
        self.first = ("", "", "")
        self._taken: set[str] = set()
        self._counts: dict[str, int] = {}

    def of(self, wanted: str, place: str) -> str:
        """The id of the next record, which says `wanted` and is at `place`."""
        given = wanted
        while given in self._taken:
            self._counts[wanted] = self._counts.get(wanted, 1) + 1
            given = f"{wanted}#{self._counts[wanted]}"
        self._taken.add(given)
        if given != wanted:
            self.first = self.first if self.repeats else (place, wanted, given)
            self.repeats += 1
        return given
