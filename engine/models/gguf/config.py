"""Files of Llama and its like: `config.json` from the metadata, names and order of the tensors."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from espalier.engine.models.config import MAX_COUNTS
from espalier.engine.models.families import FAMILIES
from espalier.engine.models.gguf.mapped import LAYER_NAMES, OUTER_NAMES
from espalier.engine.models.text_files import shown

LIKE_LLAMA = frozenset(("llama", "mistral", "qwen2", "qwen3"))
"""Architectures whose tensors have Llama's names; those of others are mapped by transformers."""
ROPE_FACTORS = "rope_freqs.weight"
"""A part of the configuration that files have as a tensor."""
_NAMES = OUTER_NAMES | LAYER_NAMES | {"cls.output": "score", "ffn_norm": "post_attention_layernorm"}
"""Modules by llama.cpp's names of them; the names of layers have a prefix."""
_NAME = re.compile(r"(blk\.(?P<layer>\d+)\.)?(?P<module>[a-z_.]+)\.(?P<kind>weight|bias)")
_INTERLEAVED = {"attn_q": "head_count", "attn_k": "head_count_kv"}
"""Projections whose heads llama.cpp reorders for models of the Llama architecture, and where their number stands."""
_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
    "xtc_probability": "xtc_probability",
    "mirostat": "mirostat",
}


class LlamaArchitecture:
    """The model of a file of one of `LIKE_LLAMA`; as `MappedArchitecture`, without transformers.

    Attributes:
        parts: llama.cpp's name of each tensor, by that in the Hugging Face layout; a name of a module that no supported
            model has stays as it is, so that a checkpoint finds it unused.
        shapes: of tensors that files hold in other shapes: none.
    """

    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    def __init__(
        self, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: np.ndarray | None
    ) -> None:
        """Find the tensors.

        Args:
            metadata: of the file.
            shapes: of all tensors of all parts, by llama.cpp's names.
            rope_factors: see `model_config`.

        Raises:
            ValueError: two of them mean the same.
        """
        self._metadata = metadata
        self._stored_shapes = shapes
        self._rope_factors = rope_factors
        self.parts: dict[str, list[str]] = {}
        for name in shapes:
            if name != ROPE_FACTORS and (other := self.parts.setdefault(_layout_name(name), [name])) != [name]:
                raise ValueError(f"it holds {other[0]} and {name}, which mean the same tensor")

    @property
    def config(self) -> dict[str, Any]:
        """The same model's `config.json`; see `model_config`."""
        shapes = {name: self._stored_shapes[stored] for name, (stored,) in self.parts.items()}
        return model_config(self._metadata, shapes, self._rope_factors)

    def read(self, name: str, values: Callable[[str], np.ndarray]) -> torch.Tensor:
        """See `MappedArchitecture`. Rows are reordered for the rotation of halves: Llama's neighbours are rotated."""
        (stored,) = self.parts[name]
        found, named = values(stored), _NAME.fullmatch(stored)
        if not named or named["module"] not in _INTERLEAVED or self._metadata["general.architecture"] != "llama":
            return torch.from_numpy(found)
        heads = self._metadata.get("llama.attention.head_count")
        heads = self._metadata.get(f"llama.attention.{_INTERLEAVED[named['module']]}", heads)
        if not isinstance(heads, int) or heads < 1 or len(found) % (2 * heads):
            raise ValueError(f"{stored} has {len(found)} rows, which are not those of {heads} heads")
        pairs = found.reshape(heads, -1, 2, *found.shape[1:])
        return torch.from_numpy(np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(found.shape))


def _layout_name(name: str) -> str:
    """The name in the Hugging Face layout of a tensor that llama.cpp calls `name`."""
    if not (parts := _NAME.fullmatch(name)) or (module := _NAMES.get(parts["module"])) is None:
        return name
    layer = f"model.layers.{parts['layer']}." if parts["layer"] else ""
    return f"{layer}{module}.{parts['kind']}"


def model_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    """The fields of the same model's `config.json` that Espalier reads.

    Args:
        metadata: of the file.
        shapes: of tensors by their names in the Hugging Face layout; they tell biases, ties and the vocabulary.
        rope_factors: float32 `[head_dim / 2]`, by which inverse frequencies are divided, as the file gives them for
            Llama 3's long contexts; None without them.

    Raises:
        KeyError: when the metadata lacks a value that has no default.
        ValueError: when there is no embedding, another number of factors than of pairs, or a value means nothing.
    """
    architecture = metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    def count(key: str, field: str, default: int | None = None) -> int:
        """A whole number of the metadata, which is called `field` in config.json."""
        name = f"{architecture}.{key}"
        value = metadata[name] if default is None else metadata.get(name, default)
        if type(value) is not int or not 1 <= value <= MAX_COUNTS[field]:
            raise ValueError(f"{name} must be a whole number from 1 to {MAX_COUNTS[field]:,}, is {shown(value)}")
        return value

    def number(key: str, default: float | None = None) -> float:
        name = f"{architecture}.{key}"
        value = metadata[name] if default is None else metadata.get(name, default)
        if type(value) not in (int, float) or value <= 0:
            raise ValueError(f"{name} must be a number above 0, is {shown(value)}")
        return value

    window = get("attention.sliding_window")
    model_type = "mistral" if architecture == "llama" and window else architecture
    if (embedding := shapes.get("model.embed_tokens.weight")) is None:
        raise ValueError("it has no token_embd.weight: it holds no decoder")
    heads = count("attention.head_count", "num_attention_heads")
    hidden = count("embedding_length", "hidden_size")
    equal = max(hidden // heads, 1)
    turned = count("rope.dimension_count", "head_dim", equal) if architecture == "llama" else equal
    head_dim = count("attention.key_length", "head_dim", turned)
    rotated = count("rope.dimension_count", "head_dim", head_dim)
    if rope_factors is not None:
        _require_factors(rope_factors, head_dim // 2)
    kind = "ForTokenClassification" if "score.weight" in shapes else "ForCausalLM"
    return {
        "architectures": [FAMILIES[model_type].class_prefix + kind],
        "model_type": model_type,
        "vocab_size": embedding[0],
        "hidden_size": hidden,
        "intermediate_size": count("feed_forward_length", "intermediate_size"),
        "num_hidden_layers": count("block_count", "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", "num_key_value_heads", heads),
        "head_dim": head_dim,
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": count("context_length", "max_position_embeddings"),
        "rope_parameters": _rope(get, number("rope.freq_base", 10_000.0), rope_factors),
        "partial_rotary_factor": rotated / head_dim,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "sliding_window": window,
        "use_sliding_window": bool(window),
        "max_window_layers": 0,
    }


def sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that the model's makers recommend, under the names of `generation_config.json`.

    Raises:
        ValueError: when one is no number.
    """
    found = {name: metadata.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    for name, value in found.items():
        if value is not None and type(value) not in (int, float):
            raise ValueError(f"general.sampling.{_SAMPLING[name]} must be a number, is {shown(value)}")
    return {name: value for name, value in found.items() if value is not None}


def _require_factors(factors: np.ndarray, pairs: int) -> None:
    if factors.shape != (pairs,):
        raise ValueError(f"its rope_freqs.weight has shape {factors.shape} for {pairs} pairs")
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ValueError("its rope_freqs.weight holds factors that are no numbers above 0")


def _rope(get: Any, theta: float, factors: np.ndarray | None) -> dict[str, Any]:
    """Rotary parameters; factors of their own rule out a scaling by formula."""
    rope = {"rope_theta": theta, "rope_type": get("rope.scaling.type", "none")}
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
