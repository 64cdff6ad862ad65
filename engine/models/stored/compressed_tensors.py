"""The layouts of the compressed-tensors library (LLM Compressor); activations are not quantised here.

    pack-quantized   weight_packed int32 [out, ceil(in * bits / 32)], values plus 2^(bits - 1), the lowest bits first
                     weight_zero_point int32 [ceil(out * bits / 32), groups], packed along outputs, if asymmetric
    int-quantized    weight int8 [out, in], weight_zero_point int8 if asymmetric
    float-quantized  weight float8_e4m3fn [out, in]
    naive-quantized  either of the two

`weight_scale` is [1], [out, 1], [out, groups], or [ceil(out / rows), ceil(in / columns)] of blocks; `weight_g_idx`
int32 [in] gives each input's group where they are no neighbours. A weight is `(value - zero) * scale`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from espalier.engine.models.stored.base import StoredFormat, refusal
from espalier.engine.models.stored.float8 import scale_blocks
from espalier.engine.models.stored.integers import neighbours, unpack

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_WORD = 32


class CompressedTensors(StoredFormat):
    """See the module."""

    parts = re.compile(
        r"(?P<weight>.+)\.(?P<part>weight|weight_packed|weight_scale|weight_shape|weight_zero_point|weight_g_idx|input_scale|"
        r"input_zero_point|output_scale|output_zero_point)"
    )
    marks = frozenset(("weight_packed", "weight_scale"))

    def __init__(self, config: Mapping[str, Any], place: str) -> None:
        """Read the scheme; raises CheckpointError for one that is not read."""
        groups = config.get("config_groups")
        found = [each for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []
        formats = {config.get("format"), *(group.get("format") for group in found)} - {None}
        if unknown := sorted(str(form) for form in formats if form not in _FORMATS):
            raise refusal(place, f"compressed-tensors' format {unknown[0]}", f"read are {', '.join(_FORMATS)}")
        schemes = [group.get("weights") for group in found]
        if not schemes or not isinstance(schemes[0], dict) or any(each != schemes[0] for each in schemes):
            raise refusal(place, "its config_groups have no one scheme of weights", "read is one for all layers")
        scheme: dict[str, Any] = schemes[0]
        self.bits: int = scheme.get("num_bits", 0)
        self.kind: str = scheme.get("type", "int")
        if (self.kind, self.bits) not in (("int", 2), ("int", 4), ("int", 8), ("float", 8)):
            raise refusal(
                place, f"{self.kind} of {self.bits} bits", "read are integers of 2, 4 and 8 bits and floats of 8"
            )
        self._group_size: int | None = scheme.get("group_size")
        self.block = scheme.get("block_structure")

    def __str__(self) -> str:
        return f"compressed-tensors, {self.kind} of {self.bits} bits"

    def shape(self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        """See `StoredFormat`."""
        if "weight_packed" in shapes:
            return tuple(read("weight_shape").tolist())
        return shapes["weight"]

    def expand(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """See `StoredFormat`."""
        scale, zero, groups = parts["weight_scale"], parts.get("weight_zero_point"), parts.get("weight_g_idx")
        if "weight_packed" in parts:
            values = self._unpack(parts["weight_packed"], shape[1])
            zero = None if zero is None else self._unpack(zero.T, shape[0]).T
        else:
            values = parts["weight"].float()
        values = values.float()
        if self.block:
            return scale_blocks(values, scale, *self.block)
        if zero is not None and zero.any():
            values -= self._spread(zero.float(), shape, groups)
        return values.mul_(self._spread(scale.float(), shape, groups))

    def _unpack(self, words: torch.Tensor, columns: int) -> torch.Tensor:
        return unpack(words, self.bits)[:, :columns] - 2 ** (self.bits - 1)

    def _spread(self, of_groups: torch.Tensor, shape: tuple[int, ...], groups: torch.Tensor | None) -> torch.Tensor:
        """Scales or zeros of groups, for each input."""
        if of_groups.numel() == 1:
            return of_groups.view(1, 1)
        if len(of_groups) != shape[0]:
            raise ValueError(f"{len(of_groups)} outputs have scales or zeros, not {shape[0]}")
        if of_groups.ndim < 2 or of_groups.shape[1] == 1:
            return of_groups.view(-1, 1)
        groups = neighbours(shape[1], self._group_size) if groups is None else groups
        return of_groups[:, groups.long()]
