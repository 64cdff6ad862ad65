"""A matrix product in float32 that sums every output in the order of the inner dimension, whatever the batch.

Libraries choose a kernel, and with it an order of summation, by the number of rows: with MKL on one x86-64 server a row
had other bits in a batch of up to 15 rows than in a larger one, on another server in batches that are no multiple of
four. A request's tokens would then depend on the other requests of its batch.
"""

import math
import sys
import threading
from typing import Any, NamedTuple

import numpy as np
import torch
from numba.core import types
from numba.extending import overload

from espalier.kernels.compilation.ahead import Compilation, compilation
from espalier.kernels.compilation.compiler import INNER, inner
from espalier.kernels.cpu import HAS_AMX, compiled
from espalier.kernels.cpu.products import amx, tiles
from espalier.kernels.cpu.products.tiles import LeftSide
from espalier.kernels.cpu.simd import Strided, flush_denormals, restore_denormals
from espalier.kernels.cpu.threads import num_threads, parallel_run, phase_items
from espalier.kernels.linear import Linear


class Shares(NamedTuple):
    """The sharing of a phase among threads.

    Attributes:
        counters: of `parallel_run`.
        phase: see `counters`; its items are `ceil(rows / ROWS) * parts`.
        parts: see `parts_of`.
        threads: how many take items in turn; the panel of this thread's likely next item is prefetched.
    """

    counters: int
    phase: int
    parts: int
    threads: int


class Weight(NamedTuple):
    """A weight among others of its kind.

    Attributes:
        panels: flat; those of the weight begin `at` elements into them.
        at: see `panels`.
        num_panels: how many it has.
        refined: how many of the last have another to add, which follow all of them.
    """

    panels: Any
    at: int
    num_panels: int
    refined: int


microkernel: Any = amx if HAS_AMX else tiles
"""The module that multiplies in float32."""
PANEL = 32 if HAS_AMX else tiles.NR
"""Columns of a product whose weights lie side by side; the width of one tile."""
PACKS = HAS_AMX
"""True if the left side of a product is stored in another way than as plain rows."""
ROWS = 256
"""Most rows of one work item: so many are multiplied with a panel each time it comes from memory."""
_SPEED = 12e10 if HAS_AMX else 4e10
"""Multiply-adds a second of one thread where rows are many, within a factor of two or so; fewer with few rows."""
_LARGE = 2**20
"""Elements of a result whose memory is worth keeping."""
FEW_ROWS = 8
"""Rows of one work item in phases with little work for each row."""
_ITEMS_PER_THREAD = 4
"""So many that a thread which is interrupted leaves most of its share to other threads."""


def room_for_weights(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An empty tensor, in large memory pages where the system has them: numpy asks for these, torch does not."""
    num_bytes = math.prod(shape) * dtype.itemsize
    room = torch.from_numpy(tiles.aligned(-(-num_bytes // 4)))
    return room.view(torch.uint8)[:num_bytes].view(dtype).view(shape)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Put a weight `[out, in]` in panels `[panel, in, PANEL]` of PANEL outputs each, the last one padded with zeros."""
    if missing := -weight.shape[0] % PANEL:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, missing))
    panels = weight.view(-1, PANEL, weight.shape[1]).transpose(1, 2)
    return room_for_weights(*panels.shape, dtype=weight.dtype).copy_(panels)


def unpack(panels: torch.Tensor, out_features: int) -> torch.Tensor:
    """The weight `[out_features, in]` that `pack` put in panels."""
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])[:out_features]


def parts_of(rows: int, panels: int) -> int:
    """Number of parts to cut the panels into, so that there are enough work items for all threads."""
    tiles = max(1, -(-rows // ROWS))
    return max(1, min(panels, -(-_ITEMS_PER_THREAD * num_threads() // tiles)))


def multiply_panel(*args: Any) -> None:
    """`tiles.multiply_panel`, or another unit's, in compiled code, for rows and panels of the kinds that are given."""
    raise NotImplementedError("compiled code alone can call this")


def pack_row(*args: Any) -> None:
    """`tiles.pack_row`, or another unit's, in compiled code, for rows of the kind that is given."""
    raise NotImplementedError("compiled code alone can call this")


def is_tuple_of(kind: Any, wanted: type) -> bool:
    """True if numba's type `kind` is that of a named tuple of class `wanted`."""
    return isinstance(kind, types.BaseNamedTuple) and getattr(kind, "instance_class", None) is wanted


@overload(multiply_panel)
def _multiply_float_panel(*args: Any) -> Any:
    def multiply(*args: Any) -> None:
        microkernel.multiply_panel(*args)

    return multiply if isinstance(args[1], types.Array) else None


@overload(pack_row)
def _pack_float_row(*args: Any) -> Any:
    def pack(*args: Any) -> None:
        microkernel.pack_row(*args)

    return pack if isinstance(args[5], types.Array) else None


@inner
def panels_of(item: int, parts: int, num_panels: int) -> tuple[int, int]:
    """The first panel of a work item, and the one after its last."""
    part = item % parts
    return part * num_panels // parts, (part + 1) * num_panels // parts


@compiled(**INNER)
def multiply_phase(
    shares: Shares, left: LeftSide, weight: Weight, bias: np.ndarray, out: np.ndarray, scratch: np.ndarray
) -> None:
    """One thread's share of a phase that writes `bias + left @ weight.T` to `out`, or adds it without the bias.

    Args:
        shares: see `Shares`.
        left: all rows of the product.
        weight: see `Weight`.
        bias: float32 `[weight.num_panels * PANEL]`; empty to add to `out`.
        out: flat float32, from `output_buffer`.
        scratch: this thread's own, from `microkernel.scratch`.
    """
    (counters, phase, parts, threads), (x, _, rows, inner), (panels, begin, num_panels, refined) = shares, left, weight
    items, stride, size = (rows + ROWS - 1) // ROWS * parts, num_panels * PANEL, inner * PANEL
    for item in phase_items(counters, phase, items):
        first, (start, end) = item // parts * ROWS, panels_of(item, parts, num_panels)
        some = LeftSide(x, first, min(ROWS, rows - first), inner)
        for panel in range(start, end):
            sums = Strided(out, first * stride + panel * PANEL, stride)
            terms = Strided(bias, panel * PANEL, 0) if len(bias) else sums
            following = panel + 1 if panel + 1 < end else panels_of(item + threads, parts, num_panels)[0]
            at, next_at = begin + panel * size, begin + following * size
            multiply_panel(some, panels, at, next_at, terms, sums, scratch)
            if panel >= num_panels - refined:
                multiply_panel(some, panels, at + refined * size, next_at, sums, sums, scratch)


def phase_compilation(x: Any, panels: Any) -> Compilation:
    """The compilation of `multiply_phase` for rows and weights stored as these."""
    floats = np.zeros(0, np.float32)
    return compilation(
        multiply_phase, Shares(0, 0, 0, 0), LeftSide(x, 0, 0, 0), Weight(panels, 0, 0, 0), floats, floats, floats
    )


@inner
def store_rows(item: int, rows: int, width: int, x: np.ndarray, out: Any) -> None:
    """Store a few of the `rows` of `x`, flat float32 `[rows * width]`, as the left side of a product."""
    for r in range(item * FEW_ROWS, min((item + 1) * FEW_ROWS, rows)):
        pack_row(x, r * width, width, 0, width, out, r)


@compiled(nogil=True)
def multiply(
    counters: int,
    given: np.ndarray,
    left: LeftSide,
    packs: bool,
    weight: Weight,
    bias: np.ndarray,
    shares: tuple[int, int],
    out: np.ndarray,
) -> None:
    """Write a product of one kind of weights and a bias to `out`, in two phases that threads share.

    Args:
        counters: of `parallel_run`.
        given: the left side, flat float32 `[rows * inner]`.
        left: the same, in memory for it as `pack_row` stores rows; in `given` itself unless `packs`.
        packs: whether rows are stored in another way than as they are given.
        weight: see `Weight`.
        bias: float32, as many as the panels' outputs.
        shares: `parts` and `threads` of `Shares`.
        out: flat float32, from `output_buffer`.
    """
    denormals = flush_denormals()
    for item in phase_items(counters, 0, (left.rows + FEW_ROWS - 1) // FEW_ROWS if packs else 0):
        store_rows(item, left.rows, left.inner, given, left.stored)
    microkernel.configure()
    phase: Any = np.int64(1)  # a plain 1 has a type of its own, for which `multiply_phase` would be compiled as well
    multiply_phase(Shares(counters, phase, shares[0], shares[1]), left, weight, bias, out, microkernel.scratch())
    restore_denormals(denormals)
    microkernel.release()


def product_compilation(x: Any, packs: bool, panels: Any) -> Compilation:
    """The compilation of a product for rows and weights stored as these; `packs` as in `multiply`."""
    floats = np.zeros(0, np.float32)
    arguments = 0, floats, LeftSide(x, 0, 0, 0), packs, Weight(panels, 0, 0, 0), floats, (0, 0), floats
    return compilation(multiply, *arguments, parts=[phase_compilation(x, panels)])


def stored_rows(rows: int, inner: int) -> np.ndarray:
    """Memory for `rows` rows of `inner` elements as `microkernel` stores them."""
    return tiles.aligned(microkernel.x_size(rows, inner))


class _LargeBuffer(threading.local):
    """A thread's last large result, used again as soon as nobody holds it.

    The system clears each new page: for logits of 64 rows over 150,000 tokens that takes half as long as the product.
    """

    kept: np.ndarray | None = None

    def take(self, size: int) -> np.ndarray:
        """Memory for `size` float32."""
        if size < _LARGE:
            return tiles.aligned(size)
        if self.kept is None or len(self.kept) < size or sys.getrefcount(self.kept.base) > 2:  # `kept` and the call
            self.kept = tiles.aligned(size)
        return self.kept[:size]


_large = _LargeBuffer()


def output_buffer(rows: int, columns: int) -> np.ndarray:
    """Memory for `rows` rows of sums, `columns` apart, and for the rows that `microkernel` writes beyond them."""
    return _large.take(-(-rows // microkernel.TILE_ROWS) * microkernel.TILE_ROWS * columns)


def multiply_cpu(
    x: torch.Tensor, stored: Any, weight: Weight, out_features: int, bias: torch.Tensor | None, seconds: float
) -> torch.Tensor:
    """`x @ weight.T + bias` for a weight of one kind, on as many threads as `seconds` of one thread are worth.

    Args:
        x: float32 `[rows, in]`.
        stored: memory for it as `pack_row` stores rows; None if that is as they are given.
        weight: see `Weight`.
        out_features: columns of the product, at most those of the panels.
        bias: float32 `[out_features]`, the first term of each sum, or None.
        seconds: what the product takes one thread, within a factor of two or so.

    Returns:
        float32 `[rows, out_features]`.
    """
    (rows, inner), columns, given = x.shape, weight.num_panels * PANEL, x.contiguous().view(-1).numpy()
    terms = np.zeros(columns, np.float32)
    if bias is not None:
        terms[:out_features] = bias
    out = output_buffer(rows, columns)
    shares, packs = (parts_of(rows, weight.num_panels), num_threads()), stored is not None
    left = LeftSide(stored if packs else given, 0, rows, inner)
    parallel_run(multiply, 2, given, left, packs, weight, terms, shares, out, seconds=seconds)
    return torch.from_numpy(out).view(-1, columns)[:rows, :out_features]


class CpuLinear(Linear):
    """`Linear` in float32 on CPU; the weight is kept in panels."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Pack `weight`, `[out, in]`; `bias` is `[out]` or None."""
        super().__init__(weight, bias)
        self._weight = pack(weight)
        self._panels = self._weight.view(-1).numpy()

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it was given, `[out, in]`, put together again."""
        return unpack(self._weight, self.out_features)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, in]` to `[rows, out]`."""
        (rows, inner), panels = x.shape, self._panels
        stored = stored_rows(rows, inner) if PACKS else None
        seconds = rows * len(panels) / _SPEED
        weight = Weight(panels, 0, len(self._weight), 0)
        return multiply_cpu(x, stored, weight, self.out_features, self.bias, seconds)
