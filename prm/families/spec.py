r"""Family specs: a family of process reward models described in TOML, so that one can be added without code.

    name = "my-prm"                        what it is called
    models = "Me/My-PRM-7B"                published checkpoints
    architectures = ["Qwen2ForMyPrm"]      model classes in config.json; a * at the start stands for any beginning
    source = "https://…"                   where the format is written down

    [detection]                            shipped families only: what a checkpoint must have for the family to be
                                           detected without --verifier-family; left out for causal models
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
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from espalier.engine.errors import FamilySpecError

_PLACEHOLDERS = {"prompt.text": {"problem"}, "step.text": {"step", "number"}}
_EXPECTED = {
    "string_type": "a text",
    "list_type": "a list of texts",
    "dict_type": "a table of whole numbers",
    "float_type": "a number",
    "int_type": "a whole number",
    "bool_type": "true or false",
}
"""By the type of pydantic's error."""


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class DetectionTable(_Table):
    """What tells the family from a checkpoint."""

    tensors: list[str] = []
    rope_theta: float | None = None


class Prompt(_Table):
    """What comes before the first step."""

    kind: Literal["chat", "text"] = "chat"
    system: str | None = None
    text: str = "{problem}"
    begin: list[str] = []


class Step(_Table):
    """How a step is written, and where its score is read."""

    text: str = "{step}"
    tag: str
    between: str = ""
    lines: bool = False
    encode: Literal["pieces", "whole"] = "pieces"


class Head(_Table):
    """What reads the score."""

    layers: list[str] = []
    tokens: list[str] = []
    labels: int = 2
    bias: bool = True
    output: Literal["softmax", "sigmoid"] = "softmax"
    index: int = 1
    unused: list[str] = []
    reduce: Literal["min", "mean", "last"] = "min"


class PublishedIds(_Table):
    """Token ids as they were published."""

    vocabulary: int = 0
    tokens: dict[str, int] = {}


class FamilySpec(_Table):
    """What a spec file says; see the module for each field.

    Attributes:
        file: where it was read.
        digest: of its text.
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
        FamilySpecError: naming the file and the key, when it cannot be read, has an unknown key, or a value it cannot
            have.
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
    """What a value that breaks its field's rule is, for a person to read."""
    key, kind = ".".join(map(str, error["loc"])), error["type"]
    if kind == "extra_forbidden":
        return f"unknown key {key!r}; known are {', '.join(_keys(FamilySpec))}"
    if kind == "missing":
        return f"{key} is missing"
    expected = error["ctx"]["expected"] if kind == "literal_error" else _EXPECTED.get(kind, error["msg"])
    return f"{key} is {error['input']!r} and should be {expected}"


def _keys(table: type[BaseModel], before: str = "") -> list[str]:
    """The keys of a table and of those in it, but what the reader adds."""
    keys: list[str] = []
    for name, field in table.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += _keys(inner, f"{name}.")
        elif not field.exclude:
            keys.append(before + name)
    return keys


def _senseless(spec: FamilySpec) -> str | None:
    """What is well spelt and means nothing, or None."""
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
