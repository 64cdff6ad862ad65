"""Folders of LoRA adapters in PEFT's layout."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RANK, ALPHA = 4, 6


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor], base: str = "", **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "base_model_name_or_path": base, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(told | config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def low_rank(weight: torch.Tensor, rank: int = RANK, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rank, weight.shape[1], generator=random), torch.randn(weight.shape[0], rank, generator=random)


def of_module(module: str, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
