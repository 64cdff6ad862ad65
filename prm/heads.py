"""What turns a hidden state into a number: linear layers of a checkpoint, or two rows of a language model's head.

Probabilities are taken in float32 whatever the weights are in.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.decoder import Decoder
from espalier.engine.models.model import Head
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.kernels.linear import Linear

Output = Callable[[torch.Tensor], torch.Tensor]
"""Logits, float32 `[R, labels]`, to scores, float32 `[R, 1]`."""


def probability_of(index: int) -> Output:
    """The probability of one label among all of them."""

    def output(logits: torch.Tensor) -> torch.Tensor:
        return torch.softmax(logits, dim=-1)[:, index : index + 1]

    return output


def stacked_head(layers: list[Linear], output: Output) -> Head:
    """Linear layers with a ReLU between each two, and what makes scores of the last one's logits."""

    def head(hidden: torch.Tensor) -> torch.Tensor:
        for layer in layers[:-1]:
            hidden = F.relu(layer(hidden))
        return output(layers[-1](hidden).float())

    return head


def take_layers(
    checkpoint: Checkpoint, names: tuple[str, ...], decoder: Decoder, labels: int, bias: bool | None = True
) -> list[Linear]:
    """The linear layers `NAME.weight` and `NAME.bias`, all as wide as the hidden state, to `labels` logits.

    Args:
        checkpoint: where they are.
        names: the layers, first to last.
        decoder: gives the hidden state.
        labels: values of the last layer.
        bias: whether each has a bias; None where some checkpoints of the family do.

    Raises:
        CheckpointError: when a layer is missing or of another shape.
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


def take_token_rows(checkpoint: Checkpoint, decoder: Decoder, token_ids: list[int]) -> Linear:
    """The language model head's rows of some tokens only: the logits of the others are never asked for.

    Raises:
        CheckpointError: when the head is untied and missing, or has no row for a token.
    """
    if (rows := decoder.config.vocab_size) <= max(token_ids):
        raise CheckpointError(
            f"{checkpoint.folder} has {rows} rows of lm_head, and the token that a score is read of has the id "
            f"{max(token_ids)}; is tokenizer.json the one that belongs to these weights?"
        )
    if decoder.config.tied:
        checkpoint.ignore("lm_head.weight")
        weight = decoder.embedding
    else:
        weight = checkpoint.take("lm_head.weight", decoder.dtype, "cpu", decoder.embedding.shape)
    return decoder.backend.prepare_linear(weight[token_ids].contiguous().to(decoder.device))


def require_token(checkpoint: Checkpoint, tokenizer: TextTokenizer, token: str, why: str) -> int:
    """The id of a token.

    Raises:
        CheckpointError: when the tokenizer does not have it.
    """
    if (token_id := tokenizer.token_id(token)) is None:
        raise CheckpointError(f"the tokenizer of {checkpoint.folder} has no token {token}, {why}")
    return token_id


def require_published_ids(
    checkpoint: Checkpoint, tokenizer: TextTokenizer, vocabulary: int, tokens: dict[str, int]
) -> None:
    """Check ids where the checkpoint's vocabulary is as large as the published one: another id there is another text.

    Raises:
        CheckpointError: when a token has another id than the published one.
    """
    if not vocabulary or checkpoint.config.get("vocab_size") != vocabulary:
        return
    for token, expected in tokens.items():
        if (found := tokenizer.token_id(token)) != expected:
            raise CheckpointError(
                f"the tokenizer of {checkpoint.folder} gives {token!r} the id {found}, and published checkpoints of "
                f"this family have {expected}: is tokenizer.json the one that belongs to these weights?"
            )
