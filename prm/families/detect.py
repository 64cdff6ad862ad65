"""Properties of a checkpoint's configuration that identify its family."""

from espalier.engine.models.checkpoint import Checkpoint


def rope_theta(checkpoint: Checkpoint) -> float:
    """Base of the rotary embedding."""
    return checkpoint.decoder_config.rope_theta


def fits(architecture: str, patterns: tuple[str, ...]) -> bool:
    """Whether a model class matches one of `patterns`; a leading `*` matches any prefix."""
    return any(
        architecture.endswith(pattern[1:]) if pattern.startswith("*") else architecture == pattern
        for pattern in patterns
    )
