"""A configuration of transformers made small, so that a model of the same class takes a moment to make and to run."""

import copy
import re
from dataclasses import asdict, dataclass, fields
from typing import Any

MIN_LAYERS, MAX_LAYERS = 4, 8
_DERIVED = {"hybrid_layer_ids", "attention_hidden_size", "attention_head_dim", "mamba_headdim", "num_query_groups"}
"""Fields that some classes work out from others, and take from a dictionary as they are."""
_OTHERS = {"transformers_version", "dtype", "id2label", "label2id"}
"""Fields that say nothing of a model's layers; labels by number look like values of the first few."""
_STATE_SPACES = ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads")
_STATE_SPACE_DIMS = ("mamba_d_head", "mamba_headdim", "mamba_head_dim")
"""Heads of a state space, and channels of each: together `mamba_d_ssm`, or so many times the hidden size."""
_OF_HEAD = "(head_dim|kv_channels|head_size)"
_LARGEST: dict[str, str | int] = {
    "vocab": "vocabulary",
    "^attention_hidden_size$": "attention_hidden",
    "key_value_heads|kv_heads|head_kv": "kv_heads",
    "^(?!.*index).*(attention_heads|num_heads|n_head)": "heads",
    "rotary_dim": "half_head",
    f"^(?=.*rope).*{_OF_HEAD}": "half_head",
    f"^(?=v_|.*_v_).*{_OF_HEAD}": "value_dim",
    _OF_HEAD: "head_dim",
    "^(hidden_size|embedding_size|word_embed_proj_dim|d_model)$": "hidden",
    "^(?=.*group).*(experts_per_tok|top_?k|num_selected|num_experts_per)": 1,
    "experts_per_tok|top_?k|num_selected|num_experts_per": 2,
    "n_group|num_expert_group": 2,
    "intermediate|ffn_dim|ffn_hidden|n_inner|inner_dim|feed_forward": "inner",
    "^(?!.*(layer|step|freq)).*expert": "experts",
    "window|attention_chunk_size": "window",
    "first_k_dense_replace": 1,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "d_state|state_size": "inner",
    "rank": "rank",
    "per_layer_input": 8,
    "^(max_position_embeddings|n_positions|n_ctx)$": "positions",
}
"""Patterns of names, and the largest number that a field has whose name matches: a size by its name, or the number."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers of a small model; those of its configuration that are smaller stay.

    Attributes:
        window: positions of every window and chunk of attention, fewer than the texts that are tried have.
        softcap: of logits, so low that it changes them.
    """

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 12
    inner: int = 32
    vocabulary: int = 61
    experts: int = 6
    window: int = 4
    positions: int = 128
    softcap: float = 5.0


def make_small(config: Any, sizes: Sizes | None = None) -> Any:
    """A configuration of the same class and features as `config`, a `PreTrainedConfig`, and of these sizes."""
    sizes = sizes or Sizes()
    left_out = _OTHERS | (_DERIVED - {field.name for field in fields(config)})
    raw = {name: value for name, value in config.to_dict().items() if name not in left_out}
    real_names = getattr(config, "attribute_map", {})
    layers_name = real_names.get("num_hidden_layers", "num_hidden_layers")
    if isinstance(count := raw.get(layers_name), int):
        shared = raw.get("num_kv_shared_layers") or 0
        own = _chosen_layers(raw, count, 0, count - shared)
        chosen = own + (_chosen_layers(raw, count, count - shared, count) if shared else [])
        raw = {name: _of_layers(value, count, chosen) for name, value in raw.items()}
        raw[layers_name] = len(chosen)
        raw |= {"num_kv_shared_layers": len(chosen) - len(own)} if shared else {}
    common = {real: name for name, real in real_names.items()}
    shrink = _Shrink(sizes, {common.get(name, name): value for name, value in raw.items()})
    small = {name: shrink(common.get(name, name), value) for name, value in raw.items()}
    return type(config).from_dict(copy.deepcopy(small))


def _chosen_layers(raw: dict[str, Any], count: int, start: int, end: int) -> list[int]:
    """Layers of each kind from `start` up to `end`: first those that differ from all before them, then these again."""
    by_layer = [_as_list(value, count) for value in raw.values() if _as_list(value, count)]
    kinds: dict[str, int] = {}
    for layer in range(start, end):
        kinds.setdefault(repr([each[layer] for each in by_layer]), layer)
    first = list(kinds.values())[:MAX_LAYERS]
    wanted = max(len(first), min(MIN_LAYERS, end - start))
    return (first * wanted)[:wanted]


def _as_list(value: Any, count: int) -> list[Any]:
    """A field's values for each of `count` layers, given in a list or by index; empty where it is no such field."""
    if isinstance(value, list) and len(value) == count:
        return value
    if isinstance(value, dict) and value and all(str(key).isdigit() and int(key) < count for key in value):
        by_index = {int(key): of_layer for key, of_layer in value.items()}
        return [by_index.get(layer) for layer in range(count)]
    return []


def _of_layers(value: Any, count: int, chosen: list[int]) -> Any:
    if not (by_layer := _as_list(value, count)):
        return value
    picked = [by_layer[layer] for layer in chosen]
    return picked if isinstance(value, list) else {i: each for i, each in enumerate(picked) if each is not None}


class _Shrink:
    """Gives the value that a field has in the small configuration."""

    def __init__(self, sizes: Sizes, raw: dict[str, Any]) -> None:
        self._sizes = sizes
        self._raw = raw

        def number(name: str, other: int) -> int:
            return raw[name] if isinstance(raw.get(name), int) else other

        heads = number("num_attention_heads", sizes.heads)
        kv_heads, own_hidden = number("num_key_value_heads", heads), number("hidden_size", heads * sizes.head_dim)
        hidden = min(heads, sizes.heads) * min(number("head_dim", own_hidden // heads), sizes.head_dim)
        inner = min(own_hidden, hidden) * int(raw.get("mamba_expand") or raw.get("expand") or 1)
        spaces = min(next((raw[name] for name in _STATE_SPACES if raw.get(name)), sizes.heads), sizes.heads)
        self._state_space = {"mamba_d_ssm": inner} | dict.fromkeys(_STATE_SPACES, spaces)
        self._state_space |= dict.fromkeys(_STATE_SPACE_DIMS, inner // spaces)
        if "num_heads" in raw and "num_attention_heads" not in raw:
            self._state_space["head_dim"] = inner // min(raw["num_heads"], sizes.heads)
        self._named = asdict(sizes) | {
            "attention_hidden": hidden * max(number("attention_hidden_size", own_hidden) // own_hidden, 1),
            "hidden": hidden,
            "kv_heads": {heads: sizes.heads, 1: 1}.get(kv_heads, sizes.kv_heads),
            "half_head": sizes.head_dim // 2,
            "rank": sizes.head_dim,
        }

    def __call__(self, name: str, value: Any) -> Any:
        """The value for `value` of the field that most configurations call `name`."""
        sizes = self._sizes
        if value is None:
            return {"head_dim": sizes.head_dim, "num_key_value_heads": sizes.heads}.get(name)
        if name.endswith("token_id"):
            ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
            return value if value is False else ends.get(name, 3)
        if name in self._state_space:
            return self._state_space[name]
        if "softcap" in name and value:
            return min(value, sizes.softcap)
        if isinstance(value, dict):
            return self._rope(value) if name in ("rope_parameters", "rope_scaling") else self._inner(value)
        if isinstance(value, list) and value and all(type(each) is int for each in value):
            wide = any(part in name for part in ("intermediate", "inner", "ffn"))
            return [self(name, each) for each in value] if wide else value
        if type(value) is not int or value <= 0:
            return value
        return min(value, self._largest(name) or value)

    def _inner(self, value: dict[Any, Any]) -> dict[Any, Any]:
        """Fields within a field; of one layer, where the keys are numbers."""
        named = {key: self(key, each) for key, each in value.items() if isinstance(key, str)}
        return named or {key: self._inner(each) if isinstance(each, dict) else each for key, each in value.items()}

    def _rope(self, value: dict[str, Any]) -> dict[str, Any]:
        """Rotary parameters with as many factors as the small head has pairs; sections of axes stay as they are."""
        part = value.get("partial_rotary_factor") or self._raw.get("partial_rotary_factor") or 1
        pairs = int(self._sizes.head_dim * part) // 2
        cut = {key: each[:pairs] for key, each in value.items() if key.endswith("factor") and isinstance(each, list)}
        return value | cut

    def _largest(self, name: str) -> int | None:
        """The largest number that a field of this name may have; None for one that says nothing of sizes."""
        size = next((size for pattern, size in _LARGEST.items() if re.search(pattern, name)), None)
        if size in ("head_dim", "value_dim") and self._raw.get(name) == self._raw.get("qk_rope_head_dim"):
            size = "half_head"
        return self._named.get(size) if isinstance(size, str) else size
