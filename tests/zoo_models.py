"""Small random checkpoints of decoders that run by transformers' code, in odd shapes."""

from pathlib import Path
from typing import Any

import transformers
from tiny_models import train_tokenizer

from espalier.engine.models.zoo.small import Sizes, make_small
from espalier.engine.models.zoo.trial import random_model

ODD = Sizes(heads=6, kv_heads=3, head_dim=8, value_dim=4, inner=40, vocabulary=350, experts=8, window=5, positions=256)
"""Other sizes than those that a class is tried with at load; nothing is a multiple of what kernels like."""

_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
GIVEN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "greedy", "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4, "num_dense_layers": 1},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
}
"""Fields without which a type's default configuration makes no model."""


def small_config(kind: str, sizes: Sizes = ODD, **fields: Any) -> Any:
    """The text half's configuration of a model type, by its defaults and `fields`."""
    config = transformers.CONFIG_MAPPING[kind](**fields)
    return make_small(config.get_text_config(decoder=True), sizes)


def write_checkpoint(folder: Path, kind: str, classes: Any = None, sizes: Sizes = ODD, **fields: Any) -> Path:
    """Write a checkpoint of a model type in `folder`, with a tokenizer."""
    return write_model(folder, small_config(kind, sizes, **fields), classes)


def write_model(folder: Path, config: Any, classes: Any = None) -> Path:
    """Write a checkpoint of a configuration in `folder`, with a tokenizer."""
    mapping: Any = classes or transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    random_model(mapping[type(config)], config).save_pretrained(folder)
    train_tokenizer().save_pretrained(folder)
    return folder
