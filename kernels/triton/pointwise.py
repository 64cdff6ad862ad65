"""Norms with their residual, the MLP's gate, and tokens just drawn: one pass over memory each."""

# pyright: reportArgumentType=false
# (within kernels, numbers and tensors have Triton's types, which are not those of Python)

import torch
import triton
import triton.language as tl

from espalier.kernels.layers import Activation

PORTION = tl.constexpr(1024)


def add_norm(
    hidden: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    added_norm: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add `added` to `hidden`, `[T, hidden]`, in place; returns RMSNorm of the sum, times `weight`, `[hidden]`.

    With `added_norm`, factors `[hidden]`, RMSNorm of `added` is what is added. The result is written to `output`, if
    there is one.
    """
    rows, size = hidden.shape
    normed = torch.empty_like(hidden) if output is None else output
    if rows:
        add_and_norm[(rows,)](hidden, added, weight, added_norm, normed, eps, SIZE=size)
    return normed


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.layers.rms_norm`."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # `reshape` keeps a stride between rows
    return add_norm(rows, None, weight, eps).view(x.shape)


def gated(gate_up: torch.Tensor, activation: Activation = Activation.SILU) -> torch.Tensor:
    """The activation of the first half of each row times the second: `[T, 2 * inner]` to `[T, inner]`."""
    rows, inner = len(gate_up), gate_up.shape[1] // 2
    output = gate_up.new_empty((rows, inner))
    if rows:
        activate_and_multiply[rows, triton.cdiv(inner, PORTION.value)](
            gate_up, output, INNER=inner, GELU=activation is Activation.GELU_TANH
        )
    return output


def take_drawn(token_ids: torch.Tensor, drawn: torch.Tensor) -> None:
    """Replace each id -1 - i of int32 `[T]` by the i-th of `drawn`, int64."""
    replace_by_drawn[(triton.cdiv(len(token_ids), PORTION.value),)](token_ids, drawn, len(token_ids))


@triton.jit
def add_and_norm(hidden, added, weight, added_weight, normed, eps, SIZE: tl.constexpr):
    """Add to the residual stream and take RMSNorm of it; the grid is `[T]`.

    Args:
        hidden: `[T, SIZE]`, the residual stream, written in place.
        added: `[T, SIZE]`; None to add nothing.
        weight: `[SIZE]`.
        added_weight: `[SIZE]`, factors of RMSNorm over `added`; None without.
        normed: `[T, SIZE]`, written.
        eps: added to the mean square.
    """
    row, e = tl.program_id(0).to(tl.int64) * SIZE, tl.arange(0, triton.next_power_of_2(SIZE))
    mask = e < SIZE
    x = tl.load(hidden + row + e, mask=mask, other=0.0)
    if added is not None:
        plus = tl.load(added + row + e, mask=mask, other=0.0).to(tl.float32)
        if added_weight is not None:
            plus *= tl.rsqrt(tl.sum(plus * plus, 0) / SIZE + eps)
            plus *= tl.load(added_weight + e, mask=mask, other=0.0).to(tl.float32)
            plus = plus.to(x.dtype).to(tl.float32)  # rounded as torch rounds it
        x = (x.to(tl.float32) + plus).to(x.dtype)
        tl.store(hidden + row + e, x, mask=mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    scaled = wide * scale * tl.load(weight + e, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + row + e, scaled.to(x.dtype), mask=mask)


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """SiLU, or GELU by tanh, rounded before the product with its result, as torch does."""
    wide = gate.to(tl.float32)
    exponent = wide
    if GELU:  # 0.5 (1 + tanh(z)) is 1 / (1 + exp(-2 z)), with z = sqrt(2 / pi) (x + 0.044715 x**3)
        exponent = wide * (1.5957691216057308 + 0.07135481282632562 * wide * wide)
    return (wide / (1.0 + tl.exp(-exponent))).to(gate.dtype)


@triton.jit
def activate_and_multiply(gate_up, output, INNER: tl.constexpr, GELU: tl.constexpr):
    """SiLU, or GELU by tanh, of the first half of each row times the second; the grid is `[T, portions of INNER]`.

    Args:
        gate_up: `[T, 2 * INNER]`.
        output: `[T, INNER]`, written.
    """
    row, e = tl.program_id(0).to(tl.int64), tl.program_id(1) * PORTION + tl.arange(0, PORTION)
    mask = e < INNER
    at = gate_up + row * (2 * INNER) + e
    gate = tl.load(at, mask=mask, other=0.0)
    tl.store(output + row * INNER + e, activated(gate, GELU) * tl.load(at + INNER, mask=mask, other=0.0), mask=mask)


@triton.jit
def replace_by_drawn(token_ids, drawn, count):
    """Replace ids -1 - i by the i-th id that was drawn; the grid is `[portions of count]`.

    Args:
        token_ids: int32 `[count]`, written in place.
        drawn: int64, more than the largest i.
        count: of ids.
    """
    e = tl.program_id(0) * PORTION + tl.arange(0, PORTION)
    ids = tl.load(token_ids + e, mask=e < count, other=0)
    from_draw = ids < 0
    tl.store(token_ids + e, tl.load(drawn + (-1 - ids), mask=from_draw, other=0).to(tl.int32), mask=from_draw)
