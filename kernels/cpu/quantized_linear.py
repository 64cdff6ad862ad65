"""A matrix product in float32 with a quantised weight, which is dequantised a few columns at a time.

A product has the bits of `linear_cpu` with the dequantised weight: the same factors, summed in the same order. So a row
does not depend on the rest of its batch, as it would with the quantising library, whose products are MKL's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numba
import numpy as np
import torch
import torch.nn.functional as F

from espalier.kernels.cpu.linear import PACKS, PANEL, ROWS, output_buffer, pack, parts_of, store_all, stored_rows, unit
from espalier.kernels.cpu.threads import barrier, complete_and_fetch, fetch_item, parallel_run

_CHUNK = 256
"""Elements of the inner dimension that are dequantised at a time: so few that they stay in a core's cache."""
_HALF = PANEL // 2


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
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

    dtype = torch.float32
    device = torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """Bytes of values, scales and zeros."""
        return self.values.nbytes + self.scales.nbytes + self.zeros.nbytes

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> torch.Tensor:
        """Compute `torch.nn.functional.linear` with this weight: torch's way of overriding a function."""
        if function is not F.linear or kwargs:
            return NotImplemented
        x, weight, *bias = args
        return quantized_linear_cpu(x, weight, bias[0] if bias else None)


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
    parallel_run(_multiply, 2, given, stored, rows, inner, *arrays, num_panels, parts, out.view(-1).numpy())
    return out[:rows, :out_features]


@numba.njit
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
    # Slices of a known beginning: the compiler sees that no index is negative, and works on whole vectors.
    for n in range(first, last):
        group, at = (panel * groups + n * groups // inner) * PANEL, (n - first) * PANEL
        scale, zero, row = scales[group : group + PANEL], zeros[group : group + PANEL], out[at : at + PANEL]
        if whole:
            source = values[(panel * inner + n) * PANEL :]
            for c in range(PANEL):
                row[c] = np.float32(np.int32(source[c]) - np.int32(zero[c])) * scale[c]
        else:
            source = values[(panel * inner + n) * _HALF :]
            for c in range(_HALF):
                row[c] = np.float32(np.int32(source[c] & 15) - 8 - np.int32(zero[c])) * scale[c]
            high, right_scale, right_zero = row[_HALF:], scale[_HALF:], zero[_HALF:]
            for c in range(_HALF):
                high[c] = np.float32(np.int32(source[c] >> 4) - 8 - np.int32(right_zero[c])) * right_scale[c]


@numba.njit(nogil=True, cache=True)
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
    factors, scratch = np.empty(min(_CHUNK, inner) * PANEL, np.float32), unit.scratch()
    store_all(counters, given, rows, inner, x)
    unit.configure()
    item = fetch_item(counters, 1)
    while item < items:
        top, part = item // parts * ROWS, item % parts
        count = min(ROWS, rows - top)
        for panel in range(part * num_panels // parts, (part + 1) * num_panels // parts):
            for first in range(0, inner, _CHUNK):
                last = min(first + _CHUNK, inner)
                _dequantize(panel, first, last, inner, values, scales, zeros, groups, factors)
                place = top * stride + panel * PANEL
                unit.multiply_columns(
                    x, top, count, inner, first, last - first, factors, 0, out, place, stride, scratch
                )
        item = complete_and_fetch(counters, 1)
    unit.release()
    barrier(counters, 1, items)
