"""A GGUF file as a checkpoint's file: tensors under the names of the Hugging Face layout, dequantised when read."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType

from espalier.engine.errors import CheckpointError
from espalier.engine.models.gguf.architectures import RECURRENT
from espalier.engine.models.gguf.config import LIKE_LLAMA, model_config, sampling
from espalier.engine.models.gguf.header import Header, StoredTensor
from espalier.engine.models.gguf.mapped import LAYER_NAMES, OUTER_NAMES, MappedArchitecture
from espalier.engine.models.gguf.recurrent import RecurrentArchitecture
from espalier.engine.models.gguf.tokenizer import tokenizer_config, tokenizer_json
from espalier.engine.models.text_files import shown
from espalier.engine.models.weights import TensorInfo, parts_of
from espalier.kernels.cpu.gguf_blocks import expand

_NAMES = OUTER_NAMES | LAYER_NAMES | {"cls.output": "score", "ffn_norm": "post_attention_layernorm"}
"""Modules by llama.cpp's names of them; the names of layers have a prefix."""
_NAME = re.compile(r"(blk\.(?P<layer>\d+)\.)?(?P<module>[a-z_.]+)\.(?P<kind>weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_INTERLEAVED = {"attn_q": "head_count", "attn_k": "head_count_kv"}
"""Projections whose heads llama.cpp reorders for models of the Llama architecture, and where their number stands."""
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
        header = Header(path)
        first, *_ = parts_of(path)
        self._path, self._header = path, header
        self._metadata = header.metadata if path == first else Header(first).metadata
        if not isinstance(kind := self._metadata.get("general.architecture"), str):
            raise CheckpointError(f"{path} holds no model: general.architecture in its metadata is {shown(kind)}")
        self._mapped: MappedArchitecture | None = None
        if kind not in LIKE_LLAMA:
            self._open_mapped(header)
            return
        self._stored = {self._layout_name(name): (name, tensor) for name, tensor in header.tensors.items()}
        if lost := header.tensors.keys() - {name for name, _ in self._stored.values()}:
            name = min(lost)
            raise CheckpointError(f"{path} holds {name} and {self._layout_name(name)}, which mean the same tensor")
        self._stored.pop(_ROPE_FACTORS, None)  # read as a part of the configuration
        self.tensors = {
            name: TensorInfo(path, tensor.shape, tensor.data.nbytes, tensor.kind.name, tensor.kind not in _WHOLE)
            for name, (_, tensor) in self._stored.items()
        }

    def read(self, name: str, room: torch.Tensor | None = None) -> torch.Tensor:
        """See `WeightFile`; float32, or as it is stored where that is float16."""
        into = None if room is None else room.numpy()
        if self._mapped:
            into = into if len(self._mapped.parts[name]) == 1 else None
            return self._mapped.read(name, lambda part: _values(self._stored[part][1], self._path, into))
        name, stored = self._stored[name]
        return torch.from_numpy(self._in_layout_order(name, _values(stored, self._path, into)))

    def first_rows(self, name: str, count: int) -> torch.Tensor:
        """The first rows of a tensor that is stored in the order of its values, as an embedding is; see `read`."""
        _, stored = self._stored[self._mapped.parts[name][0] if self._mapped else name]
        data = stored.data[:count]
        part = replace(stored, data=data, shape=(len(data), *stored.shape[1:]))
        return torch.from_numpy(_values(part, self._path))

    def text(self, name: str) -> str | None:
        """The text of the small file `name` of the same checkpoint in Hugging Face layout, or None where it has none.

        Raises:
            CheckpointError: when the metadata lacks what is needed for it, or the tokenizer is of an unknown kind.
        """
        try:
            match name:
                case "config.json":
                    return json.dumps(self._config())
                case "generation_config.json":
                    return json.dumps(sampling(self._metadata))
                case "tokenizer_config.json":
                    return json.dumps(tokenizer_config(self._metadata))
                case "tokenizer.json":
                    return json.dumps(tokenizer_json(self._metadata))
        except KeyError as missing:
            raise CheckpointError(f"{self._path} lacks {missing} in its metadata") from missing
        except ValueError as error:
            raise CheckpointError(f"{self._path}: {error}") from error
        return None

    def _open_mapped(self, header: Header) -> None:
        """Find the tensors of an architecture that transformers' tables map."""
        every = self._all_stored()
        try:
            kind = RecurrentArchitecture if self._metadata["general.architecture"] in RECURRENT else MappedArchitecture
            mapped = kind(self._metadata, {name: tensor.shape for name, tensor in every.items()})
            parts = mapped.parts
        except KeyError as missing:
            raise CheckpointError(f"{self._path} lacks {missing} in its metadata") from missing
        except ValueError as error:
            raise CheckpointError(f"{self._path}: {error}") from error
        self._mapped = mapped
        self._stored = {name: (name, tensor) for name, tensor in header.tensors.items()}
        self.tensors = {}
        for name, its in parts.items():
            here = [header.tensors[part] for part in its if part in header.tensors]
            if len(here) != len(its):
                continue  # it is in another part of the file
            shape = mapped.shapes.get(name, here[0].shape)
            size = sum(tensor.data.nbytes for tensor in here)
            numbers = all(tensor.kind not in _WHOLE for tensor in here)
            self.tensors[name] = TensorInfo(self._path, shape, size, here[0].kind.name, numbers)

    def _config(self) -> dict[str, Any]:
        if self._mapped:
            return self._mapped.config
        whole = self._all_stored()
        shapes = {self._layout_name(name): tensor.shape for name, tensor in whole.items()}
        factors = whole.get(_ROPE_FACTORS)
        return model_config(self._metadata, shapes, None if factors is None else _values(factors, self._path))

    def _all_stored(self) -> dict[str, StoredTensor]:
        """The tensors of all parts of the file, by llama.cpp's names."""
        headers = (self._header if part == self._path else Header(part) for part in parts_of(self._path))
        return {name: tensor for header in headers for name, tensor in header.tensors.items()}

    def _layout_name(self, name: str) -> str:
        """The name in the Hugging Face layout of a tensor that llama.cpp calls `name`."""
        if not (parts := _NAME.fullmatch(name)) or (module := _NAMES.get(parts["module"])) is None:
            return name
        layer = f"model.layers.{parts['layer']}." if parts["layer"] else ""
        return f"{layer}{module}.{parts['kind']}"

    def _in_layout_order(self, name: str, values: np.ndarray) -> np.ndarray:
        """Rows of a projection, reordered for the rotation of halves; llama.cpp rotates neighbours for Llama."""
        parts = _NAME.fullmatch(name)
        if not parts or parts["module"] not in _INTERLEAVED or self._metadata["general.architecture"] != "llama":
            return values
        heads = self._metadata.get("llama.attention.head_count")
        heads = self._metadata.get(f"llama.attention.{_INTERLEAVED[parts['module']]}", heads)
        if not isinstance(heads, int) or heads < 1 or len(values) % (2 * heads):
            raise CheckpointError(f"{self._path}: {name} has {len(values)} rows, which are not those of {heads} heads")
        pairs = values.reshape(heads, -1, 2, *values.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


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
