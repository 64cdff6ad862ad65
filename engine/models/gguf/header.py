"""The beginning of a GGUF file: metadata by key, and where each tensor lies.

The `gguf` package's own reader makes several arrays for each entry of a list, which takes 7 s for a vocabulary of
150,000 tokens; this one takes a tenth of a second. Layout: `docs/gguf.md` of github.com/ggml-org/ggml.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType
from gguf.quants import quant_shape_to_byte_shape

from espalier.engine.errors import CheckpointError

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
"""Names of the types of numbers in `struct`."""


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
            self._require_version(path)
            num_tensors, num_keys = self._numbers("QQ")
            self.metadata: dict[str, Any] = {}
            for _ in range(num_keys):
                self._take_entry()
            self.tensors = self._tensors(num_tensors)
        except (struct.error, ValueError, KeyError, OverflowError, MemoryError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged or cut short; download it again ({error})") from error

    def _require_version(self, path: Path) -> None:
        magic, version = self._numbers("II")
        if magic != GGUF_MAGIC:
            raise CheckpointError(f"{path} is not a GGUF file: it does not begin with GGUF")
        if version not in _VERSIONS:
            raise CheckpointError(f"{path} has version {version} of GGUF; {' and '.join(map(str, _VERSIONS))} are read")

    def _take_entry(self) -> None:
        key = self._text()
        if key in self.metadata:
            raise ValueError(f"{key} is given twice")
        self.metadata[key] = value = self._value(self._kind())
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key} is {value}, which is no number")

    def _numbers(self, form: str) -> tuple[Any, ...]:
        """The next numbers, little-endian, in the spelling of `struct`."""
        values = struct.unpack_from(f"<{form}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values

    def _kind(self) -> GGUFValueType:
        return GGUFValueType(self._numbers("I")[0])

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
        of = self._kind()
        (length,) = self._numbers("Q")
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
        return self._stored_apart({name: (kind, shape, start + at) for name, (kind, shape, at) in entries.items()})

    def _stored_apart(
        self, entries: dict[str, tuple[GGMLQuantizationType, tuple[int, ...], int]]
    ) -> dict[str, StoredTensor]:
        """The tensors at their places; no two share a byte."""
        stored = {name: self._stored(name, *entry) for name, entry in entries.items()}
        end, last = 0, ""
        for name, (*_, at) in sorted(entries.items(), key=lambda entry: entry[1][-1]):
            if at < end:
                raise ValueError(f"the tensors {last} and {name} lie on the same bytes")
            end, last = at + stored[name].data.nbytes, name
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
