"""Randomness of the algorithms themselves: counter-based, so that the same request always draws the same."""

import hashlib
from collections.abc import Sequence


def uniforms(seed: int, problem: str, label: str, round_number: int, count: int) -> list[float]:
    """Draws in [0, 1) that depend on nothing but the arguments.

    Args:
        seed: the request's.
        problem: its text.
        label: what the draws are for, so that no two uses share any.
        round_number: the counter.
        count: how many.
    """
    texts = (f"{seed}\x1f{label}\x1f{round_number}\x1f{i}\x1f{problem}" for i in range(count))
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return [(int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53 for digest in digests]


def systematic(weights: Sequence[float], count: int, draw: float) -> list[int]:
    """How often each index is taken by systematic resampling (Carpenter et al., 1999); sums to `count`.

    Index i is expected `count * weights[i] / sum(weights)` times, and taken that often rounded down or up.

    Args:
        weights: not negative, not all 0.
        count: how many are taken.
        draw: one uniform in [0, 1).
    """
    return picks(weights, [(draw + i) / count for i in range(count)])


def picks(weights: Sequence[float], draws: Sequence[float]) -> list[int]:
    """How often each index is taken when every draw in [0, 1) takes the one whose share of the weight it falls into."""
    counts = [0] * len(weights)
    total = sum(weights)
    last = max(i for i, weight in enumerate(weights) if weight > 0)
    for draw in draws:
        left = draw * total
        for i, weight in enumerate(weights):
            left -= weight
            if (left < 0 and weight > 0) or i == last:
                counts[i] += 1
                break
    return counts
