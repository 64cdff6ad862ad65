"""What a checkpoint's configuration and tensors say of the family it belongs to; nothing is loaded."""

from espalier.engine.models.checkpoint import Checkpoint


def rope_theta(checkpoint: Checkpoint) -> float:
    """Base of the rotary embedding, in either spelling."""
    parameters = checkpoint.config.get("rope_parameters") or {}
    return float(parameters.get("rope_theta") or checkpoint.config.get("rope_theta") or 10_000.0)


def fits(architecture: str, patterns: tuple[str, ...]) -> bool:
    """Whether a model class is one of `patterns`, in which `*` at the start stands for any beginning."""
    return any(
        architecture.endswith(pattern[1:]) if pattern.startswith("*") else architecture == pattern
        for pattern in patterns
    )
