r"""Adapter files: a family of process reward models described in TOML, so that one can be added without code.

    name = "my-prm"                        what it is called
    models = "Me/My-PRM-7B"                published checkpoints
    architectures = ["Qwen2ForMyPrm"]      model classes in config.json; a * at the start stands for any beginning
    source = "https://…"                   where the format is written down

    [evidence]                             of families that come along: all of it must hold for one to be chosen without
                                           --verifier-family; a family of causal models has none
    tensors = ["score.0.weight"]           tensors the checkpoint has
    rope_theta = 1000000.0                 base of the rotary embedding

    [prompt]
    kind = "chat"                          through the chat template; "text": as `text` says
    system = "…"                           chat: the system message; left out: whatever the template does without one
    text = "{problem}\n"                   text: {problem} stands for the problem
    begin = ["bos_token", "<s>"]           text: the token before it, the first of these that the tokenizer has

    [step]
    text = "Step {number}: {step}"         {step} stands for the step, {number} for 1, 2, …
    tag = "<extra_0>"                      after each step; the score is read at the last of its tokens
    between = "\n"                         between a tag and the next step
    lines = false                          whether every line that is not blank has a tag of its own
    encode = "pieces"                      each piece by itself; "whole": the path's text as one

    [head]
    layers = ["score.0", "score.2"]        linear layers, a ReLU between each two; or instead
    tokens = ["+", "-"]                    rows of the language model's head
    labels = 2                             values of the last layer
    bias = true                            whether the layers have biases
    output = "softmax"                     probability of label `index`; "sigmoid": of the only value
    index = 1
    unused = ["lm_head.weight"]            tensors that are there and not needed
    reduce = "min"                         of several lines' scores: min, mean or last

    [ids]                                  published ids, checked where the vocabulary is as large as published
    vocabulary = 32000
    tokens = { "▁+" = 648 }

There are no other placeholders and nothing is evaluated.
"""

import hashlib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.engine.errors import AdapterError

_CHOICES = {
    "prompt.kind": ("chat", "text"),
    "step.encode": ("pieces", "whole"),
    "head.output": ("softmax", "sigmoid"),
    "head.reduce": ("min", "mean", "last"),
}
_PLACEHOLDERS = {"prompt.text": {"problem"}, "step.text": {"step", "number"}}


@dataclass(frozen=True, slots=True)
class Adapter:
    """What an adapter file says; see the module for each field.

    Attributes:
        file: where it was read.
        digest: of its text.
    """

    file: Path
    digest: str
    name: str
    models: str
    architectures: tuple[str, ...]
    source: str
    evidence_tensors: tuple[str, ...]
    evidence_rope_theta: float | None
    prompt_kind: str
    prompt_system: str | None
    prompt_text: str
    prompt_begin: tuple[str, ...]
    step_text: str
    step_tag: str
    step_between: str
    step_lines: bool
    step_encode: str
    head_layers: tuple[str, ...]
    head_tokens: tuple[str, ...]
    head_labels: int
    head_bias: bool
    head_output: str
    head_index: int
    head_unused: tuple[str, ...]
    head_reduce: str
    ids_vocabulary: int
    ids_tokens: dict[str, int]

    @property
    def has_evidence(self) -> bool:
        """Whether the family can be told from the checkpoint."""
        return bool(self.evidence_tensors or self.evidence_rope_theta)


_REQUIRED = object()
_KEYS: dict[str, tuple[type, Any]] = {  # the type of each key's value, and what it is when left out
    "name": (str, _REQUIRED),
    "models": (str, ""),
    "architectures": (tuple, ()),
    "source": (str, ""),
    "evidence.tensors": (tuple, ()),
    "evidence.rope_theta": (float, None),
    "prompt.kind": (str, "chat"),
    "prompt.system": (str, None),
    "prompt.text": (str, "{problem}"),
    "prompt.begin": (tuple, ()),
    "step.text": (str, "{step}"),
    "step.tag": (str, _REQUIRED),
    "step.between": (str, ""),
    "step.lines": (bool, False),
    "step.encode": (str, "pieces"),
    "head.layers": (tuple, ()),
    "head.tokens": (tuple, ()),
    "head.labels": (int, 2),
    "head.bias": (bool, True),
    "head.output": (str, "softmax"),
    "head.index": (int, 1),
    "head.unused": (tuple, ()),
    "head.reduce": (str, "min"),
    "ids.vocabulary": (int, 0),
    "ids.tokens": (dict, {}),
}
_TABLES = {key.partition(".")[0] for key in _KEYS if "." in key}


def read_adapter(file: Path) -> Adapter:
    """Read an adapter file.

    Raises:
        AdapterError: naming the file and the key, when it cannot be read, has an unknown key, or a value it cannot
            have.
    """
    try:
        text = file.read_text(encoding="utf-8")
        raw = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise AdapterError(f"cannot read {file}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise AdapterError(f"{file} is not valid TOML: {error}") from error
    given = _flattened(file, raw)
    values = {key: _value(file, key, given) for key in _KEYS}
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    adapter = Adapter(file, digest, **{key.replace(".", "_"): value for key, value in values.items()})
    _require_sense(adapter)
    return adapter


def _flattened(file: Path, raw: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in raw.items():
        if name in _TABLES and isinstance(value, dict):
            flat.update({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            flat[name] = value
    for key in flat:
        if key not in _KEYS:
            raise AdapterError(f"{file}: unknown key {key!r}; known are {', '.join(_KEYS)}")
    return flat


def _value(file: Path, key: str, given: dict[str, Any]) -> Any:
    kind, default = _KEYS[key]
    if key not in given:
        if default is _REQUIRED:
            raise AdapterError(f"{file}: {key} is missing")
        return default
    value = _converted(kind, given[key])
    if value is None:
        raise AdapterError(f"{file}: {key} is {given[key]!r} and should be {_spoken(kind)}")
    if key in _CHOICES and value not in _CHOICES[key]:
        raise AdapterError(f"{file}: {key} is {value!r} and should be one of {', '.join(_CHOICES[key])}")
    if key in _PLACEHOLDERS and (wrong := set(re.findall(r"\{(\w*)\}", value)) - _PLACEHOLDERS[key]):
        raise AdapterError(f"{file}: {key} has the unknown placeholder {{{min(wrong)}}}")
    return value


def _converted(kind: type, value: Any) -> Any:
    """The value as this type, None where it is not of it."""
    if kind is tuple:
        return tuple(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else None
    if kind is dict:
        whole = isinstance(value, dict) and all(type(item) is int for item in value.values())
        return value if whole else None
    if kind is float and type(value) is int:
        return float(value)
    return value if type(value) is kind else None


def _spoken(kind: type) -> str:
    return {
        str: "a text",
        tuple: "a list of texts",
        dict: "a table of whole numbers",
        float: "a number",
        int: "a whole number",
        bool: "true or false",
    }[kind]


def _require_sense(adapter: Adapter) -> None:
    """Refuse what is well spelt and means nothing."""
    if not adapter.name:
        raise AdapterError(f"{adapter.file}: name is empty")
    if not adapter.step_tag:
        raise AdapterError(f"{adapter.file}: step.tag is empty; a score is read at its last token")
    for key, text, needed in (
        ("prompt.text", adapter.prompt_text, "{problem}"),
        ("step.text", adapter.step_text, "{step}"),
    ):
        if text.count(needed) != 1:
            raise AdapterError(f"{adapter.file}: {key} should hold {needed} once")
    if adapter.prompt_kind == "chat" and (adapter.prompt_text != "{problem}" or adapter.prompt_begin):
        raise AdapterError(f"{adapter.file}: prompt.text and prompt.begin go with prompt.kind = 'text' only")
    if adapter.prompt_kind == "text" and adapter.prompt_system is not None:
        raise AdapterError(f"{adapter.file}: prompt.system goes with prompt.kind = 'chat' only")
    if bool(adapter.head_layers) == bool(adapter.head_tokens):
        raise AdapterError(f"{adapter.file}: head.layers or head.tokens is needed, and not both")
    labels = len(adapter.head_tokens) or adapter.head_labels
    if adapter.head_output == "sigmoid" and labels != 1:
        raise AdapterError(f"{adapter.file}: head.output = 'sigmoid' goes with one label; head.labels is {labels}")
    if not 0 <= adapter.head_index < labels and adapter.head_output == "softmax":
        raise AdapterError(f"{adapter.file}: head.index is {adapter.head_index} and there are {labels} labels")
    if adapter.step_lines and adapter.step_encode == "whole":
        raise AdapterError(f"{adapter.file}: step.lines goes with step.encode = 'pieces' only")
