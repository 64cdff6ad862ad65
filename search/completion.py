"""Completions: texts sampled from the generator alone, without a search, and what its tokenizer makes of a prompt."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar

from annotated_types import Interval

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.engine.work import TOP_TOKENS
from espalier.search.common_fields import DEFAULT_MAX_TOKENS, ToolFields
from espalier.search.conversation import ToolCall
from espalier.search.result import StopReason, Usage
from espalier.search.rules import Form, read_form
from espalier.search.schema import Parsed, parsed, text_violations, violations

PLAIN = "plain"
"""Strategy in a model's name that samples without a search; see `CompletionRequest`."""
MAX_PROMPTS = 1024
MAX_CHOICES = 1024
"""Prompts times samples of one request."""
MAX_PROMPT_BYTES = 2**20
MAX_STOPS = 16
_MAX_STOP_BYTES = 1024
_MAX_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation that the generator's chat template makes a prompt of.

    Attributes:
        messages: each with `role` and `content`, and what else the template reads, as OpenAI's clients send it.
        continue_last: whether the last message, the assistant's, is continued and not answered.
        variables: further variables of the template.
    """

    messages: tuple[Mapping[str, Any], ...]
    continue_last: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])


Prompt = str | tuple[int, ...] | ChatPrompt
"""A text, its token ids as they are fed, or a conversation."""


@dataclass(frozen=True, slots=True)
class CompletionRequest(ToolFields):
    """Prompts and how to continue them by plain sampling.

    Attributes:
        prompts: what is continued.
        samples: choices for each prompt; each draws from a stream of its own.
        seed: of all choices; with the prompt and the choice's number it fixes every draw.
        temperature: of sampling, 0 for greedy; None for the checkpoint's, as of the three filters and of the repetition
            penalty.
        max_tokens: limit on a choice's new tokens; None for 2048, or what the context leaves.
        stop: texts that end a choice wherever they appear, also across tokens, but not in its thought.
        include_stop: whether a choice keeps the text that ended it.
        echo: whether choices begin with their prompt.
        logprobs: likeliest tokens to report at each place besides the one that is there; None for no log-probabilities.
        add_special_tokens: whether the tokens that the checkpoint puts before a text are put before prompts of text.
        time_limit: seconds from submission after which choices end as far as they are; None for no limit.
        text_form: the form of a choice behind its thought, see `search.rules`; empty for any.
    """

    prompts: tuple[Prompt, ...]
    samples: Annotated[int, Interval(ge=1, le=128)] = 1
    seed: Annotated[int, Interval(ge=0, le=2**63 - 1)] = 0
    temperature: Annotated[float | None, Interval(ge=0, le=10)] = None
    top_k: Annotated[int | None, Interval(ge=0, le=2**31 - 1)] = None
    top_p: Annotated[float | None, Interval(gt=0, le=1)] = None
    min_p: Annotated[float | None, Interval(ge=0, le=1)] = None
    max_tokens: Annotated[int | None, Interval(ge=0, le=262_144)] = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    echo: bool = False
    logprobs: Annotated[int | None, Interval(ge=0, le=TOP_TOKENS)] = None
    add_special_tokens: bool = True
    time_limit: Annotated[float | None, Interval(gt=0, le=24 * 3600)] = None
    text_form: Parsed[Form | None] = parsed(read_form)

    algorithm: ClassVar[str] = PLAIN

    @property
    def problem(self) -> str:
        """The prompts' text as far as it is known without a tokenizer."""
        return "".join(map(_text_of, self.prompts))

    @property
    def problem_text(self) -> str:
        """The same; executors route by it."""
        return self.problem

    @property
    def size(self) -> int:
        """Characters or token ids of all prompts."""
        ids = sum(len(prompt) for prompt in self.prompts if isinstance(prompt, tuple))
        return ids + len(self.problem)

    @property
    def estimated_tokens(self) -> int:
        """About how many tokens may be sampled and read, for shares."""
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return len(self.prompts) * self.samples * limit + self.size

    def validate(self) -> None:
        """Check every field.

        Raises:
            InvalidRequestError: lists all violations.
        """
        found = [*violations(self, without=("prompts", "stop")), *self.tool_violations()]
        if not 1 <= len(self.prompts) <= MAX_PROMPTS:
            found.append(Violation("prompts", f"must be between 1 and {MAX_PROMPTS}, are {len(self.prompts)}"))
        elif "samples" not in {wrong.field for wrong in found} and (
            (choices := len(self.prompts) * self.samples) > MAX_CHOICES
        ):
            found.append(Violation("samples", f"must be at most {MAX_CHOICES} with the prompts together, is {choices}"))
        for prompt in self.prompts:
            if wrong := prompt_violation(prompt):
                found.append(wrong)
                break
        if len(self.stop) > MAX_STOPS:
            found.append(Violation("stop", f"must be at most {MAX_STOPS} texts, is {len(self.stop)}"))
        for text in self.stop[:MAX_STOPS]:
            found += text_violations("stop", text, _MAX_STOP_BYTES)
            if not text:
                found.append(Violation("stop", "must not have an empty text"))
        if self.max_tokens == 0 and not self.echo:
            found.append(Violation("max_tokens", "must be at least 1 without `echo`"))
        if found:
            raise InvalidRequestError(found)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and what the model thought of it, before temperature and filters.

    Attributes:
        token_id: its id.
        token: as a person reads it: its text, or as it is written for a special token.
        raw: its bytes; none for a special token.
        logprob: its log-probability; None for the first token of a prompt, which follows nothing.
        top: ids, tokens, bytes and log-probabilities of the likeliest there, the likeliest first.
    """

    token_id: int
    token: str
    raw: bytes
    logprob: float | None
    top: tuple["TokenLogprob", ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One continuation.

    Attributes:
        index: prompts times samples, the samples of a prompt one after another.
        prompt: its prompt's index.
        text: new text alone; without the end-of-sequence token, and behind a conversation without the thought.
        token_ids: new tokens, an end-of-sequence token included.
        finish_reason: `stop`, `length`, `abort` if it was cut by its time limit or by a cancellation, or `error` if
            what guides it failed.
        stop_text: the stop text that ended it; None for another end.
        logprobs: of the new tokens, empty unless they were asked for.
        thought: what the model thought before its answer to a conversation.
        thought_tokens: new tokens that belong to the thought, its marks included.
        error: why it ended with `error`.
        calls: of tools, which are no part of `text`.
    """

    index: int
    prompt: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_text: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    thought: str = ""
    thought_tokens: int = 0
    error: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt as the generator has read it.

    Attributes:
        text: its text, special tokens as they are written.
        token_ids: its tokens.
        logprobs: of its tokens, if `echo` and log-probabilities were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionResult:
    """The outcome of a `CompletionRequest`; `configuration` is the request with every default filled in.

    `warnings` tell what the chat template did not take as it stood.
    """

    search_id: str
    prompts: tuple[ReadPrompt, ...] = ()
    choices: tuple[Choice, ...] = ()
    stop_reason: StopReason
    usage: Usage
    configuration: CompletionRequest
    error: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)


@dataclass(frozen=True, slots=True)
class TextSampled:
    """New text of a choice, or of its thought, new calls, and its tokens' log-probabilities if they are wanted.

    `prompt` comes with the first one of a choice.
    """

    search_id: str
    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt: ReadPrompt | None = None
    finish_reason: str | None = None
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()

    def including(self, earlier: "TextSampled") -> "TextSampled":
        """Return this text behind an earlier one of the same choice that was not delivered."""
        return replace(
            self,
            text=earlier.text + self.text,
            thought=earlier.thought + self.thought,
            calls=earlier.calls + self.calls,
            token_ids=earlier.token_ids + self.token_ids,
            logprobs=earlier.logprobs + self.logprobs,
            prompt=earlier.prompt or self.prompt,
        )


def _text_of(prompt: Prompt) -> str:
    """All that a caller has written of a prompt."""
    if isinstance(prompt, ChatPrompt):
        said = [text for message in prompt.messages for text in message.values()]
        written = partial(json.dumps, ensure_ascii=False, default=str)
        return "\n".join(text if isinstance(text, str) else written(text) for text in (*said, prompt.variables or ""))
    return prompt if isinstance(prompt, str) else ""


def prompt_violation(prompt: Prompt) -> Violation | None:
    """Return what is wrong with a prompt; None if it can be tokenised."""
    if isinstance(prompt, tuple):
        wrong = not prompt or min(prompt) < 0 or max(prompt) > _MAX_ID or len(prompt) > MAX_PROMPT_BYTES
        return Violation("prompts", "must have token ids, which are not negative") if wrong else None
    text = _text_of(prompt)
    if not text and not isinstance(prompt, ChatPrompt):
        return Violation("prompts", "must not be empty")
    return next(iter(text_violations("prompts", text, MAX_PROMPT_BYTES)), None)


@dataclass(frozen=True, slots=True)
class TokenizationRequest:
    """A prompt, or its token ids, to be shown in both forms.

    Attributes:
        prompt: a text, token ids or a conversation.
        add_special_tokens: as of `CompletionRequest`.
    """

    prompt: Prompt
    add_special_tokens: bool = True

    def validate(self) -> None:
        """Check the prompt.

        Raises:
            InvalidRequestError: it is too long, or no text.
        """
        empty = not self.prompt  # has no tokens, which is an answer
        if not empty and (wrong := prompt_violation(self.prompt)):
            raise InvalidRequestError([Violation("prompt", wrong.description)])


@dataclass(frozen=True, slots=True)
class Tokenization:
    """A prompt as token ids, as tokens and as text.

    Attributes:
        token_ids: its ids.
        tokens: each as it is written in the vocabulary.
        text: their text, special tokens as they are written.
        description: the tokenizer's special tokens by name, its chat template, its size and the model's context.
    """

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    text: str
    description: Mapping[str, Any]
