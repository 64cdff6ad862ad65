"""Random heads on a generator's trunk, in the layout of their folders."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from espalier.prm.scorers.trunk_head import ARCHITECTURE


def write_head(folder: Path, digest: str, hidden: int, layers: int, seed: int = 0) -> Path:
    """A head of so many layers for the trunk of a digest."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    trunk = {"name": "talker", "digest": digest}
    config = {"architectures": [ARCHITECTURE], "model_type": "trunk-head", "trunk": trunk, "hidden_size": hidden}
    (folder / "config.json").write_text(json.dumps(config))
    sizes = [hidden] * (layers - 1) + [1]
    tensors = {f"score.{i}.weight": 0.05 * torch.randn(size, hidden) for i, size in enumerate(sizes)}
    tensors |= {f"score.{i}.bias": 0.3 * torch.randn(size) for i, size in enumerate(sizes)}
    save_file(tensors, folder / "model.safetensors")
    return folder
