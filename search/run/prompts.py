"""The texts of prompts: conversations through the chat template, and what callers write in them as text.

Thoughts of earlier turns are told apart from what was said, so that the chat template keeps or drops them:

    reasoning_content     handed to the template as it is
    <think> in a content  apart for templates that read thoughts apart, else in the content, between the marks' tokens

Marks in the rest of a message are text, so that no template cuts an answer that quotes one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from espalier.engine.models.chat.arrangement import DROPPED, FOLDED, RenderedChat, folded, leading, render_conversation
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.conversation import ChatMessage, ChatRole, turns_text, whole_conversation
from espalier.search.rules import SWITCHES, ThinkingMode
from espalier.search.thoughts.marks import ThoughtMarks

_BEGIN, _END = "\ue000", "\ue001"
_PLACE = re.compile(f"{_BEGIN}(\\d+){_END}")
_APART = re.compile(r"\breasoning_content\b|\.thinking\b|\[['\"]thinking['\"]\]")
"""Templates that read the thought of a message apart."""


def render_prompt(
    tokenizer: TextTokenizer,
    system_prompt: str,
    problem: str,
    history: Sequence[ChatMessage] = (),
    switches: Mapping[str, bool] = MappingProxyType({"enable_thinking": False}),
) -> str:
    """Return the text of `render_turns`."""
    return render_turns(tokenizer, system_prompt, problem, history, switches).text


def render_turns(
    tokenizer: TextTokenizer,
    system_prompt: str,
    problem: str,
    history: Sequence[ChatMessage],
    switches: Mapping[str, bool],
) -> RenderedChat:
    """Render the prompt: through the chat template, or as plain text and a blank line without one.

    Args:
        tokenizer: has the chat template.
        system_prompt: used unless `history` starts with a system message.
        problem: what the user says last.
        history: the messages around it.
        switches: variables of the template that switch thinking on or off; see `SWITCHES`.

    Raises:
        TemplateLimitError: the template takes too much time or memory.
        CheckpointError: the template rejects the messages without a system message too, or turns of tools.
    """
    messages = [{"role": "user", "content": problem}]
    if history:
        messages = [turn.for_template() for turn in whole_conversation(problem, history)]
    if messages[0]["role"] != ChatRole.SYSTEM:
        messages.insert(0, {"role": "system", "content": system_prompt})
    if not messages[0]["content"]:
        messages.pop(0)
    if tokenizer.chat_template is None:
        return plain_text(tokenizer, messages)
    rendered = render_conversation(tokenizer, messages, **switches)
    if any(message.role == ChatRole.SYSTEM for message in history):  # the caller's own
        return rendered
    return replace(rendered, warnings=tuple(each for each in rendered.warnings if each not in (FOLDED, DROPPED)))


def plain_text(tokenizer: TextTokenizer, messages: list[dict[str, Any]], continued: str = "") -> RenderedChat:
    """A conversation for a model without a chat template: what the system says first, then the turns by name."""
    front = leading(messages)
    system = "".join(f"{message['content']}\n\n" for message in front)
    arranged = folded(messages[len(front) :])
    warnings = (FOLDED,) if len(arranged) < len(messages) - len(front) else ()
    return RenderedChat(f"{tokenizer.begin}{system}{turns_text(arranged)}\n\n{continued}", warnings)


def no_template(tokenizer: TextTokenizer) -> str:
    """A warning of a generator without a chat template, as base models are; empty for others."""
    if tokenizer.chat_template is not None:
        return ""
    return (
        "the tokenizer has no chat template, as of a base model, which goes on with the text instead of answering: "
        "problems stand in its prompt as plain text, and paths may not end; take the instruction-tuned model"
    )


def has_thinking_switch(tokenizer: TextTokenizer, system_prompt: str) -> bool:
    """Return whether the chat template can switch thinking off."""
    on, off = (
        render_prompt(tokenizer, system_prompt, "2", (), SWITCHES[mode]) for mode in (ThinkingMode.ON, ThinkingMode.OFF)
    )
    return on != off


def reads_thoughts_apart(template: str) -> bool:
    """Return whether a chat template looks at `reasoning_content` or `thinking` of messages."""
    return bool(_APART.search(template))


def split_message(content: str, marks: ThoughtMarks) -> tuple[str, str]:
    """Split what an assistant said into its thought, which stands between marks at the beginning, and the rest.

    Returns:
        The thought, empty without one, and the content behind it.
    """
    opening, closing = marks.opening.text + marks.label, marks.closing.text
    if not content.lstrip().startswith(opening):
        return "", content
    begin = content.index(opening) + len(opening)
    depth = 1
    for mark in re.compile(f"{re.escape(marks.opening.text)}|{re.escape(closing)}").finditer(content, begin):
        depth += 1 if mark[0] == marks.opening.text else -1
        if not depth:
            rest = content[mark.end() :].removeprefix(marks.header)
            return content[begin : mark.start()].strip("\n"), rest.lstrip("\n")
    return "", content


class CallerText:
    """Hides tokens in the texts of callers while a prompt is rendered, and encodes them as ordinary text."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        hidden = tokenizer.control_tokens | {_BEGIN, _END}
        self._hidden = re.compile("|".join(map(re.escape, sorted(hidden, key=len, reverse=True))))

    def protect(self, text: str, tags: list[str]) -> str:
        """Return a text with a place for each token in it, which is added to `tags`."""

        def place(found: re.Match[str]) -> str:
            tags.append(found[0])
            return f"{_BEGIN}{len(tags) - 1}{_END}"

        return self._hidden.sub(place, text)

    def encode(self, prompt: str, tags: list[str]) -> list[int]:
        """Return the token ids of a rendered prompt, with the text of the `tags` at their places."""
        if not tags:
            return self._tokenizer.encode(prompt)
        ids: list[int] = []
        for i, part in enumerate(_PLACE.split(prompt)):
            ids += self._plain(tags[int(part)]) if i % 2 else self._tokenizer.encode(part)
        return ids

    def _plain(self, text: str) -> list[int]:
        """Token ids of a text without any added token: each is encoded in two parts."""
        ids: list[int] = []
        while found := self._hidden.search(text):
            ids += self._tokenizer.encode(text[: found.start() + 1])
            text = text[found.start() + 1 :]
        return ids + self._tokenizer.encode(text)
