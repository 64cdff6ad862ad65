"""Phi-3 and Phi-4-mini (Abdin et al., 2024; Microsoft, 2025; transformers' `modeling_phi3.py`).

Queries, keys and values are stored as one tensor, gate and up as another. A part of each head turns, stretched by
LongRoPE for contexts of up to the length it was trained at; beyond that, all positions would turn by other factors.
"""

from dataclasses import replace

from espalier.engine.models.config import LAYER_NAMES, Fields, NativeConfig, read_config, read_rotary, read_window
from espalier.engine.models.families.base import Family

_OLD_LONGROPE = ("su", "yarn")
"""Names of LongRoPE in older configurations."""
_NAMES = {**LAYER_NAMES, "qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)}


def _read(fields: Fields) -> NativeConfig:
    raw = dict(fields.raw)
    for name in ("rope_scaling", "rope_parameters"):
        rope = raw.get(name)
        if isinstance(rope, dict) and any(rope.get(key) in _OLD_LONGROPE for key in ("type", "rope_type")):
            raw[name] = {key: value for key, value in rope.items() if key != "type"} | {"rope_type": "longrope"}
    raw.setdefault("sliding_window", None)
    raw.setdefault("rms_norm_eps", 1e-5)
    raw.setdefault("original_max_position_embeddings", 4096)
    fields = replace(fields, raw=raw)
    return read_config(
        fields,
        windows=(read_window(fields),) * fields.count("num_hidden_layers"),
        rotaries=(read_rotary(fields, partial=True),),
        names=_NAMES,
    )


PHI3 = Family("phi3", "Phi3", _read)
