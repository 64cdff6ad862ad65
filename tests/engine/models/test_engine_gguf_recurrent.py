"""GGUF files of architectures with recurrent layers, against the checkpoints that they were made of."""

import json
from collections.abc import Callable, Mapping
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
from tiny_models import edit_json, edit_tensors
from zoo_models import write_checkpoint

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.gguf import tokenizer
from espalier.engine.models.model import load_generator

IDS = [9, 17, 30, 4, 200, 31, 8, 77, 120, 45, 46, 5]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_text": ("qwen35", {"linear_num_key_heads": 4}),
    "lfm2": (
        "lfm2",
        {
            "layer_types": ["conv", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "mamba": ("mamba", {}),
    "mamba2": ("mamba2", {}),
}
"""llama.cpp's names of model types, and fields without which their defaults leave something untried."""
RULES = {"qwen35": "qwen35", "lfm2": "lfm2"}
"""By which their tokenizers split text."""


def as_stored(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """A tensor as llama.cpp's converter writes it."""
    if name.endswith("A_log"):
        values = -np.exp(values)
    if "conv" in name and values.ndim == 3:
        values = values[:, 0]
    if config["model_type"] == "mamba2" and (name.endswith(("A_log", "D", "mixer.norm.weight"))):
        groups = config["n_groups"] if name.endswith("weight") else len(values)
        return values.reshape(groups, -1)
    if config["model_type"] != "qwen3_5_text":
        return values
    if "linear_attn" not in name:
        return values + 1 if "norm" in name else values
    keys, per_key = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    order = [k * per_key + v for v in range(per_key) for k in range(keys)]  # the first head of each key head first
    wide = config["linear_value_head_dim"]
    elements = [head * wide + i for head in order for i in range(wide)]
    before = 2 * keys * config["linear_key_head_dim"]
    if "in_proj_qkv" in name or "conv1d" in name:
        return np.concatenate((values[:before], values[before:][elements]))
    if "in_proj_z" in name:
        return values[elements]
    if "out_proj" in name:
        return values[:, elements]
    return values if "norm" in name else values[order]


def write_recurrent(folder: Path, file: Path, without: str = "") -> Path:
    """Write a checkpoint as llama.cpp's converter does; `without` is a key of its metadata that is left out."""
    config = json.loads((folder / "config.json").read_text())
    architecture = KINDS[config["model_type"]][0]
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in shape_of(config).items():
        name = f"{architecture}.{key}"
        if key == without:
            continue
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    write_tokenizer(
        writer, folder, config["vocab_size"], {"qwen35": "qwen35", "lfm2": "lfm2"}.get(architecture, "qwen2")
    )
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        new = names.get_name(name.replace("dt_bias", "dt_proj.bias"), SUFFIXES)
        assert new, name
        writer.add_tensor(new, np.ascontiguousarray(as_stored(name, tensor.float().numpy(), config)))
    if architecture == "qwen35":  # a layer that predicts two tokens at once
        last = config["num_hidden_layers"]
        writer.add_tensor(f"blk.{last}.nextn.eh_proj.weight", np.zeros((8, 16), np.float32))
        writer.add_tensor(f"blk.{last}.attn_norm.weight", np.ones(8, np.float32))
    finish(writer)
    return file


def shape_of(config: dict[str, Any]) -> dict[str, Any]:
    """The metadata that says what a model is like, behind the architecture's name."""
    shape = {
        "block_count": config["num_hidden_layers"],
        "context_length": config.get("max_position_embeddings", 2**20),
        "embedding_length": config["hidden_size"],
        "attention.layer_norm_rms_epsilon": float(
            next(config[key] for key in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if key in config)
        ),
    }
    match config["model_type"]:
        case "qwen3_5_text":
            return shape | {
                "block_count": config["num_hidden_layers"] + 1,
                "nextn_predict_layers": 1,
                "feed_forward_length": config["intermediate_size"],
                "attention.head_count": config["num_attention_heads"],
                "attention.head_count_kv": config["num_key_value_heads"],
                "attention.key_length": config["head_dim"],
                "attention.value_length": config["head_dim"],
                "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
                "rope.dimension_count": int(
                    config["head_dim"] * config["rope_parameters"].get("partial_rotary_factor", 1)
                ),
                "rope.dimension_sections": [*config["rope_parameters"].get("mrope_section", [11, 11, 10]), 0],
                "ssm.conv_kernel": config["linear_conv_kernel_dim"],
                "ssm.state_size": config["linear_key_head_dim"],
                "ssm.group_count": config["linear_num_key_heads"],
                "ssm.time_step_rank": config["linear_num_value_heads"],
                "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
                "full_attention_interval": 4,
            }
        case "lfm2":
            kinds = config["layer_types"]
            return shape | {
                "feed_forward_length": config["intermediate_size"],
                "attention.head_count": config["num_attention_heads"],
                "attention.head_count_kv": [
                    config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds
                ],
                "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
                "shortconv.l_cache": config["conv_L_cache"],
            }
        case kind:
            heads = config["num_heads"] if kind == "mamba2" else config["time_step_rank"]
            inner = config["num_heads"] * config["head_dim"] if kind == "mamba2" else config["intermediate_size"]
            return shape | {
                "ssm.conv_kernel": config["conv_kernel"],
                "ssm.inner_size": inner,
                "ssm.state_size": config["state_size"],
                "ssm.time_step_rank": heads,
                "ssm.group_count": config.get("n_groups", 1),
                "attention.head_count": 0,
                "feed_forward_length": 0,
            }


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_checkpoint(kind: str, make_engine: Callable[..., Engine], tmp_path: Path):
    folder = write_checkpoint(tmp_path / kind, kind, **KINDS[kind][1])
    model = load_generator(Checkpoint(write_recurrent(folder, tmp_path / "model.gguf")), torch.float32, "cpu")
    assert model.config.state_shapes
    engine = make_engine(model)
    sequence = engine.open("generator", IDS[:3])
    found = torch.from_numpy(read(engine, sequence, IDS[3:]))
    release(engine, sequence)
    expected = plain_logits(folder, IDS)[3:]
    assert (found - expected).abs().max() / expected.abs().max() < 1e-4


def test_a_value_that_is_missing_or_of_another_kind_is_named(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "lfm2", "lfm2", **KINDS["lfm2"][1])
    file = write_recurrent(folder, tmp_path / "model.gguf", without="shortconv.l_cache")
    with pytest.raises(CheckpointError, match=r"lacks 'lfm2.shortconv.l_cache'"):
        Checkpoint(file)


def test_the_rule_of_qwen3_5_splits_words_as_its_tokenizer_does():
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

    assert tokenizer._RULES["qwen35"].split == PRETOKENIZE_REGEX


@pytest.mark.parametrize("architecture", ["qwen3next", "nemotron_h", "falcon-h1", "granitehybrid"])
def test_other_architectures_with_recurrent_layers_are_refused_by_name(architecture: str, tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    finish(writer)
    with pytest.raises(CheckpointError, match=f"architecture is {architecture}, which is not read"):
        Checkpoint(tmp_path / "model.gguf")


def test_a_published_layout_with_sections_of_axes_and_layers_that_predict_several_tokens_is_read(
    make_engine: Callable[..., Engine], tmp_path: Path
):
    folder = write_checkpoint(tmp_path / "qwen", "qwen3_5_text")
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    edit_json(
        folder / "config.json",
        {"rope_parameters": rope | {"mrope_section": [11, 11, 10], "mrope_interleaved": True}},
    )
    expected = plain_logits(folder, IDS)
    more = {f"mtp.{name}.weight": torch.zeros(4, 4) for name in ("fc", "layers.0.self_attn.q_proj", "norm")}
    edit_tensors(folder / "model.safetensors", dict(more))
    engine = make_engine(load_generator(Checkpoint(folder), torch.float32, "cpu"))
    sequence = engine.open("generator", [])
    assert np.allclose(read(engine, sequence, IDS), expected, atol=1e-4)
    release(engine, sequence)
