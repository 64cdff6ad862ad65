"""A decoder's shape, read from a checkpoint's raw `config.json`."""

from dataclasses import dataclass
from typing import Any

from espalier.engine.errors import CheckpointError
from espalier.kernels.rotary import ROPE_TYPES

_TRUNKS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Supported values of `model_type`, and what the names of their classes begin with."""
_NEEDED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
"""What rotary parameters of a type must say."""
_TRAINED_LENGTH = "original_max_position_embeddings"


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
        CheckpointError: for an unsupported model type or feature, or a missing key.
    """
    model_type = raw.get("model_type", "")
    if model_type not in _TRUNKS:
        supported = ", ".join(f"{kind} ({name}For*)" for kind, name in _TRUNKS.items())
        raise CheckpointError(f"model type {model_type!r} is not supported; supported are {supported}")
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"activation {raw['hidden_act']!r} is not supported; silu is")
    if raw.get("mlp_bias"):
        raise CheckpointError("biases in the MLP are not supported (mlp_bias is true)")
    try:
        return _parse(raw, model_type)
    except KeyError as missing:
        raise CheckpointError(f"config.json lacks {missing}") from missing


def _parse(raw: dict[str, Any], model_type: str) -> DecoderConfig:
    heads = raw["num_attention_heads"]
    rope = _rope_parameters(raw)
    eos = raw.get("eos_token_id")
    qkv_and_out = model_type in ("llama", "qwen3") and bool(raw.get("attention_bias", False))
    return DecoderConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
        rope_scaling=rope if rope.get("rope_type", "default") != "default" else None,
        max_positions=raw.get("max_position_embeddings", 2048),
        tied=raw.get("tie_word_embeddings", False),
        attention_bias=model_type == "qwen2" or qkv_and_out,
        out_bias=qkv_and_out,
        head_norms=model_type == "qwen3",
        windows=_windows(raw, model_type),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    )


def _rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters in one spelling: v5's `rope_parameters`, or v4's `rope_theta` beside `rope_scaling`."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_theta", raw.get("rope_theta", 10_000.0))
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
        longest = raw.get("max_position_embeddings", 2048)
        rope.setdefault(_TRAINED_LENGTH, raw.get(_TRAINED_LENGTH) or longest)
        rope["factor"] = rope.get("factor") or longest / rope[_TRAINED_LENGTH]
    return rope


def _windows(raw: dict[str, Any], model_type: str) -> tuple[int | None, ...]:
    """Each layer's window: Mistral's is for all layers, Qwen's only where asked for, and for the later ones."""
    count = raw["num_hidden_layers"]
    if model_type == "mistral":
        return (raw.get("sliding_window", 4096),) * count
    if model_type == "llama" or not raw.get("use_sliding_window"):
        return (None,) * count
    full = min(raw.get("max_window_layers", 28), count)
    kinds = raw.get("layer_types") or ["full_attention"] * full + ["sliding_attention"] * (count - full)
    return tuple(raw.get("sliding_window", 4096) if kind == "sliding_attention" else None for kind in kinds)
