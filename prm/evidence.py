"""What a checkpoint's configuration, tensors and vocabulary say of the family it belongs to; nothing is loaded."""

from espalier.engine.checkpoint import Checkpoint
from espalier.engine.errors import CheckpointError
from espalier.engine.tokenizer import TextTokenizer


def rope_theta(checkpoint: Checkpoint) -> float:
    """Base of the rotary embedding, in either spelling."""
    parameters = checkpoint.config.get("rope_parameters") or {}
    return float(parameters.get("rope_theta") or checkpoint.config.get("rope_theta") or 10_000.0)


def has_ids(checkpoint: Checkpoint, tokens: dict[str, int]) -> bool:
    """Whether the checkpoint's tokenizer gives each of these tokens its published id."""
    try:
        tokenizer = TextTokenizer(checkpoint)
    except CheckpointError:
        return False  # whoever loads it will say what is wrong with it
    return all(tokenizer.token_id(token) == expected for token, expected in tokens.items())


def fits(architecture: str, patterns: tuple[str, ...]) -> bool:
    """Whether a model class is one of `patterns`, in which `*` at the start stands for any beginning."""
    return any(
        architecture.endswith(pattern[1:]) if pattern.startswith("*") else architecture == pattern
        for pattern in patterns
    )
