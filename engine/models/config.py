"""A decoder's shape, read from a checkpoint's raw `config.json`."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from espalier.engine.errors import CheckpointError
from espalier.engine.models.options import ModelImpl
from espalier.engine.models.text_files import require, shown
from espalier.kernels.layout import KVShape
from espalier.kernels.rotary import ROPE_TYPES

TRUNKS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Values of `model_type` that run natively, and the beginning of their class names."""


def generator_class(model_type: str) -> str:
    """The class of a generator of a supported model type."""
    return f"{TRUNKS[model_type]}ForCausalLM"


def impl_of(config: Mapping[str, Any], asked: ModelImpl = ModelImpl.AUTO) -> ModelImpl:
    """The code that runs a decoder with this `config.json`: what is asked for, or native where its type is known."""
    if asked is not ModelImpl.AUTO:
        return asked
    kind = config.get("model_type", "")
    unknown = isinstance(kind, str) and bool(kind) and kind not in TRUNKS
    return ModelImpl.TRANSFORMERS if unknown else ModelImpl.NATIVE


GENERATOR_CLASSES = tuple(map(generator_class, TRUNKS))
"""Class names that a generator's `config.json` may give."""
_NEEDED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "factors": ("factors",)}
"""Keys that the rotary parameters of a type must have."""
_TRAINED_LENGTH = "original_max_position_embeddings"
_MAX_COUNT = 2**30
MAX_COUNTS = {
    "vocab_size": 2**22,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "max_position_embeddings": 2**30,
}
"""Largest numbers that are believed, several times those of any published model; others may be up to 2**30."""
_WINDOW_KINDS = ("full_attention", "sliding_attention")
_MAX_POSITIONS, _WINDOW = 2048, 4096
"""Defaults for configurations without these values."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a Llama-style decoder: RMSNorm, rotary attention with grouped heads, SiLU-gated MLP.

    Attributes:
        rope_scaling: parameters of a long-context rotary variant, or None.
        max_positions: the longest context, in tokens.
        attention_bias: whether the q, k, v projections have biases.
        out_bias: whether the projection out of attention has one.
        head_norms: whether each query and key head has a norm of its own before its rotation.
        kv_layers: what each layer keeps of a token, and for how long.
        impl: the code that runs it.
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
    out_bias: bool
    head_norms: bool
    kv_layers: tuple[KVShape, ...]
    impl: ModelImpl = ModelImpl.NATIVE

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer, how many positions a token sees, its own the last, or None for all before it."""
        return tuple(layer.window for layer in self.kv_layers)

    @property
    def window_shares(self) -> dict[int | None, float]:
        """By window, the share of a token's KV that layers with it keep; None is no window."""
        elements = Counter[int | None]()
        for layer in self.kv_layers:
            elements[layer.window] += layer.elements
        return {window: count / elements.total() for window, count in elements.items()}

    @property
    def layer_products(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of the products of one layer: into attention, out of it, into the MLP, out of it."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        return (heads + 2 * kv_heads, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)

    def kv_bytes_per_token(self, item_bytes: int) -> int:
        """Bytes of a token's keys and values in all layers, with elements of `item_bytes`."""
        return item_bytes * sum(layer.elements for layer in self.kv_layers)


def parse_decoder_config(raw: dict[str, Any], place: str = "config.json") -> DecoderConfig:
    """Read a decoder's shape; accepts the spellings of transformers 4 and 5.

    Args:
        raw: the configuration.
        place: where it stands, for errors.

    Raises:
        CheckpointError: for an unsupported model type or feature, a missing key, or a value that means nothing.
    """
    model_type = raw.get("model_type", "")
    if not isinstance(model_type, str) or model_type not in TRUNKS:
        raise CheckpointError(
            f"{place}: model type {shown(model_type)} is not supported; {', '.join(TRUNKS)} are: generators of the "
            f"classes {', '.join(GENERATOR_CLASSES)}, and reward models over them"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{place}: activation {shown(raw['hidden_act'])} is not supported; silu is")
    fields = _Fields(raw, place)
    if fields.flag("mlp_bias"):
        raise CheckpointError(f"{place}: biases in the MLP are not supported (mlp_bias is true)")
    try:
        return _parse(fields, model_type)
    except KeyError as missing:
        raise CheckpointError(f"{place} lacks {missing}") from missing


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of an object, each read as what it must be; an error names the object's place."""

    raw: Mapping[str, Any]
    place: str

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number; required where there is no default."""
        value = self.raw[name] if default is None else self.raw.get(name)
        if value is None and default is not None:
            value = default
        most = MAX_COUNTS.get(name, _MAX_COUNT)
        if isinstance(value, int) and not isinstance(value, bool) and value > most:
            raise CheckpointError(f"{name} in {self.place} must be at most {most:,}, is {shown(value)}")
        rule = f"a whole number from {least} on"
        return require(self.place, name, value, rule, lambda n: type(n) is int and n >= least)

    def number(self, name: str, default: float) -> float:
        """A number above 0."""
        value = default if self.raw.get(name) is None else self.raw[name]
        return require(
            self.place, name, value, "a number above 0", lambda n: type(n) in (int, float) and 0 < n < math.inf
        )

    def flag(self, name: str) -> bool:
        """True or false, by default false."""
        value = self.raw.get(name)
        return require(self.place, name, False if value is None else value, "true or false", lambda f: type(f) is bool)


def _parse(fields: _Fields, model_type: str) -> DecoderConfig:
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if fields.raw.get("head_dim") is None and hidden % heads:
        raise CheckpointError(
            f"hidden_size {hidden} in {fields.place} cannot be divided among {heads} heads (num_attention_heads), and "
            "there is no head_dim"
        )
    head_dim, kv_heads = fields.count("head_dim", hidden // heads), fields.count("num_key_value_heads", heads)
    if head_dim % 2:
        raise CheckpointError(f"{fields.place} means a head_dim of {head_dim}; rotary positions turn pairs")
    if heads % kv_heads:
        raise CheckpointError(
            f"{fields.place} has num_attention_heads {heads}, which cannot share num_key_value_heads {kv_heads}"
        )
    rope = _rope_parameters(fields)
    qkv_and_out = fields.flag("attention_bias") and model_type in ("llama", "qwen3")
    return DecoderConfig(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=rope if rope.get("rope_type", "default") != "default" else None,
        max_positions=fields.count("max_position_embeddings", _MAX_POSITIONS),
        tied=fields.flag("tie_word_embeddings"),
        attention_bias=model_type == "qwen2" or qkv_and_out,
        out_bias=qkv_and_out,
        head_norms=model_type == "qwen3",
        kv_layers=tuple(KVShape(kv_heads, head_dim, head_dim, window) for window in _windows(fields, model_type)),
    )


def _rope_parameters(fields: _Fields) -> dict[str, Any]:
    """Rotary parameters in one spelling: v5's `rope_parameters`, or v4's `rope_theta` beside `rope_scaling`."""
    raw, place = fields.raw, fields.place
    rope = dict(_rope_object(fields))
    inner = _Fields(rope, f"the rotary parameters in {place}")
    rope["rope_theta"] = inner.number("rope_theta", fields.number("rope_theta", 10_000.0))
    kind = rope.setdefault("rope_type", "default")
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise CheckpointError(f"{place}: rope type {shown(kind)} is not supported; {', '.join(ROPE_TYPES)} are")
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise CheckpointError(f"{place}: rotation of part of a head is not supported (partial_rotary_factor is not 1)")
    if missing := [name for name in _NEEDED.get(kind, ()) if rope.get(name) is None]:
        raise CheckpointError(f"{place}: the rotary parameters of type {kind!r} lack {', '.join(missing)}")
    if kind in ("llama3", "yarn"):
        longest = fields.count("max_position_embeddings", _MAX_POSITIONS)
        rope[_TRAINED_LENGTH] = inner.number(_TRAINED_LENGTH, fields.number(_TRAINED_LENGTH, longest))
        rope["factor"] = inner.number("factor", longest / rope[_TRAINED_LENGTH])
    for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
        inner.number(name, 1.0)
    for name in ("mscale", "mscale_all_dim"):  # where 0 is none
        if rope.get(name) != 0:
            inner.number(name, 1.0)
    if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise CheckpointError(f"high_freq_factor in {inner.place} must be above low_freq_factor")
    if kind == "yarn":
        inner.flag("truncate")
        if rope["rope_theta"] <= 1:
            raise CheckpointError(f"rope_theta in {inner.place} must be above 1 for yarn, is {rope['rope_theta']}")
    return rope


def _rope_object(fields: _Fields) -> Mapping[str, Any]:
    """The object that holds rotary parameters; an empty one where there is none."""
    given = {name: fields.raw[name] for name in ("rope_scaling", "rope_parameters") if fields.raw.get(name)}
    for name, value in given.items():
        require(fields.place, name, value, "an object", lambda it: isinstance(it, dict))
        if nested := next((key for key, inner in value.items() if isinstance(inner, dict)), None):
            raise CheckpointError(
                f"{name} in {fields.place} has parameters of its own for {nested}; one set is supported"
            )
        older = value.get("type")
        given[name] = ({} if older is None else {"rope_type": older}) | {k: v for k, v in value.items() if k != "type"}
    old, new = given.get("rope_scaling", {}), given.get("rope_parameters", {})
    if differing := [key for key in old.keys() & new.keys() if old[key] != new[key]]:
        raise CheckpointError(
            f"{fields.place} gives {differing[0]} in rope_scaling and another one in rope_parameters; leave one out"
        )
    return {**new, **old}


def _windows(fields: _Fields, model_type: str) -> tuple[int | None, ...]:
    """Each layer's window: Mistral's is for all layers, Qwen's only where asked for, and for the later ones."""
    count, raw = fields.count("num_hidden_layers"), fields.raw
    asked = fields.flag("use_sliding_window")
    if model_type != "mistral" and (model_type == "llama" or not asked):
        return (None,) * count
    window = None if raw.get("sliding_window", _WINDOW) is None else fields.count("sliding_window", _WINDOW)
    if model_type == "mistral":
        return (window,) * count
    full = min(fields.count("max_window_layers", 28, least=0), count)
    kinds = raw.get("layer_types") or ["full_attention"] * full + ["sliding_attention"] * (count - full)
    require(fields.place, "layer_types", kinds, "a list", lambda it: isinstance(it, list))
    if len(kinds) != count:
        raise CheckpointError(f"layer_types in {fields.place} has {len(kinds)} items for {count} layers")
    if unknown := [kind for kind in kinds if kind not in _WINDOW_KINDS]:
        raise CheckpointError(
            f"layer_types in {fields.place} has {shown(unknown[0])}; {' and '.join(_WINDOW_KINDS)} are supported"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
