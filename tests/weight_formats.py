"""One checkpoint's weights rewritten in every format that is read."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FORMATS = ("safetensors", "sharded-safetensors", "bin", "sharded-bin", "old-bin")


def rewrite(folder: Path, form: str) -> None:
    """Replace a folder's one `model.safetensors` by the same tensors in another of `FORMATS`."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if form == "safetensors":
        return
    file.unlink()
    if form == "sharded-safetensors":
        for shard, held in _shards(folder, tensors, "model", "safetensors").items():
            save_file(held, folder / shard, metadata={"format": "pt"})
    elif form == "sharded-bin":
        for shard, held in _shards(folder, tensors, "pytorch_model", "bin").items():
            torch.save(held, folder / shard)
    else:
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=form == "bin")


def _shards(folder: Path, tensors: dict[str, torch.Tensor], stem: str, ending: str) -> dict[str, dict]:
    """Three shards that cut through layers, and their index."""
    names = sorted(tensors)
    shards = {f"{stem}-{i + 1:05}-of-00003.{ending}": names[i::3] for i in range(3)}
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(index))
    return {shard: {name: tensors[name] for name in held} for shard, held in shards.items()}
