"""Files that hold tensors by name: safetensors, and the `.bin` files that torch pickles.

Both are mapped into memory, so that a tensor's bytes are read when the tensor is, and leave memory with the file.
"""

import json
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
from espalier.engine.models.options import LoadFormat


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is and how large, without its values."""

    file: Path
    shape: tuple[int, ...]
    nbytes: int


class WeightFile(Protocol):
    """One open file of tensors; closed when it is dropped."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What the file holds, by name."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """A tensor on the host; its bytes may belong to the file, so it is to be copied and not kept."""
        ...


class SafetensorsFile:
    """A `WeightFile` in the safetensors format."""

    def __init__(self, path: Path) -> None:
        """Open `path`.

        Raises:
            CheckpointError: when it is damaged or cut short.
        """
        try:
            self._file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error
        self.tensors = {name: self._info(path, name) for name in self._file.keys()}  # noqa: SIM118 - not a mapping

    def read(self, name: str) -> torch.Tensor:
        """See `WeightFile`."""
        return self._file.get_tensor(name)

    def _info(self, path: Path, name: str) -> TensorInfo:
        lazy = self._file.get_slice(name)
        shape = tuple(lazy.get_shape())
        bits = re.search(r"\d+", lazy.get_dtype())  # F32, BF16, I64, F8_E4M3; BOOL has none and takes a byte
        return TensorInfo(path, shape, torch.Size(shape).numel() * int(bits[0] if bits else 8) // 8)


class BinFile:
    """A `WeightFile` that `torch.save` wrote; nothing in it but tensors is ever loaded."""

    def __init__(self, path: Path) -> None:
        """Open `path`.

        Raises:
            CheckpointError: when it is damaged or cut short, or its pickle asks for more than tensors.
        """
        whole = zipfile.is_zipfile(path)
        if not whole and _first_bytes(path) in (b"PK", b""):
            raise _damaged(path, "its end is missing")
        try:
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=whole)  # the oldest are no archives
        except pickle.UnpicklingError as error:
            if not (named := re.search(r"GLOBAL ([\w.]+)", str(error))):
                raise _damaged(path, "it is no table of tensors") from error
            raise CheckpointError(
                f"{path} asks for {named[1]}, and loading it could run code; only tensors are ever read. Take a "
                "checkpoint in safetensors, or convert this one where it is trusted"
            ) from error
        except Exception as error:  # bytes that are no pickle at all raise whatever they happen to mean
            raise _damaged(path, error) from error
        self._held = _require_tensors(path, held)
        self.tensors = {name: TensorInfo(path, tuple(t.shape), t.nbytes) for name, t in self._held.items()}

    def read(self, name: str) -> torch.Tensor:
        """See `WeightFile`."""
        return self._held[name]


def open_weight_file(path: Path) -> WeightFile:
    """Open a file by its ending.

    Raises:
        CheckpointError: when it is missing, damaged, or not only tensors.
    """
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}; is the download complete?")
    return (BinFile if path.suffix == ".bin" else SafetensorsFile)(path)


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(2)


def _require_tensors(path: Path, held: object) -> dict[str, torch.Tensor]:
    if isinstance(held, dict) and held and all(isinstance(value, torch.Tensor) for value in held.values()):
        return held
    raise CheckpointError(f"{path} is not a plain table of tensors by name")


def _damaged(path: Path, reason: object) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or cut short; download it again ({reason})")


SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
"""Configuration, tokenizer, chat template, and the indices that say which weights there are."""
_INDEX = ".index.json"
_STEMS = {LoadFormat.SAFETENSORS: "model.safetensors", LoadFormat.BIN: "pytorch_model.bin"}


def small_files(folder: Path) -> list[Path]:
    """The files of a folder that tell what its weights mean, in order of name."""
    return sorted(file for pattern in SMALL_FILES for file in folder.glob(pattern) if file.is_file())


def weight_lists(load_format: LoadFormat) -> Iterator[str]:
    """File names that may say which weights there are, in the order of preference: an index, or a file on its own."""
    for form, stem in _STEMS.items():
        if load_format in (LoadFormat.AUTO, form):
            yield stem + _INDEX
            yield stem


def weight_files(folder: Path, load_format: LoadFormat) -> list[Path]:
    """The weight files of a folder, in order of name; whether all shards are there is not checked.

    Raises:
        CheckpointError: when there are none, or an index is broken.
    """
    for name in weight_lists(load_format):
        if (found := folder / name).is_file():
            return named_files(found)
    wanted = " and no ".join(stem for form, stem in _STEMS.items() if load_format in (LoadFormat.AUTO, form))
    raise CheckpointError(f"{folder} has no {wanted}, and no index of shards; is the download complete?")


def named_files(found: Path) -> list[Path]:
    """The shards that an index names, or the file itself when it is no index.

    Raises:
        CheckpointError: when the index is broken, or names a file outside of its folder.
    """
    if not found.name.endswith(_INDEX):
        return [found]
    try:
        weight_map = json.loads(found.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{found} is not an index of shards: no weight_map can be read from it") from error
    if not names:
        raise CheckpointError(f"{found} is not an index of shards: its weight_map is empty")
    if outside := [name for name in names if Path(name).name != name]:
        raise CheckpointError(f"{found} names {outside[0]!r}, which is not a file beside it")
    return [found.with_name(name) for name in names]
