"""A decoder's shape, and the fields of a checkpoint's raw `config.json` that all families read alike."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from espalier.engine.errors import CheckpointError
from espalier.engine.models.options import ModelImpl
from espalier.engine.models.text_files import A_FLAG, A_LIST, AN_OBJECT, require, shown
from espalier.kernels.layers import Activation, DecoderSpec
from espalier.kernels.layout import KVShape, StateShape, state_bytes
from espalier.kernels.rotary import ROPE_TYPES, Rotary

_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor",),
    "factors": ("factors",),
}
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
LAYER_NAMES: Mapping[str, tuple[str, ...]] = {
    "attention_norm": ("input_layernorm",),
    "query_norm": ("self_attn.q_norm",),
    "key_norm": ("self_attn.k_norm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Modules of Llama's layers that hold a field of `LayerWeights`; where there are several, their rows stand one below
the other."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers, as `layer_types` has them."""
_MAX_POSITIONS, _WINDOW = 2048, 4096
"""Defaults for configurations without these values."""


class NotNativeError(CheckpointError):
    """A decoder of a native family has what native code has not; transformers' code may run it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder, whatever code runs it.

    Attributes:
        rotaries: the kinds of rotary positions that its layers have.
        max_positions: the longest context, in tokens.
        kv_layers: what each layer keeps of a token, and for how long.
        state_shapes: parts of the recurrent state that it keeps of a sequence; empty for a decoder without.
        impl: the code that runs it.
        tied_names: the embedding's weight and the head's, which are one if `tied`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotaries: tuple[Rotary, ...]
    max_positions: int
    tied: bool
    kv_layers: tuple[KVShape, ...]
    state_shapes: tuple[StateShape, ...] = ()
    impl: ModelImpl = ModelImpl.NATIVE
    tied_names: tuple[str, str] = "model.embed_tokens.weight", "lm_head.weight"

    @property
    def rope_theta(self) -> float:
        """Base of the first kind of rotary positions; 0 without."""
        return self.rotaries[0].theta if self.rotaries else 0.0

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

    @property
    def layer_weights(self) -> int:
        """Number of weights of the products of all layers, without the head's."""
        return self.num_layers * sum(rows * columns for rows, columns in self.layer_products)

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's recurrent state; 0 for a decoder without."""
        return state_bytes(self.state_shapes)

    def kv_bytes_per_token(self, item_bytes: int) -> int:
        """Bytes of a token's keys and values in all layers, with elements of `item_bytes`."""
        return item_bytes * sum(layer.elements for layer in self.kv_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeConfig(DecoderConfig):
    """The specification of a decoder that native code runs: RMSNorm, rotary attention, a gated MLP.

    Attributes:
        rotary_of: for each layer, which of `rotaries` it has; empty for the first.
        attention_bias: whether the q, k, v projections have biases.
        out_bias: whether the projection out of attention has one.
        head_norms: whether each query and key head has a norm of its own before its rotation.
        post_norms: whether attention's and the MLP's results are normalised, too.
        norm_offset: what is added to the stored factors of norms.
        activation, query_scale, embedding_scale: see `DecoderSpec`.
        names: the modules of a layer, as in `LAYER_NAMES`.
    """

    norm_eps: float
    rotary_of: tuple[int, ...] = ()
    attention_bias: bool = False
    out_bias: bool = False
    head_norms: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    activation: Activation = Activation.SILU
    query_scale: float | None = None
    embedding_scale: float = 1.0
    names: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: LAYER_NAMES)

    @property
    def spec(self) -> DecoderSpec:
        """Description of the layers, from which a backend builds them: what is called so here, too."""
        return DecoderSpec(**{name: getattr(self, name) for name in DecoderSpec.__dataclass_fields__})


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of an object, each read as what it must be; an error names the object's place."""

    raw: Mapping[str, Any]
    place: str

    def inner(self, name: str) -> "Fields":
        """The fields of an object in this one."""
        value = require(self.place, name, self.raw[name], *AN_OBJECT)
        return Fields(value, f"{name} in {self.place}")

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
        return require(self.place, name, value, "a number above 0", _is_above_0)

    def numbers(self, name: str, count: int) -> list[float]:
        """A list of `count` numbers above 0; required."""
        value, rule = self.raw[name], f"a list of {count} numbers above 0"
        right = isinstance(value, list) and len(value) == count and all(map(_is_above_0, value))
        return require(self.place, name, value, rule, lambda _: right)

    def flag(self, name: str) -> bool:
        """True or false; the latter where it is left out."""
        value = False if self.raw.get(name) is None else self.raw[name]
        return require(self.place, name, value, *A_FLAG)


def _is_above_0(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def read_config(
    fields: Fields, windows: Sequence[int | None] = (), rotaries: tuple[Rotary, ...] = (), **others: Any
) -> NativeConfig:
    """The specification of a decoder, by the fields that all families have in common.

    Args:
        fields: of the configuration.
        windows: of each layer; empty for none.
        rotaries: the kinds of rotary positions; empty for the one that `fields` describes.
        others: fields of `NativeConfig` in which a family differs from Llama.

    Raises:
        NotNativeError: the decoder has what native code has not.
        CheckpointError: a missing key, or a value that means nothing.
        KeyError: a missing key, by its name.
    """
    heads, layers = fields.count("num_attention_heads"), fields.count("num_hidden_layers")
    head_dim, kv_heads = read_head_dim(fields), fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        shared = f"num_key_value_heads {kv_heads}"
        raise CheckpointError(f"num_attention_heads {heads} in {fields.place} cannot share {shared}")
    rotaries = rotaries or (read_rotary(fields),)
    longest = fields.count("max_position_embeddings", _MAX_POSITIONS)
    found: dict[str, Any] = {
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": fields.count("hidden_size"),
        "intermediate_size": fields.count("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "activation": _activation(fields),
        "rotaries": rotaries,
        "max_positions": min(longest, *(_usable_length(rotary, longest) for rotary in rotaries)),
        "tied": fields.flag("tie_word_embeddings"),
        "kv_layers": tuple(KVShape(kv_heads, head_dim, head_dim, window) for window in windows or (None,) * layers),
    }
    return NativeConfig(**found | others)


def read_head_dim(fields: Fields) -> int:
    """Elements of a head: `head_dim`, or else an equal share of `hidden_size`."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if fields.raw.get("head_dim") is None and hidden % heads:
        shares = f"{heads} heads (num_attention_heads)"
        raise CheckpointError(f"hidden_size {hidden} in {fields.place} cannot be divided among {shares}")
    head_dim = fields.count("head_dim", hidden // heads)
    if head_dim % 2:
        raise CheckpointError(f"{fields.place} means a head_dim of {head_dim}; rotary positions turn pairs")
    return head_dim


def read_layer_kinds(fields: Fields, default: Sequence[str]) -> list[str]:
    """`FULL` or `SLIDING` for each layer, as `layer_types` says, or else `default`."""
    kinds = fields.raw.get("layer_types") or list(default)
    require(fields.place, "layer_types", kinds, *A_LIST)
    if len(kinds) != len(default):
        raise CheckpointError(f"layer_types in {fields.place} has {len(kinds)} items for {len(default)} layers")
    if unknown := [kind for kind in kinds if kind not in (FULL, SLIDING)]:
        raise CheckpointError(f"layer_types in {fields.place} has {shown(unknown[0])}, not {FULL} or {SLIDING}")
    return kinds


def read_window(fields: Fields) -> int | None:
    """`sliding_window`: how many positions a token sees; None where it is null."""
    given_null = "sliding_window" in fields.raw and fields.raw["sliding_window"] is None
    return None if given_null else fields.count("sliding_window", _WINDOW)


def read_rotary(fields: Fields, partial: bool = False) -> Rotary:
    """Rotary positions in one spelling: v5's `rope_parameters`, or v4's `rope_theta` beside `rope_scaling`.

    `partial` families have heads of which only a part turns, by `partial_rotary_factor`.
    """
    place = fields.place
    rope = dict(_rope_object(fields))
    inner = Fields(rope, f"the rotary parameters in {place}")
    rope["rope_theta"] = inner.number("rope_theta", fields.number("rope_theta", 10_000.0))
    kind = rope.setdefault("rope_type", "default")
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise CheckpointError(f"{place}: rope type {shown(kind)} is not supported; {', '.join(ROPE_TYPES)} are")
    share = inner.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if share != 1.0 and not partial:
        raise CheckpointError(f"{place}: rotation of part of a head is not supported (partial_rotary_factor is not 1)")
    dims = int(read_head_dim(fields) * share)
    if dims % 2 or not 0 < share <= 1:
        raise CheckpointError(f"partial_rotary_factor in {place} means {dims} elements of a head, which are no pairs")
    if missing := [name for name in _NEEDED.get(kind, ()) if rope.get(name) is None]:
        raise CheckpointError(f"{place}: the rotary parameters of type {kind!r} lack {', '.join(missing)}")
    if kind in ("llama3", "yarn", "longrope"):
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
    if kind == "longrope":
        inner.numbers("short_factor", dims // 2)
    return Rotary(float(rope["rope_theta"]), None if kind == "default" else rope, None if share == 1.0 else dims)


def _usable_length(rotary: Rotary, longest: int) -> int:
    """The context that one kind of rotary positions is good for: LongRoPE has other factors beyond a length."""
    scaling = rotary.scaling or {}
    return int(scaling[_TRAINED_LENGTH]) if scaling.get("rope_type") == "longrope" else longest


def _activation(fields: Fields) -> Activation:
    """The activation of the MLP's gate; the MLP has no biases."""
    name = fields.raw.get("hidden_act", Activation.SILU)
    require(fields.place, "hidden_act", name, "a name", lambda it: isinstance(it, str))
    if name not in list(Activation):
        raise NotNativeError(f"{fields.place}: activation {shown(name)} is not supported; {', '.join(Activation)} are")
    if fields.flag("mlp_bias"):
        raise NotNativeError(f"{fields.place}: biases in the MLP are not supported (mlp_bias is true)")
    return Activation(name)


def _rope_object(fields: Fields) -> Mapping[str, Any]:
    """The object that holds rotary parameters; an empty one where there is none."""
    given = {name: fields.raw[name] for name in ("rope_scaling", "rope_parameters") if fields.raw.get(name)}
    for name, value in given.items():
        require(fields.place, name, value, *AN_OBJECT)
        if nested := next((key for key, inner in value.items() if isinstance(inner, dict)), None):
            raise CheckpointError(f"{name} in {fields.place} has parameters of its own for {nested}, which is not read")
        older = value.get("type")
        given[name] = ({} if older is None else {"rope_type": older}) | {k: v for k, v in value.items() if k != "type"}
    old, new = given.get("rope_scaling", {}), given.get("rope_parameters", {})
    if differing := [key for key in old.keys() & new.keys() if old[key] != new[key]]:
        both = "rope_scaling and rope_parameters"
        raise CheckpointError(f"{fields.place}: {differing[0]} differs in {both}; leave one out")
    return {**new, **old}
