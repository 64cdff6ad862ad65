"""The generator's side of a search: prompts and sampling defaults."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from espalier.engine.engine import Engine
from espalier.engine.errors import (
    CheckpointError,
    InvalidRequestError,
    NoEmbeddingError,
    RequestTooLargeError,
    Violation,
    name_tokens,
)
from espalier.engine.models.chat.arrangement import RenderedChat, render_conversation
from espalier.engine.models.model import Model
from espalier.engine.models.text_files import require, shown
from espalier.engine.models.tokenizer import SPECIAL_TOKENS
from espalier.engine.roles import GENERATOR
from espalier.search.completion import ChatPrompt, CompletionRequest, Prompt, Tokenization, TokenizationRequest
from espalier.search.conversation import ChatMessage, ChatRole
from espalier.search.rules import SWITCHES, ThinkingMode
from espalier.search.run import prompts
from espalier.search.run.executor import RenderedPrompt, RequestDefaults
from espalier.search.thoughts.marks import find_marks

_MIN_TOP_P = 1e-9
"""top_p that keeps only the most likely token, as a configured 0 does in transformers."""


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
        self._caller_text = prompts.CallerText(self.model.tokenizer)
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
        self, problem: str, history: Sequence[ChatMessage] = (), mode: ThinkingMode = ThinkingMode.AUTO
    ) -> RenderedPrompt:
        """Return the prompt; see `render_prompt`. What callers write is text, whatever tokens look like it.

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
        chat = self._render(problem, [self._earlier(message, tags) for message in history], mode)
        text, opened, thinks = self._opened(chat.text, mode)
        ids = self._caller_text.encode(text, tags)
        return RenderedPrompt(self._require_room(ids, 1), opened, thinks, chat.warnings)

    def _earlier(self, message: ChatMessage, tags: list[str]) -> ChatMessage:
        """A message before the problem, whose thought is where the chat template looks for it."""
        thought, said, in_content = message.reasoning_content, message.content, False
        if self.marks and message.role == ChatRole.ASSISTANT and not thought:
            thought, said = prompts.split_message(said, self.marks)
            in_content = bool(thought) and not prompts.reads_thoughts_apart(self.model.tokenizer.chat_template or "")
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
        return prompts.has_thinking_switch(self.model.tokenizer, self.system_prompt)

    @cached_property
    def _answers_by_default(self) -> bool:
        """True if the chat template has the model think only where it is asked to."""
        auto, off = (self._render("2", (), mode).text for mode in (ThinkingMode.AUTO, ThinkingMode.OFF))
        return self._has_switch and auto == off

    def _render(self, problem: str, history: Sequence[ChatMessage], mode: ThinkingMode) -> RenderedChat:
        switches = SWITCHES[mode if self.marks else ThinkingMode.OFF]
        try:
            return prompts.render_turns(self.model.tokenizer, self.system_prompt, problem, history, switches)
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
            return prompts.plain_text(self.model.tokenizer, messages, continued)
        try:
            chat = render_conversation(self.model.tokenizer, messages, not prompt.continue_last, **prompt.variables)
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


def sampling_defaults(defaults: dict[str, Any]) -> dict[str, Any]:
    """Values of `generation_config.json` for the parameters of sampling that requests leave open, or those without.

    Raises:
        CheckpointError: one of them is not a number or is out of range.
    """
    return {
        "temperature": _configured(defaults, "temperature", 0.8, 0, 10),
        "top_k": max(int(_configured(defaults, "top_k", 0, -1, 2**31 - 1)), 0),  # -1 is another word for all
        "top_p": max(_configured(defaults, "top_p", 1, 0, 1), _MIN_TOP_P),
        "min_p": _configured(defaults, "min_p", 0, 0, 1),
        "repetition_penalty": _configured(defaults, "repetition_penalty", 1, 1e-6, 100),
    }


_NOT_APPLIED: Mapping[str, tuple[Any, ...]] = {
    # what changes a draw in transformers or vLLM, and its values besides null that change nothing
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "diversity_penalty", "penalty_alpha"), (0,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("encoder_repetition_penalty", "typical_p", "num_beams", "guidance_scale"), (1,)),
    **dict.fromkeys(("sequence_bias", "logit_bias"), ({}, [])),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "constraints", "forced_decoder_ids"), ([],)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), ([],)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("top_h", "watermarking_config", "dola_layers"), ()),
    **dict.fromkeys(("min_length", "min_new_tokens", "min_tokens"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "xtc_probability", "mirostat"), (0,)),
    "stop_strings": ([], ""),
    "token_healing": (False,),
}


def not_applied(defaults: Mapping[str, Any]) -> str:
    """Warn of what `generation_config.json` sets that changes draws and is not applied; empty for nothing."""
    found = {
        name: value
        for name, harmless in _NOT_APPLIED.items()
        if (value := defaults.get(name)) is not None and value not in harmless
    }
    text = " and ".join(f"{name} {shown(value)}" for name, value in found.items())
    return f"generation_config.json has {text}, which {'is' if len(found) == 1 else 'are'} not applied" if found else ""


def _configured(defaults: dict[str, Any], name: str, default: float, minimum: float, maximum: float) -> float:
    """Read a value of `generation_config.json`; the default if it is absent."""
    if (value := defaults.get(name)) is None:
        return default

    def in_range(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and minimum <= value <= maximum

    rule = f"a number from {minimum} to {maximum}"
    return float(require("generation_config.json", name, value, rule, in_range))


Parameters = Mapping[str, float]
"""`temperature`, `top_k` and `top_p`."""
_PAIRS: tuple[tuple[Parameters, Parameters], ...] = (
    # Qwen3's model cards, "Best Practices"
    ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8}),
)
"""Those for thinking, and those without."""


def sampling_for(configured: Parameters, thinks: bool) -> Parameters:
    """The parameters of a mode that differ from those in the file; empty where the file's are used.

    Args:
        configured: those of the file, others are ignored; of a checkpoint that can think and be kept from it.
        thinks: whether the model thinks in this mode.
    """
    for pair in _PAIRS:
        if any(all(configured.get(name) == value for name, value in each.items()) for each in pair):
            return {name: value for name, value in pair[not thinks].items() if configured[name] != value}
    return {}
