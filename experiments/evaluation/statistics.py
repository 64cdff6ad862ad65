"""Confidence intervals."""

import math
from statistics import fmean, stdev

_Z95 = 1.959963984540054


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """95% Wilson interval (1927) of a proportion, accurate near 0 and 1 and for few trials; (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    p, z2 = successes / trials, _Z95**2
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _Z95 * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    # Exact at the ends, where rounding could put a bound on the wrong side of the proportion.
    return 0.0 if successes == 0 else centre - half, 1.0 if successes == trials else centre + half


def mean_interval(values: list[float]) -> tuple[float, float]:
    """Mean of independent values, and half the width of its 95% interval by the central limit theorem.

    Raises:
        ValueError: there are fewer than two values.
    """
    if len(values) < 2:
        raise ValueError("an interval needs at least two values")
    return fmean(values), _Z95 * stdev(values) / math.sqrt(len(values))
