"""Rotary positions of heads, for decoders that transformers' code runs: one pass over memory."""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# (within kernels, numbers and tensors have Triton's types, which are not those of Python)

import torch
import triton
import triton.language as tl


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `kernels.rotary.rotate_halves`; the result lies in memory as `[T, heads, head_dim]`."""
    (heads, tokens, dim), x = x.shape, x if x.stride(2) == 1 else x.contiguous()
    output = x.new_empty((tokens, heads, dim))
    if tokens:
        tables = cos.contiguous(), sin.contiguous()
        rotate_heads[(tokens,)](x, *tables, output, x.stride(1), x.stride(0), HEADS=heads, HALF=dim // 2)
    return output.transpose(0, 1)


@triton.jit
def rotate_heads(x, cos, sin, output, token_stride, head_stride, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Turn the two halves of each head; the grid is `[T]`.

    Args:
        x: elements of a head side by side, with the strides that are given.
        cos: `[T, 2 * HALF]`; likewise sin.
        output: `[T, HEADS, 2 * HALF]`, written.
    """
    token = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, triton.next_power_of_2(HEADS))[:, None], tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    mask, half = (head < HEADS) & (d < HALF), d < HALF
    at, to = x + token * token_stride + head * head_stride + d, output + (token * HEADS + head) * (2 * HALF) + d
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(2):
        table = token * (2 * HALF) + part * HALF + d
        c = tl.load(cos + table, mask=half, other=0.0).to(tl.float32)
        s = tl.load(sin + table, mask=half, other=0.0).to(tl.float32)
        turned = first * c - second * s if part == 0 else second * c + first * s
        tl.store(to + part * HALF, turned.to(output.dtype.element_ty), mask=mask)
