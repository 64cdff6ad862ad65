"""Recurrent layers over a flat batch, in torch: causal convolutions, the gated delta rule, state-space scans.

Such a layer keeps a state of fixed size for each sequence, and reads nothing else of the past. The tokens of a step lie
side by side, those of a sequence in a row; the states lie in the KV pool:

    tokens   [row 0 ............][row 1][row 2 .....][filling]     spans = 0, 16, 17, 24
    states   in the pool, from `sources[row]` on before the row's tokens, from `targets[row]` on behind them

Every operation takes a row's tokens one by one, with the same sums in the same order however many come in one step. So
with a backend whose rows are independent, a text gives the same bits in any company and wherever it is cut into steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

EPS = 1e-6
"""Added to the sum of squares by which the delta rule normalises queries and keys."""


@dataclass(frozen=True, slots=True)
class StateRows:
    """Places of one layer's states for a step's rows. The state that a row writes is no other row's source or target.

    Attributes:
        memory: float32 `[elements]`, the KV pool, written in place.
        spans: int64 `[S + 1]`; row r has the tokens `spans[r]` up to `spans[r + 1]`, at least one but in
            recorded steps, where rows without tokens write no state.
        sources: int64 `[S]`, the first element of the state that a row continues, or -1 for zeros.
        targets: int64 `[S]`, the first element of the state that it writes: the source, or a copy that it begins.
    """

    memory: torch.Tensor
    spans: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor

    def part(self, offset: int) -> "StateRows":
        """Places of a part of the states that begins `offset` elements into each."""
        sources = torch.where(self.sources < 0, self.sources, self.sources + offset)
        return StateRows(self.memory, self.spans, sources, self.targets + offset)

    def read(self, *shape: int) -> torch.Tensor:
        """The rows' states before the step, `[S, *shape]`, copied."""
        states = self.memory[self.sources.clamp_min(0)[:, None] + self._elements(shape)]
        return states.masked_fill((self.sources < 0)[:, None], 0.0).view(-1, *shape)

    def write(self, states: torch.Tensor) -> None:
        """Write the rows' states behind the step, `[S, ...]`."""
        self.memory[self.targets[:, None] + self._elements(states.shape[1:])] = states.flatten(1)

    def turns(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each n, the rows that have an nth token, and these tokens."""
        lengths = self.spans.diff()
        for n in range(int(lengths.max()) if len(lengths) else 0):
            rows = torch.nonzero(lengths > n)[:, 0]
            yield rows, self.spans[rows] + n

    def _elements(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.arange(torch.Size(shape).numel(), device=self.memory.device)


def causal_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool, rows: StateRows
) -> torch.Tensor:
    """Convolve each channel over a token and the `width - 1` tokens before it.

    A state is the last inputs, `[width - 1, channels]`, the oldest first.

    Args:
        x: `[T, channels]`.
        weight: `[channels, width]`; its last column is for the token itself.
        bias: `[channels]`, or None.
        silu: whether results go through SiLU.
        rows: see `StateRows`.

    Returns:
        `[T, channels]`; for tokens behind the last row anything.
    """
    output, taps = torch.zeros_like(x), weight.float().T
    states = rows.read(weight.shape[1] - 1, x.shape[1])
    for row, token in rows.turns():
        window = torch.cat((states[row], x[token, None].float()), dim=1)
        total = (window * taps).sum(1)
        if bias is not None:
            total += bias.float()
        output[token] = (F.silu(total) if silu else total).to(x.dtype)
        states[row] = window[:, 1:]
    rows.write(states)
    return output


def gated_recurrence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    rows: StateRows,
) -> torch.Tensor:
    """The gated delta rule (Yang et al., 2025), with queries and keys over their Euclidean norm; a scan without beta.

    The state of a head is a matrix S, `[key_dim, value_dim]`. A token multiplies it by exp(log_decay), adds the outer
    product of key and beta (value - S' key), and has S' query / sqrt(key_dim) as its result. Without beta it adds the
    outer product of key and value and has S' query, of queries and keys as they are.

    Args:
        query: `[T, key_heads, key_dim]`; a head serves `heads / key_heads` neighbouring heads of values.
        key: likewise.
        value: `[T, heads, value_dim]`.
        log_decay: `[T, heads]`, or `[T, heads, key_dim]` with one for each row of the matrix.
        beta: `[T, heads]`, or None.
        rows: see `StateRows`; a state is `[heads, key_dim, value_dim]`.

    Returns:
        `[T, heads, value_dim]`; for tokens behind the last row anything.
    """
    query, key, decay = query.float(), key.float(), log_decay.float().exp().view(*value.shape[:2], -1)
    if beta is not None:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) for x in (query, key))
        query, beta = query * key.shape[-1] ** -0.5, beta.float()
    heads, value_dim = value.shape[1:]
    shared, output = heads // key.shape[1], torch.zeros_like(value)
    states = rows.read(heads, key.shape[2], value_dim)
    for row, token in rows.turns():
        q, k = (x[token].repeat_interleave(shared, dim=1)[..., None] for x in (query, key))
        state, new = states[row] * decay[token, ..., None], value[token].float()
        if beta is not None:
            new = beta[token, :, None] * (new - (state * k).sum(-2))
        states[row] = state = state + k * new[..., None, :]
        output[token] = (state * q).sum(-2).to(value.dtype)
    rows.write(states)
    return output


def state_space_scan(
    backend: Any,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    rows: StateRows,
) -> torch.Tensor:
    """The scan of Mamba-2 (Dao and Gu, 2024), in the paper's letters.

    The state of a head is a matrix S, `[size, head_dim]`. A token multiplies it by exp(a dt), adds the outer product of
    b and dt x, and has S' c + d x as its result.

    Args:
        backend: whose method this is; by its `gated_recurrence`.
        x: `[T, heads, head_dim]`.
        dt: `[T, heads]`, positive.
        a: `[heads]`, negative.
        b: `[T, groups, size]`; a group serves `heads / groups` neighbouring heads.
        c: likewise.
        d: `[heads]`, or None.
        rows: see `StateRows`; a state is `[heads, size, head_dim]`.

    Returns:
        `[T, heads, head_dim]`; for tokens behind the last row anything.
    """
    dt = dt.float()
    output = backend.gated_recurrence(c, b, x.float() * dt[..., None], a.float() * dt, None, rows)
    return (output if d is None else output + d.float()[:, None] * x).to(x.dtype)


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    rows: StateRows,
) -> torch.Tensor:
    """The scan of the first Mamba (Gu and Dao, 2023), in the paper's letters: each element decays at its own rate.

    Args:
        x: `[T, channels]`.
        dt: `[T, channels]`, positive.
        a: `[channels, size]`, negative.
        b: `[T, size]`.
        c: likewise.
        d: `[channels]`, or None.
        rows: see `StateRows`; a state is `[channels, size]`.

    Returns:
        `[T, channels]`; for tokens behind the last row anything.
    """
    output, states, dt = torch.zeros_like(x, dtype=torch.float32), rows.read(*a.shape), dt.float()[..., None]
    for row, token in rows.turns():
        added = dt[token] * x[token, :, None].float() * b[token, None].float()
        states[row] = state = states[row] * (a.float() * dt[token]).exp() + added
        output[token] = (state * c[token, None].float()).sum(-1)
    rows.write(states)
    return (output if d is None else output + d.float() * x).to(x.dtype)
