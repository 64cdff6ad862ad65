"""Checkpoints in Hugging Face layout: where they are, what they hold, and that all of it is used."""

import hashlib
import json
import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from espalier.engine.errors import CheckpointError

_ENTRY_POINTS = "espalier.checkpoints"


def locate(name: str) -> Path:
    """The folder of a checkpoint.

    Args:
        name: a folder, a name registered under the entry-point group `espalier.checkpoints`, or a Hugging Face hub id,
            which is downloaded once into the hub's own cache.

    Raises:
        CheckpointError: when it is none of these.
    """
    if (folder := Path(name).expanduser()).is_dir():
        return folder
    for entry in entry_points(group=_ENTRY_POINTS, name=name):
        return entry.load()()
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        known = ", ".join(sorted(entry_points(group=_ENTRY_POINTS).names))
        raise CheckpointError(
            f"no checkpoint {name!r}: not a folder, not a hub id like org/name, and not one of {known}"
        )
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many kinds, none of them ours
        raise CheckpointError(f"could not download {name!r} from the Hugging Face hub: {error}") from error


class Checkpoint:
    """One folder with `config.json` and safetensors weights, single or sharded.

    Tensors are taken one at a time, and `require_all_taken` fails on any that was left: a tensor that nothing used
    means that the model was built wrongly.
    """

    def __init__(self, folder: Path) -> None:
        """Open `folder`.

        Raises:
            CheckpointError: when its configuration or weights are missing or unreadable.
        """
        self.folder = folder
        self.config = self._read_json("config.json")
        self._files = self._tensor_files()
        self._taken: set[str] = set()

    @property
    def architecture(self) -> str:
        """The model class that `config.json` names."""
        names = self.config.get("architectures") or [""]
        return names[0]

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """Read one tensor.

        Raises:
            CheckpointError: when the checkpoint has no tensor of this name.
        """
        if name not in self._files:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}; is it a checkpoint of this kind?")
        self._taken.add(name)
        with safe_open(self._files[name], framework="pt") as tensors:
            return tensors.get_tensor(name).to(device=device, dtype=dtype)

    def ignore(self, name: str) -> None:
        """Count a tensor as accounted for without reading it."""
        self._taken.add(name)

    def require_all_taken(self) -> None:
        """Raise CheckpointError when a tensor of the checkpoint was neither taken nor ignored."""
        if left := sorted(set(self._files) - self._taken):
            shown = ", ".join(left[:5]) + (", …" if len(left) > 5 else "")
            raise CheckpointError(
                f"{self.folder} holds {len(left)} tensors that {self.architecture} does not use: {shown}"
            )

    def optional_json(self, name: str) -> dict[str, Any]:
        """The JSON file `name` of the folder, or an empty dictionary when it is absent."""
        return self._read_json(name) if (self.folder / name).is_file() else {}

    def digest(self) -> str:
        """sha256 over the weight files, in order of name.

        A file in the hub's cache is a link to a blob named by its sha256, which saves reading it.
        """
        total = hashlib.sha256()
        for file in sorted(set(self._files.values())):
            blob = file.resolve().name
            known = re.fullmatch(r"[0-9a-f]{64}", blob) is not None
            total.update((blob if known else _file_digest(file)).encode())
        return total.hexdigest()

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.folder} has no {name}; is it a Hugging Face checkpoint?") from error
        except ValueError as error:
            raise CheckpointError(f"{self.folder / name} is not valid JSON: {error}") from error

    def _tensor_files(self) -> dict[str, Path]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            files = {self.folder / shard for shard in self._read_json(index.name)["weight_map"].values()}
        else:
            files = {self.folder / "model.safetensors"}
        found: dict[str, Path] = {}
        for file in sorted(files):
            found.update(dict.fromkeys(_tensor_names(file), file))
        return found


def _tensor_names(file: Path) -> Iterator[str]:
    if not file.is_file():
        raise CheckpointError(f"{file.parent} has no {file.name}")
    try:
        with safe_open(file, framework="pt") as tensors:
            yield from tensors.keys()
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged or cut short: {error}") from error


def _file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
