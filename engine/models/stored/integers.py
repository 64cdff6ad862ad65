"""Integers of few bits in words of 32: the layouts of GPTQ and AWQ.

    GPTQ  qweight int32 [in / n, out]    n = 32 / bits values of one output in a word, the lowest bits first
          qzeros  int32 [groups, out / n]
          scales        [groups, out]
          g_idx   int32 [in]             group of each input; without it groups are neighbours
    AWQ   qweight int32 [in, out / 8]    eight outputs in a word, in the order 0 2 4 6 1 3 5 7
          qzeros  int32 [groups, out / 8], in that order too
          scales        [groups, out]

A weight is `(value - zero) * scale`. Sources: AutoGPTQ and GPTQModel (whose first version writes zeros less one), and
AutoAWQ's `gemm`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from espalier.engine.models.stored.base import StoredFormat, refusal
from espalier.engine.models.text_files import require

_WORD = 32
GROUP_SIZE = "a whole number from 1 on, or -1 for one group"
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned integers of the last dimension's words, the lowest bits first; int32 `[..., words * 32 / bits]`."""
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)


def groups_of(inputs: int, group_size: int | None, given: torch.Tensor | None, count: int) -> torch.Tensor:
    """The group of each input, int64: as the checkpoint gives it, or else `group_size` neighbours each.

    There is one group of all for a size of None or -1.

    Raises:
        ValueError: there are not as many, or they are not those `count` that have scales.
    """
    size = group_size if group_size and group_size > 0 else inputs
    groups = torch.arange(inputs) // size if given is None else given.long()
    least, most = (int(groups.min()), int(groups.max())) if groups.numel() else (0, -1)
    if len(groups) != inputs or least < 0 or most >= count or (given is None and most != count - 1):
        listed = f"{len(groups)} inputs of {inputs} are of the groups {least} to {most}"
        raise ValueError(f"{listed} (group_size is {group_size}), and {count} groups have scales")
    return groups


def is_group_size(value: object) -> bool:
    """True for a number of inputs, and for None and -1, which are all of them."""
    return value is None or (type(value) is int and (value > 0 or value == -1))


class _Grouped(StoredFormat):
    """The part that GPTQ and AWQ have in common: zeros and scales of groups of inputs."""

    parts = re.compile(r"(?P<weight>.+)\.(?P<part>qweight|qzeros|scales|g_idx)")
    marks = frozenset(("qweight",))
    name = ""

    def __init__(self, config: Mapping[str, Any], place: str) -> None:
        bits = config.get("bits", config.get("w_bit", 4))
        self.bits = require(place, "quantization_config.bits", bits, "an integer", lambda value: type(value) is int)
        if self.bits not in (2, 4, 8):
            raise refusal(place, f"{self.name} with {self.bits} bits", "read are 2, 4 and 8 bits")
        size = config.get("group_size", config.get("q_group_size"))
        self._group_size = require(place, "quantization_config.group_size", size, GROUP_SIZE, is_group_size)
        self.name = f"{self.name}, {self.bits} bits"

    def _dequantised(
        self, values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor | None
    ) -> torch.Tensor:
        """`[in, out]` values, `[groups, out]` zeros and scales to a weight `[out, in]`."""
        if scales.shape != zeros.shape:
            raise ValueError(f"scales are {tuple(scales.shape)} and zeros {tuple(zeros.shape)}")
        groups = groups_of(len(values), self._group_size, groups, len(scales))
        weight = (values - zeros[groups]).float()
        return weight.mul_(scales.float()[groups]).T


class Gptq(_Grouped):
    """See the module."""

    name = "GPTQ"

    def __init__(self, config: Mapping[str, Any], place: str) -> None:
        """Read the sizes; raises CheckpointError for those that are not read."""
        super().__init__(config, place)
        version = config.get("checkpoint_format", "gptq")
        if version not in ("gptq", "gptq_v2"):
            raise refusal(place, f"checkpoint_format is {version!r}", "read are gptq and gptq_v2")
        self._offset = 1 if version == "gptq" else 0

    def shape(self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        """See `StoredFormat`."""
        words, outputs = shapes["qweight"]
        return outputs, words * _WORD // self.bits

    def expand(self, weight: str, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """See `StoredFormat`."""
        zeros = (unpack(parts["qzeros"], self.bits)[:, : shape[0]] + self._offset) & (2**self.bits - 1)
        return self._dequantised(unpack(parts["qweight"].T, self.bits).T, zeros, parts["scales"], parts.get("g_idx"))


class Awq(_Grouped):
    """See the module."""

    name = "AWQ"

    def __init__(self, config: Mapping[str, Any], place: str) -> None:
        """Read the sizes; raises CheckpointError for those that are not read."""
        super().__init__(config, place)
        version = config.get("version", "gemm")
        if self.bits != 4 or str(version).lower() != "gemm":
            raise refusal(place, f"AWQ's version {version} with {self.bits} bits", "read is gemm with 4 bits")

    def shape(self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        """See `StoredFormat`."""
        inputs, words = shapes["qweight"]
        return words * len(_AWQ_ORDER), inputs

    def expand(self, weight: str, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """See `StoredFormat`."""
        places = torch.argsort(torch.tensor(_AWQ_ORDER))  # of a word's integers, in the order of their columns
        words = (unpack(parts[name], self.bits).unflatten(-1, (-1, len(places))) for name in ("qweight", "qzeros"))
        values, zeros = (each[..., places].flatten(-2) for each in words)
        return self._dequantised(values, zeros, parts["scales"], None)
