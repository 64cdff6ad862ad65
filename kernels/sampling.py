"""Penalizing and filtering logits, and drawing tokens from them: the torch references."""

from typing import Any, NamedTuple

import torch

FILTERED = -1e30
"""Logit of a token that must not be drawn; finite, so that nothing depends on how infinities are treated."""
LEAST_TEMPERATURE = 1e-6
"""Smaller temperatures above 0 count as this one: only the most likely tokens are drawn, and no inverse overflows."""
LEAST_REPETITION = 1e-6
"""Smaller repetition penalties above 0 count as this one, so that what they divide stays finite."""


def filter_logits(
    logits: torch.Tensor, temperatures: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> torch.Tensor:
    """Logits with `FILTERED` for every token that the filters remove.

    Filters come in the order of transformers' own: top-k, top-p of the mass that it left, min-p. The most likely token
    always stays; of equal ones those with the lowest ids.

    Args:
        logits: float32 `[B, vocabulary]`.
        temperatures: float32 `[B]`.
        top_ks: int64 `[B]`; 0 keeps all.
        top_ps: float32 `[B]` in (0, 1].
        min_ps: float32 `[B]` in [0, 1].

    Returns:
        float32 `[B, vocabulary]`.
    """
    # Stable, so that equal probabilities keep the order of their ids on every machine.
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = torch.softmax(ordered / temperatures[:, None].clamp(min=LEAST_TEMPERATURE), dim=-1).double()
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    kept = torch.where((top_ks[:, None] == 0) | (ranks < top_ks[:, None]), probabilities, 0.0)
    before = kept.cumsum(dim=-1) - kept
    # The smallest set to reach top_p.
    kept = torch.where(before < top_ps[:, None] * kept.sum(dim=-1, keepdim=True), kept, 0.0)
    keep = (ranks == 0) | ((kept > 0) & (kept >= min_ps[:, None] * probabilities[:, :1]))
    return logits.scatter(1, order, torch.where(keep, ordered, FILTERED))


class Filters(NamedTuple):
    """Filters of B rows of logits; see `filter_logits`.

    Attributes:
        rows: int64, the rows that are filtered at all, ascending.
        top_ks: int64 `[B]`.
        top_ps: float32 `[B]`.
        min_ps: float32 `[B]`.
    """

    rows: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor


class TokenPenalties(NamedTuple):
    """Penalties of R draws for the tokens before them; tensors, or arrays.

    Attributes:
        rows: int64 `[R]`, the rows of the logits that have penalties; distinct.
        tokens: int32 `[R, length]`, the sequence of each, of ids below the vocabulary; at least one token.
        starts: int64 `[R]`, the place of the first token that was generated.
        ends: int64 `[R]`, how many tokens of each count.
        repetitions: float32 `[R]` above 0.
        presences: float32 `[R]`.
        frequencies: float32 `[R]`.
    """

    rows: Any
    tokens: Any
    starts: Any
    ends: Any
    repetitions: Any
    presences: Any
    frequencies: Any


def penalize_tokens(logits: torch.Tensor, penalties: TokenPenalties) -> None:
    """Make the tokens less likely that stand before each draw, each once however often it stands there; in place.

    As transformers and vLLM have them, in vLLM's order: logits, float32 `[B, vocabulary]`, are divided by the
    repetition penalty, negative ones multiplied; then the frequency penalty is taken off for each time that a token was
    generated, and the presence penalty once for those that were.
    """
    rows, tokens, starts, ends, repetitions, presences, frequencies = penalties
    places = torch.arange(tokens.shape[1], device=tokens.device)
    # What does not count stands for the first token, which is then given the same logit several times.
    ids = torch.where(places < ends[:, None], tokens, tokens[:, :1]).long().clamp(0, logits.shape[1] - 1)
    generated = ((places >= starts[:, None]) & (places < ends[:, None])).int()
    counts = generated.new_zeros(len(ids), logits.shape[1]).scatter_add_(1, ids, generated).gather(1, ids)
    at = rows[:, None], ids
    chosen, repetition = logits[at], repetitions[:, None].clamp(min=LEAST_REPETITION)
    chosen = torch.where(chosen < 0, chosen * repetition, chosen / repetition)
    logits[at] = chosen - frequencies[:, None] * counts - presences[:, None] * (counts > 0)


def mask_tokens(logits: torch.Tensor, allowed: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Logits with `FILTERED` for every token that is not allowed in its row.

    Args:
        logits: float32 `[B, vocabulary]`.
        allowed: uint8 `[B, ceil(vocabulary / 8)]`, on the same device: a bit for each token, the lowest one first.
        out: written to and returned, float32 `[B, vocabulary]`; None for new memory.

    Returns:
        float32 `[B, vocabulary]`.
    """
    bits = (allowed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=allowed.device)) & 1
    return torch.where(
        bits.view(len(logits), -1)[:, : logits.shape[1]] != 0, logits, logits.new_full((), FILTERED), out=out
    )


def draw_tokens(
    logits: torch.Tensor, candidates: torch.Tensor, temperatures: torch.Tensor, draws: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens, any number of them from a row, by inverting its cumulative distribution at each draw.

    Args:
        logits: float32 `[B, vocabulary]`.
        candidates: the same, with `FILTERED` for tokens that must not be drawn.
        temperatures: float32 `[B]`; 0 takes the most likely token.
        draws: float64 `[D]` in [0, 1).
        rows: int64 `[D]`, the row that each draw is from, ascending.

    Returns:
        Token ids int64 `[D]`, and their log-probabilities under `logits` as they are, float32 `[D]`.
    """
    token_ids = candidates.argmax(dim=-1)[rows]
    warm = (temperatures[rows] > 0).nonzero()[:, 0]
    scaled = candidates[rows[warm]] / temperatures[rows[warm], None].clamp(min=LEAST_TEMPERATURE)
    cumulative = torch.softmax(scaled, dim=-1).double().cumsum(dim=-1)
    index = torch.searchsorted(cumulative, draws[warm, None] * cumulative[:, -1:], right=True)[:, 0]
    # Rounding can put the target on the total itself; step back to the last entry with any mass.
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1)
    token_ids[warm] = torch.minimum(index, last)
    return token_ids, logits[rows, token_ids] - torch.logsumexp(logits, dim=-1)[rows]
