"""GGUF files of architectures with recurrent layers, against the checkpoints that they were made of."""

import json
from collections.abc import Callable, Iterator, Mapping
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
    "qwen3_5_moe_text": ("qwen35moe", {"linear_num_key_heads": 4}),
    "qwen3_next": ("qwen3next", {"linear_num_key_heads": 4, "linear_num_value_heads": 8}),
    "falcon_h1": (
        "falcon-h1",
        {
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "attention_in_multiplier": 1.25,
            "attention_out_multiplier": 0.9375,
            "key_multiplier": 0.39,
            "mlp_multipliers": [0.88, 0.31],
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.23,
            "ssm_multipliers": [0.35, 0.25, 0.17, 0.5, 0.31],
            "embedding_multiplier": 5.6,
            "lm_head_multiplier": 0.039,
        },
    ),
    "granitemoehybrid": (
        "granitehybrid",
        {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "attention_multiplier": 0.25,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
        },
    ),
    "nemotron_h": ("nemotron_h_moe", {"routed_scaling_factor": 2.5}),
    "mamba": ("mamba", {}),
    "mamba2": ("mamba2", {}),
}
"""llama.cpp's names of model types, and fields without which their defaults leave something untried."""
RULES = {
    "qwen35": "qwen35",
    "qwen35moe": "qwen35",
    "lfm2": "lfm2",
    "falcon-h1": "falcon-h1",
    "granitehybrid": "dbrx",
    "nemotron_h": "tekken",
    "nemotron_h_moe": "tekken",
}
"""By which their tokenizers split text; others' is `qwen2`."""


def as_stored(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """A tensor as llama.cpp's converter writes it."""
    if name.endswith("A_log"):
        values = -np.exp(values)
    if "conv" in name and values.ndim == 3:
        values = values[:, 0]
    match config["model_type"]:
        case "qwen3_5_text" | "qwen3_5_moe_text":
            return of_qwen3_5(name, values, config)
        case "qwen3_next":
            return values + 1 if "norm.weight" in name and "linear_attn.norm" not in name else values
        case "falcon_h1":
            values = multiplied(name, values, config)
        case "granitemoehybrid" | "nemotron_h" if name.endswith(("q_proj.weight", "k_proj.weight")):
            kind = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            pairs = values.reshape(config[kind], 2, -1, values.shape[1])  # rotated by neighbours, if it were rotated
            return pairs.swapaxes(1, 2).reshape(values.shape)
    if name.endswith(("A_log", ".D")) and config["model_type"] != "mamba":
        return values.reshape(-1, 1)
    if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        return values.reshape(config.get("n_groups") or config["mamba_n_groups"], -1)
    return values


def multiplied(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """A tensor of Falcon-H1 times the factor that its configuration gives to what it computes."""
    into, (gate, down) = config["attention_in_multiplier"], config["mlp_multipliers"]
    factors = {
        "gate_proj": gate,
        "down_proj": down,
        "q_proj": into,
        "k_proj": into * config["key_multiplier"],
        "v_proj": into,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    module = name.split(".")[-2]
    if module == "in_proj":
        inner, group = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        parts = np.repeat(config["ssm_multipliers"], [inner, inner, group, group, config["mamba_n_heads"]])
        return values * (config["ssm_in_multiplier"] * parts[:, None]).astype(np.float32)
    return values * np.float32(factors.get(module, 1.0))


def of_qwen3_5(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """A tensor of Qwen3.5 with the first value head of each key head first."""
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


def tensors_of(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors as llama.cpp has them, by names that its table knows: experts together, gate and up apart."""
    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        values = tensor.float().numpy()
        before, its_expert, after = name.partition(".experts.")
        if its_expert and after[0].isdigit():
            number, _, projection = after.partition(".")
            stacked = experts.setdefault(f"{before.replace('backbone', 'model')}.experts.{projection}", [])
            assert int(number) == len(stacked) < 10
            stacked.append(values)
        elif name.endswith("in_proj_qkvz.weight"):
            keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
            per_key = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
            by_head = np.split(
                values.reshape(keys, -1, values.shape[1]), np.cumsum([key_dim, key_dim, per_key]), axis=1
            )
            *qkv, gates = (rows.reshape(-1, values.shape[1]) for rows in by_head)
            yield name.replace("in_proj_qkvz", "in_proj_qkv"), np.concatenate(qkv)
            yield name.replace("in_proj_qkvz", "in_proj_z"), gates
        elif name.endswith(("block_sparse_moe.input_linear.weight", "shared_mlp.input_linear.weight")):
            gate, up = np.split(values, 2, axis=-2)
            alone = "shared_mlp" in name and not config["num_local_experts"]
            kind = "" if alone else "_shexp" if "shared_mlp" in name else "_exps"
            layer = name.split(".")[2]
            yield f"blk.{layer}.ffn_gate{kind}.weight", gate
            yield f"blk.{layer}.ffn_up{kind}.weight", up
        elif name.endswith("shared_mlp.output_linear.weight") and not config["num_local_experts"]:
            yield f"blk.{name.split('.')[2]}.ffn_down.weight", values
        else:
            yield name, as_stored(name, values, config)
    for name, stacked in experts.items():
        yield name.replace(".mixer.", ".mlp."), np.stack(stacked)


def write_recurrent(folder: Path, file: Path, **changed: Any) -> Path:
    """Write a checkpoint as llama.cpp's converter does; None for a value of its metadata leaves it out."""
    config = json.loads((folder / "config.json").read_text())
    architecture = KINDS[config["model_type"]][0]
    if architecture == "nemotron_h_moe" and "moe" not in config["layers_block_type"]:
        architecture = "nemotron_h"
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in (shape_of(config) | changed).items():
        name = f"{architecture}.{key}"
        if value is None:
            continue
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, value)
    write_tokenizer(writer, folder, config["vocab_size"], RULES.get(architecture, "qwen2"))
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, num_layers(config))
    for name, values in tensors_of(folder, config):
        known = name.replace("dt_bias", "dt_proj.bias").replace("correction_bias", "correction.bias")
        new = name if name.startswith("blk.") else names.get_name(known, SUFFIXES)
        assert new, name
        writer.add_tensor(new, np.ascontiguousarray(values))
    if architecture.startswith("qwen35"):  # a layer that predicts two tokens at once
        last = config["num_hidden_layers"]
        writer.add_tensor(f"blk.{last}.nextn.eh_proj.weight", np.zeros((8, 16), np.float32))
        writer.add_tensor(f"blk.{last}.attn_norm.weight", np.ones(8, np.float32))
    finish(writer)
    return file


def num_layers(config: Mapping[str, Any]) -> int:
    return config.get("num_hidden_layers") or len(config["layers_block_type"])


def shape_of(config: dict[str, Any]) -> dict[str, Any]:
    """The metadata that says what a model is like, behind the architecture's name."""
    shape = {
        "block_count": num_layers(config),
        "context_length": config.get("max_position_embeddings", 2**20),
        "embedding_length": config["hidden_size"],
        "attention.layer_norm_rms_epsilon": float(
            next(config[key] for key in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if key in config)
        ),
    }
    match config["model_type"]:
        case "qwen3_5_text" | "qwen3_5_moe_text" | "qwen3_next":
            if config["model_type"] != "qwen3_next":
                shape |= {
                    "block_count": config["num_hidden_layers"] + 1,
                    "nextn_predict_layers": 1,
                    "rope.dimension_sections": [*config["rope_parameters"].get("mrope_section", [11, 11, 10]), 0],
                }
            if "num_experts" in config:
                shape |= {
                    "expert_count": config["num_experts"],
                    "expert_used_count": config["num_experts_per_tok"],
                    "expert_feed_forward_length": config["moe_intermediate_size"],
                    "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
                }
            if "intermediate_size" in config:
                shape["feed_forward_length"] = config["intermediate_size"]
            return shape | {
                "attention.head_count": config["num_attention_heads"],
                "attention.head_count_kv": config["num_key_value_heads"],
                "attention.key_length": config["head_dim"],
                "attention.value_length": config["head_dim"],
                "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
                "rope.dimension_count": int(
                    config["head_dim"] * config["rope_parameters"].get("partial_rotary_factor", 1)
                ),
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
        case "falcon_h1":
            return shape | {
                "feed_forward_length": config["intermediate_size"],
                "attention.head_count": config["num_attention_heads"],
                "attention.head_count_kv": config["num_key_value_heads"],
                "attention.key_length": config.get("head_dim")
                or config["hidden_size"] // config["num_attention_heads"],
                "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
                **mamba_shape(config),
            }
        case "granitemoehybrid":
            return shape | {
                "context_length": 2**20,
                "feed_forward_length": config["intermediate_size"],
                "expert_shared_feed_forward_length": config["shared_intermediate_size"],
                "expert_count": config["num_local_experts"],
                "expert_used_count": config["num_experts_per_tok"],
                "attention.head_count": config["num_attention_heads"],
                "attention.head_count_kv": [
                    config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in config["layer_types"]
                ],
                "attention.scale": config["attention_multiplier"],
                "embedding_scale": config["embedding_multiplier"],
                "residual_scale": config["residual_multiplier"],
                "logit_scale": config["logits_scaling"],
                "rope.scaling.finetuned": False,
                **mamba_shape(config),
            }
        case "nemotron_h":
            kinds, its_experts = config["layers_block_type"], dict[str, Any]()
            wide = {"mlp": config["intermediate_size"], "moe": config["moe_intermediate_size"]}
            if "moe" in kinds:
                its_experts = {
                    "expert_count": config["n_routed_experts"],
                    "expert_used_count": config["num_experts_per_tok"],
                    "expert_feed_forward_length": config["moe_intermediate_size"],
                    "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
                    "expert_shared_count": config["n_shared_experts"],
                    "expert_group_count": config["n_group"],
                    "expert_weights_norm": config["norm_topk_prob"],
                    "expert_weights_scale": config["routed_scaling_factor"],
                }
                if config["moe_latent_size"]:
                    its_experts["moe_latent_size"] = config["moe_latent_size"]
            return (
                shape
                | its_experts
                | {
                    "feed_forward_length": [wide.get(kind, 0) for kind in kinds],
                    "attention.head_count": config["num_attention_heads"],
                    "attention.head_count_kv": [
                        config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds
                    ],
                    "attention.key_length": config["head_dim"],
                    "ssm.conv_kernel": config["conv_kernel"],
                    "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
                    "ssm.state_size": config["ssm_state_size"],
                    "ssm.time_step_rank": config["mamba_num_heads"],
                    "ssm.group_count": config["n_groups"],
                }
            )
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


def mamba_shape(config: Mapping[str, Any]) -> dict[str, int]:
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.inner_size": config["mamba_n_heads"] * config["mamba_d_head"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.time_step_rank": config["mamba_n_heads"],
        "ssm.group_count": config["mamba_n_groups"],
    }


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_checkpoint(kind: str, make_engine: Callable[..., Engine], tmp_path: Path):
    check_logits(kind, {}, make_engine, tmp_path)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("granitemoehybrid", {"num_local_experts": 0}),
        ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}),
        ("nemotron_h", {"moe_latent_size": 16}),
    ],
    ids=["granite without experts", "nemotron without experts", "nemotron with latent experts"],
)
def test_logits_of_other_layouts_of_a_type_are_those_of_the_checkpoint(
    kind: str, fields: dict[str, Any], make_engine: Callable[..., Engine], tmp_path: Path
):
    check_logits(kind, fields, make_engine, tmp_path)


def check_logits(kind: str, fields: dict[str, Any], make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / kind, kind, **KINDS[kind][1] | fields)
    vary(folder)
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
    file = write_recurrent(folder, tmp_path / "model.gguf", **{"shortconv.l_cache": None})
    with pytest.raises(CheckpointError, match=r"lacks 'lfm2.shortconv.l_cache'"):
        Checkpoint(file)


def test_the_rule_of_qwen3_5_splits_words_as_its_tokenizer_does():
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

    assert tokenizer._RULES["qwen35"].split == PRETOKENIZE_REGEX


def vary(folder: Path) -> None:
    """Give vectors that begin as ones or zeros random values, so that none may take another's place."""
    file = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(7)
    changed = {
        name: tensor + torch.rand(tensor.shape, generator=generator)
        for name, tensor in load_file(file).items()
        if tensor.ndim == 1
    }
    edit_tensors(file, changed)


def test_what_a_file_cannot_say_is_refused(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "falcon", "falcon_h1", tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"no output.weight, and does not say by what factor"):
        Checkpoint(write_recurrent(folder, tmp_path / "falcon.gguf"))
    folder = write_checkpoint(tmp_path / "granite", "granitemoehybrid", **KINDS["granitemoehybrid"][1])
    with pytest.raises(CheckpointError, match=r"lacks 'granitehybrid.attention.scale'"):
        Checkpoint(write_recurrent(folder, tmp_path / "granite.gguf", **{"attention.scale": None}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ssm.time_step_rank": 0}, "do not fit together"),
        ({"attention.head_count_kv": ["one", "two"]}, "num_key_value_heads must be a whole number"),
        ({"attention.head_count_kv": [0, 0, 0, 0]}, "num_key_value_heads must be a whole number"),
        ({"feed_forward_length": "wide"}, "intermediate_size must be a whole number"),
        ({"block_count": 1.5}, "do not fit together"),
        ({"rope.scaling.finetuned": True}, "Bamba"),
    ],
)
def test_values_that_mean_nothing_are_refused(changed: dict[str, Any], message: str, tmp_path: Path):
    folder = write_checkpoint(tmp_path / "granite", "granitemoehybrid", **KINDS["granitemoehybrid"][1])
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(write_recurrent(folder, tmp_path / "granite.gguf", **changed))


@pytest.mark.parametrize("architecture", ["jamba", "plamo2", "kimi-linear"])
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
