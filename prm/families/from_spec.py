"""A family made from an adapter file."""

import math
from collections.abc import Callable

import numpy as np
import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_trunk
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.prm.base import FamilyInfo, PrmFamily, ScoringInput, StepPath, without_label, without_special_tokens
from espalier.prm.families.spec import Adapter
from espalier.prm.heads import probability_of, require_published_ids, stacked_head, take_layers, take_token_rows

_REDUCE: dict[str, Callable[[list[float]], float]] = {
    "min": min,
    "mean": lambda scores: math.fsum(scores) / len(scores),
    "last": lambda scores: scores[-1],
}


class AdaptedFamily(PrmFamily):
    """Reads problems and steps as an adapter file says; see `prm.adapter`."""

    def __init__(self, adapter: Adapter, model: Model) -> None:
        """Prepare what every step needs.

        Raises:
            CheckpointError: when the tokenizer does not have a token that the file names.
        """
        self.info = info_of(adapter)
        self.model = model
        self._adapter = adapter
        encode = model.tokenizer.encode
        self._tag_ids = tuple(encode(adapter.step_tag))
        self._between_ids = tuple(encode(adapter.step_between))
        self._begin_ids = [] if not adapter.prompt_begin else [self._begin_id()]
        self._marks = self._tag_as_mark()
        label = encode(adapter.step_text.replace("{step}", "").replace("{number}", "100"))
        self.max_special_tokens = len(label) + len(self._tag_ids) + len(self._between_ids)

    @property
    def identity(self) -> str:
        """The name, and what the adapter file holds."""
        return f"{self.info.name} {self._adapter.digest}"

    def prompt_ids(self, problem: str) -> list[int]:
        """Everything before the first step."""
        text = self._prompt(problem)
        if self._adapter.step_encode == "whole":
            text = text.rstrip()  # a space at the end belongs to the first step's first token
        return [*self._begin_ids, *self.model.tokenizer.encode(text)]

    def read(self, path: StepPath) -> ScoringInput:
        """The newest step and its tags, or the whole path where its text is tokenised as one."""
        if self._adapter.step_encode == "whole":
            return self._encoded_whole(path)
        ids = list(self._between_ids) if path.steps[:-1] else []
        read_at: list[int] = []
        text = self._step_text(path.steps[-1], len(path.steps))
        for line in text.split("\n") if self._adapter.step_lines else [text]:
            ids += [*(self.model.tokenizer.encode(line) if line else []), *self._tag_ids]
            if line.strip() or not self._adapter.step_lines:
                read_at.append(len(ids) - 1)
        return ScoringInput(tuple(ids), tuple(read_at))

    def score(self, values: np.ndarray, before: float | None) -> float:
        """The scores of the step's lines as one."""
        return float(_REDUCE[self._adapter.head_reduce](values[:, 0].tolist()))

    def _encoded_whole(self, path: StepPath) -> ScoringInput:
        steps = [self._step_text(step, i) + self._adapter.step_tag for i, step in enumerate(path.steps, start=1)]
        text = self._prompt(path.problem) + self._adapter.step_between.join(steps)
        encoded = self.model.tokenizer.encode(text)
        if encoded[-1] != self._tag_ids[-1]:
            raise CheckpointError(
                f"{self._adapter.file}: the tag {self._adapter.step_tag!r} is merged with the text before it, so there "
                "is nowhere to read; is it the tokenizer this family needs?"
            )
        ids = (*self._begin_ids, *encoded)
        return ScoringInput(ids, (len(ids) - 1,), whole=True)

    def _prompt(self, problem: str) -> str:
        adapter, problem = self._adapter, without_special_tokens(problem, self._marks)
        if adapter.prompt_kind == "text":
            return adapter.prompt_text.replace("{problem}", problem)
        system = [] if adapter.prompt_system is None else [{"role": "system", "content": adapter.prompt_system}]
        return self.model.tokenizer.render_chat([*system, {"role": "user", "content": problem}])

    def _step_text(self, step: str, number: int) -> str:
        """The step as the file spells it; a number that it brings itself is not repeated."""
        text = without_special_tokens(
            step.strip() if self._adapter.step_encode == "whole" else step.strip("\n"), self._marks
        )
        before, _, after = self._adapter.step_text.replace("{number}", str(number)).partition("{step}")
        return before + without_label(text, before.strip()) + after

    def _begin_id(self) -> int:
        tokenizer = self.model.tokenizer
        for name in self._adapter.prompt_begin:
            if (token_id := tokenizer.token_id(tokenizer.special_token(name) or name)) is not None:
                return token_id
        raise CheckpointError(
            f"{self._adapter.file}: the tokenizer has none of {', '.join(self._adapter.prompt_begin)}, which begin a "
            "text of this family"
        )

    def _tag_as_mark(self) -> tuple[str, ...]:
        """The tag, where it is a token of its own that a text could spell too."""
        tag = self._adapter.step_tag
        alone = len(self._tag_ids) == 1 and self.model.tokenizer.token_id(tag) == self._tag_ids[0]
        return (tag,) if alone and not tag.isspace() else ()


def load_adapted(
    adapter: Adapter, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str
) -> AdaptedFamily:
    """Load a checkpoint as an adapter file says.

    Raises:
        CheckpointError: when a tensor or a token that the file names is missing, or a published id differs.
    """
    tokenizer = TextTokenizer(checkpoint)
    require_published_ids(checkpoint, tokenizer, adapter.ids_vocabulary, adapter.ids_tokens)
    token_ids = [_single_id(adapter, tokenizer, token) for token in adapter.head_tokens]
    if tokenizer.token_id(adapter.step_tag) is None and adapter.step_tag.startswith("<"):
        raise CheckpointError(
            f"the tokenizer of {checkpoint.folder} has no token {adapter.step_tag}, where scores are read"
        )
    decoder = load_trunk(checkpoint, dtype, device)
    if token_ids:
        layers = [take_token_rows(checkpoint, decoder, token_ids)]
    else:
        layers = take_layers(checkpoint, adapter.head_layers, decoder, adapter.head_labels, adapter.head_bias)
    for name in adapter.head_unused:
        checkpoint.ignore(name)
    checkpoint.require_all_taken()
    output = torch.sigmoid if adapter.head_output == "sigmoid" else probability_of(adapter.head_index)
    head = stacked_head(layers, output)
    return AdaptedFamily(adapter, Model(decoder, head, tokenizer, (), checkpoint.digest()))


def info_of(adapter: Adapter) -> FamilyInfo:
    """What an adapter file says of its family, in words."""
    prompt = "chat template" if adapter.prompt_kind == "chat" else f"`{_visible(adapter.prompt_text)}`"
    between = f", `{_visible(adapter.step_between)}` between" if adapter.step_between else ""
    of = "each line" if adapter.step_lines else "a step"
    if adapter.head_tokens:
        head = "`lm_head` rows of " + ", ".join(f"`{token}`" for token in adapter.head_tokens)
    else:
        head = " → ReLU → ".join(f"`{name}`" for name in adapter.head_layers)
    value = "sigmoid"
    if adapter.head_output == "softmax":
        label = f"`{adapter.head_tokens[adapter.head_index]}`" if adapter.head_tokens else f"label {adapter.head_index}"
        value = f"softmax, {label}"
    return FamilyInfo(
        name=adapter.name,
        models=adapter.models,
        architectures=adapter.architectures,
        head=head,
        layout=f"{prompt}, `{_visible(adapter.step_text)}`, `{_visible(adapter.step_tag)}` after {of}{between}",
        read_at=f"`{_visible(adapter.step_tag)}`",
        score=value + (f", {adapter.head_reduce} of the lines" if adapter.step_lines else ""),
        source=adapter.source,
    )


def _visible(text: str) -> str:
    return text.replace("\n", "\\n")


def _single_id(adapter: Adapter, tokenizer: TextTokenizer, token: str) -> int:
    if (token_id := tokenizer.token_id(token)) is None:
        raise CheckpointError(f"{adapter.file}: the tokenizer has no token {token!r}, which head.tokens names")
    return token_id
