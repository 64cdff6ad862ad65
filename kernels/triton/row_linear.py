"""Products of rows with a fixed weight that move its bytes once, with what a layer does before and behind them.

An output is summed in parts of the weight's columns, whose number depends on the weight's shape alone: for few rows by
a program each, of which the last to end adds the parts in order; for many rows by one program. So the bits of a row
depend on no other row where tiles of rows have one size.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# (within kernels, numbers and tensors have Triton's types, which are not those of Python)

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from espalier.kernels.layers import Activation
from espalier.kernels.linear import Linear
from espalier.kernels.triton.launches import launch_options, wait_and_trigger
from espalier.kernels.triton.pointwise import activated

FEW_ROWS = 64
"""Steps of so many rows take these products, larger ones the library's, unless rows must be independent."""
LEAST_ROWS = 16
TILE_OUT = tl.constexpr(64)
_TILE_BYTES = tl.constexpr(128)
"""Of each row of a tile of the weight."""
_AHEAD = tl.constexpr(8)
"""Lines of 128 bytes of each row that are on their way while the kernel before ends."""
_PROGRAMS = 128
"""Programs that outputs are cut for, of every device, as bits should not depend on it."""
_MOST_PARTS = 8


def parts_of(shape: Sequence[int], itemsize: int, gated: bool) -> int:
    """Parts that the columns of a weight, `[out, in]`, are cut into, for programs enough; none is empty."""
    outputs, inputs = shape
    steps = triton.cdiv(inputs * itemsize, _TILE_BYTES.value)
    wanted = 1 if gated else max(1, min(_MOST_PARTS, round(_PROGRAMS / triton.cdiv(outputs, TILE_OUT.value))))
    return triton.cdiv(steps, triton.cdiv(steps, wanted))


def options_of(itemsize: int, gated: bool) -> dict[str, int]:
    """Options of the compiler: tiles on their way fill the shared memory of the smallest GPUs, 99 KiB, at 64 rows."""
    # Float32 has no tensor cores here, but keeps its tiles in registers.
    return {"num_warps": 8 if itemsize == 4 else 4, "num_stages": 4 if gated else 6}


class Norm(NamedTuple):
    """RMSNorm of rows that are multiplied.

    Attributes:
        weight: `[in]`, its factors.
        squares: float32 `[tiles of in, rows]`, sums of squares that `RowLinear.add_to` gave.
        eps: added to the mean square.
    """

    weight: torch.Tensor
    squares: torch.Tensor
    eps: float


class RowLinear(Linear):
    """`Linear` whose sums are cut by its shape alone, fused with norm, gate or residual stream."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        gate: Activation | None = None,
        fixed: bool = True,
        dependent: bool = False,
    ) -> None:
        """Prepare products with `weight`, `[out, in]`, unquantised, and `bias`, `[out]`.

        Args:
            weight: with a gate, `[2 * out, in]`: the rows of the gate, then those that it is multiplied with.
            bias: None without; there is none with a gate.
            gate: its activation; None without.
            fixed: take any number of rows, each with the same bits in any batch; otherwise `FEW_ROWS` at most.
            dependent: whether the device has programmatic dependent launch.
        """
        super().__init__(weight.contiguous(), bias)
        self._gate, self._fixed = gate, fixed
        if gate is not None:
            self.out_features //= 2
        self._tiles = triton.cdiv(self.out_features, TILE_OUT.value)
        self._parts = parts_of(weight.shape, weight.element_size(), gated=gate is not None)
        self._ended = torch.zeros(self._tiles if self._parts > 1 else 0, dtype=torch.int32, device=weight.device)
        self._options = options_of(weight.element_size(), gated=gate is not None) | launch_options(dependent)

    def __call__(self, x: torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
        """`[rows, in]`, normed if there is a norm, to `[rows, out]`."""
        output = x.new_empty((len(x), self.out_features))
        self._launch(x, norm, output, None)
        return output

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add the product of `x`, `[rows, in]`, to `residual`, `[rows, out]`, in place.

        Returns:
            Sums of squares of its rows, float32 `[tiles of out, rows]`, for `Norm`.
        """
        squares = x.new_empty((self._tiles, len(x)), dtype=torch.float32)
        self._launch(x, None, residual, squares)
        return squares

    def _launch(self, x: torch.Tensor, norm: Norm | None, output: torch.Tensor, squares: torch.Tensor | None) -> None:
        rows, few = len(x), len(x) <= FEW_ROWS
        assert few or self._fixed, rows
        if not rows:
            return
        tile_rows = LEAST_ROWS if rows <= LEAST_ROWS and not self._fixed else FEW_ROWS
        parts = self._parts if few else 1
        partial = None
        if parts > 1:
            partial = x.new_empty((parts, self._tiles, TILE_OUT.value, tile_rows), dtype=torch.float32)
        multiply_rows[triton.cdiv(rows, tile_rows), self._tiles, parts](
            x.contiguous(),
            self.weight,
            self.bias,
            *(norm or (None, None, 0.0)),
            output,
            squares,
            partial,
            None if partial is None else self._ended,
            rows,
            OUT=self.out_features,
            IN=self.in_features,
            PARTS=self._parts,
            TILE_ROWS=tile_rows,
            GATED=self._gate is not None,
            GELU=self._gate is Activation.GELU_TANH,
            **self._options,
        )


@triton.jit(do_not_specialize=["rows"])
def multiply_rows(
    x,
    weight,
    bias,
    norm,
    norm_squares,
    eps,
    output,
    squares,
    partial,
    ended,
    rows,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    PARTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`norm(x) @ weight.T + bias`; the grid is `[tiles of rows, tiles of OUT, PARTS, or 1 without partial results]`.

    The weight is the left side, so its 64 rows fill a tensor core's instruction, and the step's rows can be few.

    Args:
        x: `[rows, IN]`.
        weight: `[OUT, IN]`, or `[2 * OUT, IN]` if GATED.
        bias: `[OUT]`, or None.
        norm: `[IN]`, factors of RMSNorm over rows; None without.
        norm_squares: float32 `[tiles of IN, rows]`, the sums of their squares.
        eps: of the norm.
        output: `[rows, OUT]`, written, or added to where there are squares.
        squares: float32 `[tiles of OUT, rows]`, written: sums of squares of what `output` holds then; None without.
        partial: float32 `[PARTS, tiles of OUT, TILE_OUT, TILE_ROWS]`, written; None for all parts in one program.
        ended: int32 `[tiles of OUT]`, zeros, and left so: programs of a tile that have ended.
        rows: their number.
    """
    tile, tiles = tl.program_id(1), tl.num_programs(1)
    m, n = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS), tile * TILE_OUT + tl.arange(0, TILE_OUT)
    tile_in: tl.constexpr = _TILE_BYTES // (x.dtype.element_ty.primitive_bitwidth // 8)
    size: tl.constexpr = ((IN + tile_in - 1) // tile_in + PARTS - 1) // PARTS * tile_in  # of a part
    mine = tl.program_id(2) * size
    if DEPENDENT:
        # Weights depend on no kernel, so they can come as near as the L2 meanwhile.
        _prefetch(weight, n, mine, OUT, IN, tile_in)
        if GATED:
            _prefetch(weight, OUT + n, mine, 2 * OUT, IN, tile_in)
    wait_and_trigger(DEPENDENT)
    scale = tl.full([TILE_ROWS], 1.0, tl.float32)
    if norm is not None:
        in_tiles: tl.constexpr = (IN + TILE_OUT - 1) // TILE_OUT
        t = tl.arange(0, triton.next_power_of_2(in_tiles))
        mask = (t < in_tiles)[:, None] & (m < rows)[None, :]
        total_squares = tl.sum(tl.load(norm_squares + t[:, None] * rows + m[None, :], mask=mask, other=0.0), 0)
        scale = tl.rsqrt(total_squares / IN + eps)
    total = tl.zeros([TILE_OUT, TILE_ROWS], tl.float32)
    second = tl.zeros([TILE_OUT, TILE_ROWS], tl.float32)
    if partial is None:
        for part in range(PARTS):
            sums, second = _part(x, weight, norm, scale, m, n, rows, part * size, size, OUT, IN, tile_in, GATED)
            total += sums
        _finish(total, second, bias, output, squares, tile, m, n, rows, OUT, GATED, GELU)
    else:
        sums, second = _part(x, weight, norm, scale, m, n, rows, mine, size, OUT, IN, tile_in, GATED)
        area: tl.constexpr = TILE_OUT * TILE_ROWS
        at = partial + tile.to(tl.int64) * area
        at += tl.arange(0, TILE_OUT)[:, None] * TILE_ROWS + tl.arange(0, TILE_ROWS)[None, :]
        tl.store(at + tl.program_id(2).to(tl.int64) * tiles * area, sums)
        tl.debug_barrier()  # every thread's sums before the program is counted
        if tl.atomic_add(ended + tile, 1, sem="acq_rel") == PARTS - 1:
            for part in tl.static_range(PARTS):
                # From the L2: others have written them.
                total += tl.load(at + part * tiles.to(tl.int64) * area, cache_modifier=".cg")
            tl.store(ended + tile, 0)
            _finish(total, second, bias, output, squares, tile, m, n, rows, OUT, GATED, GELU)


@triton.jit
def _prefetch(weight, n, begin, OUT: tl.constexpr, IN: tl.constexpr, LINE: tl.constexpr):
    """Ask for the first columns of a part, a line at a time, without waiting for them."""
    k = begin + tl.arange(0, _AHEAD) * LINE
    at = weight + tl.minimum(n, OUT - 1).to(tl.int64)[:, None] * IN + tl.minimum(k, IN - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [at.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _part(
    x,
    weight,
    norm,
    scale,
    m,
    n,
    rows,
    begin,
    SIZE: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    TILE_IN: tl.constexpr,
    GATED: tl.constexpr,
):
    """Sums over one part of the columns, `[outputs, rows]`; if GATED, those of the second half of the weight, too."""
    precision: tl.constexpr = "ieee" if x.dtype.element_ty == tl.float32 else "tf32"
    is_row, is_out = (m < rows)[:, None], (n < OUT)[:, None]
    row_at, out_at = m.to(tl.int64)[:, None] * IN, n.to(tl.int64)[:, None] * IN
    total = tl.zeros([TILE_OUT, m.shape[0]], tl.float32)
    second = tl.zeros([TILE_OUT, m.shape[0]], tl.float32)
    for at in range(begin, tl.minimum(begin + SIZE, IN), TILE_IN):
        k = at + tl.arange(0, TILE_IN)
        is_in = (k < IN)[None, :]
        w = tl.load(weight + out_at + k[None, :], mask=is_out & is_in, other=0.0)
        a = tl.load(x + row_at + k[None, :], mask=is_row & is_in, other=0.0)
        if norm is not None:
            factors = tl.load(norm + k, mask=k < IN, other=0.0).to(tl.float32)
            a = (a.to(tl.float32) * scale[:, None] * factors[None, :]).to(w.dtype)
        total = tl.dot(w, tl.trans(a), total, input_precision=precision)
        if GATED:
            w = tl.load(weight + OUT * IN + out_at + k[None, :], mask=is_out & is_in, other=0.0)
            second = tl.dot(w, tl.trans(a), second, input_precision=precision)
    return total, second


@triton.jit
def _finish(
    total,
    second,
    bias,
    output,
    squares,
    tile,
    m,
    n,
    rows,
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
):
    """Write a tile of outputs, rounded wherever torch rounds."""
    at = output + m.to(tl.int64)[None, :] * OUT + n[:, None]
    mask = (m < rows)[None, :] & (n < OUT)[:, None]
    kind: tl.constexpr = output.dtype.element_ty
    if bias is not None:
        total += tl.load(bias + n, mask=n < OUT, other=0.0).to(tl.float32)[:, None]
    result = total.to(kind)
    if GATED:
        result = activated(result, GELU) * second.to(kind)
    if squares is not None:
        held = tl.load(at, mask=mask, other=0.0)
        result = (held.to(tl.float32) + result.to(tl.float32)).to(kind)
        wide = result.to(tl.float32)
        tl.store(squares + tile * rows + m, tl.sum(wide * wide, 0), mask=m < rows)
    tl.store(at, result, mask=mask)
