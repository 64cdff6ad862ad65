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
import math
import re
import tomllib
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from espalier.engine.errors import CheckpointError, FamilySpecError, nearest
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model
from espalier.engine.models.options import LoadFormat
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.prm.base import (
    FamilyInfo,
    PrmFamily,
    Sampled,
    ScoreInput,
    StepPath,
    without_label,
    without_special_tokens,
)
from espalier.prm.heads import ScoringHead, load_scoring_model, probability_of, require_published_ids, require_token

_REDUCE: dict[str, Callable[[list[float]], float]] = {
    "min": min,
    "mean": lambda scores: math.fsum(scores) / len(scores),
    "last": lambda scores: scores[-1],
}


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
    hint = nearest(error["input"], re.findall(r"'([^']+)'", error["msg"])) if kind == "literal_error" else ""
    return f"{key} is {error['input']!r} and {error['msg'].removeprefix('Input ')}{hint}"


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
    for key, text, needed, known in (
        ("prompt.text", prompt.text, "{problem}", {"problem"}),
        ("step.text", step.text, "{step}", {"step", "number"}),
    ):
        if wrong := set(re.findall(r"\{(\w*)\}", text)) - known:
            return f"{key} has the unknown placeholder {{{min(wrong)}}}"
        if text.count(needed) != 1:
            return f"{key} should hold {needed} once"
    of_text, labels = prompt.text != "{problem}" or bool(prompt.begin), len(head.tokens) or head.labels
    one_label, softmax = f"goes with one label; head.labels is {labels}", head.output == "softmax"
    problems = {
        "name is empty": not spec.name,
        "step.tag is empty; a score is read at its last token": not step.tag,
        "prompt.text and prompt.begin go with prompt.kind = 'text' only": prompt.kind == "chat" and of_text,
        "prompt.system goes with prompt.kind = 'chat' only": prompt.kind == "text" and prompt.system is not None,
        "head.layers or head.tokens is needed, and not both": bool(head.layers) == bool(head.tokens),
        f"head.output = 'sigmoid' {one_label}": not softmax and labels != 1,
        f"head.index is {head.index} and there are {labels} labels": softmax and not 0 <= head.index < labels,
        "step.lines goes with step.encode = 'pieces' only": step.lines and step.encode == "whole",
    }
    return next((problem for problem, there in problems.items() if there), None)


class SpecifiedFamily(PrmFamily):
    """Reads problems and steps as defined by a spec file; see the module.

    Attributes:
        spec: the file; of each subclass that `family_of` makes.
    """

    spec: ClassVar[FamilySpec]

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Self:
        """Load a checkpoint as defined by the spec file.

        Raises:
            CheckpointError: a tensor or token named in the spec is missing, or a token's id differs from the published
                one.
        """
        spec, head, tokenizer = cls.spec, cls.spec.head, TextTokenizer(checkpoint)
        require_published_ids(checkpoint, tokenizer, spec.ids.vocabulary, spec.ids.tokens)
        named = f"which head.tokens of {spec.file} names"
        if spec.step.tag.startswith("<"):
            require_token(checkpoint, tokenizer, spec.step.tag, "where scores are read")
        output = torch.sigmoid if head.output == "sigmoid" else probability_of(head.index)
        ids = [require_token(checkpoint, tokenizer, token, named) for token in head.tokens]
        scores = ScoringHead(output, tuple(head.layers), head.labels, head.bias, ids, head.unused)
        return cls(load_scoring_model(checkpoint, tokenizer, dtype, device, scores))

    def __init__(self, model: Model) -> None:
        """Prepare the tokens that every step needs.

        Raises:
            CheckpointError: the tokenizer lacks a token named in the spec.
        """
        super().__init__(model)
        spec, encode = self.spec, model.tokenizer.encode
        self._tag_ids = tuple(encode(spec.step.tag))
        self._between_ids = tuple(encode(spec.step.between))
        named = (model.tokenizer.special_token(name) or name for name in spec.prompt.begin)
        known = (token_id for name in named if (token_id := model.tokenizer.token_id(name)) is not None)
        self._begin_ids = list(islice(known, 1))
        if spec.prompt.begin and not self._begin_ids:
            names = ", ".join(spec.prompt.begin)
            raise CheckpointError(f"{spec.file}: the tokenizer has none of {names}, which begin a text of this family")
        # The tag, if it is a single special token that text could also contain.
        alone = len(self._tag_ids) == 1 and model.tokenizer.token_id(spec.step.tag) == self._tag_ids[0]
        self._special_tokens = (spec.step.tag,) if alone and not spec.step.tag.isspace() else ()
        label = encode(spec.step.text.replace("{step}", "").replace("{number}", "100"))
        self.max_special_tokens = len(label) + len(self._tag_ids) + len(self._between_ids)

    @property
    def identity(self) -> str:
        """The name and the digest of the spec file."""
        return f"{self.info.name} {self.spec.digest}"

    def prompt_ids(self, problem: str) -> list[int]:
        """Token ids of everything before the first step."""
        text = self._prompt(problem)
        if self.spec.step.encode == "whole":
            text = text.rstrip()  # a trailing space is part of the first step's first token
        return [*self._begin_ids, *self.model.tokenizer.encode(text)]

    def read(self, path: StepPath) -> ScoreInput:
        """The newest step with its tags, or the whole path if the spec tokenizes it as a whole."""
        if self.spec.step.encode == "whole":
            reading = self._encoded_whole(path)
            if reading.token_ids[-1] != self._tag_ids[-1]:
                raise CheckpointError(
                    f"{self.spec.file}: the tag {self.spec.step.tag!r} is merged with the text before it, so there "
                    "is nowhere to read; is it the tokenizer this family needs?"
                )
            return reading
        ids = list(self._between_ids) if path.steps[:-1] else []
        score_positions: list[int] = []
        text = self._step_text(path.steps[-1], len(path.steps))
        for line in text.split("\n") if self.spec.step.lines else [text]:
            ids += [*(self.model.tokenizer.encode(line) if line else []), *self._tag_ids]
            if line.strip() or not self.spec.step.lines:
                score_positions.append(len(ids) - 1)
        return ScoreInput(tuple(ids), tuple(score_positions))

    def full_path(self, path: StepPath) -> ScoreInput:
        """The whole text encoded at once, where the tag is a special token, so that this gives the same ids."""
        return self._encoded_whole(path) if self._special_tokens else super().full_path(path)

    def evidence(self, values: np.ndarray, before: float | None, sampled: Sampled) -> float:
        """Combine the scores of the step's lines."""
        return float(_REDUCE[self.spec.head.reduce](values[:, 0].tolist()))

    def _encoded_whole(self, path: StepPath) -> ScoreInput:
        steps = [self._step_text(step, i) + self.spec.step.tag for i, step in enumerate(path.steps, start=1)]
        text = self._prompt(path.problem) + self.spec.step.between.join(steps)
        ids = (*self._begin_ids, *self.model.tokenizer.encode(text))
        return ScoreInput(ids, (len(ids) - 1,), full_path=True)

    def _prompt(self, problem: str) -> str:
        spec, problem = self.spec, without_special_tokens(problem, self._special_tokens)
        if spec.prompt.kind == "text":
            return spec.prompt.text.replace("{problem}", problem)
        return self.chat(problem, spec.prompt.system)

    def _step_text(self, step: str, number: int) -> str:
        """Render the step as the spec says; a step number that it already has is not repeated."""
        text = without_special_tokens(
            step.strip() if self.spec.step.encode == "whole" else step.strip("\n"), self._special_tokens
        )
        before, _, after = self.spec.step.text.replace("{number}", str(number)).partition("{step}")
        return before + without_label(text, before.strip()) + after


def family_of(spec: FamilySpec) -> type[SpecifiedFamily]:
    """The family that a spec describes."""
    head, score = spec.head, "sigmoid"
    if head.output == "softmax":
        score = f"softmax, `{head.tokens[head.index]}`" if head.tokens else f"softmax, label {head.index}"
    of_lines = f", {head.reduce} of the lines" if spec.step.lines else ""
    info = FamilyInfo(spec.name, tuple(spec.architectures), score + of_lines)
    detect = None if spec.detection == DetectionTable() else staticmethod(partial(_detected, spec.detection))
    return type(spec.name, (SpecifiedFamily,), {"spec": spec, "info": info, "detect": detect})


def _detected(detection: DetectionTable, checkpoint: Checkpoint) -> str | None:
    theta = detection.rope_theta
    if theta is not None and checkpoint.decoder_config.rope_theta != theta:
        return None
    tensors = detection.tensors if checkpoint.load_format is not LoadFormat.DUMMY else ()
    if any(name not in checkpoint for name in tensors):
        return None
    said = [f"tensor {name}" for name in tensors] + ([] if theta is None else [f"rotary base {theta:,.0f}"])
    return ", ".join(["its architecture", *said])
