"""Qwen2 and Qwen3 (Qwen team, 2024; 2025): windows where asked for, in the later layers or in those that are named.

Qwen2 always has biases on queries, keys and values; Qwen3 has norms of its heads, and biases by `attention_bias`.
"""

from espalier.engine.models.config import (
    FULL,
    SLIDING,
    Fields,
    NativeConfig,
    read_config,
    read_layer_kinds,
    read_window,
)
from espalier.engine.models.families.base import Family


def _read_qwen2(fields: Fields) -> NativeConfig:
    return read_config(fields, windows=_windows(fields), attention_bias=True)


def _read_qwen3(fields: Fields) -> NativeConfig:
    biased = fields.flag("attention_bias")
    return read_config(fields, windows=_windows(fields), attention_bias=biased, out_bias=biased, head_norms=True)


def _windows(fields: Fields) -> list[int | None]:
    count = fields.count("num_hidden_layers")
    if not fields.flag("use_sliding_window"):
        return [None] * count
    window, full = read_window(fields), min(fields.count("max_window_layers", 28, least=0), count)
    kinds = read_layer_kinds(fields, [FULL] * full + [SLIDING] * (count - full))
    return [window if kind == SLIDING else None for kind in kinds]


QWEN2 = Family("qwen2", "Qwen2", _read_qwen2)
QWEN3 = Family("qwen3", "Qwen3", _read_qwen3)
