"""Sampling a whole batch at once, with randomness that depends on the node and never on the batch."""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one sequence samples.

    Attributes:
        temperature: softmax temperature; 0 takes the most likely token.
        top_p: nucleus mass kept, in (0, 1].
        key: stream of randomness, from `stream_key`; with the token's position it fixes every draw.
    """

    temperature: float = 1.0
    top_p: float = 1.0
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
    """The sampling parameters of B rows, as arrays: float32, float32, uint64 and int64 `[B]`."""

    temperatures: np.ndarray
    top_ps: np.ndarray
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
    draws = torch.from_numpy(uniforms(batch.keys, batch.positions)).to(logits.device)
    stochastic = batch.temperatures > 0
    nucleus = stochastic & (batch.top_ps < 1)
    for rows, draw in ((stochastic & ~nucleus, _draw_full), (nucleus, _draw_nucleus)):
        if rows.any():
            index = torch.from_numpy(np.flatnonzero(rows)).to(logits.device)
            temperature = torch.from_numpy(batch.temperatures[rows]).to(logits.device)[:, None]
            probabilities = torch.softmax(logits[index] / temperature, dim=-1)
            top_p = torch.from_numpy(batch.top_ps[rows]).to(logits.device)[:, None]
            token_ids[index] = draw(probabilities, top_p, draws[index, None])
    chosen = logits.gather(1, token_ids[:, None])[:, 0]
    return token_ids, chosen - torch.logsumexp(logits, dim=-1)


def _draw_full(probabilities: torch.Tensor, _: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    return _invert(probabilities.double().cumsum(dim=-1), draws)


def _draw_nucleus(probabilities: torch.Tensor, top_p: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    # Stable, so that equal probabilities keep the order of their ids on every machine.
    ordered, order = probabilities.double().sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = torch.where(before < top_p, ordered, 0.0)  # the smallest set whose mass reaches top_p
    return order.gather(1, _invert(kept.cumsum(dim=-1), draws)[:, None])[:, 0]


def _invert(cumulative: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Index of the first entry above draw * total, for each row."""
    target = draws * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Rounding can put the target on the total itself; step back to the last entry with any mass.
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1)
    return torch.minimum(index, last)
