"""A matrix product in float32 with a quantised weight, which is dequantised a few columns at a time.

A product has the bits of `linear_cpu` with the dequantised weight: the same factors, summed in the same order. So a row
does not depend on the rest of its batch, as it would with the quantising library, whose products are MKL's.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir

from espalier.kernels.compilation.compiler import inner
from espalier.kernels.cpu import compiled
from espalier.kernels.cpu.products import tiles
from espalier.kernels.cpu.products.linear import (
    PACKS,
    PANEL,
    ROWS,
    microkernel,
    output_buffer,
    pack,
    parts_of,
    store_all,
    stored_rows,
)
from espalier.kernels.cpu.simd import FLOAT, INDEX, INT, load, loop, store, vector_function
from espalier.kernels.cpu.threads import barrier, complete_and_fetch, fetch_item, parallel_run

_CHUNK = 128
"""Elements of the inner dimension that are dequantised at a time: so few that they stay in a core's cache."""
_HALF = PANEL // 2
_BYTE = ir.IntType(8)
_RATE = 1e10
"""Factors a second that one thread dequantises, within a factor of two or so."""
_SPEED = 3e10
"""Multiply-adds a second of one thread, likewise."""
_AHEAD = 4096
"""Bytes by which values are prefetched before their use."""


class PackedWeight(ABC):
    """A weight in an order of its own that `torch.nn.functional.linear` takes, on CPU with float32 rows.

    Attributes:
        shape: `(out, in)`.
    """

    __slots__ = ()

    shape: tuple[int, int]
    dtype = torch.float32
    device = torch.device("cpu")

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all that is kept."""

    @abstractmethod
    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ weight.T + bias`: float32 `[rows, in]`, and `[out]` or None, to `[rows, out]`."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> torch.Tensor:
        """Compute `torch.nn.functional.linear` with this weight: torch's way of overriding a function."""
        if function is not F.linear or kwargs:
            return NotImplemented
        x, weight, *bias = args
        return weight.multiply(x, bias[0] if bias else None)


@dataclass(frozen=True, slots=True)
class QuantizedWeight(PackedWeight):
    """A quantised weight `[out, in]` that `torch.nn.functional.linear` takes, on CPU with float32 rows.

    A factor is `(value - zero) * scale`, with a scale and a zero for each row and group of columns.

    Attributes:
        shape: `(out, in)`.
        values: int8 `[panel, in, PANEL]`, or of 4 bits uint8 `[panel, in, PANEL / 2]`: the panel's left half in the low
            bits, its right half in the high ones, each 8 more than it stands for.
        scales: float32 `[panel, groups, PANEL]`.
        zeros: int8, of the same shape.
    """

    shape: tuple[int, int]
    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of values, scales and zeros."""
        return self.values.nbytes + self.scales.nbytes + self.zeros.nbytes

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `PackedWeight`."""
        return quantized_linear_cpu(x, self, bias)


def pack_quantized(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """Put quantised values in panels, as a `QuantizedWeight` that stands for a tensor in products.

    Args:
        values: int8 `[out, in]`; with 4 bits from -8 to 7.
        scales: float32 `[out, groups]`, of `in / groups` columns each.
        zeros: int8 `[out, groups]`.
        bits: 8 or 4.
    """
    panels = pack(values)
    if bits == 4:
        raised = (panels + 8).to(torch.uint8)
        panels = raised[..., :_HALF] | raised[..., _HALF:] << 4
    out, inner = values.shape
    packed = QuantizedWeight((out, inner), panels.contiguous(), pack(scales.float()), pack(zeros.to(torch.int8)))
    return cast(torch.Tensor, packed)


def quantized_linear_cpu(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: float32 `[rows, in]`.
        weight: from `pack_quantized`.
        bias: float32 `[out]`, the first term of each sum, or None.

    Returns:
        float32 `[rows, out]`.
    """
    (rows, inner), out_features = x.shape, weight.shape[0]
    num_panels = len(weight.values)
    columns = num_panels * PANEL
    out = torch.from_numpy(output_buffer(rows, columns)).view(-1, columns)
    out[:rows] = 0
    if bias is not None:
        out[:rows, :out_features] = bias
    given = x.contiguous().view(-1).numpy()
    stored = stored_rows(rows, inner) if PACKS else given
    arrays = tuple(t.view(-1).numpy() for t in (weight.values, weight.scales, weight.zeros))
    parts = parts_of(rows, num_panels)
    seconds = max(rows / _SPEED, 1 / _RATE) * columns * inner
    flat_out = out.view(-1).numpy()
    parallel_run(_multiply, 2, given, stored, rows, inner, *arrays, num_panels, parts, flat_out, seconds=seconds)
    return out[:rows, :out_features]


def _write_dequantize(bits: int, builder: ir.IRBuilder, args: Any) -> None:
    values, zeros, scales, out, count = args
    factors = _factors(bits, builder, values, zeros, scales)

    def write(n: Any, _: list[Any]) -> list[Any]:
        store(builder, [factors(n)], [builder.gep(out, [builder.mul(n, ir.Constant(INDEX, PANEL))])])
        return []

    loop(builder, count, [], write)


def _write_tile(bits: int, rows: int, builder: ir.IRBuilder, args: Any) -> None:
    a, a_stride, values, zeros, scales, out, out_stride, count = args
    out_rows = tiles.rows_of(builder, out, out_stride, rows)
    sums = [load(builder, place, ir.VectorType(FLOAT, PANEL)) for place in out_rows]
    factors, width = _factors(bits, builder, values, zeros, scales), PANEL * bits // 8

    def prefetched(n: Any) -> Any:
        ahead = builder.add(builder.mul(n, ir.Constant(INDEX, width)), ir.Constant(INDEX, _AHEAD))
        tiles.write_prefetch(builder, builder.gep(values, [ahead]))
        return factors(n)

    a_rows = tiles.rows_of(builder, a, a_stride, rows)
    store(builder, tiles.sum_products(builder, sums, a_rows, prefetched, count), out_rows)


def _factors(bits: int, builder: ir.IRBuilder, values: Any, zeros: Any, scales: Any) -> Callable[[Any], Any]:
    """Code for the factors of column n of a panel, a vector of PANEL; those of a group's zeros and scales."""
    ints, floats = ir.VectorType(INT, PANEL), ir.VectorType(FLOAT, PANEL)
    zero = builder.sext(load(builder, zeros, ir.VectorType(_BYTE, PANEL)), ints)
    scale = load(builder, scales, floats)

    def whole(n: Any) -> Any:
        row = load(
            builder, builder.gep(values, [builder.mul(n, ir.Constant(INDEX, PANEL))]), ir.VectorType(_BYTE, PANEL)
        )
        return builder.sext(row, ints)

    def halves(n: Any) -> Any:
        place = builder.gep(values, [builder.mul(n, ir.Constant(INDEX, _HALF))])
        kind = ir.VectorType(INT, _HALF)
        row = builder.zext(load(builder, place, ir.VectorType(_BYTE, _HALF)), kind)
        low, shift = (ir.Constant(kind, [number] * _HALF) for number in (15, 4))
        both = ir.Constant(ints, list(range(PANEL)))
        raised = builder.shuffle_vector(builder.and_(row, low), builder.lshr(row, shift), both)
        return builder.sub(raised, ir.Constant(ints, [8] * PANEL))

    column = whole if bits == 8 else halves
    return lambda n: builder.fmul(builder.sitofp(builder.sub(column(n), zero), floats), scale)


_dequantize_8, _dequantize_4 = (
    vector_function(f"espalier_dequantize_{bits}", partial(_write_dequantize, bits)) for bits in (8, 4)
)
"""Write the factors of neighbouring columns of one group, `[count, PANEL]`:

    dequantize(values, start, zeros, start, scales, start, out, start, count)

Values are as in `QuantizedWeight`, zeros int8 `[PANEL]`, scales float32 `[PANEL]`, and the factors float32.
"""
_multiply_8, _multiply_4 = (
    tiles.tile_product(f"espalier_tile_of_{bits}_bits", partial(_write_tile, bits), {0: 1, 5: 6}) for bits in (8, 4)
)
"""Add the product of some rows and neighbouring columns of one group, with the same factors, which stay in registers:

    product(rows, a, start, a_stride, values, start, zeros, start, scales, start, out, start, out_stride, count)
"""


@inner
def _multiply_few(
    x: np.ndarray,
    first: int,
    rows: int,
    inner: int,
    panel: int,
    values: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray,
    groups: int,
    out: np.ndarray,
    out_start: int,
    stride: int,
) -> None:
    """Add the product of at most `tiles.MR` rows and one panel, whose factors are never stored."""
    whole = len(values) == len(scales) // groups * inner
    size = inner // groups
    for group in range(groups):
        its = (panel * groups + group) * PANEL
        source, a, z = panel * inner + group * size, first * inner + group * size, out_start
        if whole:
            at = source * PANEL
            _multiply_8(rows, x, a, inner, values, at, zeros, its, scales, its, out, z, stride, size)
        else:
            at = source * _HALF
            _multiply_4(rows, x, a, inner, values, at, zeros, its, scales, its, out, z, stride, size)


@inner
def _dequantize(
    panel: int,
    first: int,
    last: int,
    inner: int,
    values: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray,
    groups: int,
    out: np.ndarray,
) -> None:
    """The factors of one panel from column `first` to `last` of the weight, `[last - first, PANEL]`."""
    whole = len(values) == len(scales) // groups * inner
    size, n = inner // groups, first
    while n < last:
        group = panel * groups + n // size
        end = min(last, (n // size + 1) * size)
        source, place, its = panel * inner + n, (n - first) * PANEL, group * PANEL
        if whole:
            _dequantize_8(values, source * PANEL, zeros, its, scales, its, out, place, end - n)
        else:
            _dequantize_4(values, source * _HALF, zeros, its, scales, its, out, place, end - n)
        n = end


@compiled(nogil=True)
def _multiply(
    counters: np.ndarray,
    given: np.ndarray,
    x: np.ndarray,
    rows: int,
    inner: int,
    values: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray,
    num_panels: int,
    parts: int,
    out: np.ndarray,
) -> None:
    items, stride = (rows + ROWS - 1) // ROWS * parts, num_panels * PANEL
    groups = len(scales) // stride
    factors, scratch = np.empty(min(_CHUNK, inner) * PANEL, np.float32), microkernel.scratch()
    store_all(counters, given, rows, inner, PACKS, x)
    microkernel.configure()
    item = fetch_item(counters, 1)
    while item < items:
        top, part = item // parts * ROWS, item % parts
        count = min(ROWS, rows - top)
        for panel in range(part * num_panels // parts, (part + 1) * num_panels // parts):
            if count <= tiles.MR and not PACKS:
                place = top * stride + panel * PANEL
                _multiply_few(x, top, count, inner, panel, values, scales, zeros, groups, out, place, stride)
                continue
            for first in range(0, inner, _CHUNK):
                last = min(first + _CHUNK, inner)
                _dequantize(panel, first, last, inner, values, scales, zeros, groups, factors)
                place = top * stride + panel * PANEL
                microkernel.multiply_columns(
                    x, top, count, inner, first, last - first, factors, 0, out, place, stride, scratch
                )
        item = complete_and_fetch(counters, 1)
    microkernel.release()
    barrier(counters, 1, items)
