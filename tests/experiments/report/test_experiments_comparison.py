import itertools
import math

import numpy as np
import pytest
from scipy import stats

from espalier.experiments.runs.statistics import (
    adjusted_p,
    clustered_standard_error,
    effective_trials,
    mcnemar_p,
    paired_bootstrap_interval,
    paired_interval,
    pass_at_k,
    wilson_interval,
)

CLUSTERS = [[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0], [1, 0, 0, 1], [1, 1]]


def test_clustered_error_equals_that_of_statsmodels():
    # sm.OLS(y, ones).fit(cov_type="cluster", cov_kwds={"groups": g, "use_correction": False}).bse, version 0.15.0
    assert clustered_standard_error(CLUSTERS) == pytest.approx(0.15058465, abs=1e-8)


def test_clustered_error_of_one_value_each_is_the_usual_one():
    values = [1, 0, 0, 1, 1, 0, 1]
    assert clustered_standard_error([[v] for v in values]) == pytest.approx(stats.sem(values, ddof=0))


def test_repeating_the_same_answers_adds_no_certainty():
    once, often = [[1], [0], [0], [1], [1]], [[1] * 8, [0] * 8, [0] * 8, [1] * 8, [1] * 8]
    assert clustered_standard_error(often) == pytest.approx(clustered_standard_error(once))
    assert effective_trials(often) == pytest.approx(5)


def test_clustered_interval_covers_the_truth_about_95_times_in_100():
    draws = np.random.default_rng(1)
    covered = 0
    for _ in range(1000):
        ease = draws.beta(1, 1, 60)  # problems differ, so samples of one depend on each other; the mean is 1/2
        clusters = draws.binomial(1, ease[:, None], (60, 4)).tolist()
        trials = effective_trials(clusters)
        low, high = wilson_interval(np.mean(clusters) * trials, trials)
        covered += low <= 0.5 <= high
    assert 0.93 < covered / 1000 < 0.97


def test_wilson_interval_equals_scipys():
    for right, trials in ((0, 20), (3, 10), (81, 263), (50, 50)):
        expected = stats.binomtest(right, trials).proportion_ci(method="wilson")
        assert wilson_interval(right, trials) == pytest.approx((expected.low, expected.high), abs=1e-9)


@pytest.mark.parametrize(("samples", "correct"), [(6, 0), (6, 2), (6, 6), (5, 1)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_with_a_right_one(samples, correct):
    right = [True] * correct + [False] * (samples - correct)
    for k in range(1, samples + 1):
        choices = [any(choice) for choice in itertools.combinations(right, k)]
        assert pass_at_k(samples, correct, k) == pytest.approx(np.mean(choices))


def test_pass_at_k_needs_k_samples():
    with pytest.raises(ValueError, match="needs at least 4 samples, there are 3"):
        pass_at_k(3, 1, 4)


@pytest.mark.parametrize(
    # statsmodels.stats.contingency_tables.mcnemar(exact=True), version 0.15.0
    ("only_first", "only_second", "p"),
    [(3, 11, 0.057373046875), (40, 62, 0.037066767438560584), (0, 5, 0.0625), (7, 7, 1.0)],
)
def test_mcnemar_equals_that_of_statsmodels(only_first, only_second, p):
    assert mcnemar_p(only_first, only_second) == pytest.approx(p, abs=1e-12)
    assert mcnemar_p(only_second, only_first) == pytest.approx(p, abs=1e-12)


def test_mcnemar_without_disagreement_finds_nothing():
    assert mcnemar_p(0, 0) == 1


def test_the_paired_interval_leaves_out_0_exactly_where_mcnemar_finds_a_difference():
    for problems in (1, 6, 16):
        for first in range(problems + 1):
            for second in range(problems + 1 - first):
                low, high = paired_interval(first, second, problems)
                assert -1 <= low <= (second - first) / problems <= high <= 1
                assert (low > 0 or high < 0) == (mcnemar_p(first, second) < 0.05), (first, second, problems)
                assert paired_interval(second, first, problems) == pytest.approx((-high, -low), abs=1e-12)


@pytest.mark.parametrize(
    ("problems", "rates"), [(8, (0.0, 0.5)), (20, (0.01, 0.1)), (16, (0.2, 0.4)), (24, (0.1, 0.1))]
)
def test_the_paired_interval_covers_the_truth_at_least_95_times_in_100_with_few_problems(problems, rates):
    """Over every outcome, by its probability."""
    first_alone, second_alone = rates
    covered = 0.0
    for first in range(problems + 1):
        for second in range(problems + 1 - first):
            low, high = paired_interval(first, second, problems)
            if low <= second_alone - first_alone <= high:
                shares = (first_alone, second_alone, 1 - first_alone - second_alone)
                covered += stats.multinomial.pmf([first, second, problems - first - second], problems, shares)
    assert 0.95 <= covered <= 1


def test_the_paired_interval_by_hand():
    # All are in dispute and won, so that only the lead is uncertain: it may be as low as 2 * 0.025^(1/2) - 1.
    assert paired_interval(0, 2, 2) == pytest.approx((2 * 0.025**0.5 - 1, 1.0))
    assert paired_interval(0, 0, 20) == pytest.approx((-wilson_interval(0, 20)[1], wilson_interval(0, 20)[1]))


def test_adjusted_p_equals_that_of_statsmodels():
    # statsmodels.stats.multitest.multipletests(method="fdr_bh"), version 0.15.0
    assert adjusted_p([0.01, 0.04, 0.03, 0.2]) == pytest.approx([0.04, 4 / 75, 4 / 75, 0.2])
    assert adjusted_p([]) == []


def test_bootstrap_equals_scipys_paired_one():
    draws = np.random.default_rng(4)
    first, second = draws.binomial(1, 0.5, 80).astype(float), draws.binomial(1, 0.65, 80).astype(float)
    expected = stats.bootstrap(
        (first, second), lambda a, b, axis: np.mean(b - a, axis=axis), paired=True, method="percentile",
        n_resamples=10_000, batch=500, rng=np.random.default_rng(7),
    ).confidence_interval  # fmt: skip
    found = paired_bootstrap_interval((second - first).tolist(), seed=7)
    # Other draws may be used for the same seed, so the ends agree up to the bootstrap's own noise.
    assert found == pytest.approx((expected.low, expected.high), abs=0.015)


def test_bootstrap_is_reproducible_and_near_the_normal_interval():
    differences = np.random.default_rng(2).choice([-1.0, 0.0, 1.0], 400, p=[0.1, 0.7, 0.2]).tolist()
    found = paired_bootstrap_interval(differences, seed=3)
    assert found is not None
    assert found == paired_bootstrap_interval(differences, seed=3)
    assert found != paired_bootstrap_interval(differences, resamples=1000, seed=4)
    half = 1.96 * np.std(differences) / math.sqrt(400)
    assert found == pytest.approx((np.mean(differences) - half, np.mean(differences) + half), abs=0.006)


def test_bootstrap_of_too_few_or_equal_differences():
    assert paired_bootstrap_interval([0.5]) is None
    assert paired_bootstrap_interval([0.0, 0.0, 0.0]) == (0.0, 0.0)
