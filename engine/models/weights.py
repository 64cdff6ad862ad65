"""Files that hold tensors by name: safetensors, and the `.bin` files that torch pickles; for GGUF see `gguf`.

Files are mapped into memory: a tensor's bytes are read from disk when the tensor is used, and freed with the file.
"""

import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from espalier.engine.errors import CheckpointError
from espalier.engine.models.options import GGUF, LoadFormat
from espalier.engine.models.text_files import parse_object, read_text


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's entry in a file, before its values.

    Attributes:
        kind: the type of its values, as the format calls it.
        numbers: whether these are floating-point numbers or packed ones, as weights are.
    """

    file: Path
    shape: tuple[int, ...]
    nbytes: int
    kind: str
    numbers: bool


class WeightFile(Protocol):
    """One open file of tensors; it is closed when the object is deleted."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors of the file, by name."""
        ...

    def read(self, name: str, room: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor on the host; copy it and do not keep it, for its bytes may belong to the file.

        Args:
            name: the tensor's name.
            room: contiguous float32 memory of its shape, which values that must be expanded may be put in.
        """
        ...


_NUMBERS = frozenset(("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"))
"""The types of safetensors that weights can have."""


class SafetensorsFile:
    """A `WeightFile` in the safetensors format."""

    def __init__(self, path: Path) -> None:
        """Open `path`.

        Raises:
            CheckpointError: when the file is damaged or cut short.
        """
        try:
            self._file = safe_open(path, framework="pt")
            self.tensors = {name: self._info(path, name) for name in self._file.keys()}  # noqa: SIM118 - not a mapping
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise _damaged(path, error) from error

    def read(self, name: str, room: torch.Tensor | None = None) -> torch.Tensor:
        """See `WeightFile`."""
        return self._file.get_tensor(name)

    def _info(self, path: Path, name: str) -> TensorInfo:
        lazy = self._file.get_slice(name)
        shape, kind = tuple(lazy.get_shape()), lazy.get_dtype()
        bits = re.search(r"\d+", kind)  # F32, BF16, I64, F8_E4M3; BOOL has none and takes a byte
        nbytes = torch.Size(shape).numel() * int(bits[0] if bits else 8) // 8
        return TensorInfo(path, shape, nbytes, kind, kind in _NUMBERS)


class BinFile:
    """A `WeightFile` written by `torch.save`, from which nothing but tensors is ever loaded."""

    def __init__(self, path: Path) -> None:
        """Open `path`.

        Raises:
            CheckpointError: when the file is damaged or cut short, or its pickle asks for more than tensors.
        """
        with path.open("rb") as stream:
            whole, beginning = zipfile.is_zipfile(path), stream.read(2)
        if not whole and beginning in (b"PK", b""):
            raise _damaged(path, "its end is missing")
        try:
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=whole)  # the oldest are no archives
        except pickle.UnpicklingError as error:
            if not (named := re.search(r"GLOBAL ([\w.]+)", str(error))):
                raise _damaged(path, "it is no table of tensors") from error
            refused = f"{path} asks for {named[1]}, and loading it could run code"
            raise CheckpointError(f"{refused}; only tensors are read: take a checkpoint in safetensors") from error
        except Exception as error:  # bytes that are no pickle at all raise whatever they happen to mean
            raise _damaged(path, error) from error
        self._held = _require_tensors(path, held)
        self.tensors = {name: _info(path, tensor) for name, tensor in self._held.items()}

    def read(self, name: str, room: torch.Tensor | None = None) -> torch.Tensor:
        """See `WeightFile`."""
        return self._held[name]


def open_weight_file(path: Path) -> WeightFile:
    """Open a weight file in the Hugging Face layout; its ending says which format it has.

    Raises:
        CheckpointError: when the file is missing or damaged, or holds more than tensors.
    """
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}; is the download complete?")
    if not os.access(path, os.R_OK):
        raise CheckpointError(f"{path} cannot be read: permission denied")
    return (BinFile if path.suffix == ".bin" else SafetensorsFile)(path)


def _info(path: Path, tensor: torch.Tensor) -> TensorInfo:
    kind = str(tensor.dtype).removeprefix("torch.")
    return TensorInfo(path, tuple(tensor.shape), tensor.nbytes, kind, tensor.dtype.is_floating_point)


def _require_tensors(path: Path, held: object) -> dict[str, torch.Tensor]:
    tensors = isinstance(held, dict) and held and all(isinstance(value, torch.Tensor) for value in held.values())
    if isinstance(held, dict) and tensors and all(isinstance(name, str) for name in held):
        if odd := [name for name, value in held.items() if value.layout is not torch.strided or value.is_quantized]:
            raise CheckpointError(f"{path}: {odd[0]} is stored sparse or quantised, which is not read")
        return held
    raise CheckpointError(f"{path} is not a plain table of tensors by name")


def _damaged(path: Path, reason: object) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or cut short; download it again ({reason})")


SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
"""Patterns of configuration, tokenizer, chat template and indices of weight files."""
_INDEX = ".index.json"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_STEMS = {LoadFormat.SAFETENSORS: "model.safetensors", LoadFormat.BIN: "pytorch_model.bin"}


def small_files(folder: Path) -> list[Path]:
    """Configuration, tokenizer and chat template of a folder, in order of name; none for a GGUF file."""
    return sorted(file for pattern in SMALL_FILES for file in folder.glob(pattern) if file.is_file())


def weight_lists(load_format: LoadFormat) -> Iterator[str]:
    """Names of indices of shards, and of single weight files, in the order of preference."""
    for form, stem in _STEMS.items():
        if load_format in (LoadFormat.AUTO, form):
            yield stem + _INDEX
            yield stem


def parts_of(path: Path) -> list[Path]:
    """The files that a GGUF file was split into, given any of them; itself where it was not."""
    if not (part := _PART.fullmatch(path.name)) or not 1 <= int(part["number"]) <= int(part["count"]):
        return [path]
    return [path.with_name(f"{part['stem']}-{i:05}-of-{part['count']}{GGUF}") for i in range(1, int(part["count"]) + 1)]


def weight_files(folder: Path, load_format: LoadFormat) -> list[Path]:
    """The weight files of a folder, or the parts of a GGUF file, in order; whether all are there is not checked.

    Raises:
        CheckpointError: when the folder has no weight files, an index is broken, or a GGUF file is asked for others.
    """
    if folder.suffix == GGUF:
        if load_format is not LoadFormat.AUTO:
            raise CheckpointError(f"{folder} is a GGUF file, which --load-format {load_format} leaves out; take auto")
        return parts_of(folder)
    for name in weight_lists(load_format):
        if (found := folder / name).is_file():
            return named_files(found)
    wanted = " and no ".join(stem for form, stem in _STEMS.items() if load_format in (LoadFormat.AUTO, form))
    raise CheckpointError(f"{folder} has no {wanted}, and no index of shards; is the download complete?")


def named_files(found: Path) -> list[Path]:
    """The shards that an index names, or the given file itself when it is no index.

    Raises:
        CheckpointError: when the index is broken, or names a file outside of its folder.
    """
    if not found.name.endswith(_INDEX):
        return [found]
    weight_map = parse_object(found, read_text(found) or "").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{found} is not an index of shards: no weight_map can be read from it")
    names = sorted(set(weight_map.values()))
    if not names:
        raise CheckpointError(f"{found} is not an index of shards: its weight_map is empty")
    if outside := [name for name in names if Path(name).name != name or "\0" in name]:
        raise CheckpointError(f"{found} names {outside[0]!r}, which is not a file beside it")
    return [found.with_name(name) for name in names]
