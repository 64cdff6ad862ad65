r"""Family specs: TOML files that define a family of process reward models without code.

    name = "my-prm"                        name of the family
    models = "Me/My-PRM-7B"                published checkpoints
    architectures = ["Qwen2ForMyPrm"]      model classes in config.json; a leading * matches any prefix
    source = "https://…"                   where the format is documented

    [detection]                            shipped families only: what a checkpoint must have for the family to be
                                           detected without --verifier-family; left out for causal models
    tensors = ["score.0.weight"]           tensors in the checkpoint
    rope_theta = 1000000.0                 base of the rotary embedding

    [prompt]
    kind = "chat"                          rendered by the chat template; "text": rendered by `text`
    system = "…"                           chat: the system message; left out: the template's default
    text = "{problem}\n"                   text: {problem} is replaced by the problem
    begin = ["bos_token", "<s>"]           text: the first token, the first of these that the tokenizer has

    [step]
    text = "Step {number}: {step}"         {step} is replaced by the step, {number} by 1, 2, …
    tag = "<extra_0>"                      text after each step; the score is read at its last token
    between = "\n"                         text between a tag and the next step
    lines = false                          whether every non-blank line of a step has its own tag
    encode = "pieces"                      encode each piece separately; "whole": the path's text at once

    [head]
    layers = ["score.0", "score.2"]        linear layers with a ReLU between them; instead of `tokens`
    tokens = ["+", "-"]                    rows of the language model's head; instead of `layers`
    labels = 2                             output size of the last layer
    bias = true                            whether the layers have biases
    output = "softmax"                     probability of the label `index`; "sigmoid": of the only label
    index = 1
    unused = ["lm_head.weight"]            tensors in the checkpoint that are not loaded
    reduce = "min"                         how the scores of several lines are combined: min, mean or last

    [ids]                                  published token ids, checked if the vocabulary has its published size
    vocabulary = 32000
    tokens = { "▁+" = 648 }

There are no other placeholders, and no expressions are evaluated.
"""

import hashlib
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from espalier.engine.errors import FamilySpecError, nearest, rule_of

_PLACEHOLDERS = {"prompt.text": {"problem"}, "step.text": {"step", "number"}}
_EXPECTED = {
    "string_type": "a text",
    "list_type": "a list of texts",
    "dict_type": "a table of whole numbers",
    "float_type": "a number",
    "int_type": "a whole number",
    "bool_type": "true or false",
}
"""Expected types in messages, by pydantic's error type."""


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class DetectionTable(_Table):
    """Properties of a checkpoint by which its family is detected."""

    tensors: list[str] = []
    rope_theta: float | None = None


class Prompt(_Table):
    """Rendering of the text before the first step."""

    kind: Literal["chat", "text"] = "chat"
    system: str | None = None
    text: str = "{problem}"
    begin: list[str] = []


class Step(_Table):
    """Rendering of a step, and the place where its score is read."""

    text: str = "{step}"
    tag: str
    between: str = ""
    lines: bool = False
    encode: Literal["pieces", "whole"] = "pieces"


class Head(_Table):
    """The head that computes scores."""

    layers: list[str] = []
    tokens: list[str] = []
    labels: int = 2
    bias: bool = True
    output: Literal["softmax", "sigmoid"] = "softmax"
    index: int = 1
    unused: list[str] = []
    reduce: Literal["min", "mean", "last"] = "min"


class PublishedIds(_Table):
    """Published token ids."""

    vocabulary: int = 0
    tokens: dict[str, int] = {}


class FamilySpec(_Table):
    """A parsed spec file; see the module for its fields.

    Attributes:
        file: path of the file.
        digest: digest of its text.
    """

    name: str
    models: str = ""
    architectures: list[str] = []
    source: str = ""
    detection: DetectionTable = DetectionTable()
    prompt: Prompt = Prompt()
    step: Step
    head: Head = Head()
    ids: PublishedIds = PublishedIds()
    file: Path = Field(Path(), exclude=True)
    digest: str = Field("", exclude=True)


def read_spec(file: Path) -> FamilySpec:
    """Read a spec file.

    Raises:
        FamilySpecError: the file cannot be read, or has an unknown key or an invalid value; names the file and the key.
    """
    try:
        text = file.read_text(encoding="utf-8")
        raw = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise FamilySpecError(f"cannot read {file}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise FamilySpecError(f"{file} is not valid TOML: {error}") from error
    raw = {"step": {}} | raw | {"file": file, "digest": hashlib.sha256(text.encode()).hexdigest()[:16]}
    try:
        spec = FamilySpec.model_validate(raw)
    except ValidationError as error:
        raise FamilySpecError(f"{file}: {_wrong(error.errors()[0])}") from None
    if wrong := _senseless(spec):
        raise FamilySpecError(f"{file}: {wrong}")
    return spec


def _wrong(error: Any) -> str:
    """Describe a validation error for users."""
    key, kind = ".".join(map(str, error["loc"])), error["type"]
    if kind == "extra_forbidden":
        known = _keys(FamilySpec)
        return f"unknown key {key!r}; known are {', '.join(known)}{nearest(key, known)}"
    if kind == "missing":
        return f"{key} is missing"
    expected = error["ctx"]["expected"] if kind == "literal_error" else _EXPECTED.get(kind, rule_of(error["msg"]))
    hint = nearest(error["input"], re.findall(r"'([^']+)'", expected)) if kind == "literal_error" else ""
    return f"{key} is {error['input']!r} and should be {expected}{hint}"


def _keys(table: type[BaseModel], before: str = "") -> list[str]:
    """The keys of a table and its subtables, except those set by the reader."""
    keys: list[str] = []
    for name, field in table.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += _keys(inner, f"{name}.")
        elif not field.exclude:
            keys.append(before + name)
    return keys


def _senseless(spec: FamilySpec) -> str | None:
    """Check combinations of values; returns the first problem, None without one."""
    prompt, step, head = spec.prompt, spec.step, spec.head
    if not spec.name:
        return "name is empty"
    if not step.tag:
        return "step.tag is empty; a score is read at its last token"
    for key, text, needed in (("prompt.text", prompt.text, "{problem}"), ("step.text", step.text, "{step}")):
        if wrong := set(re.findall(r"\{(\w*)\}", text)) - _PLACEHOLDERS[key]:
            return f"{key} has the unknown placeholder {{{min(wrong)}}}"
        if text.count(needed) != 1:
            return f"{key} should hold {needed} once"
    if prompt.kind == "chat" and (prompt.text != "{problem}" or prompt.begin):
        return "prompt.text and prompt.begin go with prompt.kind = 'text' only"
    if prompt.kind == "text" and prompt.system is not None:
        return "prompt.system goes with prompt.kind = 'chat' only"
    if bool(head.layers) == bool(head.tokens):
        return "head.layers or head.tokens is needed, and not both"
    labels = len(head.tokens) or head.labels
    if head.output == "sigmoid" and labels != 1:
        return f"head.output = 'sigmoid' goes with one label; head.labels is {labels}"
    if not 0 <= head.index < labels and head.output == "softmax":
        return f"head.index is {head.index} and there are {labels} labels"
    if step.lines and step.encode == "whole":
        return "step.lines goes with step.encode = 'pieces' only"
    return None
