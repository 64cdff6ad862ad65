"""Families defined by a spec file."""

import math
from collections.abc import Callable

import numpy as np
import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model
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
from espalier.prm.families.spec import FamilySpec
from espalier.prm.heads import load_scoring_model, probability_of, require_published_ids, require_token

_REDUCE: dict[str, Callable[[list[float]], float]] = {
    "min": min,
    "mean": lambda scores: math.fsum(scores) / len(scores),
    "last": lambda scores: scores[-1],
}


class SpecifiedFamily(PrmFamily):
    """Reads problems and steps as defined by a spec file; see `prm.families.spec`."""

    def __init__(self, spec: FamilySpec, model: Model) -> None:
        """Prepare the tokens that every step needs.

        Raises:
            CheckpointError: the tokenizer lacks a token named in the spec.
        """
        self.info = info_of(spec)
        self.model = model
        self._spec = spec
        encode = model.tokenizer.encode
        self._tag_ids = tuple(encode(spec.step.tag))
        self._between_ids = tuple(encode(spec.step.between))
        self._begin_ids = [] if not spec.prompt.begin else [self._begin_id()]
        self._special_tokens = self._special_tag()
        label = encode(spec.step.text.replace("{step}", "").replace("{number}", "100"))
        self.max_special_tokens = len(label) + len(self._tag_ids) + len(self._between_ids)

    @property
    def identity(self) -> str:
        """The name and the digest of the spec file."""
        return f"{self.info.name} {self._spec.digest}"

    def prompt_ids(self, problem: str) -> list[int]:
        """Token ids of everything before the first step."""
        text = self._prompt(problem)
        if self._spec.step.encode == "whole":
            text = text.rstrip()  # a trailing space is part of the first step's first token
        return [*self._begin_ids, *self.model.tokenizer.encode(text)]

    def read(self, path: StepPath) -> ScoreInput:
        """The newest step with its tags, or the whole path if the spec tokenizes it as a whole."""
        if self._spec.step.encode == "whole":
            reading = self._encoded_whole(path)
            if reading.token_ids[-1] != self._tag_ids[-1]:
                raise CheckpointError(
                    f"{self._spec.file}: the tag {self._spec.step.tag!r} is merged with the text before it, so there "
                    "is nowhere to read; is it the tokenizer this family needs?"
                )
            return reading
        ids = list(self._between_ids) if path.steps[:-1] else []
        score_positions: list[int] = []
        text = self._step_text(path.steps[-1], len(path.steps))
        for line in text.split("\n") if self._spec.step.lines else [text]:
            ids += [*(self.model.tokenizer.encode(line) if line else []), *self._tag_ids]
            if line.strip() or not self._spec.step.lines:
                score_positions.append(len(ids) - 1)
        return ScoreInput(tuple(ids), tuple(score_positions))

    def full_path(self, path: StepPath) -> ScoreInput:
        """The whole text encoded at once, where the tag is a special token, so that this gives the same ids."""
        return self._encoded_whole(path) if self._special_tokens else super().full_path(path)

    def evidence(self, values: np.ndarray, before: float | None, sampled: Sampled) -> float:
        """Combine the scores of the step's lines."""
        return float(_REDUCE[self._spec.head.reduce](values[:, 0].tolist()))

    def _encoded_whole(self, path: StepPath) -> ScoreInput:
        steps = [self._step_text(step, i) + self._spec.step.tag for i, step in enumerate(path.steps, start=1)]
        text = self._prompt(path.problem) + self._spec.step.between.join(steps)
        ids = (*self._begin_ids, *self.model.tokenizer.encode(text))
        return ScoreInput(ids, (len(ids) - 1,), full_path=True)

    def _prompt(self, problem: str) -> str:
        spec, problem = self._spec, without_special_tokens(problem, self._special_tokens)
        if spec.prompt.kind == "text":
            return spec.prompt.text.replace("{problem}", problem)
        system = [] if spec.prompt.system is None else [{"role": "system", "content": spec.prompt.system}]
        return self.model.tokenizer.render_chat([*system, {"role": "user", "content": problem}])

    def _step_text(self, step: str, number: int) -> str:
        """Render the step as the spec says; a step number that it already has is not repeated."""
        text = without_special_tokens(
            step.strip() if self._spec.step.encode == "whole" else step.strip("\n"), self._special_tokens
        )
        before, _, after = self._spec.step.text.replace("{number}", str(number)).partition("{step}")
        return before + without_label(text, before.strip()) + after

    def _begin_id(self) -> int:
        tokenizer = self.model.tokenizer
        for name in self._spec.prompt.begin:
            if (token_id := tokenizer.token_id(tokenizer.special_token(name) or name)) is not None:
                return token_id
        raise CheckpointError(
            f"{self._spec.file}: the tokenizer has none of {', '.join(self._spec.prompt.begin)}, which begin a "
            "text of this family"
        )

    def _special_tag(self) -> tuple[str, ...]:
        """The tag, if it is a single special token that text could also contain."""
        tag = self._spec.step.tag
        alone = len(self._tag_ids) == 1 and self.model.tokenizer.token_id(tag) == self._tag_ids[0]
        return (tag,) if alone and not tag.isspace() else ()


def load_from_spec(
    spec: FamilySpec, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str
) -> SpecifiedFamily:
    """Load a checkpoint as defined by a spec file.

    Raises:
        CheckpointError: a tensor or token named in the spec is missing, or a token's id differs from the published one.
    """
    tokenizer = TextTokenizer(checkpoint)
    require_published_ids(checkpoint, tokenizer, spec.ids.vocabulary, spec.ids.tokens)
    token_ids = [_single_id(spec, tokenizer, token) for token in spec.head.tokens]
    if spec.step.tag.startswith("<"):
        require_token(checkpoint, tokenizer, spec.step.tag, "where scores are read")
    model = load_scoring_model(
        checkpoint,
        tokenizer,
        dtype,
        device,
        torch.sigmoid if spec.head.output == "sigmoid" else probability_of(spec.head.index),
        layers=tuple(spec.head.layers),
        labels=spec.head.labels,
        bias=spec.head.bias,
        token_ids=token_ids,
        unused=spec.head.unused,
    )
    return SpecifiedFamily(spec, model)


def info_of(spec: FamilySpec) -> FamilyInfo:
    """Describe a spec's family."""
    head, score = spec.head, "sigmoid"
    if head.output == "softmax":
        score = f"softmax, `{head.tokens[head.index]}`" if head.tokens else f"softmax, label {head.index}"
    of_lines = f", {head.reduce} of the lines" if spec.step.lines else ""
    return FamilyInfo(spec.name, tuple(spec.architectures), score + of_lines)


def _single_id(spec: FamilySpec, tokenizer: TextTokenizer, token: str) -> int:
    if (token_id := tokenizer.token_id(token)) is None:
        raise CheckpointError(f"{spec.file}: the tokenizer has no token {token!r}, which head.tokens names")
    return token_id
