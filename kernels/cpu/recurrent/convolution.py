"""Causal convolutions on CPU: each channel by itself, the taps of a token added up from the oldest to its own."""

from functools import partial
from typing import Any

import numpy as np
import torch
from llvmlite import ir

from espalier.kernels.cpu import compiled
from espalier.kernels.cpu.pointwise import LANES, write_exp
from espalier.kernels.cpu.simd import (
    FLOAT,
    INDEX,
    first_lanes,
    flush_denormals,
    fma,
    gep,
    load,
    loop,
    masked_load,
    masked_store,
    restore_denormals,
    store,
    vector_function,
)
from espalier.kernels.cpu.threads import parallel_run, phase_items
from espalier.kernels.recurrent import StateRows

_CHANNELS = 1024
"""Channels of a work item."""
_SPEED = 2e9
"""Products a second of one thread, within a factor of two or so."""
_VECTOR = ir.VectorType(FLOAT, LANES)


def _write_token(silu: bool, builder: ir.IRBuilder, args: Any) -> None:
    """Convolve the inputs of one token, `width` of them `stride` apart, channel by channel."""
    x, x_stride, weights, weight_stride, bias, output, width, channels = args
    zero, one = (ir.Constant(_VECTOR, [number] * LANES) for number in (0.0, 1.0))

    def convolve(channel: Any, mask: Any) -> None:
        def read(place: Any) -> Any:
            at = gep(builder, place, channel)
            return load(builder, at, _VECTOR) if mask is None else masked_load(builder, at, mask, zero)

        def add(tap: Any, sums: list[Any]) -> list[Any]:
            given = read(gep(builder, x, builder.mul(tap, x_stride)))
            weight = read(gep(builder, weights, builder.mul(tap, weight_stride)))
            return [fma(builder, given, weight, sums[0])]

        (total,) = loop(builder, width, [read(bias)], add)
        if silu:
            total = builder.fdiv(total, builder.fadd(one, write_exp(builder, builder.fneg(total))))
        at = gep(builder, output, channel)
        if mask is None:
            store(builder, [total], [at])
        else:
            masked_store(builder, total, at, mask)

    def whole(n: Any, nothing: list[Any]) -> list[Any]:
        convolve(builder.mul(n, ir.Constant(INDEX, LANES)), None)
        return nothing

    lanes = ir.Constant(INDEX, LANES)
    vectors, left = builder.sdiv(channels, lanes), builder.srem(channels, lanes)
    loop(builder, vectors, [], whole)
    with builder.if_then(builder.icmp_signed(">", left, ir.Constant(INDEX, 0))):
        convolve(builder.mul(vectors, lanes), first_lanes(builder, left, LANES))


_convolve = vector_function("espalier_convolution", partial(_write_token, False))
"""convolve(x, start, stride, weights, start, stride, bias, start, output, start, width, channels)"""
_convolve_silu = vector_function("espalier_convolution_silu", partial(_write_token, True))
"""As `_convolve`, with SiLU of the result."""


@compiled(nogil=True)
def _convolution(
    counters: int,
    memory: np.ndarray,
    spans: np.ndarray,
    sources: np.ndarray,
    targets: np.ndarray,
    x: np.ndarray,
    stride: int,
    weights: np.ndarray,
    bias: np.ndarray,
    silu: bool,
    output: np.ndarray,
) -> None:
    """One thread's share; an item is some channels of a sequence. `weights` are `[width, channels]`, the rest flat."""
    width, channels = weights.shape
    taps, portions, before = weights.reshape(-1), (channels + _CHANNELS - 1) // _CHANNELS, width - 1
    edge = np.empty((2 * before, _CHANNELS), np.float32)  # the state, and the first tokens behind it
    lines = edge.reshape(-1)
    denormals = flush_denormals()
    for item in phase_items(counters, 0, portions * len(targets)):
        sequence, first = item // portions, item % portions * _CHANNELS
        count, start = min(_CHANNELS, channels - first), spans[sequence]
        tokens = spans[sequence + 1] - start
        for n in range(before):
            if sources[sequence] < 0:
                edge[n, :count] = np.float32(0.0)
            else:
                at = sources[sequence] + n * channels + first
                edge[n, :count] = memory[at : at + count]
        for n in range(min(before, tokens)):
            at = (start + n) * stride + first
            edge[before + n, :count] = x[at : at + count]
        for n in range(tokens):
            out = (start + n) * channels + first
            given, at, step = x, (start + n - before) * stride + first, stride
            if n < before:
                given, at, step = lines, n * _CHANNELS, _CHANNELS
            rest = taps, first, channels, bias, first, output, out, width, count
            if silu:
                _convolve_silu(given, at, step, *rest)
            else:
                _convolve(given, at, step, *rest)
        for n in range(before):
            to, token = targets[sequence] + n * channels + first, tokens - before + n
            if token < 0:  # of the state before
                memory[to : to + count] = edge[before + token, :count]
            else:
                at = (start + token) * stride + first
                memory[to : to + count] = x[at : at + count]
    restore_denormals(denormals)


def causal_convolution_cpu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool, rows: StateRows
) -> torch.Tensor:
    """`kernels.recurrent.causal_convolution` on CPU; same arguments and result."""
    tokens, channels = x.shape
    output, weights = torch.empty(tokens, channels), weight.T.contiguous()
    if x.stride(1) != 1:
        x = x.contiguous()
    flat = x.as_strided(((tokens - 1) * x.stride(0) + channels,), (1,))
    added = torch.zeros(channels) if bias is None else bias
    places = (each.numpy() for each in (rows.memory, rows.spans, rows.sources, rows.targets))
    given = flat.numpy(), x.stride(0), weights.numpy(), added.numpy(), silu, output.view(-1).numpy()
    parallel_run(_convolution, 1, *places, *given, seconds=x.numel() * len(weights) / _SPEED)
    return output
