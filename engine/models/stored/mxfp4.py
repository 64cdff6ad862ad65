"""Floats of 4 bits in blocks of 32 with a power of two each: MXFP4, as gpt-oss stores its experts.

    NAME_blocks  uint8 [experts, out, in / 32, 16]   two values a byte, the lower bits first
    NAME_scales  uint8 [experts, out, in / 32]       exponent plus 127

Values are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives (the OCP's Microscaling Formats, E2M1). NAME itself is
`[experts, in, out]`, the order in which transformers multiplies them.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from espalier.engine.models.stored.base import SingleFormat

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


class Mxfp4(SingleFormat):
    """See the module."""

    parts = re.compile(r"(?P<weight>.+)_(?P<part>blocks|scales)")
    suffix = ""
    marks = frozenset(("blocks", "scales"))

    def __init__(self, config: Mapping[str, Any], place: str) -> None:
        """There is one layout."""

    def __str__(self) -> str:
        return "MXFP4"

    def shape(self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        """See `Layout`."""
        *experts, outputs, groups, size = shapes["blocks"]
        return *experts, 2 * groups * size, outputs

    def expand(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """See `Layout`."""
        blocks = parts["blocks"]
        table = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
        values = table[torch.stack((blocks & 15, blocks >> 4), -1).long()].flatten(-2)
        values *= torch.exp2(parts["scales"].float() - _BIAS).unsqueeze(-1)
        return values.flatten(-2).mT
