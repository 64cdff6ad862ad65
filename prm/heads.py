"""Parts that a family takes from a checkpoint: its head, tokens that must be there, and settings.

A head maps hidden states to scores: linear layers, or some rows of a language model's head. Probabilities are computed
in float32 for any dtype of the weights.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from pydantic import TypeAdapter, ValidationError

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.decoder import Decoder
from espalier.engine.models.model import Head, Model, language_model_head, load_trunk
from espalier.engine.models.text_files import shown
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.engine.models.zoo.layers import TransformersLayers
from espalier.kernels.layers import UnsupportedShapeError
from espalier.kernels.linear import Linear

Settings = TypeVar("Settings")
_ROWS = 256
"""Maximum rows whose logits are held at once: with a vocabulary of 150,000, float32."""
Output = Callable[[torch.Tensor], torch.Tensor]
"""Maps logits, float32 `[R, labels]`, to scores, float32 `[R, 1]`."""


def probability_of(index: int) -> Output:
    """Softmax probability of the label `index`."""

    def output(logits: torch.Tensor) -> torch.Tensor:
        return torch.softmax(logits, dim=-1)[:, index : index + 1]

    return output


Product = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states, `[R, in]`, to `[R, out]`; a `Linear`, or some columns of a language model's head."""


def stacked_head(layers: Sequence[Product], output: Output) -> Head:
    """Linear layers with a ReLU between them, followed by `output`."""

    def head(hidden: torch.Tensor) -> torch.Tensor:
        for layer in layers[:-1]:
            hidden = F.relu(layer(hidden))
        return output(layers[-1](hidden).float())

    return head


def log_probability_head(logits: Product) -> Head:
    """The log-probability of a target token under a language model's head, float32 `[R, 1]`."""

    def head(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        parts = zip(hidden.split(_ROWS), targets.split(_ROWS), strict=True)
        return torch.cat([torch.log_softmax(logits(rows).float(), -1).gather(1, its[:, None]) for rows, its in parts])

    return head


@dataclass(frozen=True, slots=True)
class ScoringHead:
    """A head that gives scores, of linear layers or of rows of a language model's head.

    Attributes:
        output: maps the head's logits to a score.
        layers: names of the layers, for `take_layers`, as `labels` and `bias` are.
        labels: output size of the last layer.
        bias: whether the layers have biases; None if that differs between checkpoints of the family.
        token_ids: the head is instead made of these rows of the language model's.
        unused: tensors that are not loaded.
    """

    output: Output
    layers: tuple[str, ...] = ()
    labels: int = 1
    bias: bool | None = None
    token_ids: Sequence[int] = ()
    unused: Sequence[str] = ()


def load_scoring_model(
    checkpoint: Checkpoint, tokenizer: TextTokenizer, dtype: torch.dtype, device: torch.device | str, head: ScoringHead
) -> Model:
    """Load a trunk with a head that gives scores.

    Args:
        checkpoint: the checkpoint to load, all of it.
        tokenizer: its tokenizer.
        dtype: dtype of weights and KV.
        device: device to load onto.
        head: its parts in the checkpoint.

    Raises:
        CheckpointError: a tensor is missing, has a wrong shape or is of no use.
    """
    decoder = load_trunk(checkpoint, dtype, device)
    linears: Sequence[Product]
    if head.token_ids:
        linears = [take_token_rows(checkpoint, decoder, head.token_ids)]
    else:
        linears = take_layers(checkpoint, head.layers, decoder, head.labels, head.bias)
    for name in head.unused:
        checkpoint.mark_used(name)
    checkpoint.require_all_taken()
    return Model(decoder, stacked_head(linears, head.output), tokenizer, (), checkpoint.digest())


def load_value_model(
    checkpoint: Checkpoint, tokenizer: TextTokenizer, dtype: torch.dtype, device: torch.device | str
) -> Model:
    """Load a trunk with one value, `score` or `score.0` and `score.2`, whose sigmoid is the score."""
    layers = ("score.0", "score.2") if "score.0.weight" in checkpoint else ("score",)
    head = ScoringHead(torch.sigmoid, layers, unused=("lm_head.weight",))
    return load_scoring_model(checkpoint, tokenizer, dtype, device, head)


def take_layers(
    checkpoint: Checkpoint, names: tuple[str, ...], decoder: Decoder, labels: int, bias: bool | None = True
) -> list[Linear]:
    """Load linear layers `NAME.weight` and `NAME.bias`; the inner ones are as wide as the hidden state.

    Args:
        checkpoint: the checkpoint to load from.
        names: names of the layers, first to last.
        decoder: produces the hidden states.
        labels: output size of the last layer.
        bias: whether the layers have biases; None if that differs between checkpoints of the family.

    Raises:
        CheckpointError: a layer is missing or has a wrong shape.
    """
    layers: list[Linear] = []
    inputs = decoder.config.hidden_size
    found = checkpoint.shape(f"{names[-1]}.weight")
    if found and found[0] != labels:
        raise CheckpointError(f"{checkpoint.folder} has {found[0]} labels; a reward model of this family has {labels}")
    for name in names:
        outputs = labels if name == names[-1] else inputs
        weight = checkpoint.take(f"{name}.weight", decoder.dtype, decoder.device, (outputs, inputs))
        has_bias = f"{name}.bias" in checkpoint if bias is None else bias
        added = checkpoint.take(f"{name}.bias", decoder.dtype, decoder.device, (outputs,)) if has_bias else None
        layers.append(decoder.backend.prepare_linear(weight, added))
    return layers


def learned_head(folder: Checkpoint, decoder: Decoder, kind: str) -> Head:
    """The head of a folder that `learn-verifier` made, `score.0`, `score.1`, …: it gives the logit of "right".

    It reads the states that enter the `layer` that `config.json` names, or those after the last one, and is given those
    of all of the decoder's `taps`.

    Args:
        folder: the folder, of which all tensors are taken.
        decoder: the trunk's.
        kind: what such a folder is called, for errors.

    Raises:
        CheckpointError: its tensors are not those of such a head, its layer is no number of one, or the decoder gives
            no states between layers, or has fewer.
    """
    names = tuple(f"score.{i}" for i in range(sum(name.endswith(".weight") for name in folder.tensors)))
    if not names:
        raise CheckpointError(f"{folder.folder} holds no layers score.0, score.1, …; is it a {kind}?")
    layers = take_layers(folder, names, decoder, labels=1)
    folder.require_all_taken()
    head, layer, trunk = stacked_head(layers, lambda logits: logits), folder.config.get("layer"), decoder.layers
    if layer is None:
        return lambda states: head(trunk.last_states(states))
    if type(layer) is not int or layer < 1:
        raise CheckpointError(f"config.json of {folder.folder}: layer must be a number from 1, is {layer!r}")
    try:
        trunk.tap([layer])
    except UnsupportedShapeError as error:
        raise CheckpointError(f"{error}: a head on a middle layer cannot be read here") from error
    return lambda states: head(trunk.states_of(states)[1 + trunk.taps.index(layer)].contiguous())


def take_token_rows(checkpoint: Checkpoint, decoder: Decoder, token_ids: Sequence[int]) -> Product:
    """The logits of some tokens; only the language model head's rows of these are loaded.

    A head of transformers' code is used as a whole: it may do more to logits than multiply.

    Raises:
        CheckpointError: the head is untied and missing, or has no row for a token.
    """
    if (rows := decoder.config.vocab_size) <= max(token_ids):
        raise CheckpointError(
            f"{checkpoint.folder} has {rows} rows of lm_head, but the scores are read from the token id "
            f"{max(token_ids)}; is tokenizer.json the one that belongs to these weights?"
        )
    if isinstance(decoder.layers, TransformersLayers):
        head = language_model_head(checkpoint, decoder)
        return lambda hidden: head(hidden)[:, list(token_ids)]
    if decoder.config.tied:
        checkpoint.mark_used("lm_head.weight")
        weight = decoder.embedding
    else:
        weight = checkpoint.take("lm_head.weight", decoder.dtype, "cpu", decoder.embedding.shape)
    return decoder.backend.prepare_linear(weight[list(token_ids)].contiguous().to(decoder.device))


def require_causal_lm(checkpoint: Checkpoint, family: str, does: str) -> None:
    """Raise CheckpointError unless a checkpoint of a family that `does` something with text is a language model."""
    if not checkpoint.architecture.endswith("ForCausalLM"):
        raise CheckpointError(
            f"{checkpoint.folder} is a {checkpoint.architecture or 'model without architecture'}; {family} {does} and "
            "needs a *ForCausalLM; leave out --verifier-family, or give a checkpoint of that family"
        )


def require_token(checkpoint: Checkpoint, tokenizer: TextTokenizer, token: str, why: str) -> int:
    """Return the id of a token.

    Raises:
        CheckpointError: the tokenizer does not have it.
    """
    if (token_id := tokenizer.token_id(token)) is None:
        raise CheckpointError(f"the tokenizer of {checkpoint.folder} has no token {token}, {why}")
    return token_id


def require_one_token(checkpoint: Checkpoint, tokenizer: TextTokenizer, text: str, why: str) -> int:
    """Return the id of the only token of a text.

    Raises:
        CheckpointError: the tokenizer makes several of it.
    """
    ids = tokenizer.encode(text)
    if len(ids) != 1:
        raise CheckpointError(f"the tokenizer of {checkpoint.folder} has no single token for {text!r}, {why}")
    return ids[0]


def require_published_ids(
    checkpoint: Checkpoint, tokenizer: TextTokenizer, vocabulary: int, tokens: dict[str, int]
) -> None:
    """Check that tokens have their published ids, if the vocabulary has its published size.

    Raises:
        CheckpointError: a token's id differs from the published one.
    """
    if not vocabulary or checkpoint.config.get("vocab_size") != vocabulary:
        return
    for token, expected in tokens.items():
        if (found := tokenizer.token_id(token)) != expected:
            raise CheckpointError(
                f"the tokenizer of {checkpoint.folder} gives {token!r} the id {found}, but published checkpoints of "
                f"this family have {expected}; is tokenizer.json the one that belongs to these weights?"
            )


def read_settings(checkpoint: Checkpoint, kind: type[Settings], rule: str) -> Settings:
    """Settings as the `prm` object of `config.json` says; what it leaves out has its default.

    Args:
        checkpoint: whose `config.json` is read.
        kind: a dataclass whose annotations say which values are right.
        rule: the same in words, for errors, which also name the key and its value.

    Raises:
        CheckpointError: a value is not as `rule` says.
    """
    try:
        return TypeAdapter(kind).validate_json(json.dumps(checkpoint.files.object("prm")), strict=True)
    except ValidationError as error:
        wrong = error.errors()[0]
        key, value = ".".join(map(str, ("prm", *wrong["loc"]))), shown(wrong["input"])
        raise CheckpointError(
            f"{checkpoint.folder}: {key} in config.json is {value}; the prm object there has {rule}"
        ) from None
