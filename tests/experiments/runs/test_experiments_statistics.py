from statistics import NormalDist

import numpy as np
import pytest

from espalier.experiments.lab.bench.searches.accuracy import mean_interval
from espalier.experiments.runs.statistics import wilson_interval


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        # at the ends, by hand: z² / (n + z²) from the end
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (1, 1, 0.2065, 1.0),
    ],
)
def test_wilson_interval_matches_published_values(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_bounds_are_where_the_share_is_a_95_percent_deviation_away():
    z = NormalDist().inv_cdf(0.975)
    for successes, trials in ((1, 3), (5, 10), (123, 500), (400, 500)):
        share = successes / trials
        for bound in wilson_interval(successes, trials):
            assert abs(share - bound) == pytest.approx(z * (bound * (1 - bound) / trials) ** 0.5)


def test_without_trials_nothing_is_known():
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("trials", [1, 2, 7, 40, 500])
def test_interval_holds_the_share_and_mirrors(trials):
    for successes in range(trials + 1):
        low, high = wilson_interval(successes, trials)
        assert 0 <= low <= successes / trials <= high <= 1
        assert wilson_interval(trials - successes, trials) == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_more_trials_narrow_the_interval():
    widths = [high - low for low, high in (wilson_interval(n // 2, n) for n in (10, 100, 1000))]
    assert widths == sorted(widths, reverse=True)
    assert widths[2] < 0.07


def test_interval_of_a_mean_by_hand():
    mean, half = mean_interval([0.0, 0.5, 1.0, 0.5])
    assert mean == 0.5
    assert half == pytest.approx(1.959964 * (1 / 6) ** 0.5 / 2, rel=1e-6)


def test_interval_of_a_mean_covers_the_truth_about_95_times_in_100():
    draws = np.random.default_rng(0).uniform(0, 1, (2000, 60))
    covered = [abs(mean - 0.5) <= half for mean, half in map(mean_interval, draws.tolist())]
    assert 0.93 < np.mean(covered) < 0.97


def test_one_value_has_no_interval():
    with pytest.raises(ValueError, match="at least two"):
        mean_interval([1.0])
