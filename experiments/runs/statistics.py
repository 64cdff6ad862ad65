"""Confidence intervals, and comparisons of runs over the same problems."""

import math
from collections.abc import Sequence
from statistics import fmean
from types import ModuleType

from espalier.engine.errors import EspalierError

_Z95 = 1.959963984540054
CALIBRATION_BINS = 10


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """95% Wilson interval (1927) of a proportion, accurate near 0 and 1 and for few trials; (0, 1) without trials.

    `trials` need not be whole: see `effective_trials`.
    """
    if trials == 0:
        return 0.0, 1.0
    p, z2 = successes / trials, _Z95**2
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _Z95 * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    # Exact at the ends, where rounding could put a bound on the wrong side of the proportion.
    return 0.0 if successes == 0 else centre - half, 1.0 if successes == trials else centre + half


def clustered_standard_error(clusters: Sequence[Sequence[float]]) -> float:
    """Standard error of the mean over all values, where values of one cluster depend on each other.

    Here a cluster holds the samples of one problem. With one value per cluster, it is the usual standard error with
    the sum of squares divided by the number of values. E. Miller, "Adding Error Bars to Evals" (2024), section 2.2.

    Raises:
        ValueError: there are no values.
    """
    every = [value for values in clusters for value in values]
    mean = fmean(every)
    return math.sqrt(math.fsum(math.fsum(value - mean for value in values) ** 2 for values in clusters)) / len(every)


def effective_trials(clusters: Sequence[Sequence[float]]) -> float:
    """Number of independent trials whose proportion would have the clustered standard error.

    It is used for Wilson intervals of clustered samples (N. Dean and M. Pagano, 2015). It is at most the number of
    values; where all values are equal and the standard error is 0, it is the number of clusters.
    """
    values = [value for cluster in clusters for value in cluster]
    if not values:
        return 0.0
    mean, error = fmean(values), clustered_standard_error(clusters)
    return min(mean * (1 - mean) / error**2, float(len(values))) if error else float(len(clusters))


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is correct.

    M. Chen et al., "Evaluating Large Language Models Trained on Code" (2021), equation 1.

    Raises:
        ValueError: k is not between 1 and `samples`.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {samples}")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Two-sided p of McNemar's exact test: whether two runs solve the same share of the same problems.

    Args:
        only_first: number of problems that only the first run solves.
        only_second: number of problems that only the second run solves.

    Raises:
        EspalierError: scipy is not installed.
    """
    differing = only_first + only_second
    return float(require_scipy().binomtest(only_first, differing).pvalue) if differing else 1.0


def paired_interval(only_first: int, only_second: int, problems: int) -> tuple[float, float]:
    """95% interval of the second run's share of solved problems less the first one's; it agrees with `mcnemar_p`.

    The difference is the share of problems that only one run solves, times the lead of the second run among these. The
    share has a Wilson interval, the lead an exact one (Clopper and Pearson, 1934), which leaves out 0 if and only if
    McNemar's exact p is below 0.05. The distances to their ends are added as squares (G. Zou and A. Donner, 2008),
    those of the share scaled by the lead's end and not by its estimate: so the result leaves out 0 exactly when the
    lead's interval does. It covers the true difference at least 95 times in 100, also with few problems, where a
    bootstrap may do so less than half as often.

    Args:
        only_first: number of problems that only the first run solves.
        only_second: number of problems that only the second run solves.
        problems: number of problems that both searched.

    Raises:
        EspalierError: scipy is not installed.
    """
    disputed = only_first + only_second
    rate, (rate_low, rate_high) = disputed / problems, wilson_interval(disputed, problems)
    if not disputed:
        return -rate_high, rate_high
    exact = require_scipy().binomtest(only_second, disputed).proportion_ci(0.95, "exact")
    lead, lead_low, lead_high = (2 * share - 1 for share in (only_second / disputed, exact.low, exact.high))
    below = math.hypot(rate * (lead - lead_low), lead_low * (rate - (rate_low if lead_low > 0 else rate_high)))
    above = math.hypot(rate * (lead_high - lead), lead_high * (rate - (rate_high if lead_high > 0 else rate_low)))
    return max(-1.0, rate * lead - below), min(1.0, rate * lead + above)


def adjusted_p(values: Sequence[float]) -> list[float]:
    """Adjust the p of several tests for the false discovery rate (Benjamini and Hochberg, 1995).

    Raises:
        EspalierError: scipy is not installed.
    """
    return [float(value) for value in require_scipy().false_discovery_control(values)] if values else []


def paired_bootstrap_interval(
    differences: Sequence[float], resamples: int = 10_000, seed: int = 0
) -> tuple[float, float] | None:
    """95% percentile bootstrap interval of the mean of paired differences, one per problem; None for fewer than two.

    Raises:
        EspalierError: scipy is not installed.
    """
    import numpy as np

    if len(differences) < 2:
        return None
    if min(differences) == max(differences):  # the same in every resample
        return float(differences[0]), float(differences[0])
    rng = np.random.default_rng(seed)
    values = (np.asarray(differences),)
    found = require_scipy().bootstrap(values, np.mean, method="percentile", n_resamples=resamples, batch=500, rng=rng)
    interval = found.confidence_interval
    return float(interval.low), float(interval.high)


def calibration(scores: Sequence[float], right: Sequence[bool]) -> tuple[list[dict[str, float]], float]:
    """Share of right steps or answers by score, in bins of equal width; and the expected calibration error.

    C. Guo et al., "On Calibration of Modern Neural Networks" (2017).
    """
    import numpy as np

    values, truths = np.asarray(scores, float), np.asarray(right, float)
    place = np.clip((values * CALIBRATION_BINS).astype(int), 0, CALIBRATION_BINS - 1)
    rows: list[dict[str, float]] = []
    error = 0.0
    for index in np.unique(place):
        inside = place == index
        steps, good = int(inside.sum()), int(truths[inside].sum())
        low, high = wilson_interval(good, steps)
        mean = float(values[inside].mean())
        error += abs(mean - good / steps) * steps / len(values)
        edge = int(index) / CALIBRATION_BINS
        rows.append({
            "from": edge, "to": round(edge + 1 / CALIBRATION_BINS, 6), "steps": steps, "mean_score": mean,
            "right": good / steps, "low": low, "high": high,
        })  # fmt: skip
    return rows, error


def require_scipy() -> ModuleType:
    """Return `scipy.stats`.

    Raises:
        EspalierError: scipy is not installed.
    """
    try:
        from scipy import stats
    except ImportError as error:
        raise EspalierError("comparing runs needs scipy: pip install 'espalier-search[report]'") from error
    return stats
