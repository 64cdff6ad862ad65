"""Sampling a whole batch at once, with randomness that depends on the node and never on the batch."""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from espalier.kernels.sampling import draw_tokens, filter_logits


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
    """Draw one token per row; a row's draw depends on its own logits and parameters alone.

    Args:
        logits: `[B, vocabulary]`.
        batch: parameters of each row.

    Returns:
        Token ids int64 `[B]`, and their log-probabilities under the untempered model float32 `[B]`.
    """
    logits = logits.float()

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(logits.device)

    candidates = logits
    if filtered := np.flatnonzero((batch.top_ks > 0) | (batch.top_ps < 1) | (batch.min_ps > 0)).tolist():
        filters = [tensor(x[filtered]) for x in (batch.temperatures, batch.top_ks, batch.top_ps, batch.min_ps)]
        if len(filtered) == len(logits):
            candidates = filter_logits(logits, *filters)
        else:
            candidates = logits.clone()
            candidates[filtered] = filter_logits(logits[filtered], *filters)
    draws = uniforms(batch.keys, batch.positions)
    return draw_tokens(logits, candidates, tensor(batch.temperatures), tensor(draws))
