"""GGUF files of architectures that transformers maps, against the checkpoints that they were made of."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from engine_driver import read, release
from gguf_files import SUFFIXES, finish, write_tokenizer
from plain import plain_logits
from safetensors.torch import load_file
from zoo_models import write_checkpoint

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.families import FAMILIES
from espalier.engine.models.model import load_generator
from espalier.engine.models.options import ModelImpl

ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "gemma2": "gemma2",
    "phi3": "phi3",
    "qwen3_moe": "qwen3moe",
    "starcoder2": "starcoder2",
}
UNSAID: dict[str, dict[str, Any]] = {
    "gemma3_text": {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 4},
    "qwen3_moe": {"norm_topk_prob": True},
}
"""Fields that a file does not hold: they follow from its architecture."""
IDS = [9, 17, 30, 4, 200, 31, 8, 77, 120, 45, 46, 5]


def write_mapped(folder: Path, file: Path) -> Path:
    """Write a checkpoint as llama.cpp's converter does."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(file, architecture)
    write_shape(writer, config)
    write_tokenizer(writer, folder, config["vocab_size"], "qwen2")
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    for name, tensor in stacked(load_file(folder / "model.safetensors")):
        new = names.get_name(name, SUFFIXES)
        assert new, name
        values = tensor.float().numpy()
        writer.add_tensor(
            new, np.ascontiguousarray(values + 1 if "gemma" in architecture and "norm" in name else values)
        )
    finish(writer)
    return file


def stacked(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors; those of experts as one for all of a layer, as llama.cpp has them."""
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        before, found, after = name.partition(".experts.")
        if not found:
            yield name, tensor
        elif after.endswith("gate_up_proj"):  # as transformers 5 saves them
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                yield f"{before}.experts.{part}_proj.weight", half
        elif after == "down_proj":
            yield f"{before}.experts.down_proj.weight", tensor
        else:
            index, _, rest = after.partition(".")
            experts.setdefault(f"{before}.experts.{rest}", {})[int(index)] = tensor
    for name, by_index in experts.items():
        yield name, torch.stack([by_index[i] for i in range(len(by_index))])


def write_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    for name, add in (("rms_norm_eps", writer.add_layer_norm_rms_eps), ("norm_epsilon", writer.add_layer_norm_eps)):
        if name in config:
            add(config[name])
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(name):
            getattr(writer, f"add_{name}")(config[name])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if head_dim := config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_logits_are_those_of_the_checkpoint(kind: str, make_engine: Callable[..., Engine], tmp_path: Path):
    folder = write_checkpoint(tmp_path / kind, kind, **UNSAID.get(kind, {}))
    checkpoint = Checkpoint(write_mapped(folder, tmp_path / "model.gguf"))
    assert checkpoint.decoder_config.impl is (ModelImpl.NATIVE if kind in FAMILIES else ModelImpl.TRANSFORMERS)
    model = load_generator(checkpoint, torch.float32, "cpu")
    engine = make_engine(model)
    sequence = engine.open("generator", [])
    found = torch.from_numpy(read(engine, sequence, IDS))
    release(engine, sequence)
    expected = plain_logits(folder, IDS)
    assert (found - expected).abs().max() / expected.abs().max() < 1e-4


def test_an_architecture_that_nobody_maps_is_named(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "grok")
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    finish(writer)
    with pytest.raises(CheckpointError, match="architecture is grok, which is not read"):
        Checkpoint(tmp_path / "model.gguf")
