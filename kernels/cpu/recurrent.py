"""Recurrent layers on CPU: causal convolutions, and the gated delta rule and Mamba-2's scan, token by token.

A convolution takes each channel by itself, and adds up the taps of a token from the oldest to its own. The other two
are one recurrence over a matrix S, `[rows, columns]`, with a key, a query and a decay for each row:

    seen = (decay key)' S      new = beta (value - seen)      result = (decay query)' S + (key' query) new
    S = decay S + key new'

A scan has no beta, and its new is the value itself. So a token reads S twice and writes it once; it comes from memory
once in a step, for a head's S fits into the second cache. The sums run over the rows in their order and each column has
a lane of its own, so that a token has the same bits wherever a text is cut into steps.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from espalier.kernels.compilation.compiler import inner
from espalier.kernels.cpu import compiled
from espalier.kernels.cpu.pointwise import exp_in_place, write_exp
from espalier.kernels.cpu.simd import (
    FLOATS,
    INDEX,
    LANES,
    LARGE_REGISTERS,
    Builder,
    Strided,
    constant,
    flush_denormals,
    restore_denormals,
    vector_function,
)
from espalier.kernels.cpu.threads import parallel_run, phase_items
from espalier.kernels.recurrent import EPS, StateRows

_CHANNELS = 1024
"""Channels of a work item of a convolution."""
_CONVOLUTION_SPEED = 2e9
"""Products a second of one thread, within a factor of two or so."""
_WIDTHS = (8, 4, 1) if LARGE_REGISTERS else (2, 1)
"""Vectors of columns that are taken together, the most first: with their sums they fit in the machine's registers."""
_SPEED = 1e10
"""Elements of states a second that one thread takes a token through, within a factor of two or so."""
_PARTS = 4
"""Vectors `[rows]` that a token's key, query and decay become: decay key, decay query, key, decay."""


class _States(NamedTuple):
    """`StateRows` as arrays."""

    memory: np.ndarray
    spans: np.ndarray
    sources: np.ndarray
    targets: np.ndarray


def _states(rows: StateRows) -> _States:
    return _States(*(each.numpy() for each in (rows.memory, rows.spans, rows.sources, rows.targets)))


def _by_token(x: torch.Tensor) -> Strided:
    """The memory of `x`, `[T, ...]`, flat, what a token has side by side; the stride is that from token to token."""
    x = x.flatten(1)
    if x.stride(1) != 1:
        x = x.contiguous()
    (tokens, elements), stride = x.shape, x.stride(0)
    return Strided(x.as_strided(((tokens - 1) * stride + elements,), (1,)).numpy(), 0, stride)


def _write_convolution(silu: bool, builder: Builder, args: Any) -> None:
    """Convolve the inputs of one token, `width` of them `stride` apart, channel by channel."""
    x, x_stride, weights, weight_stride, bias, output, width, channels = args
    one = constant(FLOATS, 1.0)

    def convolve(channel: Any, mask: Any, nothing: list[Any]) -> list[Any]:
        def read(place: Any) -> Any:
            return builder.read(builder.offset(place, channel), FLOATS, mask)

        def add(tap: Any, sums: list[Any]) -> list[Any]:
            given = read(builder.offset(x, tap, x_stride))
            weight = read(builder.offset(weights, tap, weight_stride))
            return [builder.fma(given, weight, sums[0])]

        (total,) = builder.loop(width, [read(bias)], add)
        if silu:
            total = builder.fdiv(total, builder.fadd(one, write_exp(builder, builder.fneg(total))))
        builder.write(total, builder.offset(output, channel), mask)
        return nothing

    builder.each_vector(channels, [], convolve)


_convolve = vector_function("espalier_convolution", partial(_write_convolution, False))
"""convolve(x: Strided, weights, start, stride, bias, start, output, start, width, channels)"""
_convolve_silu = vector_function("espalier_convolution_silu", partial(_write_convolution, True))
"""As `_convolve`, with SiLU of the result."""


@compiled(nogil=True)
def _convolution(
    counters: int, states: _States, x: Strided, weights: np.ndarray, bias: np.ndarray, silu: bool, output: np.ndarray
) -> None:
    """One thread's share; an item is some channels of a sequence. `weights` are `[width, channels]`, the rest flat."""
    (memory, spans, sources, targets), (inputs, _, stride), (width, channels) = states, x, weights.shape
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
            edge[before + n, :count] = inputs[at : at + count]
        for n in range(tokens):
            out = (start + n) * channels + first
            given = Strided(inputs, (start + n - before) * stride + first, stride)
            if n < before:
                given = Strided(lines, n * _CHANNELS, _CHANNELS)
            rest = taps, first, channels, bias, first, output, out, width, count
            if silu:
                _convolve_silu(given, *rest)
            else:
                _convolve(given, *rest)
        for n in range(before):
            to, token = targets[sequence] + n * channels + first, tokens - before + n
            if token < 0:  # of the state before
                memory[to : to + count] = edge[before + token, :count]
            else:
                at = (start + token) * stride + first
                memory[to : to + count] = inputs[at : at + count]
    restore_denormals(denormals)


def causal_convolution_cpu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool, rows: StateRows
) -> torch.Tensor:
    """`kernels.recurrent.causal_convolution` on CPU; same arguments and result."""
    output, weights = torch.empty(x.shape), weight.T.contiguous()
    added = torch.zeros(x.shape[1]) if bias is None else bias
    given = _states(rows), _by_token(x), weights.numpy(), added.numpy(), silu, output.view(-1).numpy()
    parallel_run(_convolution, 1, *given, seconds=x.numel() * len(weights) / _CONVOLUTION_SPEED)
    return output


def _write_columns(vectors: int, builder: Builder, args: Any) -> None:
    """One token through `vectors` vectors of columns, or the first lanes of one where a last argument says how many."""
    state, value, output, token, rows, stride, beta, corrects, product, *count = args
    mask = builder.first_lanes(count[0]) if count else None

    def read(place: Any) -> list[Any]:
        return [builder.read(builder.offset(place, v * LANES), FLOATS, mask) for v in range(vectors)]

    def write(values: list[Any], place: Any) -> None:
        for v, one in enumerate(values):
            builder.write(one, builder.offset(place, v * LANES), mask)

    def element(part: int, n: Any) -> Any:
        at = builder.add(n, builder.mul(rows, constant(INDEX, part)))
        return builder.to_all_lanes(builder.load(builder.offset(token, at)))

    def add_products(n: Any, sums: list[Any]) -> list[Any]:
        values, key, query = read(builder.offset(state, n, stride)), element(0, n), element(1, n)
        factors = [key] * vectors + [query] * vectors
        return [builder.fma(s, x, total) for s, x, total in zip(values * 2, factors, sums, strict=True)]

    sums = builder.loop(rows, [constant(FLOATS, 0.0)] * (2 * vectors), add_products)
    betas, shares, products = (builder.to_all_lanes(number) for number in (beta, builder.fneg(corrects), product))
    pairs = zip(read(value), sums[:vectors], strict=True)
    new = [builder.fmul(betas, builder.fma(shares, seen, given)) for given, seen in pairs]
    write([builder.fma(products, one, total) for one, total in zip(new, sums[vectors:], strict=True)], output)

    def update(n: Any, nothing: list[Any]) -> list[Any]:
        key, decay, row = element(2, n), element(3, n), builder.offset(state, n, stride)
        pairs = zip(read(row), new, strict=True)
        write([builder.fma(key, one, builder.fmul(decay, s)) for s, one in pairs], row)
        return nothing

    builder.loop(rows, [], update)


def _write_token(builder: Builder, args: Any) -> None:
    *moving, token, rows, columns, beta, corrects, product = args
    shared = [token, rows, columns, beta, corrects, product]

    def columns_of(vectors: int, _: Any, places: list[Any]) -> list[Any]:
        builder.call_function(f"espalier_recurrent_{vectors}", [*places, *shared], partial(_write_columns, vectors))
        return [builder.offset(place, vectors * LANES) for place in places]

    left = columns
    for vectors in _WIDTHS:
        width = constant(INDEX, vectors * LANES)
        moving = builder.loop(builder.sdiv(left, width), moving, partial(columns_of, vectors))
        left = builder.srem(left, width)
    with builder.if_then(builder.icmp_signed(">", left, constant(INDEX, 0))):
        builder.call_function("espalier_recurrent_rest", [*moving, *shared, left], partial(_write_columns, 1))


_take_token = vector_function("espalier_recurrent", _write_token)
"""Take one token through the state of a head:

    take_token(state, start, values, start, output, start, token, start, rows, columns, beta, corrects, key' query)

`token` is what `_make_ready` wrote; `corrects` is 1 for the delta rule and 0 for a scan.
"""


@inner(fastmath=True)
def _dot(x: np.ndarray, y: np.ndarray) -> np.float32:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * y[i]
    return total


@inner
def _make_ready(
    query: np.ndarray, key: np.ndarray, log_decay: np.ndarray, normalises: bool, token: np.ndarray
) -> np.float32:
    """Write what a token's `[rows]` become to `token`, `[_PARTS * rows]`; returns the product of its key and query."""
    rows = len(key)
    decayed_key, decayed_query = token[:rows], token[rows : 2 * rows]
    own_key, decay = token[2 * rows : 3 * rows], token[3 * rows :]
    of_key = of_query = np.float32(1.0)
    if normalises:
        of_key = np.float32(1.0) / np.sqrt(_dot(key, key) + np.float32(EPS))
        of_query = np.float32(1.0) / np.sqrt((_dot(query, query) + np.float32(EPS)) * np.float32(rows))
    if len(log_decay) == 1:
        decay[:] = np.exp(log_decay[0])
    else:
        decay[:] = log_decay
        exp_in_place(decay, 0, rows, np.float32(0.0))
    for i in range(rows):
        own_key[i] = key[i] * of_key
        decayed_query[i] = query[i] * of_query
    product = _dot(own_key, decayed_query)
    for i in range(rows):
        decayed_key[i] = own_key[i] * decay[i]
        decayed_query[i] *= decay[i]
    return product


@compiled(nogil=True)
def _recur(
    counters: int,
    states: _States,
    heads_of: tuple[Strided, Strided, Strided],
    log_decays: np.ndarray,
    betas: np.ndarray,
    shape: tuple[int, int, int, int],
    output: np.ndarray,
) -> None:
    """One thread's share; an item is a head of a sequence. All arrays are flat, and strides are those of tokens.

    `heads_of` are queries, keys and values; `betas` are empty for a scan. `shape` is how many heads there are, heads of
    keys, and rows and columns of a state.
    """
    (memory, spans, sources, targets), (query, key, value) = states, heads_of
    heads, key_heads, rows, columns = shape
    token = np.empty(_PARTS * rows, np.float32)
    decays = len(log_decays) * columns // max(1, len(output))  # of a token and head: one, or one a row
    delta = len(betas) > 0
    denormals = flush_denormals()
    for item in phase_items(counters, 0, heads * len(targets)):
        sequence, head = item // heads, item % heads
        own, shared = head * rows * columns, head * key_heads // heads * rows
        state = memory[targets[sequence] + own : targets[sequence] + own + rows * columns]
        if sources[sequence] < 0:
            state[:] = np.float32(0.0)
        elif sources[sequence] != targets[sequence]:
            state[:] = memory[sources[sequence] + own : sources[sequence] + own + rows * columns]
        for t in range(spans[sequence], spans[sequence + 1]):
            q, k, v = t * query.stride + shared, t * key.stride + shared, t * value.stride + head * columns
            place = t * heads + head
            log_decay = log_decays[place * decays : (place + 1) * decays]
            product = _make_ready(query.array[q : q + rows], key.array[k : k + rows], log_decay, delta, token)
            beta, corrects = (betas[place], np.float32(1.0)) if delta else (np.float32(1.0), np.float32(0.0))
            out = place * columns
            _take_token(state, 0, value.array, v, output, out, token, 0, rows, columns, beta, corrects, product)
    restore_denormals(denormals)


def gated_recurrence_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    rows: StateRows,
) -> torch.Tensor:
    """`kernels.recurrent.gated_recurrence` on CPU; same arguments and result."""
    output, beta = torch.empty(value.shape), torch.empty(0) if beta is None else beta
    given = _by_token(query), _by_token(key), _by_token(value)
    rest = (each.contiguous().view(-1).numpy() for each in (log_decay, beta))
    shape = value.shape[1], *key.shape[1:], value.shape[2]
    seconds = value.numel() * shape[2] / _SPEED
    parallel_run(_recur, 1, _states(rows), given, *rest, shape, output.view(-1).numpy(), seconds=seconds)
    return output
