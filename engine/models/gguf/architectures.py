"""The model of a GGUF file, as a class of Espalier's or of transformers': configuration, names and order of values.

Architectures of `tables` are read by a table each, all others by those of transformers.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from espalier.engine.models.config import MAX_COUNTS
from espalier.engine.models.quantization import quiet_imports
from espalier.engine.models.text_files import shown

_KNOWN_AS = {"gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
"""Names that transformers spells in another way."""
_TEXT = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}
"""Model types of the text half, which is all that files of these architectures hold."""
_ROPE_SCALING = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "attn_factor": "attention_factor",
}
_LEFT_OUT = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Caps and widths of experts, which the tables of transformers 5.23 leave out."""
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Modules outside the layers by llama.cpp's names of them, in most classes."""
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The same of those in layers, whose names have a prefix."""
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_MAX_COUNT = 2**30


class Values:
    """The values of a file's metadata under its architecture's name.

    Attributes:
        architecture: that name.
        shapes: of all tensors of all parts, by llama.cpp's names.
    """

    def __init__(self, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.architecture: str = metadata["general.architecture"]
        self.shapes = shapes
        self._metadata = metadata

    def __call__(self, key: str, *default: Any) -> Any:
        """A value by its key; the second argument is its default.

        Raises:
            KeyError: there is neither.
            ValueError: it is a number that no model has.
        """
        name = f"{self.architecture}.{key}"
        value = self._metadata.get(name, *default) if default else self._metadata[name]
        if type(value) is int and not 0 <= value <= _MAX_COUNT:
            raise ValueError(f"{name} must be a whole number up to {_MAX_COUNT:,}, is {shown(value)}")
        return value

    def count(self, key: str, field: str, *default: int) -> int:
        """A whole number, which is called `field` in config.json; raises as a call does."""
        value, most = self(key, *default), MAX_COUNTS[field]
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"{self.architecture}.{key} must be a whole number from 1 to {most:,}, is {shown(value)}")
        return value

    def number(self, key: str, *default: float) -> float:
        """A number above 0; raises as a call does."""
        value = self(key, *default)
        if type(value) not in (int, float) or value <= 0:
            raise ValueError(f"{self.architecture}.{key} must be a number above 0, is {shown(value)}")
        return value

    def any_layer(self, tensor: str) -> bool:
        """True if a layer has a tensor of this name."""
        return any(name.endswith(f".{tensor}") for name in self.shapes)


def side_by_side(parts: Sequence[np.ndarray], config: Mapping[str, Any]) -> np.ndarray:
    """Gate and up, of one product or of each expert."""
    return np.concatenate(parts, axis=-2)


def without_logarithm(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """A tensor's values as they are, but for `A_log`, of which llama.cpp has -exp(A_log)."""
    return np.log(-values) if name.endswith("A_log") else values


@dataclass(frozen=True, slots=True)
class Architecture:
    """Description of one architecture.

    Attributes:
        model_type: of transformers; empty where native code runs it, whose `config` gives it.
        config: fields of `config.json`.
        inner: names of modules in layers, by llama.cpp's without the layer's prefix; of tensors that make up one, in
            order.
        outer: the same of those outside the layers.
        layers: what comes before a layer's number.
        restore: gives a tensor's values as the class has them, from its name and llama.cpp's values.
        merge: the same of a tensor that several make up.
    """

    model_type: str
    config: Callable[[Values], dict[str, Any]]
    inner: Mapping[str, str]
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER_NAMES)
    layers: str = "model.layers."
    restore: Callable[[str, np.ndarray, Mapping[str, Any]], np.ndarray] = without_logarithm
    merge: Callable[[Sequence[np.ndarray], Mapping[str, Any]], np.ndarray] = side_by_side


class MappedModel:
    """The model of a file, by transformers' tables for GGUF."""

    def __init__(self, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Take a file.

        Args:
            metadata: of the file.
            shapes: of all tensors of all parts, by llama.cpp's names.

        Raises:
            ValueError: it holds no decoder.
        """
        if _EMBEDDING not in shapes:
            raise ValueError(f"it has no {_EMBEDDING}: it holds no decoder")
        self._architecture: str = metadata["general.architecture"]
        self._metadata = metadata
        self._shapes = shapes

    @cached_property
    def config(self) -> dict[str, Any]:
        """The same model's `config.json`.

        Raises:
            KeyError: the metadata lacks a value that has no default.
            ValueError: a value means nothing, or the model is of a kind that is not read.
        """
        with quiet_imports():
            from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

        if self._known_as not in GGUF_CONFIG_MAPPING:
            raise self._unread()
        found = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(self._known_as, {}))
        for prefix, table in (
            (self._architecture, _LEFT_OUT | GGUF_CONFIG_MAPPING[self._known_as]),
            ("tokenizer", GGUF_CONFIG_MAPPING["tokenizer"]),
        ):
            for key, name in table.items():
                if isinstance(name, str) and (value := self._metadata.get(f"{prefix}.{key}")) is not None:
                    found[name] = value
        given = {
            name: self._metadata.get(f"{self._architecture}.rope.scaling.{key}") for key, name in _ROPE_SCALING.items()
        }
        rope = {name: value for name, value in given.items() if value is not None}
        scaled = {"rope_scaling": rope} if rope.get("rope_type", "none") != "none" else {}
        return found | self._common_config(_TEXT.get(self._known_as, self._known_as)) | scaled

    @cached_property
    def parts(self) -> dict[str, list[str]]:
        """llama.cpp's names of the tensors that make up each of the class's; its own name for one that has none."""
        found = defaultdict[str, list[str]](list)
        for name in self._shapes:
            found[self._names.get(name) or self._names.get(name.removesuffix(".weight")) or name].append(name)
        return dict(found)

    def read(self, name: str, values: Callable[[str], np.ndarray]) -> torch.Tensor:
        """One of the class's tensors, in the order that it keeps its values in.

        Args:
            name: in the Hugging Face layout.
            values: gives those of a tensor by llama.cpp's name.
        """
        merged: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
        for part in self.parts[name]:
            made = self._processor.process(
                weights=values(part), name=part, tensor_key_mapping=self._names, parsed_parameters=merged
            )
            if made.name is not None:
                return torch.from_numpy(np.ascontiguousarray(made.weights))
        return merged["tensors"][name]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the class's tensors, by their names in the Hugging Face layout; none where files have the same."""
        return {name: tuple(tensor.shape) for name, tensor in self._model.state_dict().items()}

    def _class_of(self, model_type: str) -> str:
        """The class that runs a model type of transformers.

        Raises:
            ValueError: there is no such language model.
        """
        with quiet_imports():  # transformers imports torchao where it finds it
            from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        classes: Mapping[str, Any] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if model_type not in classes:
            raise self._unread()
        return classes[model_type]

    def _unread(self) -> ValueError:
        return ValueError(f"general.architecture is {self._architecture}, which is not read from GGUF files")

    def _common_config(self, model_type: str) -> dict[str, Any]:
        return {
            "architectures": [self._class_of(model_type)] if model_type else [],
            "model_type": model_type,
            "vocab_size": self._shapes[_EMBEDDING][0],
            "tie_word_embeddings": _HEAD not in self._shapes,
        }

    @cached_property
    def _model(self) -> Any:
        import transformers

        config = transformers.CONFIG_MAPPING[self.config["model_type"]].from_dict(self.config)
        with quiet_imports(), torch.device("meta"):
            return getattr(transformers, self.config["architectures"][0])(config)

    @property
    def _known_as(self) -> str:
        return _KNOWN_AS.get(self._architecture, self._architecture)

    @cached_property
    def _processor(self) -> Any:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        kind = TENSOR_PROCESSORS.get(self._architecture) or TENSOR_PROCESSORS.get(self._known_as, TensorProcessor)
        return kind(config=self.config)

    @cached_property
    def _names(self) -> dict[str, str]:
        """The class's names of tensors, by llama.cpp's."""
        from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

        return get_gguf_hf_weights_map(_TopLevels(self._model), self._processor)


class TableModel(MappedModel):
    """The model of a file, by a table of its architecture's names and values."""

    def __init__(self, table: Architecture, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Take a file of the architecture that `table` describes; see `MappedModel`."""
        super().__init__(metadata, shapes)
        self._table = table
        if metadata.get(f"{self._architecture}.ssm.dt_b_c_rms"):
            raise ValueError("general.architecture has norms of time steps (Falcon Mamba), which is not read")

    @cached_property
    def config(self) -> dict[str, Any]:
        """See `MappedModel`."""
        try:
            config = self._table.config(Values(self._metadata, self._shapes))
        except (TypeError, ZeroDivisionError) as error:
            raise ValueError(f"its values for {self._architecture} do not fit together: {error}") from error
        for name, most in MAX_COUNTS.items():
            if type(value := config.get(name, 1)) is not int or not 1 <= value <= most:
                raise ValueError(f"{name} must be a whole number from 1 to {most:,}, is {shown(value)}")
        return self._common_config(self._table.model_type) | config

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `MappedModel`."""
        return super().shapes if self._table.model_type else {}

    @cached_property
    def parts(self) -> dict[str, list[str]]:
        """See `MappedModel`.

        Raises:
            ValueError: two tensors mean the same.
        """
        found, order = defaultdict[str, list[str]](list), list(self._table.inner)
        of_drafts = range(self.config["num_hidden_layers"], self._metadata[f"{self._architecture}.block_count"])
        for name in self._shapes:
            if (layer := _LAYER.fullmatch(name)) and int(layer[1]) in of_drafts:
                continue  # predicts several tokens at once
            found[self._layout_name(name, layer)].append(name)
        for parts in found.values():
            if len(parts) > 1:
                keys = {part: _key(self._table.inner, part.partition(".")[2].partition(".")[2]) for part in parts}
                if not set(order).issuperset(keys.values()):
                    raise ValueError(f"it holds {' and '.join(parts)}, which mean the same tensor")
                parts.sort(key=lambda part: order.index(keys[part]))
        return dict(found)

    def read(self, name: str, values: Callable[[str], np.ndarray]) -> torch.Tensor:
        """See `MappedModel`."""
        parts = [values(part) for part in self.parts[name]]
        merged = parts[0] if len(parts) == 1 else self._table.merge(parts, self.config)
        tensor = torch.from_numpy(np.ascontiguousarray(self._table.restore(name, merged, self.config)))
        shape = torch.Size(self.shapes.get(name, tensor.shape))
        return tensor.reshape(shape) if tensor.numel() == shape.numel() else tensor

    def _layout_name(self, name: str, layer: re.Match[str] | None) -> str:
        names, rest = (self._table.inner, layer[2]) if layer else (self._table.outer, name)
        if (key := _key(names, rest)) not in names:
            return name
        found = names[key] + rest.removeprefix(key)
        return f"{self._table.layers}{layer[1]}.{found}" if layer else found


def _key(names: Mapping[str, str], name: str) -> str:
    """The key that a tensor's name has in a table: the name, or that of its module."""
    return name if name in names else name.rpartition(".")[0]


class _TopLevels:
    """A model as `get_gguf_hf_weights_map` walks it, without the modules in its decoder.

    Names begin at the model or at its decoder. The walk makes a table of all names for each module that it visits,
    which takes seconds for all of them.
    """

    def __init__(self, model: Any, levels: int = 2) -> None:
        self._levels = levels
        self.config = model.config
        self.state_dict = model.state_dict
        self._model = model

    def named_children(self) -> list[tuple[str, Any]]:
        children = self._model.named_children() if self._levels > 1 else ()
        return [(name, _TopLevels(child, self._levels - 1)) for name, child in children if hasattr(child, "config")]
