"""Weights of a checkpoint that are stored in several tensors each, in the format that its configuration names."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.stored.base import StoredFormat, refusal
from espalier.engine.models.stored.compressed_tensors import CompressedTensors
from espalier.engine.models.stored.floats import BitsAndBytes, Float8, Mxfp4
from espalier.engine.models.stored.integers import Awq, Gptq
from espalier.engine.models.text_files import shown
from espalier.engine.models.weights import TensorInfo

_METHODS: dict[str, Callable[[Mapping[str, Any], str], StoredFormat]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fp8": Float8,
    "gptq": Gptq,
    "mxfp4": lambda config, place: Mxfp4(),
}


def stored_format(config: Mapping[str, Any], place: str) -> StoredFormat | None:
    """The format of a checkpoint's weights; None where they are not quantised.

    Args:
        config: `config.json`.
        place: the file, for errors.

    Raises:
        CheckpointError: the layout is not one of those that are read.
    """
    if (stored := config.get("quantization_config")) is None:
        return None
    method = stored.get("quant_method") if isinstance(stored, dict) else stored
    if not isinstance(stored, dict) or not isinstance(method, str) or method not in _METHODS:
        raise refusal(place, f"the weights are quantised by {shown(method)}", f"read are {', '.join(_METHODS)}")
    return _METHODS[method](stored, place)


class PackedWeights:
    """The weights of a checkpoint that are stored in several tensors each.

    Attributes:
        tensors: the checkpoint's, with one entry in place of each weight's parts.
        parts: names of the tensors of each packed weight, by part.
    """

    def __init__(
        self, form: StoredFormat, tensors: Mapping[str, TensorInfo], read: Callable[[str], torch.Tensor]
    ) -> None:
        """Find the weights.

        Args:
            form: their format.
            tensors: of the files.
            read: gives one of them.

        Raises:
            CheckpointError: a part is missing, their shapes contradict each other, or there is no such weight.
        """
        self._form = form
        self._read = read
        self.tensors = dict(tensors)
        self.parts = dict[str, dict[str, str]]()
        found = dict[str, dict[str, str]]()
        for name in tensors:
            if match := form.parts.fullmatch(name):
                found.setdefault(match["weight"], {})[match["part"]] = name
        for weight, parts in found.items():
            if form.marks & parts.keys():
                self._add(weight + form.suffix, parts)
        if not self.parts:
            wrong = f"quantization_config says that weights are quantised ({form.name}), and none is"
            raise CheckpointError(f"config.json: {wrong}; if so, remove it")

    def read(self, name: str) -> torch.Tensor:
        """The values of a packed weight, float32."""
        parts = {part: self._read(tensor) for part, tensor in self.parts[name].items()}
        with self._reading(name, self.tensors[name].file):
            expanded = self._form.expand(self._stem(name), parts, self.tensors[name].shape)
            if (found := tuple(expanded.shape)) != self.tensors[name].shape:
                raise ValueError(f"its parts are those of a weight of {found}, and not of {self.tensors[name].shape}")
            return expanded

    def is_empty_bias(self, name: str) -> bool:
        """True for a bias of zeros beside a packed weight: GPTQ's writers give one to every layer."""
        weight = f"{name.removesuffix('.bias')}.weight"
        return name.endswith(".bias") and weight in self.parts and not self._read(name).any()

    def _add(self, name: str, parts: dict[str, str]) -> None:
        infos = {part: self.tensors.pop(tensor) for part, tensor in parts.items()}
        file = next(iter(infos.values())).file
        with self._reading(name, file):
            shapes = {part: info.shape for part, info in infos.items()}
            kind, shape = self._form.kind(self._stem(name)), self._form.shape(shapes, lambda p: self._read(parts[p]))
            if not shape or min(shape) < 1:
                raise ValueError(f"its shape is {shape}")
        nbytes = sum(info.nbytes for info in infos.values())
        self.parts[name] = parts
        self.tensors[name] = TensorInfo(file, shape, nbytes, kind, numbers=True)

    def _stem(self, name: str) -> str:
        return name.removesuffix(self._form.suffix)

    @contextmanager
    def _reading(self, name: str, file: Path) -> Iterator[None]:
        """Name the weight, its file and the layout in errors."""
        try:
            yield
        except KeyError as error:
            raise CheckpointError(f"{file}: {name} ({self._form.name}) lacks its part {error}") from error
        except (RuntimeError, IndexError, ValueError, TypeError) as error:  # shapes, or groups that are not there
            raise CheckpointError(f"{file}: {name} cannot be read as {self._form.name}: {error}") from error
