"""A decoder's shape, read from a checkpoint's raw `config.json`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from espalier.engine.errors import CheckpointError
from espalier.kernels.rotary import ROPE_TYPES

_TRUNKS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Supported values of `model_type`, and the beginning of their class names."""
GENERATOR_CLASSES = tuple(f"{name}ForCausalLM" for name in _TRUNKS.values())
"""Class names that a generator's `config.json` may give."""
_NEEDED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "factors": ("factors",)}
"""Keys that the rotary parameters of a type must have."""
_TRAINED_LENGTH = "original_max_position_embeddings"
_MAX_POSITIONS, _WINDOW = 2048, 4096
"""Defaults for configurations without these values."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a Llama-style decoder: RMSNorm, rotary attention with grouped heads, SiLU-gated MLP.

    Attributes:
        rope_scaling: parameters of a long-context rotary variant, or None.
        max_positions: the longest context, in tokens.
        attention_bias: whether the q, k, v projections have biases.
        out_bias: whether the projection out of attention has one.
        head_norms: whether each query and key head has a norm of its own before its rotation.
        windows: for each layer, how many positions a token sees, its own the last, or None for all before it.
        eos_token_ids: ids that end a generation.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_positions: int
    tied: bool
    attention_bias: bool
    out_bias: bool
    head_norms: bool
    windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]


def parse_decoder_config(raw: dict[str, Any]) -> DecoderConfig:
    """Read a decoder's shape; accepts the spellings of transformers 4 and 5.

    Raises:
        CheckpointError: for an unsupported model type or feature, a missing key, or a value that means nothing.
    """
    model_type = raw.get("model_type", "")
    if not isinstance(model_type, str) or model_type not in _TRUNKS:
        raise CheckpointError(
            f"model type {model_type!r} is not supported; {', '.join(_TRUNKS)} are: generators of the classes "
            f"{', '.join(GENERATOR_CLASSES)}, and reward models over them"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"activation {raw['hidden_act']!r} is not supported; silu is")
    if raw.get("mlp_bias"):
        raise CheckpointError("biases in the MLP are not supported (mlp_bias is true)")
    try:
        return _parse(raw, model_type)
    except KeyError as missing:
        raise CheckpointError(f"config.json lacks {missing}") from missing


def _parse(raw: dict[str, Any], model_type: str) -> DecoderConfig:
    hidden, heads = _count(raw, "hidden_size"), _count(raw, "num_attention_heads")
    if raw.get("head_dim") is None and hidden < heads:
        raise CheckpointError(f"config.json has hidden_size {hidden}, which is less than one for each of {heads} heads")
    rope = _rope_parameters(raw)
    qkv_and_out = model_type in ("llama", "qwen3") and bool(raw.get("attention_bias", False))
    return DecoderConfig(
        vocab_size=_count(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(raw, "intermediate_size"),
        num_layers=_count(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_count(raw, "num_key_value_heads", heads),
        head_dim=_count(raw, "head_dim", hidden // heads),
        norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=rope if rope.get("rope_type", "default") != "default" else None,
        max_positions=_count(raw, "max_position_embeddings", _MAX_POSITIONS),
        tied=raw.get("tie_word_embeddings", False),
        attention_bias=model_type == "qwen2" or qkv_and_out,
        out_bias=qkv_and_out,
        head_norms=model_type == "qwen3",
        windows=_windows(raw, model_type),
        eos_token_ids=_eos_token_ids(raw),
    )


def _count(raw: Mapping[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    """A whole number; required where there is no default."""
    value = raw[name] if default is None else raw.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CheckpointError(f"{name} in config.json must be a whole number from {least} on, is {value!r}")
    return value


def _number(raw: Mapping[str, Any], name: str, default: float) -> float:
    """A number above 0."""
    value = default if raw.get(name) is None else raw[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"{name} in config.json must be a number above 0, is {value!r}")
    return value


def _eos_token_ids(raw: dict[str, Any]) -> tuple[int, ...]:
    """The end-of-sequence ids, given as one id, as a list, or not at all."""
    given = raw.get("eos_token_id")
    ids = [] if given is None else given if isinstance(given, list) else [given]
    return tuple(_count({"eos_token_id": i}, "eos_token_id", least=0) for i in ids)


def _rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters in one spelling: v5's `rope_parameters`, or v4's `rope_theta` beside `rope_scaling`."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"the rotary parameters in config.json must be an object, are {given!r}")
    rope = dict(given)
    rope["rope_theta"] = _number(rope, "rope_theta", _number(raw, "rope_theta", 10_000.0))
    if "type" in rope:
        rope["rope_type"] = rope.pop("type")
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise CheckpointError(f"rope type {kind!r} is not supported; {', '.join(ROPE_TYPES)} are")
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise CheckpointError("rotation of part of a head is not supported (partial_rotary_factor is not 1)")
    if missing := [name for name in _NEEDED.get(kind, ()) if rope.get(name) is None]:
        raise CheckpointError(f"the rotary parameters of type {kind!r} lack {', '.join(missing)}")
    if kind in ("llama3", "yarn"):
        longest = _count(raw, "max_position_embeddings", _MAX_POSITIONS)
        rope[_TRAINED_LENGTH] = _number(rope, _TRAINED_LENGTH, _number(raw, _TRAINED_LENGTH, longest))
        rope["factor"] = _number(rope, "factor", longest / rope[_TRAINED_LENGTH])
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        _number(rope, name, 1.0)
    return rope


def _windows(raw: dict[str, Any], model_type: str) -> tuple[int | None, ...]:
    """Each layer's window: Mistral's is for all layers, Qwen's only where asked for, and for the later ones."""
    count = _count(raw, "num_hidden_layers")
    if model_type != "mistral" and (model_type == "llama" or not raw.get("use_sliding_window")):
        return (None,) * count
    window = None if raw.get("sliding_window", _WINDOW) is None else _count(raw, "sliding_window", _WINDOW)
    if model_type == "mistral":
        return (window,) * count
    full = min(_count(raw, "max_window_layers", 28, least=0), count)
    kinds = raw.get("layer_types") or ["full_attention"] * full + ["sliding_attention"] * (count - full)
    if not isinstance(kinds, list):
        raise CheckpointError(f"layer_types in config.json must be a list, is {kinds!r}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
