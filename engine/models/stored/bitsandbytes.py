"""The layouts of bitsandbytes: values of 4 bits from a table (NF4, FP4), and LLM.int8.

    weight                           uint8 [out * in / 2, 1], two values a byte, the higher bits first
    weight.quant_map                 float32 [16], the table
    weight.absmax                    a factor for each block of values, float32; or uint8 of a table of their own
    weight.nested_absmax, .nested_quant_map   its blocks' factors and that table
    weight.quant_state.bitsandbytes__nf4      uint8, JSON: shape, blocksize, nested_blocksize, nested_offset
    weight, SCB                      int8 [out, in] and the largest value of each output, float32 (LLM.int8)

Source: bitsandbytes' `QuantState` (Dettmers et al., 2023, "QLoRA").
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from espalier.engine.models.stored.base import SingleFormat

_MAX_INT8 = 127
_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")


class BitsAndBytes(SingleFormat):
    """See the module."""

    parts = re.compile(
        r"(?P<weight>.+)\.(?P<part>weight|weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map)|"
        r"weight\.quant_state\.bitsandbytes__\w+|SCB|weight_format)"
    )
    marks = frozenset((*_STATES, "SCB"))

    def __init__(self, config: Mapping[str, Any], place: str) -> None:
        """Read the number of bits; what else there is to know is stored beside each weight."""
        self._bits = 8 if config.get("load_in_8bit") else 4

    def __str__(self) -> str:
        return f"bitsandbytes, {self._bits} bits"

    def shape(self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        """See `Layout`."""
        if "SCB" in shapes:
            return shapes["weight"]
        state = next(name for name in _STATES if name in shapes)
        return tuple(int(size) for size in _state(read(state))["shape"])

    def expand(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """See `Layout`."""
        if "SCB" in parts:
            return parts["weight"].float().mul_(parts["SCB"].float().view(-1, 1) / _MAX_INT8)
        state = _state(next(parts[name] for name in _STATES if name in parts))
        absmax = parts["weight.absmax"]
        if absmax.dtype == torch.uint8:
            factors = parts["weight.nested_quant_map"][absmax.long()]
            absmax = _scaled(factors, parts["weight.nested_absmax"], state["nested_blocksize"]) + state["nested_offset"]
        packed = parts["weight"].flatten()
        values = parts["weight.quant_map"].float()[torch.stack((packed >> 4, packed & 15), -1).long()].flatten()
        return _scaled(values, absmax, state["blocksize"])[: torch.Size(shape).numel()].view(shape)


def _state(stored: torch.Tensor) -> dict[str, Any]:
    return json.loads(bytes(stored.tolist()).decode())


def _scaled(values: torch.Tensor, factors: torch.Tensor, size: int) -> torch.Tensor:
    """Values times the factor of their block of `size` neighbours."""
    return values * factors.float().repeat_interleave(size)[: len(values)]
