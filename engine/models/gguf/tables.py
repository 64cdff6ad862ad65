"""The architectures that a table each describes: configuration, names, and the order of values.

They are Llama and its like, which native code runs, and those of llama.cpp with recurrent layers.

llama.cpp's converter changes some tensors, which is undone here: rows of Llama's queries and keys are for the rotation
of neighbours, convolutions and columns have no dimension of size 1, `ssm_a` holds -exp(A_log), gate and up are apart,
of Qwen3-Next and Qwen3.5 norms are stored with one added, and of Qwen3.5 value heads in another order. Factors of
Falcon-H1 are part of its weights. Where no positions are rotated, rows of queries and keys stay in llama.cpp's order,
which is the same for both. Tensors of layers behind the last, which predict several tokens at once, are left aside.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from espalier.engine.models.families import FAMILIES
from espalier.engine.models.gguf.architectures import (
    LAYER_NAMES,
    OUTER_NAMES,
    Architecture,
    Values,
    side_by_side,
    without_logarithm,
)
from espalier.engine.models.text_files import shown

ROPE_FACTORS = "rope_freqs.weight"
"""A part of the configuration that files have as a tensor: by what inverse frequencies are divided, as in Llama 3."""
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
"""Projections whose heads llama.cpp reorders for models of the Llama architecture, and how many these are."""


def _like_llama(get: Values) -> dict[str, Any]:
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
LIKE_LLAMA = {kind: Architecture("", _like_llama, _LAYERS, _OUTER) for kind in ("mistral", "qwen2", "qwen3")} | {
    "llama": Architecture("", _like_llama, _LAYERS, _OUTER, restore=_of_halves)
}
"""By `general.architecture`."""


def _num_layers(get: Values) -> int:
    """Number of layers, without those that predict several tokens at once."""
    return get("block_count") - get("nextn_predict_layers", 0)


def _kinds(get: Values, of_others: str = "full_attention") -> list[str]:
    """The kind of each layer, by its tensors."""
    layers = range(_num_layers(get))
    return ["linear_attention" if f"blk.{layer}.ssm_a" in get.shapes else of_others for layer in layers]


def _largest(value: Any) -> Any:
    """A count, or the largest of a list with one for each layer, which is 0 where a layer has none."""
    return max(value, default=0) if isinstance(value, list) else value


def _qwen3_5(get: Values) -> dict[str, Any]:
    heads, head_dim = get("ssm.time_step_rank"), get("attention.key_length")
    return _attention(get) | {
        "intermediate_size": get("feed_forward_length", 1),  # of layers without experts
        "head_dim": head_dim,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "layer_types": _kinds(get),
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


def _qwen3_5_moe(get: Values) -> dict[str, Any]:
    layers = range(_num_layers(get))
    return _qwen3_5(get) | {
        "num_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "moe_intermediate_size": get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": get("expert_shared_feed_forward_length"),
        "mlp_only_layers": [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" not in get.shapes],
    }


def _qwen3_next(get: Values) -> dict[str, Any]:
    config = _qwen3_5_moe(get)
    rope = {name: value for name, value in config["rope_parameters"].items() if not name.startswith("mrope")}
    return config | {"rope_parameters": rope}


def _lfm2(get: Values) -> dict[str, Any]:
    by_layer = get("attention.head_count_kv")  # none in layers of convolutions
    if not isinstance(by_layer, list) or not any(by_layer):
        raise ValueError(f"lfm2.attention.head_count_kv must be a list of heads by layer, is {shown(by_layer)}")
    return _attention(get) | {
        "intermediate_size": get("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention" if heads else "conv" for heads in by_layer],
        "norm_eps": get("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": get("shortconv.l_cache"),
        "conv_bias": "blk.0.shortconv.in_proj.bias" in get.shapes,
        "rope_parameters": {"rope_type": "default", "rope_theta": get("rope.freq_base")},
    }


def _mamba(get: Values) -> dict[str, Any]:
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
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in get.shapes,
        "use_bias": "blk.0.ssm_in.bias" in get.shapes,
    }


def _mamba2(get: Values) -> dict[str, Any]:
    names = "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", "use_conv_bias", "use_bias"
    return _mamba(get) | _state_space(get, *names) | {"time_step_rank": "auto"}


def _state_space(get: Values, *names: str) -> dict[str, Any]:
    """Fields of Mamba-2's layers, under these names.

    Heads, channels of a head, groups, size of the state, length of the convolution; whether the convolution has a bias,
    and the projections.
    """
    heads = get("ssm.time_step_rank")
    sizes = heads, get("ssm.inner_size") // heads, get("ssm.group_count"), get("ssm.state_size"), get("ssm.conv_kernel")
    biases = get.any_layer("ssm_conv1d.bias"), get.any_layer("ssm_in.bias")
    return dict(zip(names, (*sizes, *biases), strict=True))


def _attention(get: Values) -> dict[str, Any]:
    """Fields that layers of attention have in all of them."""
    return {
        "hidden_size": get("embedding_length"),
        "num_hidden_layers": _num_layers(get),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": _largest(get("attention.head_count_kv")),
        "max_position_embeddings": get("context_length"),
    }


def _mamba_of_hybrid(get: Values) -> dict[str, Any]:
    names = "n_heads", "d_head", "n_groups", "d_state", "d_conv", "conv_bias", "proj_bias"
    return {
        **_state_space(get, *(f"mamba_{name}" for name in names)),
        "mamba_expand": get("ssm.inner_size") // get("embedding_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "attention_bias": get.any_layer("attn_q.bias"),
    }


def _falcon_h1(get: Values) -> dict[str, Any]:
    if "output.weight" not in get.shapes:
        raise ValueError("it has no output.weight, and does not say by what factor the embedding differs from it")
    return {
        **_attention(get),
        **_mamba_of_hybrid(get),
        "intermediate_size": get("feed_forward_length"),
        "head_dim": get("attention.key_length"),
        "mamba_d_ssm": get("ssm.inner_size"),
        "mamba_rms_norm": get.any_layer("ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # as llama.cpp computes it
        "projectors_bias": get.any_layer("ssm_out.bias"),
        "mlp_bias": get.any_layer("ffn_gate.bias"),
        "rope_parameters": {"rope_type": "default", "rope_theta": get("rope.freq_base")},
    }


def _granite_hybrid(get: Values) -> dict[str, Any]:
    if get("rope.scaling.finetuned", False):
        raise ValueError("general.architecture is granitehybrid with rotary positions (Bamba), which is not read")
    width = _largest(get("feed_forward_length"))
    return {
        **_attention(get),
        **_mamba_of_hybrid(get),
        "intermediate_size": width,
        "shared_intermediate_size": get("expert_shared_feed_forward_length", width),
        "layer_types": _kinds(get),
        "num_local_experts": get("expert_count", 0),
        "num_experts_per_tok": get("expert_used_count", 0),
        "attention_multiplier": get("attention.scale"),
        "embedding_multiplier": get("embedding_scale", 1.0),
        "residual_multiplier": get("residual_scale", 1.0),
        "logits_scaling": get("logit_scale", 1.0),
        "position_embedding_type": None,
    }


def _nemotron_h(get: Values) -> dict[str, Any]:
    kinds = _kinds(get, "mlp")
    for layer, kind in enumerate(kinds):
        if kind == "mlp" and f"blk.{layer}.attn_q.weight" in get.shapes:
            kinds[layer] = "full_attention"
        elif kind == "mlp" and f"blk.{layer}.ffn_gate_inp.weight" in get.shapes:
            kinds[layer] = "moe"
    sizes = "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"
    config = {
        **_attention(get),
        **_state_space(get, *sizes, "use_conv_bias", "use_bias"),
        "layers_block_type": kinds,
        "head_dim": get("attention.key_length"),
        "intermediate_size": _largest(get("feed_forward_length")),
        "layer_norm_epsilon": get("attention.layer_norm_rms_epsilon"),
        "attention_bias": get.any_layer("attn_q.bias"),
        "mlp_bias": get.any_layer("ffn_up.bias"),
    }
    if "moe" not in kinds:
        return config
    groups = get("expert_group_count", 1)
    return config | {
        "n_routed_experts": get("expert_count"),
        "n_shared_experts": get("expert_shared_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "moe_intermediate_size": get("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": get("expert_shared_feed_forward_length"),
        "moe_latent_size": get("moe_latent_size", None),
        "norm_topk_prob": get("expert_weights_norm"),
        "routed_scaling_factor": get("expert_weights_scale"),
        "n_group": groups,
        "topk_group": get("expert_group_used_count") if groups > 1 else 1,
    }


def _of_qwen3_next(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    values = without_logarithm(name, values, config)
    return values - 1 if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight") else values


def _of_qwen3_5(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Value heads of each key head side by side, where llama.cpp has the first of every key head first."""
    values = _of_qwen3_next(name, values, config)
    part = name.rpartition("linear_attn.")[2]
    if part == name or part == "norm.weight":
        return values
    key_heads, value_dim = config["linear_num_key_heads"], config["linear_value_head_dim"]
    per_head = 1 if part in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight") else value_dim
    if part == "out_proj.weight":
        return _grouped(values.T, key_heads, per_head).T
    first = 2 * key_heads * config["linear_key_head_dim"] if part in ("in_proj_qkv.weight", "conv1d.weight") else 0
    return np.concatenate((values[:first], _grouped(values[first:], key_heads, per_head)))


def _merged_qwen3_next(parts: Sequence[np.ndarray], config: Mapping[str, Any]) -> np.ndarray:
    """Queries, keys, values and gates of each key head side by side, where llama.cpp has each for all heads."""
    heads = config["linear_num_key_heads"]
    qkv, gates = parts
    if qkv.ndim != 2:
        return side_by_side(parts, config)
    keys = heads * config["linear_key_head_dim"]
    each = (qkv[:keys], qkv[keys : 2 * keys], qkv[2 * keys :], gates)
    by_head = [rows.reshape(heads, -1, rows.shape[-1]) for rows in each]
    return np.concatenate(by_head, axis=1).reshape(-1, qkv.shape[-1])


def _grouped(rows: np.ndarray, key_heads: int, per_head: int) -> np.ndarray:
    by_head = rows.reshape(-1, key_heads, per_head, *rows.shape[1:])
    return by_head.swapaxes(0, 1).reshape(rows.shape)


def _attention_names(module: str, out: str = "o_proj") -> dict[str, str]:
    of = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": out}
    return {name: f"{module}.{its}" for name, its in of.items()}


def _mamba_names(module: str) -> dict[str, str]:
    return {
        "ssm_in": f"{module}.in_proj",
        "ssm_conv1d": f"{module}.conv1d",
        "ssm_dt.bias": f"{module}.dt_bias",
        "ssm_a": f"{module}.A_log",
        "ssm_d": f"{module}.D",
        "ssm_norm": f"{module}.norm",
        "ssm_out": f"{module}.out_proj",
    }


_MAMBA = {"attn_norm": "norm", **_mamba_names("mixer"), "ssm_x": "mixer.x_proj", "ssm_dt": "mixer.dt_proj"}
_OF_MAMBA: Callable[..., Architecture] = partial(
    Architecture,
    outer={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
    layers="backbone.layers.",
)
_QWEN = {
    **LAYER_NAMES,
    **_mamba_names("linear_attn"),
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
_QWEN_3_5 = _QWEN | {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}
_QWEN_3_NEXT = _QWEN | {
    "ssm_in": "linear_attn.in_proj_qkvz",  # so older files, as the class has it
    "attn_qkv": "linear_attn.in_proj_qkvz",
    "attn_gate": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
}
_FALCON_H1 = {
    **LAYER_NAMES,
    **_mamba_names("mamba"),
    "ffn_norm": "pre_ff_layernorm.weight",  # a name without an ending
    "ffn_norm.weight": "pre_ff_layernorm.weight",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
_GRANITE_HYBRID = {
    **LAYER_NAMES,
    **_mamba_names("mamba"),
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_gate_exps.weight": "block_sparse_moe.experts.gate_up_proj",
    "ffn_up_exps.weight": "block_sparse_moe.experts.gate_up_proj",
    "ffn_down_exps.weight": "block_sparse_moe.experts.down_proj",
    "ffn_gate_shexp": "shared_mlp.input_linear",
    "ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
    "ffn_gate": "shared_mlp.input_linear",  # without experts
    "ffn_up": "shared_mlp.input_linear",
    "ffn_down": "shared_mlp.output_linear",
}
_NEMOTRON_H = Architecture(
    "nemotron_h",
    _nemotron_h,
    {
        "attn_norm": "norm",
        **_mamba_names("mixer"),
        **_attention_names("mixer"),
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        "ffn_up_exps.weight": "mixer.experts.up_proj",
        "ffn_down_exps.weight": "mixer.experts.down_proj",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    },
    {"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"},
)
_LFM_2 = {
    "attn_norm": "operator_norm",
    **_attention_names("self_attn", out="out_proj"),
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_OUTER_LFM_2 = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"}
_OUTER_FALCON_H1 = OUTER_NAMES | {"output_norm": "model.final_layernorm"}
RECURRENT = {
    "qwen35": Architecture("qwen3_5_text", _qwen3_5, _QWEN_3_5, restore=_of_qwen3_5),
    "qwen35moe": Architecture("qwen3_5_moe_text", _qwen3_5_moe, _QWEN_3_5, restore=_of_qwen3_5),
    "qwen3next": Architecture(
        "qwen3_next", _qwen3_next, _QWEN_3_NEXT, restore=_of_qwen3_next, merge=_merged_qwen3_next
    ),
    "lfm2": Architecture("lfm2", _lfm2, _LFM_2, _OUTER_LFM_2),
    "falcon-h1": Architecture("falcon_h1", _falcon_h1, _FALCON_H1, _OUTER_FALCON_H1),
    "granitehybrid": Architecture("granitemoehybrid", _granite_hybrid, _GRANITE_HYBRID),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "mamba": _OF_MAMBA("mamba", _mamba, _MAMBA | {"ssm_dt.bias": "mixer.dt_proj.bias"}),
    "mamba2": _OF_MAMBA("mamba2", _mamba2, _MAMBA),
}
"""By `general.architecture`."""
