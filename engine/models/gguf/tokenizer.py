"""A tokenizer in the form of `tokenizer.json`, made of a GGUF file's metadata.

A GGUF file holds tokens, merges or scores, and the name of the rule that splits text into words; the rule itself is
known to its reader. Sources: `src/llama-vocab.cpp` of github.com/ggml-org/llama.cpp, and the `tokenizer.json` files of
the models that the rules are of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
"""Types of tokens that are not plain text."""
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
"""Control tokens that end a turn by their names; a file gives the id of one of them only."""
_SPACE = "▁"
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _WordRule:
    """How text is prepared for byte-level merges.

    Attributes:
        split: pattern of words; empty for GPT-2's.
        digits: whether every digit is a word.
        nfc: whether text is brought into the composed form of Unicode first.
        whole_words: whether a word that is a token is never merged from pieces.
    """

    split: str = ""
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False


_RULES = {
    "gpt-2": _WordRule(),
    "smollm": _WordRule(digits=True),
    "llama-bpe": (llama_3 := _WordRule(_LLAMA_3, whole_words=True)),
    "llama3": llama_3,
    "llama-v3": llama_3,
    "qwen2": (qwen_2 := _WordRule(_QWEN_2, nfc=True)),
    "deepseek-r1-qwen": qwen_2,
    "tekken": _WordRule(_TEKKEN, whole_words=True),
}
"""By `tokenizer.ggml.pre`."""


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Ids of the tokens that end a generation: those the file names, and control tokens known to end a turn."""
    named = (metadata.get(f"{_PREFIX}{name}_token_id") for name in ("eos", "eot", "eom"))
    kinds = metadata.get(f"{_PREFIX}token_type", ())
    known = [
        i
        for i, (token, kind) in enumerate(zip(metadata[f"{_PREFIX}tokens"], kinds, strict=False))
        if kind == _CONTROL and token in _END_TOKENS
    ]
    return sorted({i for i in named if i is not None} | set(known))


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`tokenizer_config.json`: the texts of the special tokens, and the chat template where the file has one."""
    tokens = metadata[f"{_PREFIX}tokens"]
    ids = {name: metadata.get(_PREFIX + key) for name, key in _SPECIAL.items()}
    special = {name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}
    template = metadata.get("tokenizer.chat_template")
    return special if template is None else special | {"chat_template": template}


def tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`tokenizer.json`, as the tokenizers library reads it.

    Raises:
        KeyError: when the metadata lacks a part of it.
        ValueError: when it is of another kind than byte-level or SentencePiece merges, or splits by an unknown
            rule.
    """
    model = metadata[f"{_PREFIX}model"]
    if model not in ("gpt2", "llama"):
        raise ValueError(f"its tokenizer is of the kind {model!r}; gpt2 and llama are read")
    tokens: list[str] = metadata[f"{_PREFIX}tokens"]
    kinds: Sequence[int] = metadata.get(f"{_PREFIX}token_type") or [1] * len(tokens)
    added = [
        {"id": i, "content": token, "special": kind != _USER_DEFINED, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED) or (kind == _UNKNOWN and model == "llama")
    ]
    vocabulary = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
    shared = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": None}
    parts = _byte_level(metadata, vocabulary) if model == "gpt2" else _sentence_piece(metadata, vocabulary, kinds)
    return shared | parts


def _byte_level(metadata: Mapping[str, Any], vocabulary: dict[str, int]) -> dict[str, Any]:
    name = metadata[f"{_PREFIX}pre"]
    if (rule := _RULES.get(name)) is None:
        raise ValueError(
            f"its tokenizer splits text by the rule {name!r}; {', '.join(_RULES)} are known. Take the same model in "
            "Hugging Face layout"
        )
    words: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if rule.digits else []
    if rule.split:
        words.append({"type": "Split", "pattern": {"Regex": rule.split}, "behavior": "Isolated", "invert": False})
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": not rule.split}
    return {
        "normalizer": {"type": "NFC"} if rule.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*words, to_bytes]},
        "decoder": to_bytes | {"use_regex": False},
        "model": _bpe(vocabulary, metadata[f"{_PREFIX}merges"]) | {"ignore_merges": rule.whole_words},
    }


def _sentence_piece(metadata: Mapping[str, Any], vocabulary: dict[str, int], kinds: Sequence[int]) -> dict[str, Any]:
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if metadata.get(f"{_PREFIX}add_space_prefix", True) else []
    to_space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    from_space = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prepend else []
    merges = metadata.get(f"{_PREFIX}merges") or _merges_of(vocabulary, metadata[f"{_PREFIX}scores"], kinds)
    unknown = next((token for token, i in vocabulary.items() if kinds[i] == _UNKNOWN), None)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, to_space]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [from_space, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": _bpe(vocabulary, merges) | {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
    }


def _bpe(vocabulary: dict[str, int], merges: Sequence[str | tuple[str, str]]) -> dict[str, Any]:
    return {"type": "BPE", "vocab": vocabulary, "merges": merges, "dropout": None, "unk_token": None}


def _merges_of(vocabulary: Mapping[str, int], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Merges in the order that SentencePiece takes: of two that fit, the one whose result has the greater score."""
    plain = {token: i for token, i in vocabulary.items() if kinds[i] not in (_UNKNOWN, _CONTROL, _BYTE)}
    merges: list[tuple[str, str]] = []
    for token in sorted(plain, key=lambda token: -scores[plain[token]]):
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += sorted((p for p in pairs if plain.keys() >= set(p)), key=lambda p: (plain[p[0]], plain[p[1]]))
    return merges
