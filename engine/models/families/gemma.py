"""Gemma 3's text decoder, alone or in a checkpoint with images (Gemma team, 2025; transformers' `modeling_gemma3.py`).

Norms stand before and after attention and MLP, with factors stored less 1; embeddings are scaled by the root of their
width. Five of six layers have a window, and rotary positions of another base than the sixth, which alone is stretched.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from espalier.engine.models.config import (
    FULL,
    LAYER_NAMES,
    SLIDING,
    Fields,
    NativeConfig,
    NotNativeError,
    read_config,
    read_layer_kinds,
    read_rotary,
    read_window,
)
from espalier.engine.models.families.base import Family
from espalier.engine.models.text_files import require
from espalier.kernels.rotary import Rotary

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
"""Values of fields that configurations leave out, as transformers has them."""
_THETAS = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}
"""Fields that older configurations have the bases of rotary positions in, and defaults."""
_NAMES = {
    **LAYER_NAMES,
    "attention_post_norm": ("post_attention_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
    "mlp_post_norm": ("post_feedforward_layernorm",),
}


def _read(fields: Fields) -> NativeConfig:
    given = {name: value for name, value in fields.raw.items() if value is not None}
    fields = replace(fields, raw=_DEFAULTS | given)
    fields = replace(fields, raw={**fields.raw, "hidden_act": fields.raw["hidden_activation"]})
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if fields.raw.get(name):
            raise NotNativeError(f"{fields.place}: {name} is not supported in Gemma 3")
    every = fields.count("sliding_window_pattern", fields.count("_sliding_window_pattern", 6))
    count = fields.count("num_hidden_layers")
    kinds = read_layer_kinds(fields, [SLIDING if (i + 1) % every else FULL for i in range(count)])
    window, biased = read_window(fields), fields.flag("attention_bias")
    return read_config(
        fields,
        windows=[window if kind == SLIDING else None for kind in kinds],
        rotaries=(_rotary(fields, FULL), _rotary(fields, SLIDING)),
        rotary_of=tuple(int(kind == SLIDING) for kind in kinds),
        attention_bias=biased,
        out_bias=biased,
        head_norms=True,
        post_norms=True,
        norm_offset=1.0,
        query_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=fields.count("hidden_size") ** 0.5,
        names=_NAMES,
    )


def _rotary(fields: Fields, kind: str) -> Rotary:
    """One kind of layers' rotary positions: `rope_parameters` has them by kind, `rope_scaling` those of `FULL`."""
    by_kind = fields.raw.get("rope_parameters") or {}
    require(fields.place, "rope_parameters", by_kind, "an object", lambda it: isinstance(it, Mapping))
    name, default = _THETAS[kind]
    own = {
        "rope_theta": fields.number(name, default),
        "rope_parameters": by_kind.get(kind),
        "rope_scaling": fields.raw.get("rope_scaling") if kind == FULL else None,
    }
    return read_rotary(replace(fields, raw={**fields.raw, **own}))


GEMMA3 = Family("gemma3_text", "Gemma3", _read, with_images="gemma3")
