"""Files of architectures with recurrent layers, by a table of their names and values."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch

from espalier.engine.models.config import MAX_COUNTS
from espalier.engine.models.gguf.architectures import RECURRENT
from espalier.engine.models.gguf.mapped import MappedArchitecture
from espalier.engine.models.text_files import shown

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_MAX_COUNT = 2**30


class RecurrentArchitecture(MappedArchitecture):
    """The model of a file of one of `RECURRENT`."""

    def __init__(self, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """See `MappedArchitecture`.

        Raises:
            KeyError: the metadata lacks a value.
            ValueError: a value means nothing, or the file is of a kind that is not read.
        """
        architecture: str = metadata["general.architecture"]
        self._its = RECURRENT[architecture]
        if metadata.get(f"{architecture}.ssm.dt_b_c_rms"):
            raise ValueError(f"general.architecture is {architecture} with norms of time steps (Falcon Mamba), unread")
        self._find_class(metadata, shapes, self._its.model_type)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The same model's `config.json`."""
        architecture: str = self._metadata["general.architecture"]

        def get(key: str, *default: Any) -> Any:
            name = f"{architecture}.{key}"
            value = self._metadata.get(name, *default) if default else self._metadata[name]
            value = value.tolist() if isinstance(value, np.ndarray) else value
            if type(value) is int and not 0 <= value <= _MAX_COUNT:
                raise ValueError(f"{name} must be a whole number up to {_MAX_COUNT:,}, is {shown(value)}")
            return value

        try:
            config = self._its.config(get, self._shapes)
        except (TypeError, ZeroDivisionError) as error:
            raise ValueError(f"its values for {architecture} do not fit together: {error}") from error
        for field, most in MAX_COUNTS.items():
            if type(value := config.get(field, 1)) is not int or not 1 <= value <= most:
                raise ValueError(f"{field} must be a whole number from 1 to {most:,}, is {shown(value)}")
        return config | self._common_config()

    @cached_property
    def parts(self) -> dict[str, list[str]]:
        """llama.cpp's names of the tensors that make up each of the class's; its own name for one that has none."""
        found = defaultdict[str, list[str]](list)
        for name in self._shapes:
            if (layer := _LAYER.fullmatch(name)) and int(layer[1]) >= self.config["num_hidden_layers"]:
                continue  # predicts several tokens at once
            found[self._layout_name(name, layer)].append(name)
        order = list(self._its.inner)
        for parts in found.values():
            if len(parts) > 1:
                parts.sort(key=lambda part: order.index(self._key(part.partition(".")[2].partition(".")[2])))
        return dict(found)

    def read(self, name: str, values: Callable[[str], np.ndarray]) -> torch.Tensor:
        """See `MappedArchitecture`."""
        parts = [values(part) for part in self.parts[name]]
        merged = parts[0] if len(parts) == 1 else self._its.merge(parts, self.config)
        restored = self._its.restore(name, merged, self.config)
        tensor, shape = torch.from_numpy(np.ascontiguousarray(restored)), torch.Size(self.shapes.get(name, ()))
        return tensor.reshape(shape) if tensor.numel() == shape.numel() else tensor

    def _key(self, rest: str) -> str:
        """The key that a name in a layer has in `inner`."""
        return rest if rest in self._its.inner else rest.rpartition(".")[0]

    def _layout_name(self, name: str, layer: re.Match[str] | None) -> str:
        names, rest = (self._its.inner, layer[2]) if layer else (self._its.outer, name)
        module, _, kind = rest.rpartition(".")
        if whole := names.get(rest):
            found = whole
        elif known := names.get(module):
            found = f"{known}.{kind}"
        else:
            return name
        return f"{self._its.layers}{layer[1]}.{found}" if layer else found
