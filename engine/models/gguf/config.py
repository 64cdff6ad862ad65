"""A model's `config.json`, made of a GGUF file's metadata."""

from collections.abc import Mapping
from typing import Any

import numpy as np

_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Names of classes by `model_type`."""
_SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def model_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    """What `config.json` of the same model says, so far as Espalier reads it.

    Args:
        metadata: of the file.
        shapes: of tensors by their names in the Hugging Face layout; they tell biases, ties and the vocabulary.
        rope_factors: float32 `[head_dim / 2]`, by which inverse frequencies are divided, as the file gives them for
            Llama 3's long contexts; None without them.

    Raises:
        KeyError: when the metadata lacks a value that has no default.
        ValueError: when there is no embedding, or another number of factors than of pairs.
    """
    architecture = metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    window = get("attention.sliding_window")
    model_type = "mistral" if architecture == "llama" and window else architecture
    if (embedding := shapes.get("model.embed_tokens.weight")) is None:
        raise ValueError("it has no token_embd.weight: it holds no decoder")
    heads = metadata[f"{architecture}.attention.head_count"]
    rotated = get("rope.dimension_count")
    head_dim = get("attention.key_length", rotated if architecture == "llama" else None)
    head_dim = head_dim or metadata[f"{architecture}.embedding_length"] // heads
    if rope_factors is not None and rope_factors.shape != (head_dim // 2,):
        raise ValueError(f"its rope_freqs.weight has shape {rope_factors.shape} for {head_dim // 2} pairs")
    kind = "ForTokenClassification" if "score.weight" in shapes else "ForCausalLM"
    return {
        "architectures": [_CLASSES.get(model_type, model_type) + kind],
        "model_type": model_type,
        "vocab_size": embedding[0],
        "hidden_size": metadata[f"{architecture}.embedding_length"],
        "intermediate_size": metadata[f"{architecture}.feed_forward_length"],
        "num_hidden_layers": metadata[f"{architecture}.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata[f"{architecture}.attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": metadata[f"{architecture}.context_length"],
        "rope_parameters": _rope(get, rope_factors),
        "partial_rotary_factor": 1.0 if rotated is None else rotated / head_dim,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "sliding_window": window,
        "use_sliding_window": bool(window),
        "max_window_layers": 0,
    }


def sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that the model's makers recommend, under the names of `generation_config.json`."""
    found = {name: metadata.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    return {name: value for name, value in found.items() if value is not None}


def _rope(get: Any, factors: np.ndarray | None) -> dict[str, Any]:
    """Rotary parameters; factors of their own rule out a scaling by formula."""
    rope = {"rope_theta": get("rope.freq_base", 10_000.0), "rope_type": get("rope.scaling.type", "none")}
    if factors is not None:
        return rope | {"rope_type": "factors", "factors": factors.tolist()}
    if rope["rope_type"] == "none":
        return rope | {"rope_type": "default"}
    rope["factor"] = get("rope.scaling.factor", 1.0)
    if (original := get("rope.scaling.original_context_length")) is not None:
        rope["original_max_position_embeddings"] = original
    if (attention := get("rope.scaling.attn_factor")) is not None:
        rope["attention_factor"] = attention
    return rope
