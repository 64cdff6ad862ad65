"""A decoder's shape, read from a checkpoint's raw `config.json`."""

from dataclasses import dataclass
from typing import Any

from espalier.engine.errors import CheckpointError

_TRUNKS = {"qwen2": "Qwen2", "llama": "Llama"}


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a Llama-style decoder: RMSNorm, rotary attention with grouped heads, SiLU-gated MLP.

    Attributes:
        rope_scaling: parameters of a long-context rotary variant, or None.
        attention_bias: whether the q, k, v projections have biases.
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
    eos_token_ids: tuple[int, ...]


def parse_decoder_config(raw: dict[str, Any]) -> DecoderConfig:
    """Read a decoder's shape; accepts the spellings of transformers 4 and 5.

    Raises:
        CheckpointError: for an unsupported model type or feature, or a missing key.
    """
    model_type = raw.get("model_type", "")
    if model_type not in _TRUNKS:
        raise CheckpointError(f"model type {model_type!r} is not supported; supported are {', '.join(sorted(_TRUNKS))}")
    if raw.get("use_sliding_window"):
        raise CheckpointError("sliding-window attention is not supported yet (use_sliding_window is true)")
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"activation {raw['hidden_act']!r} is not supported; silu is")
    try:
        return _parse(raw, model_type)
    except KeyError as missing:
        raise CheckpointError(f"config.json lacks {missing}") from missing


def _parse(raw: dict[str, Any], model_type: str) -> DecoderConfig:
    heads = raw["num_attention_heads"]
    rope = _rope_parameters(raw)
    eos = raw.get("eos_token_id")
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
        attention_bias=model_type == "qwen2" or raw.get("attention_bias", False),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    )


def _rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters in one spelling: v5's `rope_parameters`, or v4's `rope_theta` beside `rope_scaling`."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_theta", raw.get("rope_theta", 10_000.0))
    if "type" in rope:
        rope["rope_type"] = rope.pop("type")
    if rope.get("rope_type", "default") not in ("default", "linear", "llama3"):
        raise CheckpointError(f"rope type {rope['rope_type']!r} is not supported; default, linear and llama3 are")
    return rope
