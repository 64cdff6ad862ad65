"""Architectures of llama.cpp with recurrent layers: configuration, names, and the order of values, from this table.

llama.cpp's converter changes some tensors, which is undone here: convolutions and columns have no dimension of size 1,
`ssm_a` holds -exp(A_log), and of Qwen3.5 norms are stored with one added and value heads in another order. Tensors of
layers that predict several tokens at once, behind the last layer, are left aside.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from espalier.engine.models.config import MAX_COUNTS
from espalier.engine.models.gguf.mapped import LAYER_NAMES, OUTER_NAMES, MappedArchitecture
from espalier.engine.models.text_files import shown

Get = Callable[..., Any]
"""A value of the metadata by its key, behind the architecture's name; the second argument is its default."""
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_MAX_COUNT = 2**30


@dataclass(frozen=True, slots=True)
class _Architecture:
    """Description of one architecture.

    Attributes:
        model_type: of transformers.
        config: fields of `config.json` from the metadata and the tensors' shapes.
        outer: names of modules outside the layers, by llama.cpp's.
        inner: the same of those in layers, with the layer's prefix left out.
        layers: what comes before a layer's number.
        restore: gives a tensor's values as the class has them, from its name and llama.cpp's values.
    """

    model_type: str
    config: Callable[[Get, Mapping[str, Any]], dict[str, Any]]
    outer: Mapping[str, str]
    inner: Mapping[str, str]
    layers: str
    restore: Callable[[str, np.ndarray, Mapping[str, Any]], np.ndarray]


def _qwen3_5(get: Get, shapes: Mapping[str, Any]) -> dict[str, Any]:
    heads, head_dim = get("ssm.time_step_rank"), get("attention.key_length")
    layers = get("block_count") - get("nextn_predict_layers", 0)
    return {
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": head_dim,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": get("context_length"),
        "layer_types": [
            "linear_attention" if f"blk.{layer}.ssm_a" in shapes else "full_attention" for layer in range(layers)
        ],
        "linear_conv_kernel_dim": get("ssm.conv_kernel"),
        "linear_key_head_dim": get("ssm.state_size"),
        "linear_num_key_heads": get("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": get("ssm.inner_size") // heads,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": get("rope.freq_base"),
            "partial_rotary_factor": get("rope.dimension_count", head_dim) / head_dim,
            # One section for each axis, filled up to four.
            "mrope_section": [section for section in get("rope.dimension_sections", []) if section],
            "mrope_interleaved": True,
        },
    }


def _lfm2(get: Get, shapes: Mapping[str, Any]) -> dict[str, Any]:
    by_layer = get("attention.head_count_kv")  # none in layers of convolutions
    if not isinstance(by_layer, list) or not any(by_layer):
        raise ValueError(f"lfm2.attention.head_count_kv must be a list of heads by layer, is {shown(by_layer)}")
    return {
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": max(by_layer),
        "layer_types": ["full_attention" if heads else "conv" for heads in by_layer],
        "norm_eps": get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": get("context_length"),
        "conv_L_cache": get("shortconv.l_cache"),
        "conv_bias": "blk.0.shortconv.in_proj.bias" in shapes,
        "rope_parameters": {"rope_type": "default", "rope_theta": get("rope.freq_base")},
    }


def _mamba(get: Get, shapes: Mapping[str, Any]) -> dict[str, Any]:
    hidden, inner = get("embedding_length"), get("ssm.inner_size")
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "expand": inner // hidden,
        "num_hidden_layers": get("block_count"),
        "state_size": get("ssm.state_size"),
        "conv_kernel": get("ssm.conv_kernel"),
        "time_step_rank": get("ssm.time_step_rank"),
        "layer_norm_epsilon": get("attention.layer_norm_rms_epsilon"),
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in shapes,
        "use_bias": "blk.0.ssm_in.bias" in shapes,
    }


def _mamba2(get: Get, shapes: Mapping[str, Any]) -> dict[str, Any]:
    heads = get("ssm.time_step_rank")
    return _mamba(get, shapes) | {
        "num_heads": heads,
        "head_dim": get("ssm.inner_size") // heads,
        "n_groups": get("ssm.group_count"),
        "time_step_rank": "auto",
    }


def _without_logarithm(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    return np.log(-values) if name.endswith("A_log") else values


def _of_qwen3_5(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Value heads of each key head side by side, where llama.cpp has the first of every key head first."""
    values = _without_logarithm(name, values, config)
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return values - 1
    part = name.rpartition("linear_attn.")[2]
    if part == name or part == "norm.weight":
        return values
    key_heads, value_dim = config["linear_num_key_heads"], config["linear_value_head_dim"]
    per_head = 1 if part in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight") else value_dim
    if part == "out_proj.weight":
        return _grouped(values.T, key_heads, per_head).T
    first = 2 * key_heads * config["linear_key_head_dim"] if part in ("in_proj_qkv.weight", "conv1d.weight") else 0
    return np.concatenate((values[:first], _grouped(values[first:], key_heads, per_head)))


def _grouped(rows: np.ndarray, key_heads: int, per_head: int) -> np.ndarray:
    by_head = rows.reshape(-1, key_heads, per_head, *rows.shape[1:])
    return by_head.swapaxes(0, 1).reshape(rows.shape)


_MAMBA = {
    "attn_norm": "norm",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_x": "mixer.x_proj",
    "ssm_dt": "mixer.dt_proj",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
}
_OF_MAMBA: Callable[..., _Architecture] = partial(
    _Architecture,
    outer={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
    layers="backbone.layers.",
    restore=_without_logarithm,
)
_QWEN_3_5 = _Architecture(
    "qwen3_5_text",
    _qwen3_5,
    OUTER_NAMES,
    LAYER_NAMES
    | {
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
    },
    "model.layers.",
    _of_qwen3_5,
)
_LFM_2 = _Architecture(
    "lfm2",
    _lfm2,
    {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
    {
        "attn_norm": "operator_norm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
    },
    "model.layers.",
    lambda name, values, config: values,
)
RECURRENT = {
    "qwen35": _QWEN_3_5,
    "lfm2": _LFM_2,
    "mamba": _OF_MAMBA(model_type="mamba", config=_mamba, inner=_MAMBA),
    "mamba2": _OF_MAMBA(model_type="mamba2", config=_mamba2, inner=_MAMBA | {"ssm_dt.bias": "mixer.dt_bias"}),
}
"""By `general.architecture`."""


class RecurrentArchitecture(MappedArchitecture):
    """The model of a file of one of `RECURRENT`."""

    def __init__(self, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """See `MappedArchitecture`.

        Raises:
            KeyError: the metadata lacks a value.
            ValueError: a value means nothing, or the file is of a kind that is not read.
        """
        architecture: str = metadata["general.architecture"]
        self._its = RECURRENT[architecture]
        if metadata.get(f"{architecture}.ssm.dt_b_c_rms"):
            raise ValueError(f"general.architecture is {architecture} with norms of time steps (Falcon Mamba), unread")
        self._find_class(metadata, shapes, self._its.model_type)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The same model's `config.json`."""
        architecture: str = self._metadata["general.architecture"]

        def get(key: str, *default: Any) -> Any:
            name = f"{architecture}.{key}"
            value = self._metadata.get(name, *default) if default else self._metadata[name]
            value = value.tolist() if isinstance(value, np.ndarray) else value
            if type(value) is int and not 0 <= value <= _MAX_COUNT:
                raise ValueError(f"{name} must be a whole number up to {_MAX_COUNT:,}, is {shown(value)}")
            return value

        config = self._its.config(get, self._shapes)
        for field, most in MAX_COUNTS.items():
            if (value := config.get(field, 1)) > most or value < 1:
                raise ValueError(f"{field} must be a whole number from 1 to {most:,}, is {shown(value)}")
        return config | self._common_config()

    @cached_property
    def parts(self) -> dict[str, list[str]]:
        """llama.cpp's name of the tensor that each of the class's is; its own name for one that has none."""
        found: dict[str, list[str]] = {}
        for name in self._shapes:
            if (layer := _LAYER.fullmatch(name)) and int(layer[1]) >= self.config["num_hidden_layers"]:
                continue  # predicts several tokens at once
            found[self._layout_name(name, layer)] = [name]
        return found

    def read(self, name: str, values: Callable[[str], np.ndarray]) -> torch.Tensor:
        """See `MappedArchitecture`."""
        (part,) = self.parts[name]
        restored = self._its.restore(name, values(part), self.config)
        tensor, shape = torch.from_numpy(np.ascontiguousarray(restored)), torch.Size(self.shapes.get(name, ()))
        return tensor.reshape(shape) if tensor.numel() == shape.numel() else tensor

    def _layout_name(self, name: str, layer: re.Match[str] | None) -> str:
        names, rest = (self._its.inner, layer[2]) if layer else (self._its.outer, name)
        module, _, kind = rest.rpartition(".")
        if whole := names.get(rest):
            found = whole
        elif known := names.get(module):
            found = f"{known}.{kind}"
        else:
            return name
        return f"{self._its.layers}{layer[1]}.{found}" if layer else found
