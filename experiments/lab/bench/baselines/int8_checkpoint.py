"""A checkpoint's copy with linear layers in int8 (W8A8), in the form that vLLM reads: compressed-tensors'."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_SYMMETRIC = {"num_bits": 8, "type": "int", "symmetric": True}
_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "score"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_SYMMETRIC, "strategy": "channel", "dynamic": False},
            "input_activations": {**_SYMMETRIC, "strategy": "token", "dynamic": True},
        }
    },
}
_MAX = 127


def write_int8_checkpoint(source: Path, target: Path) -> None:
    """Copy the checkpoint in the folder `source`, one safetensors file, to the new folder `target`.

    The weights of attention and MLP get a scale for each output; activations will be rounded with a scale for each
    token. Embedding and head stay as they are.
    """
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            weight = tensor.float()
            scale = weight.abs().amax(dim=1, keepdim=True) / _MAX
            tensors[name] = (weight / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(config | {"quantization_config": _CONFIG}, indent=2)
    (target / "config.json").write_text(text + "\n", encoding="utf-8")
