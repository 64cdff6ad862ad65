"""Files of a checkpoint as they are stored: configuration, other small files, and tensors by name."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.options import GGUF, LoadFormat
from espalier.engine.models.stored.base import StoredFormat
from espalier.engine.models.stored.formats import stored_format
from espalier.engine.models.stored.packed import PackedWeights
from espalier.engine.models.text_files import parse_object, read_text, require
from espalier.engine.models.weights import TensorInfo, WeightFile, open_weight_file, parts_of, weight_files

if TYPE_CHECKING:
    from espalier.engine.models.gguf.file import GgufFile

_OPEN_FILES = 2
"""Shards that are open at once: a layer may lie across two. Closing one frees its memory."""


class CheckpointFiles:
    """One folder with `config.json` and weights, single or sharded, safetensors or `.bin`; or one GGUF file.

    Attributes:
        folder: the checkpoint's folder, or its GGUF file.
        config: `config.json` as it stands, or as a GGUF file's metadata mean it.
        weights: the weight files, in order; none with `LoadFormat.DUMMY`.
        tensors: shape and place of every tensor in the weight files, by name.
        packed: tensors that are made up of several stored ones; None where weights are stored as they are.
    """

    def __init__(self, folder: Path, load_format: LoadFormat = LoadFormat.AUTO) -> None:
        """Read the configuration, and names and shapes from every weight file.

        Raises:
            CheckpointError: when its configuration or weights are missing or unreadable.
        """
        self.folder = folder
        self._open: dict[Path, WeightFile] = {}
        if (text := self.text("config.json")) is None:
            raise CheckpointError(f"{folder} has no config.json; is it a Hugging Face checkpoint?")
        self.config = parse_object(folder / "config.json", text)
        self.weights = [] if load_format is LoadFormat.DUMMY else weight_files(folder, load_format)
        self.tensors: Mapping[str, TensorInfo] = self._all_tensors()
        self.packed: PackedWeights | None = None
        if self.stored and self.tensors:
            stored = self.tensors
            self.packed = PackedWeights(self.stored, stored, lambda name: self._file(stored[name].file).read(name))
            self.tensors = self.packed.tensors

    @cached_property
    def stored(self) -> StoredFormat | None:
        """The layout of weights that are stored quantised; None where they are not.

        Raises:
            CheckpointError: it is not one of those that are read.
        """
        return stored_format(self.config, self.place("config.json"))

    def place(self, name: str) -> str:
        """A small file as errors call it."""
        return f"the metadata of {self.folder}" if self.folder.suffix == GGUF else f"{name} of {self.folder}"

    def object(self, name: str) -> dict[str, Any]:
        """An object that `config.json` may hold, such as `prm`; empty when it is absent.

        Raises:
            CheckpointError: when it is something else.
        """
        found = self.config.get(name)
        value = {} if found is None else found
        return require(self.place("config.json"), name, value, "an object", lambda it: isinstance(it, dict))

    def text(self, name: str) -> str | None:
        """The text of the small file `name`, such as `tokenizer.json`, or None when it is absent.

        Raises:
            CheckpointError: when it cannot be read as text, or cannot be made of a GGUF file's metadata.
        """
        if self.folder.suffix == GGUF:
            return cast("GgufFile", self._file(parts_of(self.folder)[0])).text(name)
        return read_text(self.folder / name)

    def optional_json(self, name: str) -> dict[str, Any]:
        """The JSON file `name`, or an empty dictionary when it is absent."""
        return {} if (text := self.text(name)) is None else parse_object(self.folder / name, text)

    def read(self, name: str, room: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor as it is stored, or as those that it is made up of mean it; see `WeightFile.read`."""
        if self.packed and name in self.packed.parts:
            return self.packed.read(name)
        return self._file(self.tensors[name].file).read(name, room)

    def first_rows(self, name: str, count: int) -> torch.Tensor:
        """The first rows of a tensor, with the values of `read`."""
        if self.packed and name in self.packed.parts:
            return self.packed.read(name)[:count]
        return self._file(self.tensors[name].file).first_rows(name, count)

    def close(self) -> None:
        """Free the memory of the weight files; they are opened again as they are read."""
        self._open.clear()

    def _all_tensors(self) -> dict[str, TensorInfo]:
        found: dict[str, TensorInfo] = {}
        for path in self.weights:
            tensors = self._file(path).tensors
            for name in found.keys() & tensors.keys():
                raise CheckpointError(
                    f"{name} is in {found[name].file} and in {tensors[name].file.name}; one belongs to another "
                    "checkpoint"
                )
            found.update(tensors)
        return found

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
