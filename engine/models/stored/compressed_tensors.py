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
from espalier.engine.models.stored.floats import is_block, scale_blocks
from espalier.engine.models.stored.integers import GROUP_SIZE, groups_of, is_group_size, unpack
from espalier.engine.models.text_files import require, shown

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_KINDS = (("int", 2), ("int", 4), ("int", 8), ("float", 8))
_PATTERN = "re:"
_CLASSES = ("Linear", "Embedding")
_MIXED = "mixed-precision"
"""The format of a checkpoint whose groups of layers have one each."""


class CompressedTensors(StoredFormat):
    """See the module. Each layer has the scheme of the group that targets it."""

    parts = re.compile(
        r"(?P<weight>.+)\.(?P<part>weight|weight_packed|weight_scale|weight_shape|weight_zero_point|weight_g_idx|input_scale|"
        r"input_zero_point|output_scale|output_zero_point)"
    )
    marks = frozenset(("weight_packed", "weight_scale"))

    def __init__(self, config: Mapping[str, Any], place: str) -> None:
        """Read the schemes; raises CheckpointError for one that is not read."""
        given = config.get("config_groups")
        groups = [each for each in given.values() if isinstance(each, dict)] if isinstance(given, dict) else []
        groups = [group for group in groups if isinstance(group.get("weights"), dict)]
        if not groups:
            raise refusal(place, "its config_groups have no scheme of weights", "each group that has one is read")
        whole = config.get("format")
        formats = [group.get("format") or whole for group in groups] + ([] if whole == _MIXED else [whole])
        if unknown := [form for form in formats if form is not None and form not in _FORMATS]:
            raise refusal(place, f"compressed-tensors' format {unknown[0]}", f"read are {', '.join(_FORMATS)}")
        self._schemes = [_Scheme(group["weights"], place) for group in groups]
        self.name = f"compressed-tensors, {', '.join(dict.fromkeys(scheme.name for scheme in self._schemes))}"
        self._alike = all(group["weights"] == groups[0]["weights"] for group in groups)
        self._targets = list[tuple[int, str, _Scheme]]()
        for group, scheme in zip(groups, self._schemes, strict=True):
            targets = group.get("targets") or []
            require(place, "targets of a group in quantization_config", targets, "a list of patterns", _are_patterns)
            self._targets += [(_rank(target), target, scheme) for target in targets]
        self._targets.sort(key=lambda each: each[:2])

    def kind(self, weight: str) -> str:
        """See `StoredFormat`."""
        return self._scheme(weight).name

    def shape(self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        """See `StoredFormat`."""
        return tuple(read("weight_shape").tolist()) if "weight_packed" in shapes else shapes["weight"]

    def expand(self, weight: str, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """See `StoredFormat`."""
        return self._scheme(weight).expand(parts, shape)

    def _scheme(self, weight: str) -> "_Scheme":
        """The scheme of the first target that a layer's name fits: whole names, then patterns, then classes."""
        if self._alike:
            return self._schemes[0]
        for rank, target, scheme in self._targets:
            if _fits(rank, target, weight):
                return scheme
        raise ValueError("no group of quantization_config has it among its targets")


def _rank(target: str) -> int:
    """0 for the name of a layer, 1 for a pattern, 2 for a class."""
    return 1 if target.startswith(_PATTERN) else 2 if target in _CLASSES else 0


def _fits(rank: int, target: str, weight: str) -> bool:
    if rank == 1:
        return re.match(target.removeprefix(_PATTERN), weight) is not None
    embeds = weight.endswith("embed_tokens")
    return target == weight if rank == 0 else (target == "Embedding") == embeds


def _are_patterns(value: object) -> bool:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        return False
    try:
        return all(re.compile(each.removeprefix(_PATTERN)) for each in value if each.startswith(_PATTERN))
    except re.error:
        return False


class _Scheme:
    """The layout of the weights of some layers."""

    def __init__(self, scheme: Mapping[str, Any], place: str) -> None:
        self.bits: int = scheme.get("num_bits", 0)
        kind = scheme.get("type", "int")
        self.name = f"{shown(kind)} of {shown(self.bits)} bits".replace("'", "")
        if type(self.bits) is not int or (kind, self.bits) not in _KINDS:
            raise refusal(place, self.name, "read are integers of 2, 4 and 8 bits and floats of 8")
        size, block = scheme.get("group_size"), scheme.get("block_structure")
        self._group_size = require(place, "group_size in quantization_config", size, GROUP_SIZE, is_group_size)
        if isinstance(block, str):
            block = [int(each) for each in block.split("x") if each.isdecimal()]
        rule = "two positive integers"
        self.block = block and require(place, "block_structure in quantization_config", block, rule, is_block)
        self._symmetric = scheme.get("symmetric", True) is not False

    def expand(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """See `StoredFormat.expand`."""
        scale, zero, groups = parts["weight_scale"], parts.get("weight_zero_point"), parts.get("weight_g_idx")
        if not self._symmetric and not self.block and zero is None:
            raise KeyError("weight_zero_point")
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
        groups = groups_of(shape[1], self._group_size, groups, of_groups.shape[1] if of_groups.ndim > 1 else 1)
        if of_groups.numel() == 1:
            return of_groups.view(1, 1)
        if len(of_groups) != shape[0]:
            raise ValueError(f"{len(of_groups)} outputs have scales or zeros, not {shape[0]}")
        if of_groups.ndim < 2 or of_groups.shape[1] == 1:
            return of_groups.view(-1, 1)
        return of_groups[:, groups]
