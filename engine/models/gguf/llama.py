"""Files of Llama and its like, which native code runs."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from espalier.engine.models.families import FAMILIES
from espalier.engine.models.gguf.architectures import LAYER_NAMES, OUTER_NAMES, Architecture, Values

ROPE_FACTORS = "rope_freqs.weight"
"""A part of the configuration that files have as a tensor: by what inverse frequencies are divided, as in Llama 3."""
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
"""Projections whose heads llama.cpp reorders for models of the Llama architecture, and how many these are."""


def _config(get: Values) -> dict[str, Any]:
    kind, window = get.architecture, get("attention.sliding_window", None)
    model_type = "mistral" if kind == "llama" and window else kind
    heads = get.count("attention.head_count", "num_attention_heads")
    hidden = get.count("embedding_length", "hidden_size")
    equal = max(hidden // heads, 1)
    turned = get.count("rope.dimension_count", "head_dim", equal) if kind == "llama" else equal
    head_dim = get.count("attention.key_length", "head_dim", turned)
    verifies = "cls.output.weight" in get.shapes
    return {
        "architectures": [
            FAMILIES[model_type].class_prefix + ("ForTokenClassification" if verifies else "ForCausalLM")
        ],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": get.count("feed_forward_length", "intermediate_size"),
        "num_hidden_layers": get.count("block_count", "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": get.count("attention.head_count_kv", "num_key_value_heads", heads),
        "head_dim": head_dim,
        "rms_norm_eps": get.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": get.count("context_length", "max_position_embeddings"),
        "rope_parameters": _rope(get, head_dim // 2),
        "partial_rotary_factor": get.count("rope.dimension_count", "head_dim", head_dim) / head_dim,
        "attention_bias": "blk.0.attn_q.bias" in get.shapes,
        "sliding_window": window,
        "use_sliding_window": bool(window),
        "max_window_layers": 0,
    }


def _rope(get: Values, pairs: int) -> dict[str, Any]:
    """Rotary parameters; factors of their own, one for each pair, rule out a scaling by formula."""
    rope = {"rope_theta": get.number("rope.freq_base", 10_000.0), "rope_type": get("rope.scaling.type", "none")}
    if (factors := get(ROPE_FACTORS, None)) is not None:
        if factors.shape != (pairs,):
            raise ValueError(f"its {ROPE_FACTORS} has shape {factors.shape} for {pairs} pairs")
        if not (np.isfinite(factors).all() and (factors > 0).all()):
            raise ValueError(f"its {ROPE_FACTORS} holds factors that are no numbers above 0")
        return rope | {"rope_type": "factors", "factors": factors.tolist()}
    if rope["rope_type"] == "none":
        return rope | {"rope_type": "default"}
    rope["factor"] = get("rope.scaling.factor", 1.0)
    if (original := get("rope.scaling.original_context_length", None)) is not None:
        rope["original_max_position_embeddings"] = original
    if (attention := get("rope.scaling.attn_factor", None)) is not None:
        rope["attention_factor"] = attention
    return rope


def _of_halves(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Rows of queries and keys for the rotation of halves; in Llama's own files neighbours are rotated."""
    if (heads := config.get(_HEADS.get(name.rpartition(".")[0].rpartition(".")[2], ""))) is None:
        return values
    if len(values) % (2 * heads):
        raise ValueError(f"{name} has {len(values)} rows, which are not those of {heads} heads")
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


_LAYERS = {**LAYER_NAMES, "ffn_norm": "post_attention_layernorm"}
_OUTER = {**OUTER_NAMES, "cls.output": "score"}
LIKE_LLAMA = {kind: Architecture("", _config, _LAYERS, _OUTER) for kind in ("mistral", "qwen2", "qwen3")} | {
    "llama": Architecture("", _config, _LAYERS, _OUTER, restore=_of_halves)
}
"""By `general.architecture`."""
