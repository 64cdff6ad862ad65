"""A GGUF file as a checkpoint's file: tensors under the names of the Hugging Face layout, dequantised when read.

The `gguf` package's own reader makes several arrays for each entry of a list, which takes 7 s for a vocabulary of
150,000 tokens; `Header` takes a tenth of a second. Layout: `docs/gguf.md` of github.com/ggml-org/ggml.
"""

import json
import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType
from gguf.quants import quant_shape_to_byte_shape

from espalier.engine.errors import CheckpointError
from espalier.engine.models.gguf.architectures import MappedModel, TableModel
from espalier.engine.models.gguf.tables import LIKE_LLAMA, RECURRENT, ROPE_FACTORS
from espalier.engine.models.gguf.tokenizer import tokenizer_config, tokenizer_json
from espalier.engine.models.text_files import shown
from espalier.engine.models.weights import TensorInfo, parts_of
from espalier.kernels.cpu.gguf_blocks import expand

_WHOLE = {GGMLQuantizationType[name] for name in ("I8", "I16", "I32", "I64")}
"""Kinds that no weights have."""
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_SCALARS = {kind: letter for kind, letter in zip(GGUFValueType, "BbHhIif?--Qqd", strict=True) if letter != "-"}
"""Letters of the types of numbers in `struct`; those of texts and lists, the eighth and ninth type, have none."""
_PLAIN = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}

_SAMPLING = {name: name for name in ("top_k", "top_p", "min_p", "xtc_probability", "mirostat")}
_SAMPLING |= {"temperature": "temp", "repetition_penalty": "penalty_repeat"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the file holds it.

    Attributes:
        kind: how its values are packed.
        shape: of its values, the slowest dimension first.
        data: uint8, its packed bytes, `[..., bytes of a row]`; they belong to the file.
        file: the file, mapped into memory.
    """

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray
    file: mmap.mmap

    def let_go(self) -> None:
        """Give back the memory that the file's bytes take once they are read; reading them again maps them again."""
        if hasattr(self.file, "madvise"):
            self.file.madvise(mmap.MADV_DONTNEED)


class Header:
    """Metadata and tensors of one file, which is mapped into memory.

    Attributes:
        metadata: numbers, texts, and lists of them, by key.
        tensors: by the names that llama.cpp gives them.
    """

    def __init__(self, path: Path) -> None:
        """Read the header of `path`.

        Raises:
            CheckpointError: when the file is missing, is no GGUF file, or is cut short.
        """
        try:
            with path.open("rb") as stream:
                self._file = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
                self._bytes = memoryview(self._file)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path.parent} has no {path.name}; is the download complete?") from error
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        self._at = 0
        try:
            magic, version = self._numbers("II")
            if magic != GGUF_MAGIC:
                raise CheckpointError(f"{path} is not a GGUF file: it does not begin with GGUF")
            if version not in _VERSIONS:
                read = " and ".join(map(str, _VERSIONS))
                raise CheckpointError(f"{path} has version {version} of GGUF; {read} are read")
            num_tensors, num_keys = self._numbers("QQ")
            self.metadata: dict[str, Any] = {}
            for _ in range(num_keys):
                self._take_entry()
            self.tensors = self._tensors(num_tensors)
        except (struct.error, ValueError, KeyError, OverflowError, MemoryError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged or cut short; download it again ({error})") from error

    def _take_entry(self) -> None:
        key = self._text()
        if key in self.metadata:
            raise ValueError(f"{key} is given twice")
        self.metadata[key] = value = self._value(GGUFValueType(*self._numbers("I")))
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key} is {value}, which is no number")

    def _numbers(self, form: str) -> tuple[Any, ...]:
        """The next numbers, little-endian, in the spelling of `struct`."""
        values = struct.unpack_from(f"<{form}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values

    def _text(self) -> str:
        (length,) = self._numbers("Q")
        self._require(length)
        self._at += length
        return str(self._bytes[self._at - length : self._at], "utf-8", "replace")

    def _value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self._text()
        if kind is GGUFValueType.FLOAT32:
            return float(str(np.float32(self._numbers("f")[0])))  # 1e-06, as it was before it was stored
        if kind is not GGUFValueType.ARRAY:
            return self._numbers(_SCALARS[kind])[0]
        of, length = self._numbers("IQ")
        of = GGUFValueType(of)
        self._require(length)
        if of in _SCALARS:
            return list(self._numbers(f"{length}{_SCALARS[of]}"))
        return self._texts(length) if of is GGUFValueType.STRING else [self._value(of) for _ in range(length)]

    def _texts(self, count: int) -> list[str]:
        """A list of texts, such as a vocabulary, without a call for each."""
        at, whole, texts = self._at, self._bytes, []
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            end = at + 8 + unpack(whole, at)[0]
            texts.append(str(whole[at + 8 : end], "utf-8", "replace"))
            at = end
        if at > len(whole):
            raise ValueError(f"its texts end at {at}, beyond its {len(whole)} bytes")
        self._at = at
        return texts

    def _require(self, num_bytes: int) -> None:
        """Check a length that the file gives before anything of that size is made."""
        if num_bytes > len(self._bytes) - self._at:
            raise ValueError(f"{num_bytes} bytes at {self._at} are beyond its {len(self._bytes)}")

    def _tensors(self, count: int) -> dict[str, StoredTensor]:
        entries: dict[str, tuple[GGMLQuantizationType, tuple[int, ...], int]] = {}
        for _ in range(count):
            name, (dimensions,) = self._text(), self._numbers("I")
            if name in entries:
                raise ValueError(f"the tensor {name} is given twice")
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                raise ValueError(f"the tensor {name} has {dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are read")
            shape = tuple(reversed(self._numbers(f"{dimensions}Q")))
            if 0 in shape:
                raise ValueError(f"the tensor {name} has the shape {shape}, which holds nothing")
            kind, offset = self._numbers("IQ")
            entries[name] = GGMLQuantizationType(kind), shape, offset
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment must be a whole number from 1 on, is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        stored, end, last = dict[str, StoredTensor](), 0, ""
        for name, (kind, shape, offset) in entries.items():
            stored[name] = self._stored(name, kind, shape, start + offset)
        for name, (*_, offset) in sorted(entries.items(), key=lambda entry: entry[1][-1]):
            if offset < end:
                raise ValueError(f"the tensors {last} and {name} lie on the same bytes")
            end, last = offset + stored[name].data.nbytes, name
        return stored

    def _stored(self, name: str, kind: GGMLQuantizationType, shape: tuple[int, ...], at: int) -> StoredTensor:
        values, size = GGML_QUANT_SIZES[kind]
        if shape[-1] % values:
            raise ValueError(f"the tensor {name} has rows of {shape[-1]} values, which are no blocks of {values}")
        packed = quant_shape_to_byte_shape(shape, kind) if values > 1 else (*shape[:-1], shape[-1] * size)
        num_bytes = math.prod(packed)
        if num_bytes > len(self._bytes) - at:
            raise ValueError(f"the tensor {name} takes {num_bytes} bytes at {at}, beyond the file's {len(self._bytes)}")
        data = np.frombuffer(self._bytes[at : at + num_bytes], np.uint8).reshape(packed)
        return StoredTensor(kind, shape, data, self._file)


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
            self._model = self._model_of(kind, every)
            self.tensors: dict[str, TensorInfo] = {}
            for name, made_of in self._model.parts.items():
                if self._stored.keys() >= set(made_of):  # else it is in another part of the file
                    self.tensors[name] = self._info(name, [self._stored[part] for part in made_of])

    def read(self, name: str, room: torch.Tensor | None = None) -> torch.Tensor:
        """See `WeightFile`; float32, or as it is stored where that is float16."""
        alone = len(self._model.parts[name]) == 1
        into = room.numpy() if room is not None and alone else None
        with self._reading():
            return self._model.read(name, lambda part: _values(self._stored[part], self._path, into))

    def text(self, name: str) -> str | None:
        """The text of the small file `name` of the same checkpoint in Hugging Face layout, or None where it has none.

        Raises:
            CheckpointError: when the metadata lacks what is needed for it, or the tokenizer is of an unknown kind.
        """
        makers: dict[str, Callable[[], dict[str, Any]]] = {
            "config.json": lambda: self._model.config,
            "generation_config.json": lambda: sampling(self._metadata),
            "tokenizer_config.json": lambda: tokenizer_config(self._metadata),
            "tokenizer.json": lambda: tokenizer_json(self._metadata),
        }
        with self._reading():
            return json.dumps(makers[name]()) if name in makers else None

    def _model_of(self, kind: str, every: dict[str, StoredTensor]) -> MappedModel:
        """The file's model; `every` holds the tensors of all parts by llama.cpp's names."""
        metadata = dict(self._metadata)
        if kind in LIKE_LLAMA and ROPE_FACTORS in every:
            metadata[f"{kind}.{ROPE_FACTORS}"] = _values(every.pop(ROPE_FACTORS), self._path)
        shapes = {name: tensor.shape for name, tensor in every.items()}
        table = (LIKE_LLAMA | RECURRENT).get(kind)
        return TableModel(table, metadata, shapes) if table else MappedModel(metadata, shapes)

    def _info(self, name: str, stored: Sequence[StoredTensor]) -> TensorInfo:
        shape = self._model.shapes.get(name, stored[0].shape)
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


def sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that the model's makers recommend, under the names of `generation_config.json`.

    Raises:
        ValueError: when one is no number.
    """
    found = {name: metadata.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    for name, value in found.items():
        if value is not None and type(value) not in (int, float):
            raise ValueError(f"general.sampling.{_SAMPLING[name]} must be a number, is {shown(value)}")
    return {name: value for name, value in found.items() if value is not None}
