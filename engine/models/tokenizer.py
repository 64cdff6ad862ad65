"""Text to token ids and back, and chat templates, from the files of a checkpoint."""

from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint

_TEMPLATE_DATE = "26 Jul 2024"  # Llama 3.x templates insert today's date; a fixed one keeps prompts the same tomorrow


class TextTokenizer:
    """A checkpoint's tokenizer.

    Decoding looks each token's bytes up in a table, so the text of a step is the join of its tokens' bytes, and a
    growing sequence is never decoded from its start.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Read `tokenizer.json`, `tokenizer_config.json` and the chat template.

        Raises:
            CheckpointError: when `tokenizer.json` is missing or unreadable.
        """
        self._folder = checkpoint.folder
        if (text := checkpoint.text("tokenizer.json")) is None:
            raise CheckpointError(f"{self._folder} has no tokenizer.json; save the checkpoint with a fast tokenizer")
        try:
            self._tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise CheckpointError(f"tokenizer.json of {self._folder} is not a tokenizer: {error}") from error
        self._template_file = checkpoint.text("chat_template.jinja")
        self._config = checkpoint.optional_json("tokenizer_config.json")

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id of a token, added tokens included; ids below it may have no token."""
        return max(self.vocabulary.values(), default=-1) + 1

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Every token and its id."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as it stands: nothing is added before or after it; special tokens are recognised."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: list[int]) -> str:
        """Text of `token_ids`, without special tokens; broken UTF-8 becomes the replacement character."""
        return self.decode_bytes(token_ids).decode("utf-8", errors="replace")

    def decode_bytes(self, token_ids: list[int]) -> bytes:
        """Bytes of `token_ids`, without special tokens."""
        table = self.token_bytes
        return b"".join([table[i] if i < len(table) else b"" for i in token_ids])

    def show(self, token_ids: list[int]) -> str:
        """Text of `token_ids` for a person to read, special tokens as they are written."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def token(self, token_id: int) -> str:
        """A token as it is written; empty for an id without a token."""
        return (token_id < self.vocab_size and self._tokenizer.id_to_token(token_id)) or ""

    def token_id(self, token: str) -> int | None:
        """The id of one token, or None."""
        return self._tokenizer.token_to_id(token)

    def special_token(self, name: str) -> str | None:
        """The text of `bos_token`, `eos_token` or another named special token, or None."""
        value = self._config.get(name)
        return value.get("content") if isinstance(value, dict) else value

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """Bytes of every token, indexed by id; special tokens have none."""
        added = self._tokenizer.get_added_tokens_decoder()
        table = [b""] * self.vocab_size
        to_bytes = _byte_level_bytes if self._is_byte_level() else _metaspace_bytes
        for token, i in self.vocabulary.items():
            if i not in added:
                table[i] = to_bytes(token)
            elif not added[i].special:
                table[i] = added[i].content.encode()
        return table

    @cached_property
    def has_newline(self) -> np.ndarray:
        """Bool `[vocab_size]`: whether a token's bytes hold a newline, so that it can complete a step's delimiter."""
        return np.array([b"\n" in token for token in self.token_bytes], dtype=bool)

    @cached_property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint comes with a chat template."""
        return self._chat_template() is not None

    def render_chat(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = True, **variables: object
    ) -> str:
        """Render messages by the checkpoint's chat template, as text.

        Args:
            messages: each with `role` and `content`.
            add_generation_prompt: end with the text that opens the assistant's turn.
            variables: further variables for the template.

        Raises:
            CheckpointError: when there is no template, or it refuses the messages.
        """
        from jinja2 import TemplateError

        if (source := self._chat_template()) is None:
            raise CheckpointError(f"{self._folder} has no chat template")
        special = {name: self.special_token(name) or "" for name in ("bos_token", "eos_token", "pad_token")}
        try:
            return _compile_template(source).render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **{"date_string": _TEMPLATE_DATE, "tools": None, "documents": None} | special | variables,
            )
        except TemplateError as error:
            raise CheckpointError(f"the chat template of {self._folder} failed: {error}") from error

    def _chat_template(self) -> str | None:
        if self._template_file is not None:
            return self._template_file
        template = self._config.get("chat_template")
        if isinstance(template, list):  # transformers 4 wrote several with names
            template = next((named["template"] for named in template if named.get("name") == "default"), None)
        return template

    def _is_byte_level(self) -> bool:
        return "ByteLevel" in str(self._tokenizer.decoder) or "ByteLevel" in str(self._tokenizer.pre_tokenizer)


@lru_cache(maxsize=8)
def _compile_template(source: str) -> Any:
    """A template as transformers compiles it: sandboxed, blocks trimmed, with two of its functions."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.strptime(_TEMPLATE_DATE, "%d %b %Y").strftime(form)
    return environment.from_string(source)


def _unicode_to_byte() -> dict[str, int]:
    """GPT-2's map of bytes to printable characters, inverted."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}


_BYTE_OF = _unicode_to_byte()


def _byte_level_bytes(token: str) -> bytes:
    return bytes([_BYTE_OF[c] for c in token]) if all(c in _BYTE_OF for c in token) else token.encode()


def _metaspace_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()
