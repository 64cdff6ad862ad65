"""Architectures of llama.cpp that transformers maps to classes of its own: configuration, names and order of values."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch

from espalier.engine.models.quantization import quiet_imports

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


class MappedArchitecture:
    """The model of a file, by transformers' tables for GGUF."""

    def __init__(self, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Look the architecture up.

        Args:
            metadata: of the file.
            shapes: of all tensors of all parts, by llama.cpp's names.

        Raises:
            ValueError: neither Espalier nor transformers maps it.
        """
        with quiet_imports():  # transformers imports torchao where it finds it
            from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

        self._architecture: str = metadata["general.architecture"]
        self._known_as = _KNOWN_AS.get(self._architecture, self._architecture)
        if self._known_as not in GGUF_CONFIG_MAPPING:
            raise ValueError(f"general.architecture is {self._architecture}, which is not read from GGUF files")
        self._find_class(metadata, shapes, _TEXT.get(self._known_as, self._known_as))

    def _find_class(self, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], model_type: str) -> None:
        """Take the file's model for one of a type of transformers.

        Raises:
            ValueError: there is no such language model, or the file holds no decoder.
        """
        with quiet_imports():
            from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        classes: Mapping[str, Any] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if model_type not in classes:
            architecture = metadata["general.architecture"]
            raise ValueError(f"general.architecture is {architecture}, which is not read from GGUF files")
        if _EMBEDDING not in shapes:
            raise ValueError(f"it has no {_EMBEDDING}: it holds no decoder")
        self._model_type, self._class_name = model_type, classes[model_type]
        self._metadata = metadata
        self._shapes = shapes

    @cached_property
    def config(self) -> dict[str, Any]:
        """The same model's `config.json`."""
        from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

        found = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(self._known_as, {}))
        for prefix, table in (
            (self._architecture, _LEFT_OUT | GGUF_CONFIG_MAPPING[self._known_as]),
            ("tokenizer", GGUF_CONFIG_MAPPING["tokenizer"]),
        ):
            for key, field in table.items():
                if isinstance(field, str) and (value := self._metadata.get(f"{prefix}.{key}")) is not None:
                    found[field] = value.tolist() if isinstance(value, np.ndarray) else value
        scaling = f"{self._architecture}.rope.scaling."
        rope = {
            field: self._metadata[scaling + key]
            for key, field in _ROPE_SCALING.items()
            if scaling + key in self._metadata
        }
        scaled = {"rope_scaling": rope} if rope.get("rope_type", "none") != "none" else {}
        return found | self._common_config() | scaled

    def _common_config(self) -> dict[str, Any]:
        return {
            "architectures": [self._class_name],
            "model_type": self._model_type,
            "vocab_size": self._shapes[_EMBEDDING][0],
            "tie_word_embeddings": _HEAD not in self._shapes,
        }

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the class's tensors, by their names in the Hugging Face layout."""
        return {name: tuple(tensor.shape) for name, tensor in self._model.state_dict().items()}

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
    def _model(self) -> Any:
        import transformers

        config = transformers.CONFIG_MAPPING[self._model_type].from_dict(self.config)
        with quiet_imports(), torch.device("meta"):
            return getattr(transformers, self._class_name)(config)

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
