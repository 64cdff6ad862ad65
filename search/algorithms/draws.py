"""Random draws for algorithms: counter-based, so the same request always gets the same draws."""

import hashlib
from collections.abc import Sequence


def uniforms(seed: int, problem: str, label: str, round_number: int, count: int) -> list[float]:
    """Uniform draws in [0, 1) that depend only on the arguments.

    Args:
        seed: the request's seed.
        problem: the problem's text.
        label: purpose of the draws; different purposes get independent draws.
        round_number: the counter.
        count: number of draws.
    """
    texts = (f"{seed}\x1f{label}\x1f{round_number}\x1f{i}\x1f{problem}" for i in range(count))
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return [(int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53 for digest in digests]


def systematic(weights: Sequence[float], count: int, draw: float) -> list[int]:
    """Systematic resampling (Carpenter et al., 1999): how often each index is drawn; sums to `count`.

    Index i has the expectation `count * weights[i] / sum(weights)`, and is drawn that often, rounded down or up.

    Args:
        weights: non-negative, not all 0.
        count: number of draws.
        draw: one uniform draw in [0, 1).
    """
    return picks(weights, [(draw + i) / count for i in range(count)])


def picks(weights: Sequence[float], draws: Sequence[float]) -> list[int]:
    """Multinomial resampling: how often each index is drawn, given uniform draws in [0, 1)."""
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
