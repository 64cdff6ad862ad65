"""The generator's side of a search: its prompts, what callers write in them as text, and defaults of its requests.

Thoughts of earlier turns are told apart from what was said, so that the chat template keeps or drops them:

    reasoning_content     handed to the template as it is
    <think> in a content  apart for templates that read thoughts apart, else in the content, between the marks' tokens

Marks in the rest of a message are text, so that no template cuts an answer that quotes one.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from espalier.engine.engine import Engine
from espalier.engine.errors import (
    CheckpointError,
    InvalidRequestError,
    NoEmbeddingError,
    RequestTooLargeError,
    Violation,
    name_tokens,
)
from espalier.engine.models.chat.template import DROPPED, FOLDED, RenderedChat, folded, leading, render_conversation
from espalier.engine.models.model import Model
from espalier.engine.models.tokenizer import SPECIAL_TOKENS, TextTokenizer
from espalier.engine.roles import GENERATOR
from espalier.search.completion import ChatPrompt, CompletionRequest, Prompt, Tokenization, TokenizationRequest
from espalier.search.conversation import ChatMessage, ChatRole, turns_text, whole_conversation
from espalier.search.rules import SWITCHES, ThinkingMode
from espalier.search.run.executor import RenderedPrompt, RequestDefaults
from espalier.search.run.generation_config import Parameters, sampling_defaults, sampling_for
from espalier.search.thoughts.marks import ThoughtMarks, find_marks

if TYPE_CHECKING:
    from espalier.search.tools.forms import CallForm

Advice = Callable[[str], tuple[str, ...]]
"""Takes a problem's text and returns warnings, whole sentences for the caller; empty where there are none."""


class Generator:
    """Renders problems for one generator, and knows the defaults of its requests."""

    def __init__(
        self,
        engine: Engine,
        system_prompt: str,
        defaults: dict[str, Any],
        advice: Advice = lambda _: (),
        thought_marks: str | None = None,
    ) -> None:
        """Create a generator.

        Args:
            engine: the engine that holds the generator's model.
            system_prompt: text of the system message; empty for none.
            defaults: the checkpoint's `generation_config.json`.
            advice: warns of problems that it was not made for.
            thought_marks: see `find_marks`.

        Raises:
            CheckpointError: `thought_marks` are none, one of the values used is not a number or is out of range, or the
                model has no embedding for a token of every prompt.
        """
        self._engine = engine
        self.system_prompt = system_prompt
        self.advice = advice
        self.marks = find_marks(self.model.tokenizer, thought_marks)
        self._caller_text = CallerText(self.model.tokenizer)
        try:
            self.prompt_ids("2")
        except NoEmbeddingError as error:
            raise CheckpointError(
                f"the generator has no embedding for {name_tokens(error.tokens)}, which its chat template or the "
                "system prompt puts into every prompt; is tokenizer.json the one that belongs to these weights?"
            ) from None
        except RequestTooLargeError:
            pass  # each request will say so
        sampling = sampling_defaults(defaults)
        by_mode: dict[ThinkingMode, Parameters] = {}
        if self.marks and self._has_switch:
            by_mode = {
                mode: sampling_for(sampling, self._opened(self._render("2", (), mode).text, mode)[2])
                for mode in ThinkingMode
            }
        self.defaults = RequestDefaults(**sampling, max_positions=self.model.config.max_positions, by_mode=by_mode)

    @property
    def model(self) -> Model:
        """The generator's model."""
        return self._engine.model(GENERATOR)

    def prompt_ids(self, problem: str, history: Sequence[ChatMessage] = ()) -> list[int]:
        """Return the token ids of `prompt`."""
        return self.prompt(problem, history).token_ids

    def prompt(
        self,
        problem: str,
        history: Sequence[ChatMessage] = (),
        mode: ThinkingMode = ThinkingMode.AUTO,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> RenderedPrompt:
        """Return the prompt; see `render_turns`. What callers write is text, whatever tokens look like it.

        Args:
            problem: what the user says last.
            history: the messages around it.
            mode: whether the model is to think.
            tools: what the chat template is to list.

        Raises:
            InvalidRequestError: the chat template rejects the conversation, or the generator cannot think.
            NoEmbeddingError: the prompt has tokens without an embedding in the model.
            RequestTooLargeError: the prompt leaves no room for an answer.
        """
        if mode is ThinkingMode.ON and self.marks is None:
            why = (
                "the generator does not think: neither its chat template nor its tokenizer has marks of thoughts; "
                "--thought-marks names those of others"
            )
            raise InvalidRequestError([Violation("thinking", why)])
        tags: list[str] = []
        problem = self._caller_text.protect(problem, tags)
        more = self._shown_tools(tools, tags)
        chat = self._render(problem, [self._earlier(message, tags) for message in history], mode, more)
        text, opened, thinks = self._opened(chat.text, mode)
        ids = self._caller_text.encode(text, tags)
        return RenderedPrompt(self._require_room(ids, 1), opened, thinks, chat.warnings)

    def _earlier(self, message: ChatMessage, tags: list[str]) -> ChatMessage:
        """A message before the problem, whose thought is where the chat template looks for it."""
        thought, said, in_content = message.reasoning_content, message.content, False
        if self.marks and message.role == ChatRole.ASSISTANT and not thought:
            thought, said = split_message(said, self.marks)
            in_content = bool(thought) and not reads_thoughts_apart(self.model.tokenizer.chat_template or "")
        thought, said = (self._caller_text.protect(text, tags) for text in (thought, said))
        if in_content and self.marks:
            opening, closing = self.marks.opening.text + self.marks.label, self.marks.closing.text
            thought, said = "", f"{opening}\n{thought}\n{closing}\n\n{said}"
        more = json.dumps(message.fields, ensure_ascii=False) if message.more else ""  # without escapes that hide marks
        return replace(message, content=said, reasoning_content=thought, more=self._caller_text.protect(more, tags))

    def _opened(self, text: str, mode: ThinkingMode) -> tuple[str, bool, bool]:
        """The prompt's text with a thought opened or closed, whether it is open, and whether the model is to think."""
        if not (marks := self.marks):
            return text, False, False
        off, opening, closing = mode is ThinkingMode.OFF, marks.opening.text, marks.closing.text
        if marks.header:  # written for the model, which writes some of them wrongly
            return text + (marks.direct_header if off else f"{opening}{marks.label}"), not off, not off
        end = text.rstrip()
        opened, closed = marks.opened_by(text), end.endswith(closing)
        if off and opened:
            return f"{end}\n\n{closing}\n\n", False, False
        if off and not closed and marks.in_template and not self._has_switch:
            return f"{text}{opening}\n\n{closing}\n\n", False, False
        if mode is ThinkingMode.ON and closed:
            raise InvalidRequestError(
                [Violation("thinking", "the generator's chat template closes the thought itself")]
            )
        asked = mode is ThinkingMode.ON or (marks.in_template and not self._answers_by_default)
        return text, opened, not off and not closed and (opened or asked)

    @cached_property
    def _has_switch(self) -> bool:
        """True if the chat template can switch thinking off."""
        return has_thinking_switch(self.model.tokenizer, self.system_prompt)

    @cached_property
    def _answers_by_default(self) -> bool:
        """True if the chat template has the model think only where it is asked to."""
        auto, off = (self._render("2", (), mode).text for mode in (ThinkingMode.AUTO, ThinkingMode.OFF))
        return self._has_switch and auto == off

    @cached_property
    def call_form(self) -> "CallForm | None":
        """The form in which the model writes calls of tools; None if it does not, or in a form that is not known."""
        from espalier.search.tools.forms import find_form  # for requests with tools alone

        return find_form(self.model.tokenizer)

    def _shown_tools(self, tools: Any, tags: list[str]) -> dict[str, Any]:
        """The variable of chat templates that lists tools, whose texts are the caller's; none without tools."""
        written = json.dumps(tools, ensure_ascii=False)  # without escapes that hide marks
        return {"tools": json.loads(self._caller_text.protect(written, tags))} if tools else {}

    def _render(
        self, problem: str, history: Sequence[ChatMessage], mode: ThinkingMode, more: Mapping[str, Any] | None = None
    ) -> RenderedChat:
        switches = {**SWITCHES[mode if self.marks else ThinkingMode.OFF], **(more or {})}
        try:
            return render_turns(self.model.tokenizer, self.system_prompt, problem, history, switches)
        except CheckpointError as error:
            if not history:
                raise
            why = f"is rejected by the generator's chat template: {error.__cause__ or error}"
            raise InvalidRequestError([Violation("history", why)]) from error

    def completion_prompt(self, prompt: Prompt, request: CompletionRequest) -> RenderedPrompt:
        """Return a prompt that is continued as it is: a conversation through the chat template alone.

        It opens no thought where none is told apart: of a text, of an answer that is continued, and where the generator
        does not think.

        Raises:
            InvalidRequestError: there is no chat template, or it rejects the conversation.
            NoEmbeddingError: the prompt has tokens without an embedding in the model.
            RequestTooLargeError: the prompt leaves no room for a token.
        """
        ids, warnings = self._ids_of(prompt, request.add_special_tokens)
        if not ids:
            raise InvalidRequestError([Violation("prompts", "must have a token")])
        opened = thinks = False
        if self.marks and isinstance(prompt, ChatPrompt) and not prompt.continue_last:
            opened, thinks = self.marks.opened_by(self.model.tokenizer.show(ids)), True
        return RenderedPrompt(self._require_room(ids, 0 if request.max_tokens == 0 else 1), opened, thinks, warnings)

    def tokenize(self, request: TokenizationRequest) -> Tokenization:
        """Look at a prompt; see `completion_prompt`, except that it may be of any length.

        Raises:
            InvalidRequestError: there is no chat template, or it rejects the conversation.
        """
        tokenizer = self.model.tokenizer
        ids, _ = self._ids_of(request.prompt, request.add_special_tokens)
        special = {name: tokenizer.special_token(name) for name in SPECIAL_TOKENS}
        description = {
            **special,
            "add_bos_token": bool(tokenizer.begin),
            "chat_template": tokenizer.chat_template,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": self.model.config.max_positions,
        }
        tokens = tuple(map(tokenizer.token, ids))
        return Tokenization(tuple(ids), tokens, tokenizer.show(ids), description)

    def _ids_of(self, prompt: Prompt, add_special_tokens: bool) -> tuple[list[int], tuple[str, ...]]:
        tokenizer = self.model.tokenizer
        if isinstance(prompt, tuple):
            return list(prompt), ()
        if isinstance(prompt, str):
            return tokenizer.encode(tokenizer.begin + prompt if add_special_tokens else prompt), ()
        tags: list[str] = []
        chat = self._render_chat(prompt, tags)
        return self._caller_text.encode(chat.text, tags), chat.warnings

    def _render_chat(self, prompt: ChatPrompt, tags: list[str]) -> RenderedChat:
        """A conversation as text: by the chat template alone, or as plain text and a blank line without one.

        What others than the assistant say is text, whatever tokens look like it; see `CallerText`.
        """
        messages = [dict(message) for message in prompt.messages]
        for message in messages:
            if message["role"] != ChatRole.ASSISTANT:
                message["content"] = self._caller_text.protect(message["content"], tags)
        if self.model.tokenizer.chat_template is None:
            continued = messages.pop()["content"] if prompt.continue_last else ""
            spoken = [message for message in messages if message["role"] != ChatRole.SYSTEM]
            if not spoken or spoken[-1]["role"] == ChatRole.ASSISTANT:
                raise InvalidRequestError([Violation("prompts", "must end with the user's message: no chat template")])
            return plain_text(self.model.tokenizer, messages, continued)
        try:
            variables = {**prompt.variables, **self._shown_tools(prompt.variables.get("tools"), tags)}
            chat = render_conversation(
                self.model.tokenizer.render_chat, messages, not prompt.continue_last, **variables
            )
        except CheckpointError as error:
            why = f"are rejected by the generator's chat template: {error.__cause__ or error}"
            raise InvalidRequestError([Violation("prompts", why)]) from error
        if not prompt.continue_last:
            return chat
        text = chat.text
        last = messages[-1]["content"]
        at = text.rfind(last.strip())
        if at < 0 or not last.strip():
            raise InvalidRequestError([Violation("prompts", "end with a message that the chat template does not show")])
        kept = last.lstrip() if text[at:].startswith(last.lstrip()) else last.strip()  # some templates strip messages
        return RenderedChat(text[: at + len(kept)], chat.warnings)

    def _require_room(self, ids: list[int], for_tokens: int) -> list[int]:
        self.model.require_embedded(GENERATOR, ids)
        if len(ids) + for_tokens > (limit := self.model.config.max_positions):
            raise RequestTooLargeError(f"the prompt has {len(ids)} tokens and the generator's context is {limit}")
        return ids


_BEGIN, _END = "\ue000", "\ue001"
_PLACE = re.compile(f"{_BEGIN}(\\d+){_END}")
_APART = re.compile(r"\breasoning_content\b|\.thinking\b|\[['\"]thinking['\"]\]")
"""Templates that read the thought of a message apart."""


def render_turns(
    tokenizer: TextTokenizer,
    system_prompt: str,
    problem: str,
    history: Sequence[ChatMessage] = (),
    variables: Mapping[str, Any] = MappingProxyType({"enable_thinking": False}),
) -> RenderedChat:
    """Render the prompt: through the chat template, or as plain text and a blank line without one.

    Args:
        tokenizer: has the chat template.
        system_prompt: used unless `history` starts with a system message.
        problem: what the user says last.
        history: the messages around it.
        variables: of the template: `SWITCHES` of thinking, and tools.

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
    rendered = render_conversation(tokenizer.render_chat, messages, **variables)
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
    modes = ThinkingMode.ON, ThinkingMode.OFF
    on, off = (render_turns(tokenizer, system_prompt, "2", (), SWITCHES[mode]).text for mode in modes)
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
