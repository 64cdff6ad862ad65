"""A matrix product in float32 with a quantised weight, which is dequantised a few columns at a time.

A product has the bits of `CpuLinear` with the dequantised weight: the same factors, summed in the same order. So a row
does not depend on the rest of its batch, as it would with the quantising library, whose products are MKL's.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba.core import types
from numba.extending import overload

from espalier.kernels.cpu.products import tiles
from espalier.kernels.cpu.products.linear import (
    PACKS,
    PANEL,
    Weight,
    is_tuple_of,
    microkernel,
    multiply_cpu,
    multiply_panel,
    pack,
    stored_rows,
)
from espalier.kernels.cpu.simd import BYTE, FLOAT, INDEX, INT, Builder, Strided, constant, vector_function

_CHUNK = 128
"""Elements of the inner dimension that are dequantised at a time: so few that they stay in a core's cache."""
_HALF = PANEL // 2
_RATE = 1e10
"""Factors a second that one thread dequantises, within a factor of two or so."""
_SPEED = 3e10
"""Multiply-adds a second of one thread, likewise."""
_PREFETCH_DISTANCE = 4096
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
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        parts = (getattr(self, name) for name in self.__slots__)
        return sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))

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


class QuantizedPanels(NamedTuple):
    """The arrays of a `QuantizedWeight`, flat, as products read them, and its groups a row."""

    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: int


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

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `PackedWeight`."""
        (rows, inner), num_panels = x.shape, len(self.values)
        values, scales, zeros = (tensor.view(-1).numpy() for tensor in (self.values, self.scales, self.zeros))
        panels = QuantizedPanels(values, scales, zeros, self.scales.shape[1])
        stored = stored_rows(rows, inner) if PACKS else None
        seconds = max(rows / _SPEED, 1 / _RATE) * num_panels * PANEL * inner
        return multiply_cpu(x, stored, Weight(panels, 0, num_panels, 0), self.shape[0], bias, seconds)


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


def _write_dequantize(bits: int, builder: Builder, args: Any) -> None:
    values, zeros, scales, out, count = args
    factors = _factors(bits, builder, values, zeros, scales)

    def write(n: Any, _: list[Any]) -> list[Any]:
        builder.write(factors(n), builder.offset(out, n, PANEL))
        return []

    builder.loop(count, [], write)


def _write_tile(bits: int, rows: int, builder: Builder, args: Any) -> None:
    a, a_stride, values, zeros, scales, out, out_stride, count = args
    out_rows = builder.rows_of(out, out_stride, rows)
    sums = [builder.read(place, ir.VectorType(FLOAT, PANEL)) for place in out_rows]
    factors, width = _factors(bits, builder, values, zeros, scales), PANEL * bits // 8

    def prefetched(n: Any) -> Any:
        ahead = builder.add(builder.mul(n, constant(INDEX, width)), constant(INDEX, _PREFETCH_DISTANCE))
        builder.prefetch(builder.gep(values, [ahead]))
        return factors(n)

    sums = tiles.sum_products(builder, sums, builder.rows_of(a, a_stride, rows), prefetched, count)
    for total, place in zip(sums, out_rows, strict=True):
        builder.write(total, place)


def _factors(bits: int, builder: Builder, values: Any, zeros: Any, scales: Any) -> Callable[[Any], Any]:
    """Code for the factors of column n of a panel, a vector of PANEL; those of a group's zeros and scales."""
    bytes_, ints, floats = (ir.VectorType(kind, PANEL) for kind in (BYTE, INT, FLOAT))
    zero = builder.sext(builder.read(zeros, bytes_), ints)
    scale = builder.read(scales, floats)

    def whole(n: Any) -> Any:
        return builder.sext(builder.read(builder.offset(values, n, PANEL), bytes_), ints)

    def halves(n: Any) -> Any:
        kind = ir.VectorType(INT, _HALF)
        row = builder.zext(builder.read(builder.offset(values, n, _HALF), ir.VectorType(BYTE, _HALF)), kind)
        raised = builder.joined(builder.and_(row, constant(kind, 15)), builder.lshr(row, constant(kind, 4)))
        return builder.sub(raised, constant(ints, 8))

    column = whole if bits == 8 else halves
    return lambda n: builder.fmul(builder.sitofp(builder.sub(column(n), zero), floats), scale)


def _product_of(bits: int) -> Any:
    """Code for `multiply_panel` with panels of so many bits, by two functions.

        dequantize(values, start, zeros, start, scales, start, out, start, count)
        product(rows, a: Strided, values, start, zeros, start, scales, start, out: Strided, count)

    The one writes the factors of neighbouring columns of one group, `[count, PANEL]`; the other adds the product with
    these factors to `out`, and keeps them in registers.
    """
    dequantize = vector_function(f"espalier_dequantize_{bits}", partial(_write_dequantize, bits))
    product = tiles.tile_product(f"espalier_tile_of_{bits}_bits", partial(_write_tile, bits), {0: 1, 5: 6})
    width = PANEL * bits // 8

    def multiply(*args: Any) -> None:
        left, (values, scales, zeros, groups), panel_at, _, terms, out, scratch = args
        x, first, rows, inner = left
        if terms.stride == 0:
            tiles.fill_rows(terms.array, terms.start, PANEL, out, rows)
        size, column_at, group_at = inner // groups, panel_at // PANEL, panel_at // (inner * PANEL) * groups
        if rows <= tiles.MR and not PACKS:
            for group in range(groups):
                n, its = group * size, (group_at + group) * PANEL
                a, at = Strided(x, first * inner + n, inner), (column_at + n) * width
                product(rows, a, values, at, zeros, its, scales, its, out, size)
            return
        factors = np.empty(min(_CHUNK, inner) * PANEL, np.float32)
        for column in range(0, inner, _CHUNK):
            last, n = min(column + _CHUNK, inner), column
            while n < last:
                end, its = min(last, (n // size + 1) * size), (group_at + n // size) * PANEL
                at, place = (column_at + n) * width, (n - column) * PANEL
                dequantize(values, at, zeros, its, scales, its, factors, place, end - n)
                n = end
            microkernel.multiply_columns(left, column, last - column, factors, 0, out, scratch)

    return multiply


_multiply_8, _multiply_4 = _product_of(8), _product_of(4)


@overload(multiply_panel)
def _multiply_quantized_panel(*args: Any) -> Any:
    if not is_tuple_of(args[1], QuantizedPanels):
        return None
    return _multiply_8 if args[1].types[0].dtype == types.int8 else _multiply_4
