"""Floats of 8 and 4 bits: FP8, MXFP4, and the layouts of bitsandbytes."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from espalier.engine.models.stored.base import StoredFormat
from espalier.engine.models.text_files import require

_MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MXFP4_BIAS = 127
_MAX_INT8 = 127
_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")


def scale_blocks(values: torch.Tensor, scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Multiply values by the scales of their blocks, in place.

    Args:
        values: float32 `[..., out, in]`.
        scales: `[..., ceil(out / rows), ceil(in / columns)]`, or one for all.
        rows: outputs of a block.
        columns: inputs of a block.
    """
    scales = scales.float()
    blocks = tuple(-(-size // block) for size, block in zip(values.shape[-2:], (rows, columns), strict=True))
    if scales.numel() > 1 and scales.shape[-2:] != blocks:
        raise ValueError(f"scales are {tuple(scales.shape)}, and blocks of {rows} x {columns} are {blocks}")
    for dimension, size in ((-2, rows), (-1, columns)):
        if scales.numel() > 1:
            scales = scales.repeat_interleave(size, dimension).narrow(dimension, 0, values.shape[dimension])
    return values.mul_(scales)


class Float8(StoredFormat):
    """Floats of 8 bits with a scale for each block, as the FP8 checkpoints of DeepSeek and Qwen3.

        weight            float8_e4m3fn [out, in]
        weight_scale_inv  [ceil(out / rows), ceil(in / columns)], blocks of rows x columns, 128 x 128 unless
                          weight_block_size says otherwise; or weight_scale, one for all or one for each output
        input_scale       of activations, which are not quantised here

    A weight is its value times its block's scale, whatever "inv" may say.
    """

    name = "FP8"
    parts = re.compile(r"(?P<weight>.+)\.(?P<part>weight|weight_scale_inv|weight_scale|input_scale|activation_scale)")
    marks = frozenset(("weight_scale_inv", "weight_scale"))

    def __init__(self, config: Mapping[str, Any], place: str) -> None:
        """Read the block's size; raises CheckpointError where it is none."""
        size = config.get("weight_block_size") or (128, 128)
        rule, name = "two positive integers", "quantization_config.weight_block_size"
        self.block = require(place, name, size, rule, is_block)

    def expand(self, weight: str, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """See `StoredFormat`."""
        values = parts["weight"].float()
        if "weight_scale_inv" in parts:
            return scale_blocks(values, parts["weight_scale_inv"], *self.block)
        scale = parts["weight_scale"].float()
        return values.mul_(scale.view(-1, 1) if scale.numel() > 1 else scale)


def is_block(value: object) -> bool:
    """True for numbers of outputs and inputs."""
    return isinstance(value, list | tuple) and [type(size) for size in value] == [int, int] and min(value) > 0


class Mxfp4(StoredFormat):
    """Floats of 4 bits in blocks of 32 with a power of two each: MXFP4, as gpt-oss stores its experts.

        NAME_blocks  uint8 [experts, out, in / 32, 16]   two values a byte, the lower bits first
        NAME_scales  uint8 [experts, out, in / 32]       exponent plus 127

    Values are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives (the OCP's Microscaling Formats, E2M1). NAME itself is
    `[experts, in, out]`, the order in which transformers multiplies them.
    """

    name = "MXFP4"
    parts = re.compile(r"(?P<weight>.+)_(?P<part>blocks|scales)")
    suffix = ""
    marks = frozenset(("blocks", "scales"))

    def shape(self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        """See `StoredFormat`."""
        *experts, outputs, groups, size = shapes["blocks"]
        return *experts, 2 * groups * size, outputs

    def expand(self, weight: str, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """See `StoredFormat`."""
        blocks = parts["blocks"]
        table = torch.tensor([*_MXFP4_VALUES, *(-value for value in _MXFP4_VALUES)])
        values = table[torch.stack((blocks & 15, blocks >> 4), -1).long()].flatten(-2)
        values *= torch.exp2(parts["scales"].float() - _MXFP4_BIAS).unsqueeze(-1)
        return values.flatten(-2).mT


class BitsAndBytes(StoredFormat):
    """The layouts of bitsandbytes: values of 4 bits from a table (NF4, FP4), and LLM.int8.

        weight                           uint8 [out * in / 2, 1], two values a byte, the higher bits first
        weight.quant_map                 float32 [16], the table
        weight.absmax                    a factor for each block of values, float32; or uint8 of a table of their own
        weight.nested_absmax, .nested_quant_map   its blocks' factors and that table
        weight.quant_state.bitsandbytes__nf4      uint8, JSON: shape, blocksize, nested_blocksize, nested_offset
        weight, SCB                      int8 [out, in] and the largest value of each output, float32 (LLM.int8)

    Source: bitsandbytes' `QuantState` (Dettmers et al., 2023, "QLoRA").
    """

    parts = re.compile(
        r"(?P<weight>.+)\.(?P<part>weight|weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map)|"
        r"weight\.quant_state\.bitsandbytes__\w+|SCB|weight_format)"
    )
    marks = frozenset((*_STATES, "SCB"))

    def __init__(self, config: Mapping[str, Any], place: str) -> None:
        """Read the number of bits; what else there is to know is stored beside each weight."""
        self.name = f"bitsandbytes, {8 if config.get('load_in_8bit') else 4} bits"

    def shape(self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        """See `StoredFormat`."""
        if "SCB" in shapes:
            return shapes["weight"]
        state = next(name for name in _STATES if name in shapes)
        return tuple(int(size) for size in _state(read(state))["shape"])

    def expand(self, weight: str, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """See `StoredFormat`."""
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
