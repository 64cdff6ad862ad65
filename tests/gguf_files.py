"""Checkpoints written as GGUF files the way llama.cpp's converter does it, by the `gguf` package's own writer."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType, TokenType
from gguf.quants import quantize
from safetensors.torch import load_file

_ARCHITECTURES = {"qwen2": "qwen2", "qwen3": "qwen3", "llama": "llama", "mistral": "llama"}
_SCALINGS = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}


def write_gguf(
    folder: Path,
    file: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    rule: str = "qwen2",
    tensors_a_part: int = 0,
) -> Path:
    """Write a checkpoint in Hugging Face layout with a byte-level tokenizer as a GGUF file.

    Args:
        folder: the checkpoint; its weights are one safetensors file.
        file: where to; of several parts the first is returned.
        kind: how matrices are packed where their rows divide into blocks; vectors stay in float32.
        rule: the name of the rule by which the tokenizer splits text.
        tensors_a_part: for a file in several parts, the most tensors of one.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=tensors_a_part)
    _write_shape(writer, config)
    write_tokenizer(writer, folder, config["vocab_size"], rule)
    _write_sampling(writer, folder / "generation_config.json")
    names = gguf.get_tensor_name_map(_model_arch(architecture), config["num_hidden_layers"])
    if (factors := _rope_factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = np.ascontiguousarray(tensor.float().numpy())
        if architecture == "llama" and (heads := _heads_of(name, config)):
            values = _neighbours(values, heads)
        stored = kind if values.ndim > 1 and values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else None
        new = f"cls.output.{name.rpartition('.')[2]}" if name.startswith("score.") else names.get_name(name, SUFFIXES)
        assert new, name
        if stored is None or stored is GGMLQuantizationType.F32:
            writer.add_tensor(new, values)
        else:
            packed = quantize(values, stored)
            writer.add_tensor(new, packed, raw_dtype=stored)
    finish(writer)
    return file if not tensors_a_part else sorted(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))[0]


SUFFIXES = (".weight", ".bias")


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tokenizer(writer: gguf.GGUFWriter, folder: Path, size: int, rule: str) -> None:
    """Tokens, merges and special tokens of a byte-level tokenizer; ids without a token get one marked as unused."""
    read = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    added = {token["id"]: token for token in read["added_tokens"]}
    ids = {i: token for token, i in read["model"]["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    special = {True: TokenType.CONTROL, False: TokenType.USER_DEFINED}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list([ids.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types(
        [
            special[added[i]["special"]] if i in added else TokenType.NORMAL if i in ids else TokenType.UNUSED
            for i in range(size)
        ]
    )
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in read["model"]["merges"]])
    numbers = {token: i for i, token in ids.items()}
    writer.add_eos_token_id(numbers[settings["eos_token"]])
    writer.add_pad_token_id(numbers[settings["pad_token"]])
    template = folder / "chat_template.jinja"
    writer.add_chat_template(template.read_text() if template.is_file() else settings["chat_template"])


def _write_shape(writer: gguf.GGUFWriter, config: dict) -> None:
    heads, rope = config["num_attention_heads"], config["rope_parameters"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if config["model_type"] != "qwen2":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    if config["model_type"] == "mistral" and config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])
    if (scaling := _SCALINGS.get(rope["rope_type"])) is not None:
        writer.add_rope_scaling_type(scaling)
        writer.add_rope_scaling_factor(rope["factor"])
        if original := rope.get("original_max_position_embeddings"):
            writer.add_rope_scaling_orig_ctx_len(original)


def _write_sampling(writer: gguf.GGUFWriter, file: Path) -> None:
    said = json.loads(file.read_text()) if file.is_file() else {}
    add = {
        "temperature": writer.add_sampling_temp,
        "top_k": writer.add_sampling_top_k,
        "top_p": writer.add_sampling_top_p,
        "repetition_penalty": writer.add_sampling_penalty_repeat,
    }
    for name in add.keys() & said.keys():
        add[name](said[name])


def _model_arch(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def _heads_of(name: str, config: dict) -> int:
    """Heads of a projection that is rotated; 0 for other tensors."""
    if ".q_proj." in name:
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if ".k_proj." in name else 0


def _neighbours(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows reordered so that a rotation of neighbours does what one of halves did; so `LlamaModel.permute`."""
    halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _rope_factors(config: dict) -> np.ndarray | None:
    """What inverse frequencies are divided by in Llama 3's scaling; by transformers' own formula."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if config["rope_parameters"]["rope_type"] != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), torch.device("cpu"))
    plain = config["rope_parameters"]["rope_theta"] ** -(np.arange(len(scaled)) / len(scaled))
    return (plain / scaled.numpy()).astype(np.float32)
