"""The gated delta rule and Mamba-2's scan on CPU: a head's state, token by token.

Both are one recurrence over a matrix S, `[rows, columns]`, with a key, a query and a decay for each row:

    seen = (decay key)' S      new = beta (value - seen)      result = (decay query)' S + (key' query) new
    S = decay S + key new'

A scan has no beta, and its new is the value itself. So a token reads S twice and writes it once; it comes from memory
once in a step, for a head's S fits into the second cache. The sums run over the rows in their order and each column has
a lane of its own, so that a token has the same bits wherever a text is cut into steps.
"""

from functools import partial
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir

from espalier.kernels.compilation.compiler import inner
from espalier.kernels.cpu import compiled
from espalier.kernels.cpu.pointwise import exp_in_place
from espalier.kernels.cpu.simd import (
    FLOAT,
    INDEX,
    call_function,
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
    to_all_lanes,
    vector_function,
)
from espalier.kernels.cpu.threads import parallel_run, phase_items
from espalier.kernels.recurrent import EPS, StateRows

_LANES = 16
_VECTOR = ir.VectorType(FLOAT, _LANES)
_WIDTHS = (8, 4, 1) if llvmlite.binding.get_host_cpu_features().get("avx512f") else (2, 1)
"""Vectors of columns that are taken together, the most first: with their sums they fit in the machine's registers."""
_SPEED = 1e10
"""Elements of states a second that one thread takes a token through, within a factor of two or so."""
_PARTS = 4
"""Vectors `[rows]` that a token's key, query and decay become: decay key, decay query, key, decay."""


def _write_columns(vectors: int, builder: ir.IRBuilder, args: Any) -> None:
    """One token through `vectors` vectors of columns, or the first lanes of one where a last argument says how many."""
    state, value, output, token, rows, stride, beta, corrects, product, *count = args
    zero = ir.Constant(_VECTOR, [0.0] * _LANES)
    mask = first_lanes(builder, count[0], _LANES) if count else None

    def read(place: Any) -> list[Any]:
        if mask:
            return [masked_load(builder, place, mask, zero)]
        return [load(builder, gep(builder, place, v * _LANES), _VECTOR) for v in range(vectors)]

    def write(values: list[Any], place: Any) -> None:
        if mask:
            masked_store(builder, values[0], place, mask)
        else:
            store(builder, values, [gep(builder, place, v * _LANES) for v in range(vectors)])

    def row(n: Any) -> Any:
        return gep(builder, state, builder.mul(n, stride))

    def element(part: int, n: Any) -> Any:
        at = builder.add(n, builder.mul(rows, ir.Constant(INDEX, part)))
        return to_all_lanes(builder, builder.load(gep(builder, token, at)), _LANES)

    def add_products(n: Any, sums: list[Any]) -> list[Any]:
        values, key, query = read(row(n)), element(0, n), element(1, n)
        factors = [key] * vectors + [query] * vectors
        return [fma(builder, s, x, total) for s, x, total in zip(values * 2, factors, sums, strict=True)]

    sums = loop(builder, rows, [zero] * (2 * vectors), add_products)
    betas, shares, products = (
        to_all_lanes(builder, number, _LANES) for number in (beta, builder.fneg(corrects), product)
    )
    pairs = zip(read(value), sums[:vectors], strict=True)
    new = [builder.fmul(betas, fma(builder, shares, seen, given)) for given, seen in pairs]
    write([fma(builder, products, one, total) for one, total in zip(new, sums[vectors:], strict=True)], output)

    def update(n: Any, nothing: list[Any]) -> list[Any]:
        key, decay = element(2, n), element(3, n)
        pairs = zip(read(row(n)), new, strict=True)
        write([fma(builder, key, one, builder.fmul(decay, s)) for s, one in pairs], row(n))
        return nothing

    loop(builder, rows, [], update)


def _write_token(builder: ir.IRBuilder, args: Any) -> None:
    *moving, token, rows, columns, beta, corrects, product = args
    shared = [token, rows, columns, beta, corrects, product]

    def columns_of(vectors: int, _: Any, places: list[Any]) -> list[Any]:
        write, name = partial(_write_columns, vectors), f"espalier_recurrent_{vectors}"
        call_function(builder, name, ir.VoidType(), [*places, *shared], write)
        return [gep(builder, place, vectors * _LANES) for place in places]

    left = columns
    for vectors in _WIDTHS:
        width = ir.Constant(INDEX, vectors * _LANES)
        moving = loop(builder, builder.sdiv(left, width), moving, partial(columns_of, vectors))
        left = builder.srem(left, width)
    with builder.if_then(builder.icmp_signed(">", left, ir.Constant(INDEX, 0))):
        write = partial(_write_columns, 1)
        call_function(builder, "espalier_recurrent_rest", ir.VoidType(), [*moving, *shared, left], write)


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
    memory: np.ndarray,
    spans: np.ndarray,
    sources: np.ndarray,
    targets: np.ndarray,
    queries: np.ndarray,
    query_stride: int,
    keys: np.ndarray,
    key_stride: int,
    values: np.ndarray,
    value_stride: int,
    log_decays: np.ndarray,
    betas: np.ndarray,
    shape: tuple[int, int, int, int],
    output: np.ndarray,
) -> None:
    """One thread's share; an item is a head of a sequence. All arrays are flat, and strides are those of tokens.

    `betas` are empty for a scan. `shape` is how many heads there are, heads of keys, and rows and columns of a state.
    """
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
            q, k, v = t * query_stride + shared, t * key_stride + shared, t * value_stride + head * columns
            place = t * heads + head
            log_decay = log_decays[place * decays : (place + 1) * decays]
            product = _make_ready(queries[q : q + rows], keys[k : k + rows], log_decay, delta, token)
            beta, corrects = (betas[place], np.float32(1.0)) if delta else (np.float32(1.0), np.float32(0.0))
            _take_token(state, 0, values, v, output, place * columns, token, 0, rows, columns, beta, corrects, product)
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
    places = (each.numpy() for each in (rows.memory, rows.spans, rows.sources, rows.targets))
    given = (part for each in (query, key, value) for part in _by_token(each))
    rest = (each.contiguous().view(-1).numpy() for each in (log_decay, beta))
    shape = value.shape[1], *key.shape[1:], value.shape[2]
    seconds = value.numel() * shape[2] / _SPEED
    parallel_run(_recur, 1, *places, *given, *rest, shape, output.view(-1).numpy(), seconds=seconds)
    return output


def _by_token(x: torch.Tensor) -> tuple[np.ndarray, int]:
    """The memory of `x`, `[T, heads, dim]`, flat, heads side by side; and how far a token is from the next one."""
    tokens, heads, dim = x.shape
    if x.stride()[1:] != (dim, 1):
        x = x.contiguous()
    return x.as_strided(((tokens - 1) * x.stride(0) + heads * dim,), (1,)).numpy(), x.stride(0)
