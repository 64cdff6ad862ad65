"""A checkpoint in Hugging Face layout: what its folder holds, and that all of it is used."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.options import LoadFormat, Quantization
from espalier.engine.models.weights import TensorInfo, WeightFile, open_weight_file, small_files, weight_files

_OPEN_FILES = 2
"""Shards open at once: a layer may lie across two. One that is closed leaves memory."""
_COMPUTED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Buffers that old checkpoints were saved with; they follow from config.json."""
_DUMMY_STD = 0.02


class Checkpoint:
    """One folder with `config.json` and weights, single or sharded, safetensors or `.bin`.

    Tensors are taken one at a time, straight to the device, from files mapped into memory: the host never holds more
    than the shards a layer lies in. `require_all_taken` fails on any that was left: a tensor that nothing used means
    that the model was built wrongly.

    Attributes:
        folder: where it is.
        config: `config.json` as it stands.
        tensors: what the weight files hold, by name; empty with `LoadFormat.DUMMY`.
        quantization: how its decoder's weights are to be kept.
    """

    def __init__(
        self,
        folder: Path,
        load_format: LoadFormat = LoadFormat.AUTO,
        quantization: Quantization = Quantization.NONE,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """Open `folder`; reads the names and shapes in every weight file, and no tensor.

        Args:
            folder: the checkpoint.
            load_format: which files to read.
            quantization: how to keep what is read.
            on_bytes: called with the size of every tensor that is done with; at the end they sum to `nbytes`.

        Raises:
            CheckpointError: when its configuration or weights are missing or unreadable.
        """
        self.folder = folder
        self.config = self._read_json("config.json")
        self.quantization = quantization
        self.load_format = load_format
        self._on_bytes = on_bytes
        self._open: dict[Path, WeightFile] = {}
        self.tensors: dict[str, TensorInfo] = {}
        if load_format is not LoadFormat.DUMMY:
            for file in weight_files(folder, load_format):
                self.tensors.update(self._file(file).tensors)
        self._taken: set[str] = set()

    @property
    def architecture(self) -> str:
        """The model class that `config.json` names."""
        names = self.config.get("architectures") or [""]
        return names[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(info.nbytes for info in self.tensors.values())

    def __contains__(self, name: str) -> bool:
        """Whether the files hold a tensor of this name; with dummy weights, which can be taken all the same, never."""
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, or None when the checkpoint has none of this name."""
        return self.tensors[name].shape if name in self.tensors else None

    def take(
        self, name: str, dtype: torch.dtype, device: torch.device | str, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """Read one tensor.

        Args:
            name: of the tensor.
            dtype: what to convert it to.
            device: where to put it.
            shape: what it must have; dummy weights cannot do without.

        Raises:
            CheckpointError: when the checkpoint has no tensor of this name, or it has another shape.
        """
        if shape is None and (shape := self.shape(name)) is None:
            raise self._no_tensor(name)
        out = torch.empty(shape, dtype=dtype, device=device)
        self.take_into(name, out)
        return out

    def take_into(self, name: str, out: torch.Tensor) -> None:
        """Read one tensor into `out`, a tensor of its shape, converting it to its dtype.

        Raises:
            CheckpointError: when the checkpoint has no tensor of this name, or it has another shape.
        """
        if self.load_format is LoadFormat.DUMMY:
            _fill_with_noise(name, out)
            return
        self._require(name, tuple(out.shape))
        out.copy_(self._file(self.tensors[name].file).read(name))
        self._count(name)

    def ignore(self, name: str) -> None:
        """Count a tensor as accounted for without reading it."""
        self._count(name)

    def require_all_taken(self) -> None:
        """Raise CheckpointError when a tensor of the checkpoint was neither taken nor ignored; closes its files."""
        self._open.clear()
        for name in filter(_COMPUTED.search, self.tensors):
            self._count(name)
        if left := sorted(set(self.tensors) - self._taken):
            shown = ", ".join(left[:5]) + (", …" if len(left) > 5 else "")
            raise CheckpointError(
                f"{self.folder} holds {len(left)} tensors that {self.architecture} does not use: {shown}"
            )

    def optional_json(self, name: str) -> dict[str, Any]:
        """The JSON file `name` of the folder, or an empty dictionary when it is absent."""
        return self._read_json(name) if (self.folder / name).is_file() else {}

    def digest(self) -> str:
        """sha256 over all files that results depend on, and over how weights are kept when they are quantised.

        Those are the weight files and, beside them, configuration, tokenizer and chat template, in order of name. With
        dummy weights it is over the latter alone. A weight file in the hub's cache is a link to a blob named by its
        sha256, which saves reading it.
        """
        dummy = self.load_format is LoadFormat.DUMMY
        total = hashlib.sha256(f"{self.quantization} {dummy}".encode())
        for file in small_files(self.folder) + sorted({info.file for info in self.tensors.values()}):
            blob = file.resolve().name
            known = re.fullmatch(r"[0-9a-f]{64}", blob) is not None
            total.update(f"\n{file.name} {blob if known else _file_digest(file)}".encode())
        return total.hexdigest()

    def _count(self, name: str) -> None:
        if self._on_bytes and name in self.tensors and name not in self._taken:
            self._on_bytes(self.tensors[name].nbytes)
        self._taken.add(name)

    def _require(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.tensors:
            raise self._no_tensor(name)
        if (found := self.tensors[name].shape) != shape:
            raise CheckpointError(f"{self.folder}: {name} has shape {found}, config.json means {shape}")

    def _no_tensor(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self.folder} has no tensor {name!r}; is it a checkpoint of this kind?")

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            read = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.folder} has no {name}; is it a Hugging Face checkpoint?") from error
        except ValueError as error:
            raise CheckpointError(f"{self.folder / name} is not valid JSON: {error}") from error
        if not isinstance(read, dict):
            raise CheckpointError(f"{self.folder / name} holds no JSON object")
        return read

    def _file(self, path: Path) -> WeightFile:
        """An open file; the one that was used longest ago makes room for it."""
        file = self._open.pop(path, None)
        if file is None:
            while len(self._open) >= _OPEN_FILES:
                del self._open[next(iter(self._open))]
            file = open_weight_file(path)
        self._open[path] = file
        return file


def _fill_with_noise(name: str, out: torch.Tensor) -> None:
    """Small random values, the same for the same name; ones for the factors of a norm, as trained models have."""
    if name.endswith("norm.weight"):
        out.fill_(1.0)
        return
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    out.normal_(std=_DUMMY_STD, generator=torch.Generator(out.device).manual_seed(seed))


def _file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class Outline(Checkpoint):
    """A checkpoint of which names and shapes are read and nothing else: for models on the `meta` device.

    What is missing, left over or of another shape is found as by a checkpoint that is loaded, in no time.
    """

    def take_into(self, name: str, out: torch.Tensor) -> None:
        """Check that there is such a tensor; see `Checkpoint`."""
        if self.load_format is not LoadFormat.DUMMY:
            self._require(name, tuple(out.shape))
        self._count(name)

    def digest(self) -> str:
        """Empty: it would take reading all weights."""
        return ""
