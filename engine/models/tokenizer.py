"""Text to token ids and back, and chat templates, from the files of a checkpoint."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer

from espalier.engine.errors import CheckpointError, first_line
from espalier.engine.models.chat.template import ChatTemplate
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.options import GGUF
from espalier.engine.models.text_files import A_FLAG, A_LIST, A_TEXT, AN_OBJECT, parse_object, require, shown, some

MAX_TOKEN_ID = 2**22 - 1
"""Beyond it are no tokens of any model, and a table by id would take gigabytes."""
MAX_GROWTH = 64
"""Factor by which a tokenizer's rules may lengthen a text."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Fields of tokenizer_config.json that name a special token; a chat template has them as variables."""
END_NAMES = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>"),
    *("<|call|>", "<|tool_response>"),
)
"""Tokens that end what a model says, in every model that has them."""
_CALL_MARK = re.compile(
    r"[<\[].*(?:tool.?call|TOOL_CALL|CALL_ID|ARGS|DSML|tool▁(?:call|sep)|python_tag).*[>\]]|<\|\"\|>"
)
"""Pattern of special tokens that mark calls of tools: they have text, as a call is part of what the model says."""
_CONTROL = re.compile(r"<.+>|\[.+\]")
"""Pattern of special tokens, which words do not match."""
_MARK = re.compile(r"<[｜|][^<>\s]+[｜|]>")
"""Pattern of marks that no text has, such as `<|im_start|>`."""
_WRITTEN = re.compile(r"<[^<>\s{}'\"]{1,64}>|\[/?[A-Z_]{1,64}\]")
"""Pattern of what may be a mark where a chat template writes it."""
_IN_BRACKETS = re.compile(r"[<\[◁].+[>\]▷]")
_RAW_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONFIG = "tokenizer_config.json"


class TextTokenizer:
    """A checkpoint's tokenizer.

    Decoding looks each token's bytes up in a table, so the text of a step is the join of its tokens' bytes, and a
    growing sequence is never decoded from its start.

    As in transformers, tokens that tokenizer_config.json calls special are special whatever tokenizer.json says, and
    nothing cuts or pads a text; so are tokens of `END_NAMES`.

    Attributes:
        begin: special tokens that go before a text without a chat template; often none.
        begin_source: the field that says so.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Read `tokenizer.json`, `tokenizer_config.json` and the chat template.

        Raises:
            CheckpointError: when `tokenizer.json` is missing, or one of them is unreadable or means nothing.
        """
        self._folder = checkpoint.folder
        if (text := checkpoint.files.text("tokenizer.json")) is None:
            raise CheckpointError(f"{self._folder} has no tokenizer.json; save the checkpoint with a fast tokenizer")
        written = parse_object(self._folder / "tokenizer.json", text)
        self._require_no_growth(written)
        with self._library("is not a tokenizer"):
            self._tokenizer = Tokenizer.from_str(text)
        self._config = checkpoint.files.optional_json(_CONFIG)
        if "added_tokens_decoder" not in self._config:  # older checkpoints have a file for these
            listed = checkpoint.files.optional_json("special_tokens_map.json")
            self._config |= {name: listed[name] for name in (*SPECIAL_TOKENS, *_LISTS) if name in listed}
        self._special = self._mark_special(self._named_tokens())
        self._require_ids(checkpoint, written)
        self._template, self._template_for_tools = self._chat_templates(checkpoint)
        if self._folder.suffix == GGUF:
            self._mark_untyped(checkpoint)
        # What cuts, pads or varies a text may be on for training.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if dropout := getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None
            place = f"tokenizer.json of {self._folder}"
            checkpoint.warn(f"dropout in {place} is {dropout}, which is for training; it is off")
        self.begin, self.begin_source = self._take_begin()

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id of a token, added tokens included; ids below it may have no token."""
        return max(self.vocabulary.values(), default=-1) + 1

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Every token and its id."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as it stands: nothing is added before or after it; special tokens are recognised.

        Raises:
            CheckpointError: when a rule of the tokenizer fails on it.
        """
        with self._library("fails on a text"):
            # `encode` would hold the interpreter's lock all the time, and also compute offsets.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

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

    def is_special(self, token_id: int) -> bool:
        """True if a token has no text."""
        return token_id in self._special

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """Bytes of every token, indexed by id; special tokens have none."""
        added = self._tokenizer.get_added_tokens_decoder()
        table = [b""] * self.vocab_size
        parts = self._tokenizer.decoder, self._tokenizer.pre_tokenizer
        to_bytes = _byte_level_bytes if any("ByteLevel" in str(part) for part in parts) else _metaspace_bytes
        for token, i in self.vocabulary.items():
            if i not in self._special:
                table[i] = added[i].content.encode() if i in added else to_bytes(token)
        return table

    @cached_property
    def control_tokens(self) -> frozenset[str]:
        """Added tokens that are no words of a text: special ones, and others in brackets, as marks of thoughts are."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(
            token.content for i, token in added.items() if i in self._special or _IN_BRACKETS.fullmatch(token.content)
        )

    @property
    def added_tokens(self) -> list[str]:
        """Tokens that are recognised in a text as they are written, special or not."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template; None without one."""
        return self._template and self._template.source

    @property
    def chat_template_for_tools(self) -> str | None:
        """The text of the chat template for conversations with tools."""
        return self._template_for_tools and self._template_for_tools.source

    @property
    def response_template(self) -> dict[str, Any]:
        """The checkpoint's own account of the parts of what it says, as transformers has it; empty without one."""
        given = self._config.get("response_template")
        return given if isinstance(given, dict) else {}

    def render_chat(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, /, **variables: object
    ) -> str:
        """Render messages by the checkpoint's chat template, as text.

        Args:
            messages: each with `role` and `content`.
            add_generation_prompt: end with the text that opens the assistant's turn.
            variables: further variables for the template.

        Raises:
            TemplateLimitError: when the template takes too much time or memory, or makes too long a text.
            CheckpointError: when there is no template, it fails, or it refuses the messages.
        """
        template = self._template_for_tools if variables.get("tools") else self._template
        if template is None:
            raise CheckpointError(f"{self._folder} has no chat template")
        special = {name: self.special_token(name) for name in SPECIAL_TOKENS}
        return template.render(messages, add_generation_prompt, special, **variables)

    def _chat_templates(self, checkpoint: Checkpoint) -> tuple[ChatTemplate | None, ChatTemplate | None]:
        """The chat template, and the one for conversations with tools, which is the same unless it has a name."""
        if (source := checkpoint.files.text(name := "chat_template.jinja")) is not None:
            return (template := ChatTemplate(source, str(self._folder / name))), template
        place = checkpoint.files.place(_CONFIG)
        source = self._config.get("chat_template")
        if isinstance(source, list):  # transformers 4 wrote several with names
            source = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        for_tools = None
        if isinstance(source, dict):
            if "default" not in source:
                checkpoint.warn(f"chat_template in {place} has none named default: prompts are plain text")
            source, for_tools = source.get("default"), source.get("tool_use")
        made = [
            ChatTemplate(require(place, "chat_template", each, *A_TEXT), f"chat_template in {place}")
            for each in (source, for_tools)
            if each is not None
        ]
        return (made[0], made[-1]) if source is not None else (None, None)

    def _named_tokens(self) -> Iterator[AddedToken]:
        """The tokens that tokenizer_config.json describes, and `END_NAMES`."""
        place = f"{_CONFIG} of {self._folder}"
        listed = require(place, "added_tokens_decoder", self._config.get("added_tokens_decoder") or {}, *AN_OBJECT)
        for number, entry in listed.items():
            yield _added_token(place, f"added_tokens_decoder[{number}]", entry)
        for name in SPECIAL_TOKENS:
            if (given := self._config.get(name)) is not None:
                yield _added_token(place, name, given, special=True)
        for name in _LISTS:
            given = self._config.get(name) or []
            for each in given.values() if isinstance(given, dict) else require(place, name, given, *A_LIST):
                yield _added_token(place, name, each, special=True)
        yield from (AddedToken(name, special=True, normalized=False) for name in END_NAMES)

    def _mark_special(self, named: Iterable[AddedToken]) -> set[int]:
        """Have the library recognise `named` tokens of the vocabulary in texts; returns the ids of all special ones.

        A word that is named as a special token, such as a full stop, stays a word: texts are full of it.
        """
        known = self._tokenizer.get_added_tokens_decoder()
        special = {i for i, token in known.items() if token.special}
        for token in named:
            i = self._tokenizer.token_to_id(token.content)
            if i is None or not (i in known or _CONTROL.fullmatch(token.content)):
                continue
            if i not in known:
                self._tokenizer.add_special_tokens([token]) if token.special else self._tokenizer.add_tokens([token])
            if token.special:
                special.add(i)
        return {i for i in special if not _CALL_MARK.fullmatch(self._tokenizer.id_to_token(i) or "")}

    def _mark_untyped(self, checkpoint: Checkpoint) -> None:
        """Recognise marks whose type in a GGUF file is that of words: converters lose it, and llama.cpp mends ends'.

        They are those in bars and brackets, the ends that the file names, and what its chat template writes; the last
        may be text, such as marks of thoughts.
        """
        typed = self._tokenizer.get_added_tokens_decoder().keys()
        ends = {self._config.get("eot_token"), self._config.get("eom_token")}
        written = set(_WRITTEN.findall(self.chat_template or ""))
        marks = {token: _MARK.fullmatch(token) is not None or token in ends for token in self.vocabulary}
        self._special |= self._mark_special(
            AddedToken(token, special=special, normalized=False)
            for token, special in marks.items()
            if special or token in written
        )
        added = self._tokenizer.get_added_tokens_decoder()
        if found := [token.content for i, token in sorted(added.items()) if i not in typed]:
            place = f"tokenizer.ggml.token_type of {self._folder}"
            checkpoint.warn(f"{place} says that {some(found)} are words; they are taken as marks, each whole")

    def _require_ids(self, checkpoint: Checkpoint, written: dict[str, Any]) -> None:
        """Refuse ids that no model has, and warn of those that are not as tokenizer.json says."""
        place = f"tokenizer.json of {self._folder}"
        for entry in written.get("added_tokens") or ():
            token, given_id = entry["content"], entry["id"]
            if given_id > MAX_TOKEN_ID:
                given = f"{shown(token)} has the id {given_id}"
                raise CheckpointError(f"added_tokens in {place}: {given}; {MAX_TOKEN_ID} is the largest")
            if (found := self._tokenizer.token_to_id(token)) != given_id:
                checkpoint.warn(f"added_tokens in {place}: {shown(token)} is read as {found}, not as the id {given_id}")
        if self.vocab_size > MAX_TOKEN_ID + 1:
            token = max(self.vocabulary, key=self.vocabulary.__getitem__)
            given = f"{shown(token)} has the id {self.vocab_size - 1}"
            raise CheckpointError(f"vocab in {place}: {given}; {MAX_TOKEN_ID} is the largest")
        if twice := len(self.vocabulary) - len(set(self.vocabulary.values())):
            checkpoint.warn(f"vocab in {place} gives {twice} tokens the id of another")

    def _take_begin(self) -> tuple[str, str]:
        """Tokens before a text, and their source: `add_bos_token`, or what the post-processor of tokenizer.json does.

        The post-processor is taken off, for `encode` adds nothing.
        """
        some = "0"
        with self._library("fails on a text"):
            plain, whole = (self._tokenizer.encode(some, add_special_tokens=add).ids for add in (False, True))
            self._tokenizer.post_processor = None  # type: ignore[assignment]
            if plain != (alone := self._tokenizer.encode(some).ids):
                raise CheckpointError(f"post_processor in tokenizer.json of {self._folder} changes a text's own tokens")
        if (says := self._config.get("add_bos_token")) is not None:
            require(f"{_CONFIG} of {self._folder}", "add_bos_token", says, *A_FLAG)
            bos = self.special_token("bos_token") or ""
            return bos if says and self.token_id(bos) is not None else "", f"add_bos_token of {_CONFIG}"
        before = next((at for at in range(len(whole)) if whole[at : at + len(alone)] == alone), 0)
        return "".join(self.token(i) for i in whole[:before]), "post_processor of tokenizer.json"

    def _require_no_growth(self, written: dict[str, Any]) -> None:
        """Refuse rules that make texts many times longer, step by step: some twenty steps fill any memory."""
        for part, several in (("normalizer", "normalizers"), ("decoder", "decoders")):
            growth = 1.0
            for step in _steps(written.get(part), several):
                pattern, new = step.get("pattern"), step.get("content") or step.get("prepend") or ""
                old = pattern.get("String") if isinstance(pattern, dict) else None
                growth *= max(1.0, len(str(new)) / max(1, len(str(old or ""))))
            if growth > MAX_GROWTH:
                place, longer = f"{part} in tokenizer.json of {self._folder}", f"{growth:.3g} times longer"
                raise CheckpointError(f"{place} may make a text {longer}; at most {MAX_GROWTH} times is read")

    @contextmanager
    def _library(self, what: str) -> Iterator[None]:
        """Turn what the tokenizers library raises, a bare Exception or Rust's panic, into an error of ours."""
        try:
            yield
        except CheckpointError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise CheckpointError(f"tokenizer.json of {self._folder} {what}: {first_line(error)}") from error


_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _added_token(place: str, name: str, given: Any, special: bool = False) -> AddedToken:
    """A token as tokenizer_config.json describes it: its text, or an object with `content` and flags."""
    entry = {"content": given} if isinstance(given, str) else given
    rule = "text, or an object with content"
    require(place, name, entry, rule, lambda it: isinstance(it, dict) and isinstance(it.get("content"), str))
    flags = {flag: bool(entry[flag]) for flag in _FLAGS if flag in entry}
    return AddedToken(entry["content"], **{"normalized": False} | flags | ({"special": True} if special else {}))


def _steps(rule: Any, several: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or decoder, which may be sequences of others."""
    if isinstance(rule, dict):
        yield rule
        for each in rule.get(several) or ():
            yield from _steps(each, several)


_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN = [b for b in range(256) if b not in _PRINTABLE]
_BYTE_OF = {chr(b): b for b in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_HIDDEN)}
"""GPT-2's map of bytes to printable characters, inverted."""


def _byte_level_bytes(token: str) -> bytes:
    return bytes([_BYTE_OF[c] for c in token]) if all(c in _BYTE_OF for c in token) else token.encode()


def _metaspace_bytes(token: str) -> bytes:
    if found := _RAW_BYTE.fullmatch(token):
        return bytes.fromhex(found[1])
    return token.replace("▁", " ").encode()
