"""Convolutions, the gated delta rule and scans over a flat batch; states stay in registers for all tokens."""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# (within kernels, numbers, tensors and ranges have Triton's types, which are not those of Python)

import torch
import triton
import triton.language as tl

from espalier.kernels.recurrent import EPS, StateRows

CHANNELS = 256
"""Channels of one program of a convolution."""
COLUMNS = 32
"""Columns of a state that one program keeps in registers."""
_EPS = tl.constexpr(EPS)


def causal_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool, rows: StateRows
) -> torch.Tensor:
    """See `kernels.recurrent.causal_convolution`."""
    (tokens, channels), sequences = x.shape, len(rows.sources)
    output = x.new_empty((tokens, channels))
    x = x if x.stride(1) == 1 else x.contiguous()
    if tokens and sequences:
        portions = triton.cdiv(channels, CHANNELS)
        places = x, rows.memory, rows.spans, rows.sources
        shape = {"CHANNELS": channels, "WIDTH": weight.shape[1], "PORTION": CHANNELS}
        convolve_tokens[tokens, portions](
            *places,
            weight.contiguous(),
            bias,
            output,
            x.stride(0),
            sequences,
            PADDED=triton.next_power_of_2(sequences),
            SILU=silu,
            **shape,
        )
        keep_inputs[sequences, portions](*places, rows.targets, x.stride(0), **shape)
    return output


def keep_last(hidden: torch.Tensor, rows: StateRows) -> None:
    """Write the last of each row's `hidden`, `[T, hidden]`, to its state `[hidden]`."""
    grid = len(rows.targets), triton.cdiv(hidden.shape[1], CHANNELS)
    if len(rows.targets):
        places = rows.memory, rows.spans, rows.sources, rows.targets
        keep_inputs[grid](hidden, *places, hidden.stride(0), CHANNELS=hidden.shape[1], WIDTH=2, PORTION=CHANNELS)


def gated_recurrence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    rows: StateRows,
) -> torch.Tensor:
    """See `kernels.recurrent.gated_recurrence`."""
    heads, columns = value.shape[1:]
    output = value.new_empty(value.shape)
    query, key, value = (_heads_side_by_side(x) for x in (query, key, value))
    if len(rows.sources):
        recur_heads[len(rows.sources) * heads, triton.cdiv(columns, COLUMNS)](
            query,
            key,
            value,
            log_decay.contiguous(),
            None if beta is None else beta.contiguous(),
            output,
            *(rows.memory, rows.spans, rows.sources, rows.targets),
            query.stride(0),
            key.stride(0),
            value.stride(0),
            HEADS=heads,
            KEY_HEADS=key.shape[1],
            ROWS=key.shape[2],
            COLUMNS=columns,
            PORTION=COLUMNS,
            BY_ROW=log_decay.dim() == 3,
        )
    return output


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    rows: StateRows,
) -> torch.Tensor:
    """See `kernels.recurrent.selective_scan`."""
    channels, size = a.shape
    output = x.new_empty(x.shape)
    if len(rows.sources):
        scan_channels[len(rows.sources), triton.cdiv(channels, COLUMNS)](
            *(x.contiguous(), dt.contiguous(), a.contiguous(), b.contiguous(), c.contiguous()),
            None if d is None else d.contiguous(),
            output,
            *(rows.memory, rows.spans, rows.sources, rows.targets),
            CHANNELS=channels,
            SIZE=size,
            PORTION=COLUMNS,
        )
    return output


def _heads_side_by_side(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


@triton.jit
def convolve_tokens(
    x,
    memory,
    spans,
    sources,
    weight,
    bias,
    output,
    stride,
    sequences,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PORTION: tl.constexpr,
    PADDED: tl.constexpr,
    SILU: tl.constexpr,
):
    """Convolve each token with those before it; the grid is `[T, portions of CHANNELS]`.

    Args:
        x: `[T, CHANNELS]`, tokens `stride` apart.
        memory: float32, states of `[WIDTH - 1, CHANNELS]`.
        spans: int64 `[sequences + 1]`.
        sources: int64 `[sequences]`.
        weight: `[CHANNELS, WIDTH]`.
        bias: `[CHANNELS]`, or None.
        output: `[T, CHANNELS]`, written.
    """
    token, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * PORTION + tl.arange(0, PORTION)
    each = tl.arange(0, PADDED)
    ends = tl.load(spans + 1 + each, mask=each < sequences, other=0)
    sequence = tl.sum(((ends <= token) & (each < sequences)).to(tl.int32), 0)
    if sequence < sequences:
        start, source, mask = tl.load(spans + sequence), tl.load(sources + sequence), c < CHANNELS
        total = tl.zeros((PORTION,), tl.float32)
        for tap in tl.static_range(WIDTH):
            back = token + tap - (WIDTH - 1)
            own = tl.where(back >= start, CHANNELS, 0)  # channels that this step has, or else the state
            kept = tl.where(source >= 0, CHANNELS - own, 0)
            given = tl.load(x + back * stride + c, mask=c < own, other=0.0).to(tl.float32)
            given += tl.load(memory + source + (back - start + WIDTH - 1) * CHANNELS + c, mask=c < kept, other=0.0)
            total += given * tl.load(weight + c * WIDTH + tap, mask=mask, other=0.0).to(tl.float32)
        if bias is not None:
            total += tl.load(bias + c, mask=mask, other=0.0).to(tl.float32)
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        tl.store(output + token * CHANNELS + c, total.to(output.dtype.element_ty), mask=mask)


@triton.jit
def keep_inputs(
    x, memory, spans, sources, targets, stride, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, PORTION: tl.constexpr
):
    """Write each sequence's last inputs to its state; the grid is `[S, portions of CHANNELS]`.

    Args: see `convolve_tokens`; targets: int64 `[S]`.
    """
    sequence, c = tl.program_id(0), tl.program_id(1) * PORTION + tl.arange(0, PORTION)
    start, end = tl.load(spans + sequence), tl.load(spans + sequence + 1)
    source, target = tl.load(sources + sequence), tl.load(targets + sequence)
    for n in tl.static_range(WIDTH - 1):  # the oldest first: what is read later is not yet written
        back = end - (WIDTH - 1) + n
        own = tl.where(back >= start, CHANNELS, 0)
        kept = tl.where(source >= 0, CHANNELS - own, 0)
        given = tl.load(x + back * stride + c, mask=c < own, other=0.0).to(tl.float32)
        given += tl.load(memory + source + (back - start + WIDTH - 1) * CHANNELS + c, mask=c < kept, other=0.0)
        tl.store(memory + target + n * CHANNELS + c, given, mask=c < tl.where(end > start, CHANNELS, 0))


@triton.jit
def recur_heads(
    query,
    key,
    value,
    log_decay,
    beta,
    output,
    memory,
    spans,
    sources,
    targets,
    query_stride,
    key_stride,
    value_stride,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PORTION: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    """Take a sequence's tokens through some columns of a head's state; the grid is `[S * HEADS, portions of COLUMNS]`.

    Args:
        query: `[T, KEY_HEADS, ROWS]`, tokens `query_stride` apart; likewise key.
        value: `[T, HEADS, COLUMNS]`, tokens `value_stride` apart.
        log_decay: `[T, HEADS]`, or `[T, HEADS, ROWS]` where `BY_ROW`.
        beta: `[T, HEADS]`; None for a scan.
        output: `[T, HEADS, COLUMNS]`, written.
        memory: float32, states of `[HEADS, ROWS, COLUMNS]`.
        spans: int64 `[S + 1]`.
        sources: int64 `[S]`; likewise targets.
    """
    sequence, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    r, c = tl.arange(0, triton.next_power_of_2(ROWS)), tl.program_id(1) * PORTION + tl.arange(0, PORTION)
    in_rows, in_columns = r < ROWS, c < COLUMNS
    place = head * (ROWS * COLUMNS) + r[:, None] * COLUMNS + c[None, :]
    whole = in_rows[:, None] & in_columns[None, :]
    source, shared = tl.load(sources + sequence), head * KEY_HEADS // HEADS * ROWS
    state = tl.load(memory + tl.maximum(source, 0) + place, mask=whole, other=0.0)
    state = tl.where(source >= 0, state, 0.0)
    start, end = tl.load(spans + sequence), tl.load(spans + sequence + 1)
    for token in range(start, end):
        q = tl.load(query + token * query_stride + shared + r, mask=in_rows, other=0.0).to(tl.float32)
        k = tl.load(key + token * key_stride + shared + r, mask=in_rows, other=0.0).to(tl.float32)
        new = tl.load(value + token * value_stride + head * COLUMNS + c, mask=in_columns, other=0.0).to(tl.float32)
        at = token * HEADS + head
        if BY_ROW:
            decay = tl.load(log_decay + at * ROWS + r, mask=in_rows, other=0.0).to(tl.float32)
            state *= tl.exp(decay)[:, None]
        else:
            state *= tl.exp(tl.load(log_decay + at).to(tl.float32))
        if beta is not None:
            k *= tl.rsqrt(tl.sum(k * k, 0) + _EPS)
            q *= tl.rsqrt((tl.sum(q * q, 0) + _EPS) * ROWS)
            new = tl.load(beta + at).to(tl.float32) * (new - tl.sum(state * k[:, None], 0))
        state += k[:, None] * new[None, :]
        result = tl.sum(state * q[:, None], 0)
        tl.store(output + at * COLUMNS + c, result.to(output.dtype.element_ty), mask=in_columns)
    if end > start:
        tl.store(memory + tl.load(targets + sequence) + place, state, mask=whole)


@triton.jit
def scan_channels(
    x,
    dt,
    a,
    b,
    c,
    d,
    output,
    memory,
    spans,
    sources,
    targets,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    PORTION: tl.constexpr,
):
    """Take a sequence's tokens through the states of some channels; the grid is `[S, portions of CHANNELS]`.

    Args:
        x: `[T, CHANNELS]`; likewise dt.
        a: `[CHANNELS, SIZE]`.
        b: `[T, SIZE]`; likewise c.
        d: `[CHANNELS]`, or None.
        output: `[T, CHANNELS]`, written.
        memory: float32, states of `[CHANNELS, SIZE]`.
        spans: int64 `[S + 1]`.
        sources: int64 `[S]`; likewise targets.
    """
    sequence, channel = tl.program_id(0), tl.program_id(1) * PORTION + tl.arange(0, PORTION)
    n = tl.arange(0, triton.next_power_of_2(SIZE))
    inside, in_size = channel < CHANNELS, n < SIZE
    place, whole = channel[:, None] * SIZE + n[None, :], inside[:, None] & in_size[None, :]
    source, rates = tl.load(sources + sequence), tl.load(a + place, mask=whole, other=0.0).to(tl.float32)
    state = tl.load(memory + tl.maximum(source, 0) + place, mask=whole, other=0.0)
    state = tl.where(source >= 0, state, 0.0)
    start, end = tl.load(spans + sequence), tl.load(spans + sequence + 1)
    for token in range(start, end):
        at = token * CHANNELS + channel
        given = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        step = tl.load(dt + at, mask=inside, other=0.0).to(tl.float32)
        enters = tl.load(b + token * SIZE + n, mask=in_size, other=0.0).to(tl.float32)
        leaves = tl.load(c + token * SIZE + n, mask=in_size, other=0.0).to(tl.float32)
        state = state * tl.exp(rates * step[:, None]) + (step * given)[:, None] * enters[None, :]
        result = tl.sum(state * leaves[None, :], 1)
        if d is not None:
            result += tl.load(d + channel, mask=inside, other=0.0).to(tl.float32) * given
        tl.store(output + at, result.to(output.dtype.element_ty), mask=inside)
    if end > start:
        tl.store(memory + tl.load(targets + sequence) + place, state, mask=whole)
