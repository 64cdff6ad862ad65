"""Matrix products of bytes: weights and activations in int8, summed exactly and scaled in float32.

A weight has a scale for each output. Each row of the left side is rounded to bytes as it comes, with a scale for every
`GROUP` of neighbours, so that one large element costs its neighbours alone their precision. (Dettmers et al., 2022,
"LLM.int8()", for one scale a row; llama.cpp's Q8_0 has groups of this size.) The processor multiplies an unsigned byte
by a signed one: weights are kept 128 higher than they are, which each group's sum of the left side takes back.

    activations  int8 `[rows, groups, GROUP]`, scales float32 and starts int32, `[rows, groups]` each
    weights      uint8 `[panel, inner / 4, PANEL, 4]`, scales float32 `[panel, PANEL]`

Some of the last panels may be refined: others that follow hold what rounding took, which is added to their products.

Integers are summed without error and groups in their order, so a row does not depend on the rest of its batch. The
inner dimension is filled up to whole groups, with zeros on the left side.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba.extending import overload

from espalier.kernels.cpu.products.linear import (
    PANEL,
    Weight,
    is_tuple_of,
    multiply_cpu,
    multiply_panel,
    pack,
    pack_row,
)
from espalier.kernels.cpu.products.quantized_linear import PackedWeight
from espalier.kernels.cpu.products.tiles import tile_product
from espalier.kernels.cpu.simd import (
    BYTE,
    FLOAT,
    FLOATS,
    INT,
    LANES,
    WORDS,
    Builder,
    call_llvm,
    constant,
    vector_function,
)
from espalier.kernels.linear import Kept, Rest

GROUP = 32
"""Neighbours of the inner dimension that share a scale on the left side."""
MR = 6
"""Rows of the largest tile: twice as many vectors of integers and of floats are as many as fit in the registers."""
_PER_LANE = 4
"""Products that one lane sums in one instruction."""
_OFFSET = 128
_MAX_INT8 = 127
_LEAST = 2.0**-100
"""A group without an element of this size is rounded to zeros: the inverse of its scale might not be a number."""
_PREFETCH_DISTANCE = 2048
"""Bytes by which weights are prefetched before their use, in tiles of few rows: others read them from a cache."""
_RATE = 1e10
"""Weights a second that one thread reads, within a factor of two or so."""
_SPEED = 1e11
"""Multiply-adds a second of one thread where rows are many, likewise."""
_SUM_BYTES = "llvm.x86.avx512.vpdpbusd.512"


class Int8Rows(NamedTuple):
    """The left side of a product, flat: see the module.

    Attributes:
        values: int8 `[rows * inner]`.
        scales: float32 `[rows * groups]`.
        starts: int32 `[rows * groups]`, -128 times the sum of a group's values.
    """

    values: np.ndarray
    scales: np.ndarray
    starts: np.ndarray


class Int8Panels(NamedTuple):
    """Weights, flat: see the module.

    Attributes:
        values: uint8 `[panels * inner * PANEL]`.
        scales: float32 `[panels * PANEL]`.
    """

    values: np.ndarray
    scales: np.ndarray


@dataclass(frozen=True, slots=True)
class Int8Weight(PackedWeight):
    """A weight `[out, in]` of bytes that `torch.nn.functional.linear` takes, on CPU with float32 rows.

    Attributes:
        shape: `(out, in)`.
        values: uint8 `[panel, in / 4, PANEL, 4]`, with zeros of the weight where it is filled up.
        scales: float32 `[panel, PANEL]`.
        refined: how many panels are refined; as many follow that refine them.
    """

    shape: tuple[int, int]
    values: torch.Tensor
    scales: torch.Tensor
    refined: int = 0

    @property
    def panels(self) -> Int8Panels:
        """The arrays, of one weight or of several in one tensor, as products read them."""
        return Int8Panels(self.values.view(-1).numpy(), self.scales.view(-1).numpy())

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `PackedWeight`."""
        (rows, given), inner = x.shape, self.values.shape[1] * _PER_LANE
        filled = F.pad(x, (0, inner - given)) if inner > given else x
        stored = int8_rows(rows, inner)
        seconds = max(rows / _SPEED, 1 / _RATE) * len(self.values) * PANEL * inner
        weight = Weight(self.panels, 0, len(self.values) - self.refined, self.refined)
        return multiply_cpu(filled, stored, weight, self.shape[0], bias, seconds)


def pack_int8(values: torch.Tensor, scales: torch.Tensor, rest: Rest | None = None) -> torch.Tensor:
    """Put int8 values `[out, in]` and their outputs' scales, float32 `[out, 1]`, in panels.

    Args:
        values: see above.
        scales: see above.
        rest: what rounding took from the last outputs, whose panels are refined.

    Returns:
        An `Int8Weight`, which stands for a tensor in products.
    """
    (out, inner), refined = values.shape, 0
    if rest:
        panels, first = -(-out // PANEL), (out - len(rest[0])) // PANEL
        refined = panels - first
        below, above = (0, 0, 0, panels * PANEL - out), (0, 0, out - len(rest[0]) - first * PANEL, 0)
        pairs = zip((values, scales), rest, strict=True)
        values, scales = (torch.cat([F.pad(whole, below), F.pad(part, above)]) for whole, part in pairs)
    if inner % GROUP:
        values = F.pad(values, (0, -inner % GROUP))
    panels = pack(values.view(torch.int32)).view(torch.uint8).unflatten(-1, (PANEL, _PER_LANE))
    panels.bitwise_xor_(_OFFSET)  # bytes of two's complement: 128 is added by its bit
    return cast(torch.Tensor, Int8Weight((out, inner), panels, pack(scales.float()).view(-1, PANEL), refined))


def kept_int8(weight: Int8Weight, name: str) -> Kept:
    """A weight's tensors and shape under its name, for `int8_of_kept`."""
    tensors = {f"{name}.values": weight.values, f"{name}.scales": weight.scales}
    return Kept(tensors, {name: [*weight.shape, weight.refined]})


def int8_of_kept(tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any], name: str) -> Int8Weight:
    """The weight that was kept under a name."""
    out, inner, refined = facts[name]
    return Int8Weight((out, inner), tensors[f"{name}.values"], tensors[f"{name}.scales"], refined)


def int8_rows(rows: int, inner: int) -> Int8Rows:
    """Memory for `rows` rows of `inner` elements, a multiple of `GROUP`, as `pack_row` stores them."""
    groups = rows * inner // GROUP
    return Int8Rows(np.empty(rows * inner, np.int8), np.empty(groups, np.float32), np.empty(groups, np.int32))


def _write_round_group(builder: Builder, args: Any) -> None:
    given, values, scale_at, start_at = args
    floats = [builder.read(builder.offset(given, offset)) for offset in range(0, GROUP, LANES)]
    bits = [builder.and_(builder.bitcast(x, WORDS), constant(WORDS, 0x7FFFFFFF)) for x in floats]
    largest = bits[0]
    for more in bits[1:]:
        largest = call_llvm(builder, f"llvm.umax.v{LANES}i32", WORDS, largest, more)
    # without its sign a float is the larger the larger its bits are; those of infinity and of no number are largest
    most = builder.bitcast(call_llvm(builder, f"llvm.vector.reduce.umax.v{LANES}i32", INT, largest), FLOAT)
    enough = builder.fcmp_unordered(">=", most, constant(FLOAT, _LEAST))
    zero, limit = constant(FLOAT, 0.0), constant(FLOAT, float(_MAX_INT8))
    builder.store(builder.select(enough, builder.fdiv(most, limit), zero), scale_at)
    inverse = builder.to_all_lanes(builder.select(enough, builder.fdiv(limit, most), zero))
    total = constant(WORDS, 0)
    for index, x in enumerate(floats):
        all_lanes, as_usual = constant(ir.IntType(LANES), -1), constant(INT, 4)  # rounds to nearest
        near = builder.fmul(x, inverse)
        words = call_llvm(builder, "llvm.x86.avx512.mask.cvtps2dq.512", WORDS, near, total, all_lanes, as_usual)
        total = builder.add(total, words)
        builder.write(builder.trunc(words, ir.VectorType(BYTE, LANES)), builder.offset(values, index * LANES))
    start = builder.mul(builder.reduce(total, builder.add), constant(INT, -_OFFSET))
    builder.store(start, start_at)


def _write_tile(rows: int, builder: Builder, args: Any) -> None:
    values, values_stride, scales, starts, weights, weight_scales, terms, terms_stride, out, out_stride, groups = args
    halves = range(PANEL // LANES)
    value_rows, scale_rows = builder.rows_of(values, values_stride, rows), builder.rows_of(scales, groups, rows)
    start_rows, out_rows = builder.rows_of(starts, groups, rows), builder.rows_of(out, out_stride, rows)
    first_terms = builder.rows_of(terms, terms_stride, rows)

    def add_group(group: Any, sums: list[Any]) -> list[Any]:
        integers = []
        for row in start_rows:
            integers += [builder.to_all_lanes(builder.load(builder.offset(row, group)))] * len(halves)
        of_group = builder.offset(weights, group, GROUP * PANEL)
        left = [builder.offset(row, group, GROUP) for row in value_rows]
        for column in range(0, GROUP, _PER_LANE):
            factors = []
            for half in halves:
                place = builder.offset(of_group, column * PANEL + half * LANES * _PER_LANE)
                if rows < MR:
                    builder.prefetch(builder.offset(place, _PREFETCH_DISTANCE))
                factors.append(builder.read(place, WORDS))
            for row, place in enumerate(left):
                four = builder.load(builder.bitcast(builder.offset(place, column), INT.as_pointer()), align=4)
                shared = builder.to_all_lanes(four)
                for half in halves:
                    i = row * len(halves) + half
                    integers[i] = call_llvm(builder, _SUM_BYTES, WORDS, integers[i], factors[half], shared)
        added = []
        for row, place in enumerate(scale_rows):
            scale = builder.to_all_lanes(builder.load(builder.offset(place, group)))
            for i in range(row * len(halves), (row + 1) * len(halves)):
                added.append(builder.fma(builder.sitofp(integers[i], FLOATS), scale, sums[i]))
        return added

    sums = builder.loop(groups, [constant(FLOATS, 0.0)] * (rows * len(halves)), add_group)
    for half in halves:
        scale = builder.read(builder.offset(weight_scales, half * LANES))
        for row, (place, first) in enumerate(zip(out_rows, first_terms, strict=True)):
            term = builder.read(builder.offset(first, half * LANES))
            total = builder.fma(sums[row * len(halves) + half], scale, term)
            builder.write(total, builder.offset(place, half * LANES))


_round_group = vector_function("espalier_round_group", _write_round_group)
"""round_group(x, start, values, start, scales, start, starts, start) rounds one group to bytes."""
_multiply = tile_product("espalier_int8_tile", _write_tile, {0: 1, 2: 10, 3: 10, 6: 7, 8: 9}, (MR, 4, 2, 1))
"""Writes the product of some rows and one panel, added to what `terms` has in its rows:

    multiply(rows, values, start, values_stride, scales, start, starts, start, weights, start, weight_scales, start,
             terms: Strided, out: Strided, groups)

`groups` is also the distance between rows of scales and starts.
"""


@overload(pack_row)
def _pack_int8_row(*args: Any) -> Any:
    def round_groups(*args: Any) -> None:
        row, start, inner, first, count, (values, scales, starts), r = args
        for column in range(first, first + count, GROUP):
            at, group = r * inner + column, (r * inner + column) // GROUP
            _round_group(row, start + column - first, values, at, scales, group, starts, group)

    return round_groups if is_tuple_of(args[5], Int8Rows) else None


@overload(multiply_panel)
def _multiply_int8_panel(*args: Any) -> Any:
    def multiply(*args: Any) -> None:
        (x, first, rows, inner), (weights, weight_scales), panel_at, _, terms, out, _ = args
        (values, scales, starts), groups = x, inner // GROUP
        row, group, panel = first * inner, first * groups, panel_at // inner
        _multiply(
            rows, values, row, inner, scales, group, starts, group, weights, panel_at, weight_scales, panel, terms, out,
            groups,
        )  # fmt: skip

    return multiply if is_tuple_of(args[0].types[0], Int8Rows) and is_tuple_of(args[1], Int8Panels) else None
