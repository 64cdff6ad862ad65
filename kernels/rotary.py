"""Rotary position embedding: frequency tables and their application."""

import math
from typing import Any

import torch


def inverse_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> torch.Tensor:
    """Inverse frequencies of each pair of dimensions.

    Args:
        head_dim: dimensions rotated.
        theta: base.
        scaling: parameters of a long-context variant with `rope_type` `llama3` or `linear`, or None.

    Returns:
        float32 `[head_dim / 2]`.

    Raises:
        ValueError: for an unknown `rope_type`.
    """
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match (scaling or {}).get("rope_type", "default"):
        case "default":
            return inverse
        case "linear":
            return inverse / float(scaling["factor"])  # type: ignore[index]
        case "llama3":
            return _llama3(inverse, scaling or {})
        case other:
            raise ValueError(f"rope_type {other!r} is not supported (default, linear, llama3 are)")


def _llama3(inverse: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's rule: long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    factor, low, high = (float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    is_between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(is_between, between, scaled)


def rotary_table(inverse: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of a step's positions, float32 `[T, 1, head_dim / 2]` each."""
    angles = positions.float()[:, None, None] * inverse
    return angles.cos(), angles.sin()


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of each head.

    Args:
        x: `[T, head, head_dim]`.
        cos: float32 `[T, 1, head_dim / 2]`.
        sin: float32 `[T, 1, head_dim / 2]`.

    Returns:
        `[T, head, head_dim]` in the dtype of `x`, computed in float32.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
