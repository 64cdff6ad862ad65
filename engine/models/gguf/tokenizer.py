"""A tokenizer in the form of `tokenizer.json`, made of a GGUF file's metadata.

A GGUF file holds tokens, merges or scores, and the name of the rule that splits text into words; the rule itself is
known to its reader. Sources: `src/llama-vocab.cpp` of github.com/ggml-org/llama.cpp, and the `tokenizer.json` files of
the models that the rules are of.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.engine.models.text_files import shown

_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
"""Types of tokens that are not plain text."""
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "eot_token": "eot_token_id",
    "eom_token": "eom_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}
_SPACE = "▁"
_MAX_PIECE = 256
"""Characters of a token of SentencePiece; longer ones would take forever to cut in two at every place."""
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN_3_5 = _QWEN_2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _WordRule:
    """Preparation of text for byte-level merges.

    Attributes:
        split: pattern of words; empty for GPT-2's.
        digits: whether every digit is a word.
        nfc: whether text is brought into the composed form of Unicode first.
        whole_words: whether a word that is a token is never merged from pieces.
        begin: whether text begins with `bos_token` where the file does not say.
    """

    split: str = ""
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    begin: bool = False


_RULES = {
    "gpt-2": _WordRule(),
    "smollm": _WordRule(digits=True),
    "llama-bpe": (llama_3 := _WordRule(_LLAMA_3, whole_words=True, begin=True)),
    "llama3": llama_3,
    "llama-v3": llama_3,
    "qwen2": (qwen_2 := _WordRule(_QWEN_2, nfc=True)),
    "deepseek-r1-qwen": qwen_2,
    "qwen35": _WordRule(_QWEN_3_5, nfc=True),
    "lfm2": llama_3,
    "falcon-h1": llama_3,
    "dbrx": _WordRule(_LLAMA_3),
    "tekken": _WordRule(_TEKKEN, whole_words=True, begin=True),
}
"""By `tokenizer.ggml.pre`."""


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`tokenizer_config.json`: special tokens, whether a text begins with `bos_token`, and the chat template if any.

    An id that no token has stands for none, as llama.cpp takes it; older converters wrote such.

    Raises:
        KeyError: when the metadata has no tokens.
        ValueError: when an id is no number, or the template no text.
    """
    tokens = _list_of(str, metadata, "tokens")
    special: dict[str, Any] = {name: tokens[i] for name, i in _special_ids(metadata, len(tokens)).items()}
    rule = _RULES.get(str(metadata.get(f"{_PREFIX}pre")))
    means = metadata.get(f"{_PREFIX}model") == "llama" or (rule is not None and rule.begin)
    special["add_bos_token"] = says = metadata.get(f"{_PREFIX}add_bos_token", means)
    if not isinstance(says, bool):
        raise ValueError(f"{_PREFIX}add_bos_token must be true or false, is {shown(says)}")
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise ValueError(f"tokenizer.chat_template must be text, is {shown(template)}")
    return special if template is None else special | {"chat_template": template}


def _special_ids(metadata: Mapping[str, Any], count: int) -> dict[str, int]:
    """The ids of special tokens by their names in tokenizer_config.json, of `count` tokens."""
    ids = {name: metadata.get(_PREFIX + key) for name, key in _SPECIAL.items()}
    for name, i in ids.items():
        if i is not None and type(i) is not int:
            raise ValueError(f"{_PREFIX}{_SPECIAL[name]} must be a whole number, is {shown(i)}")
    return {name: i for name, i in ids.items() if i is not None and 0 <= i < count}


def _list_of(kind: type, metadata: Mapping[str, Any], key: str, required: bool = True) -> list[Any]:
    """A list of the metadata, whose items are all of one type in the file; empty if it is absent and not required."""
    values = metadata[_PREFIX + key] if required else metadata.get(_PREFIX + key, [])
    if not isinstance(values, list) or not all(isinstance(v, kind) and not isinstance(v, bool) for v in values[:1]):
        what = {str: "texts", int: "whole numbers", float: "numbers"}[kind]
        raise ValueError(f"{_PREFIX}{key} must be a list of {what}, is {shown(values)}")
    return values


def tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`tokenizer.json`, as the tokenizers library reads it.

    Raises:
        KeyError: when the metadata lacks a part of it.
        ValueError: when its kind is neither byte-level nor SentencePiece merges, splits by an unknown rule, or
            contradicts itself.
    """
    model = metadata[f"{_PREFIX}model"]
    if model not in ("gpt2", "llama"):
        raise ValueError(f"its tokenizer is of the kind {model!r}; gpt2 and llama are read")
    tokens = _list_of(str, metadata, "tokens")
    kinds: list[int] = _list_of(int, metadata, "token_type", required=False) or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise ValueError(f"{_PREFIX}token_type has {len(kinds)} items for {len(tokens)} tokens")
    added = [
        {"id": i, "content": token, "special": kind != _USER_DEFINED, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED) or (kind == _UNKNOWN and model == "llama")
    ]
    named = set(_special_ids(metadata, len(tokens)).values())
    used = [i for i, kind in enumerate(kinds) if kind != _UNUSED or i in named]
    vocabulary = {tokens[i]: i for i in used}
    if len(vocabulary) < len(used):
        twice = next(token for token, times in Counter(tokens[i] for i in used).items() if times > 1)
        raise ValueError(f"{_PREFIX}tokens holds {shown(twice)} more than once")
    parts = _byte_level(metadata, vocabulary) if model == "gpt2" else _sentence_piece(metadata, vocabulary, kinds)
    nothing = dict.fromkeys(("truncation", "padding", "post_processor"))
    return {"version": "1.0", **nothing, "added_tokens": added, **parts}


def _byte_level(metadata: Mapping[str, Any], vocabulary: dict[str, int]) -> dict[str, Any]:
    name = metadata[f"{_PREFIX}pre"]
    if (rule := _RULES.get(str(name))) is None:
        known = ", ".join(_RULES)
        raise ValueError(f"{_PREFIX}pre is the rule {name!r}; {known} are read. Take it in Hugging Face layout")
    words: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if rule.digits else []
    if rule.split:
        words.append({"type": "Split", "pattern": {"Regex": rule.split}, "behavior": "Isolated", "invert": False})
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": not rule.split}
    return {
        "normalizer": {"type": "NFC"} if rule.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*words, to_bytes]},
        "decoder": to_bytes | {"use_regex": False},
        "model": _bpe(vocabulary, _list_of(str, metadata, "merges")) | {"ignore_merges": rule.whole_words},
    }


def _sentence_piece(metadata: Mapping[str, Any], vocabulary: dict[str, int], kinds: Sequence[int]) -> dict[str, Any]:
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if metadata.get(f"{_PREFIX}add_space_prefix", True) else []
    to_space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    from_space = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prepend else []
    if not (merges := _list_of(str, metadata, "merges", required=False)):
        merges = _merges_of(vocabulary, _list_of(float, metadata, "scores"), kinds)
    unknown = next((token for token, i in vocabulary.items() if kinds[i] == _UNKNOWN), None)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, to_space]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [from_space, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": _bpe(vocabulary, merges) | {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
    }


def _bpe(vocabulary: dict[str, int], merges: Sequence[str | tuple[str, str]]) -> dict[str, Any]:
    return {"type": "BPE", "vocab": vocabulary, "merges": merges, "dropout": None, "unk_token": None}


def _merges_of(vocabulary: Mapping[str, int], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Merges in the order that SentencePiece takes: of two that fit, the one whose result has the greater score."""
    if len(scores) != len(kinds):
        raise ValueError(f"{_PREFIX}scores has {len(scores)} items for {len(kinds)} tokens")
    plain = {token: i for token, i in vocabulary.items() if kinds[i] not in (_UNKNOWN, _CONTROL, _BYTE)}
    if (longest := max(map(len, plain), default=0)) > _MAX_PIECE:
        raise ValueError(f"{_PREFIX}tokens holds one of {longest} characters; {_MAX_PIECE} are read at most")
    merges: list[tuple[str, str]] = []
    for token in sorted(plain, key=lambda token: -scores[plain[token]]):
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += sorted((p for p in pairs if plain.keys() >= set(p)), key=lambda p: (plain[p[0]], plain[p[1]]))
    return merges
