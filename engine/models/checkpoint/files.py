"""Files of a checkpoint as they are stored: configuration, other small files, tensors by name, and a hash of them."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.options import GGUF, LoadFormat
from espalier.engine.models.stored.base import StoredFormat
from espalier.engine.models.stored.packed import PackedWeights, stored_format
from espalier.engine.models.text_files import AN_OBJECT, parse_object, read_text, require
from espalier.engine.models.weights import TensorInfo, WeightFile, open_weight_file, parts_of, weight_files

_BLOB = re.compile(r"[0-9a-f]{64}")
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
        stored: dict[str, TensorInfo] = {}
        for path in self.weights:
            tensors = self._file(path).tensors
            for name in stored.keys() & tensors.keys():
                raise CheckpointError(f"{name} is in two files, {stored[name].file} and {path.name}; remove one")
            stored.update(tensors)
        self.tensors: Mapping[str, TensorInfo] = stored
        self.packed: PackedWeights | None = None
        if self.stored and stored:
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
        return require(self.place("config.json"), name, value, *AN_OBJECT)

    def text(self, name: str) -> str | None:
        """The text of the small file `name`, such as `tokenizer.json`, or None when it is absent.

        Raises:
            CheckpointError: when it cannot be read as text, or cannot be made of a GGUF file's metadata.
        """
        if self.folder.suffix == GGUF:
            first: Any = self._file(parts_of(self.folder)[0])
            return first.text(name)
        return read_text(self.folder / name)

    def optional_json(self, name: str) -> dict[str, Any]:
        """The JSON file `name`, or an empty dictionary when it is absent."""
        return {} if (text := self.text(name)) is None else parse_object(self.folder / name, text)

    def read(self, name: str, room: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor as it is stored, or as those that it is made up of mean it; see `WeightFile.read`."""
        if self.packed and name in self.packed.parts:
            return self.packed.read(name)
        return self._file(self.tensors[name].file).read(name, room)

    def close(self) -> None:
        """Free the memory of the weight files; they are opened again as they are read."""
        self._open.clear()

    def _file(self, path: Path) -> WeightFile:
        """The weight file at `path`, opened; the least recently used one is closed to make room."""
        file = self._open.pop(path, None)
        if file is None:
            while len(self._open) >= _OPEN_FILES:
                del self._open[next(iter(self._open))]
            if path.suffix == GGUF:
                from espalier.engine.models.gguf.file import GgufFile

                file = GgufFile(path)
            else:
                file = open_weight_file(path)
        self._open[path] = file
        return file


def digest_of(kind: str, files: Iterable[Path]) -> str:
    """sha256 over files, in this order, and over what becomes of them.

    A weight file in the hub's cache is a link to a blob named by its sha256, so it is not read for this.

    Args:
        kind: what becomes of them, such as the kind of quantisation.
        files: configuration, tokenizer, chat template, weights.

    Raises:
        CheckpointError: one cannot be read.
    """
    total = hashlib.sha256(kind.encode())
    for file in files:
        try:
            if not _BLOB.fullmatch(found := file.resolve().name):
                with file.open("rb") as stream:
                    found = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
        total.update(f"\n{file.name} {found}".encode())
    return total.hexdigest()
