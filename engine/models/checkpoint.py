"""A checkpoint, a folder in Hugging Face layout or a GGUF file: configuration, tensors, and that each is used."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.options import LoadFormat, Quantization
from espalier.engine.models.weights import (
    GGUF,
    TensorInfo,
    WeightFile,
    open_weight_file,
    parts_of,
    small_files,
    weight_files,
)

if TYPE_CHECKING:
    from espalier.engine.models.gguf.file import GgufFile

_OPEN_FILES = 2
"""Shards that are open at once: a layer may lie across two. Closing one frees its memory."""
_COMPUTED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Buffers saved in old checkpoints; they follow from config.json, so nothing reads them."""
_DUMMY_STD = 0.02


class Checkpoint:
    """One folder with `config.json` and weights, single or sharded, safetensors or `.bin`; or one GGUF file.

    Tensors are taken one at a time, straight to the device, from files mapped into memory: the host never holds more
    than the shards a layer lies in. `require_all_taken` fails where a tensor was not taken: a tensor that nothing uses
    means that the model was built wrongly.

    Attributes:
        folder: the checkpoint's folder, or its GGUF file.
        config: `config.json` as it stands, or as a GGUF file's metadata mean it.
        tensors: shape and place of every tensor in the weight files, by name; empty with `LoadFormat.DUMMY`.
        quantization: how the decoder's weights are to be kept.
        batch_invariant: whether a request must have the same bits in any batch.
    """

    def __init__(
        self,
        folder: Path,
        load_format: LoadFormat = LoadFormat.AUTO,
        quantization: Quantization = Quantization.NONE,
        on_bytes: Callable[[int], None] | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """Open `folder`, reading names and shapes from every weight file, and no tensor.

        Args:
            folder: the checkpoint.
            load_format: which files to read.
            quantization: how to keep the decoder's weights.
            on_bytes: called with the size of each tensor once it is read or ignored; the sizes add up to `nbytes`.
            batch_invariant: whether a request must have the same bits in any batch, on every device.

        Raises:
            CheckpointError: when its configuration or weights are missing or unreadable.
        """
        self.folder = folder
        self._open: dict[Path, WeightFile] = {}
        self.config = self._read_json("config.json")
        self.quantization = quantization
        self.batch_invariant = batch_invariant
        self.load_format = load_format
        self._on_bytes = on_bytes
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
        """Whether the files hold a tensor of this name; never with dummy weights, though any name can be taken."""
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, or None when the checkpoint has none of this name."""
        return self.tensors[name].shape if name in self.tensors else None

    def take(
        self, name: str, dtype: torch.dtype, device: torch.device | str, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """Read one tensor.

        Args:
            name: the tensor's name.
            dtype: the dtype to convert it to.
            device: where to put it.
            shape: the shape it must have; needed for dummy weights.

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
        """Count a tensor as used without reading it."""
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
        return {} if (text := self.text(name)) is None else self._parse(name, text)

    def text(self, name: str) -> str | None:
        """What the small file `name` says, such as `tokenizer.json`, or None when it is absent.

        Raises:
            CheckpointError: when it is not text, or cannot be made of a GGUF file's metadata.
        """
        if self.folder.suffix == GGUF:
            return cast("GgufFile", self._file(parts_of(self.folder)[0])).text(name)
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise CheckpointError(f"{self.folder / name} is not text in UTF-8: {error}") from error

    def digest(self) -> str:
        """sha256 over all files that results depend on, and over the kind of quantisation.

        The files are configuration, tokenizer, chat template and, except with dummy weights, the weight files, in order
        of name. A weight file in the hub's cache is a link to a blob named by its sha256, so it is not read for this.
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
        if (text := self.text(name)) is None:
            raise CheckpointError(f"{self.folder} has no {name}; is it a Hugging Face checkpoint?")
        return self._parse(name, text)

    def _parse(self, name: str, text: str) -> dict[str, Any]:
        try:
            read = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"{self.folder / name} is not valid JSON: {error}") from error
        if not isinstance(read, dict):
            raise CheckpointError(f"{self.folder / name} holds no JSON object")
        return read

    def _file(self, path: Path) -> WeightFile:
        """The weight file at `path`, opened; the least recently used one is closed to make room."""
        file = self._open.pop(path, None)
        if file is None:
            while len(self._open) >= _OPEN_FILES:
                del self._open[next(iter(self._open))]
            file = _open_gguf(path) if path.suffix == GGUF else open_weight_file(path)
        self._open[path] = file
        return file


def _open_gguf(path: Path) -> "GgufFile":
    from espalier.engine.models.gguf.file import GgufFile

    return GgufFile(path)


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
    """A checkpoint that reads names and shapes and no values, for models on the `meta` device.

    It finds missing, unused and misshapen tensors as a loaded checkpoint does, without reading them.
    """

    def take_into(self, name: str, out: torch.Tensor) -> None:
        """Check that the tensor exists and has the shape of `out`; see `Checkpoint`."""
        if self.load_format is not LoadFormat.DUMMY:
            self._require(name, tuple(out.shape))
        self._count(name)

    def digest(self) -> str:
        """Empty: a digest would need all weights to be read."""
        return ""
