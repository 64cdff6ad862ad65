"""The decoder families that native code runs, by the `model_type` of their configurations.

A family reads a `config.json` and gives the specification of its decoder, `NativeConfig`: which norms, biases, windows
and rotary positions each layer has, how the MLP is gated, what is scaled, and how its tensors are called. Everything
after that is data. Nothing outside this module decides by a family's name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from espalier.engine.errors import CheckpointError
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
from espalier.engine.models.options import ModelImpl
from espalier.engine.models.text_files import require, shown
from espalier.kernels.rotary import Rotary


@dataclass(frozen=True, slots=True)
class Family:
    """A family of decoders; nothing else decides by its name.

    Attributes:
        model_type: of its configurations.
        class_prefix: the beginning of its classes' names in transformers.
        with_images: `model_type` of checkpoints with images, whose `text_config` is of this family; empty without.
        read: gives the specification of a decoder by the fields of its `config.json`; a `KeyError` names a missing one.
    """

    model_type: str
    class_prefix: str
    read: Callable[[Fields], NativeConfig]
    with_images: str = ""

    @property
    def generator_class(self) -> str:
        """The class of its generators."""
        return f"{self.class_prefix}ForCausalLM"


def _read_llama(fields: Fields) -> NativeConfig:
    """Llama (Touvron et al., 2023), what other families differ from."""
    biased = fields.flag("attention_bias")
    return read_config(fields, attention_bias=biased, out_bias=biased)


def _read_mistral(fields: Fields) -> NativeConfig:
    """Mistral (Jiang et al., 2023): no biases, and one window for all layers."""
    return read_config(fields, windows=(read_window(fields),) * fields.count("num_hidden_layers"))


def _read_qwen2(fields: Fields) -> NativeConfig:
    """Qwen2 (Qwen team, 2024): biases on queries, keys and values."""
    return read_config(fields, windows=_qwen_windows(fields), attention_bias=True)


def _read_qwen3(fields: Fields) -> NativeConfig:
    """Qwen3 (Qwen team, 2025): norms of its heads, and biases by `attention_bias`."""
    biased = fields.flag("attention_bias")
    return read_config(fields, windows=_qwen_windows(fields), attention_bias=biased, out_bias=biased, head_norms=True)


def _qwen_windows(fields: Fields) -> list[int | None]:
    """Windows where asked for, in the later layers or in those that are named."""
    count = fields.count("num_hidden_layers")
    if not fields.flag("use_sliding_window"):
        return [None] * count
    window, full = read_window(fields), min(fields.count("max_window_layers", 28, least=0), count)
    kinds = read_layer_kinds(fields, [FULL] * full + [SLIDING] * (count - full))
    return [window if kind == SLIDING else None for kind in kinds]


_OLD_LONGROPE = ("su", "yarn")
"""Names of LongRoPE in older configurations."""
_PHI_NAMES = {**LAYER_NAMES, "qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)}


def _read_phi3(fields: Fields) -> NativeConfig:
    """Phi-3 and Phi-4-mini (Abdin et al., 2024; Microsoft, 2025; transformers' `modeling_phi3.py`).

    Queries, keys and values are stored as one tensor, gate and up as another. A part of each head turns, stretched by
    LongRoPE for contexts of up to the length it was trained at; beyond that, all positions would turn by other factors.
    """
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
        names=_PHI_NAMES,
    )


_GEMMA_DEFAULTS: dict[str, Any] = {
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
_GEMMA_NAMES = {
    **LAYER_NAMES,
    "attention_post_norm": ("post_attention_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
    "mlp_post_norm": ("post_feedforward_layernorm",),
}


def _read_gemma3(fields: Fields) -> NativeConfig:
    """Gemma 3's text decoder, alone or with images (Gemma team, 2025; transformers' `modeling_gemma3.py`).

    Norms stand before and after attention and MLP, with factors stored less 1; embeddings are scaled by the root of
    their width. Five of six layers have a window, and rotary positions of another base than the sixth, which alone is
    stretched.
    """
    given = {name: value for name, value in fields.raw.items() if value is not None}
    fields = replace(fields, raw=_GEMMA_DEFAULTS | given)
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
        rotaries=(_gemma_rotary(fields, FULL), _gemma_rotary(fields, SLIDING)),
        rotary_of=tuple(int(kind == SLIDING) for kind in kinds),
        attention_bias=biased,
        out_bias=biased,
        head_norms=True,
        post_norms=True,
        norm_offset=1.0,
        query_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=fields.count("hidden_size") ** 0.5,
        names=_GEMMA_NAMES,
    )


def _gemma_rotary(fields: Fields, kind: str) -> Rotary:
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


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", "Llama", _read_llama),
        Family("mistral", "Mistral", _read_mistral),
        Family("qwen2", "Qwen2", _read_qwen2),
        Family("qwen3", "Qwen3", _read_qwen3),
        Family("gemma3_text", "Gemma3", _read_gemma3, with_images="gemma3"),
        Family("phi3", "Phi3", _read_phi3),
    )
}
"""Every family, by its `model_type`."""
_WITH_IMAGES = {family.with_images: family for family in FAMILIES.values() if family.with_images}
"""Families by the `model_type` of checkpoints whose text half they are."""
GENERATOR_CLASSES = tuple(family.generator_class for family in FAMILIES.values())
"""Class names that a generator's `config.json` may give."""


def family_of(model_type: object) -> Family | None:
    """The family that runs checkpoints of a `model_type`, or the text half of them."""
    return (FAMILIES | _WITH_IMAGES).get(model_type) if isinstance(model_type, str) else None


def parse_decoder_config(raw: Mapping[str, Any], place: str = "config.json") -> NativeConfig:
    """Read a decoder's specification; accepts the spellings of transformers 4 and 5.

    Args:
        raw: the configuration.
        place: where it stands, for errors.

    Raises:
        NotNativeError: for what native code has not, though it knows the family.
        CheckpointError: for an unknown model type, a missing key, or a value that means nothing.
    """
    if (family := family_of(model_type := raw.get("model_type", ""))) is None:
        raise CheckpointError(f"{place}: model type {shown(model_type)} is not supported; {', '.join(FAMILIES)} are")
    fields = Fields(raw, place)
    try:
        return family.read(fields if family.model_type == model_type else fields.inner("text_config"))
    except KeyError as missing:
        raise CheckpointError(f"{place} lacks {missing}") from missing


def impl_of(config: Mapping[str, Any], asked: ModelImpl = ModelImpl.AUTO) -> ModelImpl:
    """The code that runs a decoder with this `config.json`: what is asked for, or native code where that can."""
    if asked is not ModelImpl.AUTO:
        return asked
    kind = config.get("model_type", "")
    if isinstance(kind, str) and kind and family_of(kind) is None:
        return ModelImpl.TRANSFORMERS
    try:
        parse_decoder_config(config)
    except NotNativeError:
        return ModelImpl.TRANSFORMERS
    except CheckpointError:  # which is raised again where the decoder is loaded, with the file's name
        pass
    return ModelImpl.NATIVE
