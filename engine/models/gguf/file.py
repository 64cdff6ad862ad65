"""A GGUF file as a checkpoint's file: tensors under the names of the Hugging Face layout, dequantised when read."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType

from espalier.engine.errors import CheckpointError
from espalier.engine.models.gguf.architectures import RECURRENT
from espalier.engine.models.gguf.config import LIKE_LLAMA, ROPE_FACTORS, LlamaArchitecture, sampling
from espalier.engine.models.gguf.header import Header, StoredTensor
from espalier.engine.models.gguf.mapped import MappedArchitecture
from espalier.engine.models.gguf.recurrent import RecurrentArchitecture
from espalier.engine.models.gguf.tokenizer import tokenizer_config, tokenizer_json
from espalier.engine.models.text_files import shown
from espalier.engine.models.weights import TensorInfo, parts_of
from espalier.kernels.cpu.gguf_blocks import expand

_WHOLE = {GGMLQuantizationType[name] for name in ("I8", "I16", "I32", "I64")}
"""Kinds that no weights have."""
_PLAIN = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}


class GgufFile:
    """One file of tensors; a `WeightFile`. Of several parts the first holds the metadata, which all need.

    Attributes:
        tensors: by their names in the Hugging Face layout; a name of a module that no supported model has stays as it
            is, so that a checkpoint finds it unused.
    """

    def __init__(self, path: Path) -> None:
        """Read the file's header, and no tensor.

        Raises:
            CheckpointError: when the file or its first part is missing, damaged, or holds no model.
        """
        parts = parts_of(path)
        headers = {part: Header(part) for part in dict.fromkeys((path, *parts))}
        self._path, self._stored, self._metadata = path, headers[path].tensors, headers[parts[0]].metadata
        if not isinstance(kind := self._metadata.get("general.architecture"), str):
            raise CheckpointError(f"{path} holds no model: general.architecture in its metadata is {shown(kind)}")
        with self._reading():
            every = {name: tensor for header in headers.values() for name, tensor in header.tensors.items()}
            self._architecture = self._architecture_of(kind, every)
            self.tensors: dict[str, TensorInfo] = {}
            for name, made_of in self._architecture.parts.items():
                if self._stored.keys() >= set(made_of):  # else it is in another part of the file
                    self.tensors[name] = self._info(name, [self._stored[part] for part in made_of])

    def read(self, name: str, room: torch.Tensor | None = None) -> torch.Tensor:
        """See `WeightFile`; float32, or as it is stored where that is float16."""
        alone = len(self._architecture.parts[name]) == 1
        into = room.numpy() if room is not None and alone else None
        with self._reading():
            return self._architecture.read(name, lambda part: _values(self._stored[part], self._path, into))

    def first_rows(self, name: str, count: int) -> torch.Tensor:
        """The first rows of a tensor that is stored in the order of its values, as an embedding is; see `read`."""
        stored = self._stored[self._architecture.parts[name][0]]
        data = stored.data[:count]
        part = replace(stored, data=data, shape=(len(data), *stored.shape[1:]))
        return torch.from_numpy(_values(part, self._path))

    def text(self, name: str) -> str | None:
        """The text of the small file `name` of the same checkpoint in Hugging Face layout, or None where it has none.

        Raises:
            CheckpointError: when the metadata lacks what is needed for it, or the tokenizer is of an unknown kind.
        """
        with self._reading():
            match name:
                case "config.json":
                    return json.dumps(self._architecture.config)
                case "generation_config.json":
                    return json.dumps(sampling(self._metadata))
                case "tokenizer_config.json":
                    return json.dumps(tokenizer_config(self._metadata))
                case "tokenizer.json":
                    return json.dumps(tokenizer_json(self._metadata))
        return None

    def _architecture_of(self, kind: str, every: Mapping[str, StoredTensor]) -> LlamaArchitecture | MappedArchitecture:
        """The file's model, by its tables of names; `every` holds the tensors of all parts by llama.cpp's names."""
        shapes = {name: tensor.shape for name, tensor in every.items()}
        if kind in LIKE_LLAMA:
            factors = _values(every[ROPE_FACTORS], self._path) if ROPE_FACTORS in every else None
            return LlamaArchitecture(self._metadata, shapes, factors)
        return (RecurrentArchitecture if kind in RECURRENT else MappedArchitecture)(self._metadata, shapes)

    def _info(self, name: str, stored: Sequence[StoredTensor]) -> TensorInfo:
        shape = self._architecture.shapes.get(name, stored[0].shape)
        numbers = all(tensor.kind not in _WHOLE for tensor in stored)
        return TensorInfo(self._path, shape, sum(each.data.nbytes for each in stored), stored[0].kind.name, numbers)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Name the file in errors."""
        try:
            yield
        except KeyError as missing:
            raise CheckpointError(f"{self._path} lacks {missing} in its metadata") from missing
        except ValueError as error:
            raise CheckpointError(f"{self._path}: {error}") from error


def _values(stored: StoredTensor, path: Path, room: np.ndarray | None = None) -> np.ndarray:
    """The values of a tensor, in its shape; float16 where it is stored so, else float32, in `room` if it is given."""
    if (dtype := _PLAIN.get(stored.kind)) is not None:
        values = np.array(stored.data).view(dtype)
        stored.let_go()
        return values
    try:
        values = expand(stored.data, stored.kind, stored.shape, room)
    except NotImplementedError as error:
        raise CheckpointError(f"{path} has tensors of type {stored.kind.name}, which is not read") from error
    stored.let_go()
    return values
