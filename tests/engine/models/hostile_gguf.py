"""GGUF files that are damaged, contradict themselves or mean harm, each a change to a good one, and what is right.

A good file is taken apart into `Parts`, of which a case changes some; `write` puts them together again without checks.
`outcome` and `named` are as in `hostile_checkpoints`.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType, TokenType

T = GGUFValueType
FORMS = {
    T.UINT8: "B", T.INT8: "b", T.UINT16: "H", T.INT16: "h", T.UINT32: "I", T.INT32: "i", T.FLOAT32: "f", T.BOOL: "?",
    T.UINT64: "Q", T.INT64: "q", T.FLOAT64: "d",
}  # fmt: skip


@dataclass(slots=True)
class StoredTensor:
    """One tensor as the header describes it, fastest dimension first, and its bytes."""

    name: str
    dimensions: list[int]
    kind: int
    offset: int
    data: bytes


@dataclass(slots=True)
class Parts:
    """A file's parts; `counts` and `head` override what follows from them."""

    entries: list[tuple[str, list[int], Any]]
    tensors: list[StoredTensor]
    version: int = 3
    magic: bytes = b"GGUF"
    counts: tuple[int, int] | None = None
    alignment: int = 32
    tail: Callable[[bytes], bytes] = field(default=lambda raw: raw)

    def key(self, name: str) -> int:
        return next(i for i, (key, *_) in enumerate(self.entries) if key == name)

    def set(self, name: str, value: Any, kind: int | None = None) -> None:
        """Give a key another value, of its own type or of another one."""
        at = self.key(name) if any(key == name for key, *_ in self.entries) else len(self.entries)
        if at == len(self.entries):
            self.entries.append((name, [], None))
        self.entries[at] = (name, self.entries[at][1] if kind is None else [kind], value)

    def value(self, name: str) -> Any:
        return self.entries[self.key(name)][2]

    def drop(self, name: str) -> None:
        del self.entries[self.key(name)]

    def tensor(self, name: str) -> StoredTensor:
        return next(tensor for tensor in self.tensors if tensor.name == name)


def take_apart(file: Path) -> Parts:
    """The parts of a good file."""
    reader = gguf.GGUFReader(file)
    entries = [
        (name, [int(kind) for kind in each.types], each.contents())
        for name, each in reader.fields.items()
        if not name.startswith("GGUF.")
    ]
    start = min(tensor.data_offset for tensor in reader.tensors)
    tensors = [
        StoredTensor(t.name, [int(n) for n in t.shape], int(t.tensor_type), t.data_offset - start, t.data.tobytes())
        for t in reader.tensors
    ]
    return Parts(entries, tensors)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def packed(types: list[int], value: Any) -> bytes:
    kind, *rest = types
    if isinstance(value, bytes) and kind != T.STRING:
        return value  # as it is, wrong or not
    if kind == T.ARRAY:
        of = rest or [T.UINT32]
        return struct.pack("<IQ", of[0], len(value)) + b"".join(packed(of, each) for each in value)
    return text(value) if kind == T.STRING else struct.pack("<" + FORMS[T(kind)], value)


def write(parts: Parts, file: Path) -> None:
    """Put a file together."""
    raw = parts.magic + struct.pack("<I", parts.version)
    raw += struct.pack("<QQ", *(parts.counts or (len(parts.tensors), len(parts.entries))))
    for name, types, value in parts.entries:
        raw += text(name) + struct.pack("<I", types[0] if types else T.UINT32) + packed(types or [T.UINT32], value)
    for tensor in parts.tensors:
        raw += text(tensor.name) + struct.pack("<I", len(tensor.dimensions))
        raw += struct.pack(f"<{len(tensor.dimensions)}Q", *tensor.dimensions)
        raw += struct.pack("<IQ", tensor.kind, tensor.offset)
    raw += bytes(-len(raw) % parts.alignment)
    start = len(raw)
    for tensor in parts.tensors:
        if 0 <= tensor.offset < 2**30:
            raw = raw.ljust(start + tensor.offset, b"\0")
            raw = raw[: start + tensor.offset] + tensor.data + raw[start + tensor.offset + len(tensor.data) :]
    file.write_bytes(parts.tail(raw))


@dataclass(frozen=True, slots=True)
class HostileGguf:
    """One case; see the module."""

    name: str
    damage: Callable[[Parts], object]
    named: tuple[str, ...] = ()
    outcome: Literal["refused", "warned", "same"] = "refused"


def value(name: str, new: Any, kind: int | None = None) -> Callable[[Parts], None]:
    return lambda parts: parts.set(name, new, kind)


def tensor(which: str, /, **fields: Any) -> Callable[[Parts], None]:
    def change(parts: Parts) -> None:
        for key, new in fields.items():
            setattr(parts.tensor(which), key, new)

    return change


def attribute(**fields: Any) -> Callable[[Parts], None]:
    return lambda parts: [setattr(parts, key, new) for key, new in fields.items()] and None


def retyped(token: int, kind: TokenType) -> Callable[[Parts], None]:
    """Gives a token another type."""
    return lambda parts: parts.value("tokenizer.ggml.token_type").__setitem__(token, int(kind))


def filled(name: str, number: float) -> Callable[[Parts], None]:
    def change(parts: Parts) -> None:
        held = np.frombuffer(parts.tensor(name).data, np.float32).copy()
        held[3] = number
        parts.tensor(name).data = held.tobytes()

    return change


GATE, NORM, EMBEDDING = "blk.0.ffn_gate.weight", "output_norm.weight", "token_embd.weight"
FILE = "model.gguf"
_ARRAY_OF_ARRAYS = struct.pack("<IQ", T.ARRAY, 1) * 5000 + struct.pack("<IQ", T.UINT8, 0)

IN_HEADER = [
    HostileGguf("another magic", attribute(magic=b"GGML"), (FILE,)),
    HostileGguf("a version to come", attribute(version=9), (FILE, "version 9")),
    HostileGguf("the other byte order", attribute(version=3 << 24), (FILE, "version")),
    HostileGguf("2^60 tensors", lambda p: attribute(counts=(2**60, len(p.entries)))(p), (FILE,)),
    HostileGguf("2^60 keys", lambda p: attribute(counts=(len(p.tensors), 2**60))(p), (FILE,)),
    HostileGguf("a tensor fewer", lambda p: attribute(counts=(len(p.tensors) - 1, len(p.entries)))(p), (FILE,)),
    HostileGguf("no tensors", lambda p: p.tensors.clear(), (FILE, "token_embd")),
    HostileGguf("no keys", lambda p: p.entries.clear(), (FILE, "general.architecture")),
    HostileGguf("nothing after the magic", attribute(tail=lambda raw: raw[:4]), (FILE,)),
    HostileGguf("no bytes", attribute(tail=lambda _: b""), (FILE,)),
    HostileGguf("cut in its keys", attribute(tail=lambda raw: raw[:300]), (FILE,)),
    HostileGguf("cut in its last tensor", attribute(tail=lambda raw: raw[:-4]), (FILE, "beyond")),
    HostileGguf(
        "a key twice", lambda p: p.entries.append(("qwen2.block_count", [T.UINT32], 1)), (FILE, "qwen2.block_count")
    ),
    HostileGguf("a type that is none", value("general.name", b"", 99), (FILE,)),
    HostileGguf("a text of 2^62 bytes", value("odd", struct.pack("<Q", 2**62), T.UINT64 + 90), (FILE,)),
    HostileGguf("a list of 2^62", value("odd", struct.pack("<IQ", T.UINT32, 2**62), T.ARRAY), (FILE,)),
    HostileGguf("lists in lists in lists", value("odd", _ARRAY_OF_ARRAYS, T.ARRAY), (FILE,)),
    HostileGguf("an alignment of 0", value("general.alignment", 0, T.UINT32), (FILE, "general.alignment")),
    HostileGguf("an alignment of text", value("general.alignment", "32", T.STRING), (FILE, "general.alignment")),
    HostileGguf("an alignment of 2^31", value("general.alignment", 2**31, T.UINT32), (FILE,)),
    HostileGguf(
        "a number that is none", value("qwen2.rope.freq_base", float("nan"), T.FLOAT32), (FILE, "qwen2.rope.freq_base")
    ),
]

IN_SHAPE = [
    HostileGguf("an architecture of 7", value("general.architecture", 7, T.UINT32), (FILE, "general.architecture")),
    HostileGguf("an architecture to come", value("general.architecture", "mamba", T.STRING), (FILE,)),
    *(
        HostileGguf(f"{key} is {new!r}", value(f"qwen2.{key}", new, kind), (FILE, f"qwen2.{key}" if own else field_))
        for key, new, kind, own, field_ in (
            ("block_count", 10**9, T.UINT32, True, ""),
            ("block_count", "2", T.STRING, True, ""),
            ("block_count", 3, T.UINT32, False, "model.layers.2"),
            ("embedding_length", 0, T.UINT32, True, ""),
            ("embedding_length", True, T.BOOL, True, ""),
            ("feed_forward_length", -1, T.INT32, True, ""),
            ("feed_forward_length", 64, T.UINT32, False, "shape"),
            ("attention.head_count", 0, T.UINT32, True, ""),
            ("attention.head_count", [4, 4], T.ARRAY, True, ""),
            ("attention.head_count", 3, T.UINT32, False, "q_proj.weight has shape"),
            ("attention.head_count_kv", 0, T.UINT32, True, ""),
            ("attention.head_count_kv", 3, T.UINT32, False, "num_key_value_heads"),
            ("attention.key_length", 0, T.UINT32, True, ""),
            ("rope.dimension_count", 4, T.UINT32, False, "partial_rotary_factor"),
            ("rope.freq_base", -1.0, T.FLOAT32, True, ""),
            ("rope.freq_base", "big", T.STRING, True, ""),
            ("rope.scaling.type", "magic", T.STRING, False, "rope type"),
            ("attention.layer_norm_rms_epsilon", 0.0, T.FLOAT32, True, ""),
            ("context_length", 0, T.UINT32, True, ""),
            ("context_length", 1.5, T.FLOAT32, True, ""),
        )
    ),
    HostileGguf("no block_count", lambda p: p.drop("qwen2.block_count"), (FILE, "qwen2.block_count")),
]

IN_TENSORS = [
    HostileGguf("a tensor without dimensions", tensor(NORM, dimensions=[]), (FILE, NORM)),
    HostileGguf("a tensor of 2^31 dimensions", tensor(NORM, dimensions=[1] * 200), (FILE, NORM)),
    HostileGguf("a tensor of nothing", tensor(NORM, dimensions=[0]), (FILE, NORM)),
    HostileGguf("a tensor of 2^62 values", tensor(NORM, dimensions=[2**62]), (FILE, NORM)),
    HostileGguf("a tensor whose size overflows", tensor(NORM, dimensions=[2**32, 2**32]), (FILE, NORM)),
    HostileGguf("a tensor of another shape", tensor(NORM, dimensions=[16]), (FILE, "model.norm.weight", "shape")),
    HostileGguf("a tensor twice", lambda p: p.tensors.append(p.tensor(NORM)), (FILE, NORM)),
    HostileGguf("a tensor on another's bytes", lambda p: tensor(NORM, offset=p.tensor(GATE).offset)(p), (FILE, NORM)),
    HostileGguf("a tensor beyond the file", tensor(NORM, offset=2**40), (FILE, NORM)),
    HostileGguf("a kind that is none", tensor(NORM, kind=77), (FILE,)),
    HostileGguf("rows that are no blocks", tensor(GATE, kind=int(GGMLQuantizationType.Q4_K)), (FILE, GATE)),
    HostileGguf(
        "whole numbers for weights", tensor(GATE, kind=int(GGMLQuantizationType.I32)), (FILE, "gate_proj", "I32")
    ),
    HostileGguf("a kind that is not unpacked", tensor(GATE, kind=int(GGMLQuantizationType.Q8_1)), (FILE, "Q8_1")),
    HostileGguf("a NaN among the weights", filled(GATE, float("nan")), (FILE, "gate_proj")),
    HostileGguf("an infinite norm", filled(NORM, float("inf")), (FILE, "model.norm.weight")),
    HostileGguf("a module to come", tensor(NORM, name="output_magic.weight"), (FILE,)),
    HostileGguf(
        "a name of the other layout",
        lambda p: p.tensors.append(StoredTensor("model.norm.weight", [32], 0, 2**20, bytes(128))),
        (FILE, "model.norm.weight"),
    ),
]

_TOKENS, _TYPES, _MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"
IN_TOKENIZER = [
    HostileGguf("no tokens", lambda p: p.drop(_TOKENS), (FILE, _TOKENS)),
    HostileGguf(
        "tokens that are numbers", value(_TOKENS, struct.pack("<IQ", T.UINT8, 3) + b"abc", T.ARRAY), (FILE, _TOKENS)
    ),
    HostileGguf("tokens that are one text", value(_TOKENS, "abc", T.STRING), (FILE, _TOKENS)),
    HostileGguf("a token twice", lambda p: p.value(_TOKENS).__setitem__(9, p.value(_TOKENS)[8]), (FILE, _TOKENS)),
    HostileGguf("types too few", lambda p: p.value(_TYPES).pop(), (FILE, _TYPES)),
    HostileGguf("types of text", value(_TYPES, "normal", T.STRING), (FILE, _TYPES)),
    HostileGguf("no merges", lambda p: p.drop(_MERGES), (FILE, _MERGES)),
    HostileGguf("merges of numbers", value(_MERGES, 7, T.UINT32), (FILE, _MERGES)),
    HostileGguf("a merge of no tokens", lambda p: p.value(_MERGES).append("q zzzz"), (FILE,)),
    HostileGguf("an unknown kind of tokenizer", value("tokenizer.ggml.model", "t5", T.STRING), (FILE, "t5")),
    HostileGguf("a kind that is a number", value("tokenizer.ggml.model", 5, T.UINT32), (FILE, "kind")),
    HostileGguf("an unknown rule", value("tokenizer.ggml.pre", "new", T.STRING), (FILE, "new")),
    HostileGguf(
        "a rule that is a list", value("tokenizer.ggml.pre", struct.pack("<IQ", T.UINT8, 0), T.ARRAY), (FILE, "rule")
    ),
    HostileGguf("an end that is text", value("tokenizer.ggml.eos_token_id", "2", T.STRING), (FILE, "eos_token_id")),
    HostileGguf("a begin that is true", value("tokenizer.ggml.bos_token_id", True, T.BOOL), (FILE, "bos_token_id")),
    HostileGguf("add_bos_token of 7", value("tokenizer.ggml.add_bos_token", 7, T.UINT32), (FILE, "add_bos_token")),
    HostileGguf("a template that is a number", value("tokenizer.chat_template", 5, T.UINT32), (FILE, "chat_template")),
    HostileGguf(
        "a template that raises",
        value("tokenizer.chat_template", "{{ raise_exception('no') }}", T.STRING),
        (FILE, "no"),
    ),
    HostileGguf(
        "a temperature of text", value("general.sampling.temp", "hot", T.STRING), (FILE, "general.sampling.temp")
    ),
    HostileGguf("an end that is no token", value("tokenizer.ggml.eos_token_id", 2**32 - 1, T.UINT32), outcome="same"),
    HostileGguf("an end of type normal", retyped(2, TokenType.NORMAL), outcome="same"),
    HostileGguf("an end of a user's type", retyped(2, TokenType.USER_DEFINED), outcome="same"),
    HostileGguf("an end that is unused", retyped(2, TokenType.UNUSED), outcome="same"),
    HostileGguf("an end that is a byte", retyped(2, TokenType.BYTE), outcome="same"),
    HostileGguf(
        "an end that only its name tells",
        lambda p: (p.drop("tokenizer.ggml.eos_token_id"), retyped(2, TokenType.NORMAL)(p)),
        outcome="same",
    ),
]

CASES = [*IN_HEADER, *IN_SHAPE, *IN_TENSORS, *IN_TOKENIZER]
