"""Rotary position embedding: frequency tables and their application."""

import math
from dataclasses import dataclass
from typing import Any

import torch

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary positions of some layers of a decoder.

    Attributes:
        theta: base.
        scaling: parameters of a long-context variant by its `rope_type`, one of `ROPE_TYPES`; None for `default`.
        dims: elements of a head that turn, its first ones; None for all.
    """

    theta: float = 10_000.0
    scaling: dict[str, Any] | None = None
    dims: int | None = None


def inverse_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> torch.Tensor:
    """Inverse frequencies of each pair of dimensions.

    Args:
        head_dim: dimensions rotated.
        theta: base.
        scaling: parameters of a variant by its `rope_type`, one of `ROPE_TYPES`, or None for `default`.

    Returns:
        float32 `[head_dim / 2]`.

    Raises:
        ValueError: for an unknown `rope_type`.
    """
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match (scaling or {}).get("rope_type", "default"):
        case "default" | "dynamic":  # dynamic stretches nothing within the length the model was trained at
            return inverse
        case "linear":
            return inverse / float(scaling["factor"])  # type: ignore[index]
        case "llama3":
            return _llama3(inverse, scaling or {})
        case "yarn":
            return _yarn(inverse, theta, scaling or {})
        case "longrope":  # its long factors are for contexts beyond the length the model was trained at
            return inverse / torch.tensor(scaling["short_factor"], dtype=torch.float32)  # type: ignore[index]
        case "factors":  # one for each pair, as GGUF files give them
            return inverse / torch.tensor(scaling["factors"], dtype=torch.float32)  # type: ignore[index]
        case other:
            raise ValueError(f"rope_type {other!r} is not supported ({', '.join(ROPE_TYPES)} are)")


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


def _yarn(inverse: torch.Tensor, theta: float, scaling: dict[str, Any]) -> torch.Tensor:
    """YaRN's rule (Peng et al., 2023): pairs with many turns are kept, others are divided by the factor.

    Between the two limits, given as turns within the original length, a ramp over the pairs' indices mixes both.
    """
    dims, original = 2 * len(inverse), float(scaling["original_max_position_embeddings"])

    def pair_that_turns(times: float) -> float:
        return dims * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.get("beta_fast") or 32), pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = high - low or 0.001
    divided = ((torch.arange(len(inverse), dtype=torch.float32) - low) / width).clamp(0, 1)
    return inverse / float(scaling["factor"]) * divided + inverse * (1 - divided)


def attention_factor(scaling: dict[str, Any] | None) -> float:
    """Factor on cosines and sines: more than one with YaRN and LongRoPE, otherwise one.

    Args:
        scaling: as `inverse_frequencies` takes it.
    """
    scaling = scaling or {}
    if (kind := scaling.get("rope_type")) not in ("yarn", "longrope"):
        return 1.0
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)
    if kind == "longrope":
        stretched, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
        return math.sqrt(1 + math.log(stretched) / math.log(original)) if stretched > 1 else 1.0

    def of(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    factor, scale, scale_all = float(scaling["factor"]), scaling.get("mscale"), scaling.get("mscale_all_dim")
    return of(scale) / of(scale_all) if scale and scale_all else of(1.0)


def rotary_table(
    inverse: torch.Tensor, positions: torch.Tensor, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of a step's positions, times `attention_factor`, float32 `[T, 1, pairs]` each."""
    angles = positions.float()[:, None, None] * inverse
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of each head, or of its first elements where fewer turn.

    Args:
        x: `[T, head, head_dim]`.
        cos: float32 `[T, 1, pairs]`.
        sin: float32 `[T, 1, pairs]`.

    Returns:
        `[T, head, head_dim]` in the dtype of `x`, computed in float32.
    """
    turned, rest = x.float().split((2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]), dim=-1)
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of each head by tables that hold a number for each of its elements.

    Args:
        x: `[heads, T, head_dim]`.
        cos: `[T, head_dim]`.
        sin: `[T, head_dim]`.

    Returns:
        `[heads, T, head_dim]` in the dtype of `x`.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
