"""Sampling a whole batch at once, with randomness that depends on the node and never on the batch."""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one sequence samples: the temperature first, then each filter on what the one before it left.

    Attributes:
        temperature: softmax temperature; 0 takes the most likely token.
        top_k: most likely tokens kept; 0 keeps all.
        top_p: nucleus mass kept of those, in (0, 1].
        min_p: tokens kept are at least this share as likely as the most likely one, in [0, 1].
        key: stream of randomness, from `stream_key`; with the token's position it fixes every draw.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    key: int = 0


def stream_key(seed: int, problem: str, path: tuple[int, ...]) -> int:
    """The 64-bit stream of one node: a hash of the request's seed, the problem's text and the node's path.

    Nothing about the batch, the slot or the order of arrival enters, so a request gives the same text in any company.
    """
    text = f"{seed}\x1f{'.'.join(map(str, path))}\x1f{problem}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One draw in [0, 1) for each (key, position), counter-based: SplitMix64 (Steele et al., 2014) at that offset.

    Args:
        keys: uint64 `[B]`.
        positions: int `[B]`.

    Returns:
        float64 `[B]`.
    """
    with np.errstate(over="ignore"):
        x = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of B rows as arrays `[B]`: float32, but int64 `top_ks` and `positions`, uint64 `keys`."""

    temperatures: np.ndarray
    top_ks: np.ndarray
    top_ps: np.ndarray
    min_ps: np.ndarray
    keys: np.ndarray
    positions: np.ndarray


def sample(logits: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row by inverting the cumulative distribution at the row's own uniform.

    A row's draw depends on its own logits and parameters alone: rows are grouped by what they need, never by what
    others in the batch need.

    Args:
        logits: `[B, vocabulary]`.
        batch: parameters of each row.

    Returns:
        Token ids int64 `[B]`, and their log-probabilities under the untempered model float32 `[B]`.
    """
    logits = logits.float()
    token_ids = logits.argmax(dim=-1)
    stochastic = batch.temperatures > 0
    filtered = stochastic & ((batch.top_ks > 0) | (batch.top_ps < 1) | (batch.min_ps > 0))
    draws = uniforms(batch.keys, batch.positions)
    for rows in (np.flatnonzero(stochastic & ~filtered), np.flatnonzero(filtered)):
        if len(rows) == 0:
            continue

        def column(values: np.ndarray, rows: np.ndarray = rows) -> torch.Tensor:
            return torch.from_numpy(values[rows]).to(logits.device)[:, None]

        index = column(np.arange(len(stochastic)))[:, 0]
        probabilities = torch.softmax(logits[index] / column(batch.temperatures), dim=-1).double()
        if filtered[rows[0]]:
            filters = (column(batch.top_ks), column(batch.top_ps), column(batch.min_ps))
            kept, order = _filter(probabilities, *filters)
            token_ids[index] = order.gather(1, _invert(kept.cumsum(dim=-1), column(draws))[:, None])[:, 0]
        else:
            token_ids[index] = _invert(probabilities.cumsum(dim=-1), column(draws))
    chosen = logits.gather(1, token_ids[:, None])[:, 0]
    return token_ids, chosen - torch.logsumexp(logits, dim=-1)


def _filter(
    probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities in falling order, zero where filtered out, and the token ids they belong to; all `[R, vocabulary]`.

    Filters come in the order of transformers' own: top-k, top-p of the mass that it left, min-p.
    """
    # Stable, so that equal probabilities keep the order of their ids on every machine.
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    kept = torch.where((top_k == 0) | (ranks < top_k), ordered, 0.0)
    before = kept.cumsum(dim=-1) - kept
    kept = torch.where(before < top_p * kept.sum(dim=-1, keepdim=True), kept, 0.0)  # the smallest set to reach top_p
    return torch.where(kept >= min_p * ordered[:, :1], kept, 0.0), order


def _invert(cumulative: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Index of the first entry above draw * total, for each row."""
    target = draws * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Rounding can put the target on the total itself; step back to the last entry with any mass.
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1)
    return torch.minimum(index, last)
