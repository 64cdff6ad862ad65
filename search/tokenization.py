"""Prompts as the generator's token ids, and token ids as text, for clients that count or show tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.completion import Prompt, prompt_violation


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
