"""Floats of 8 bits with a scale for each block, as the FP8 checkpoints of DeepSeek and Qwen3.

    weight            float8_e4m3fn [out, in]
    weight_scale_inv  [ceil(out / rows), ceil(in / columns)], blocks of rows x columns, 128 x 128 unless
                      weight_block_size says otherwise; or weight_scale, one for all or one for each output
    input_scale       of activations, which are not quantised here

A weight is its value times its block's scale, whatever "inv" may say.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from espalier.engine.models.stored.base import SingleFormat
from espalier.engine.models.text_files import require


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


class Float8(SingleFormat):
    """See the module."""

    parts = re.compile(r"(?P<weight>.+)\.(?P<part>weight|weight_scale_inv|weight_scale|input_scale|activation_scale)")
    marks = frozenset(("weight_scale_inv", "weight_scale"))

    def __init__(self, config: Mapping[str, Any], place: str) -> None:
        """Read the block's size; raises CheckpointError where it is none."""
        size = config.get("weight_block_size") or (128, 128)
        rule, name = "two positive integers", "quantization_config.weight_block_size"
        self.block = require(place, name, size, rule, is_block)

    def __str__(self) -> str:
        return "FP8"

    def shape(self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        """See `Layout`."""
        return shapes["weight"]

    def expand(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """See `Layout`."""
        values = parts["weight"].float()
        if "weight_scale_inv" in parts:
            return scale_blocks(values, parts["weight_scale_inv"], *self.block)
        scale = parts["weight_scale"].float()
        return values.mul_(scale.view(-1, 1) if scale.numel() > 1 else scale)


def is_block(value: object) -> bool:
    """True for numbers of outputs and inputs."""
    return isinstance(value, list | tuple) and [type(size) for size in value] == [int, int] and min(value) > 0
