import numpy as np
import pytest

from espalier.experiments.prm_evaluation.metrics import (
    auc,
    auc_within,
    best_threshold,
    first_flagged,
    process_metrics,
    step_metrics,
)
from espalier.experiments.runs.statistics import calibration


def test_process_f1_is_the_harmonic_mean_of_both_accuracies():
    labels = [0, 1, 2, 3, -1, -1, -1, -1, -1]
    predictions = [0, 1, 0, -1, -1, -1, -1, -1, 2]
    found = process_metrics(predictions, labels)
    assert found["erroneous"] is not None
    assert (found["erroneous"].value, found["erroneous"].trials) == (0.5, 4)
    assert found["correct"] is not None
    assert (found["correct"].value, found["correct"].trials) == (0.8, 5)
    assert found["f1"] is not None
    assert found["f1"].value == pytest.approx(2 * 0.5 * 0.8 / 1.3)
    assert found["f1"].low < found["f1"].value < found["f1"].high


def test_there_is_no_f1_without_correct_samples():
    found = process_metrics([0, 1], [0, 0])
    assert found["correct"] is None
    assert found["f1"] is None


def test_f1_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    truth, covered = 2 * 0.6 * 0.9 / 1.5, 0
    labels = np.array([0, -1] * 100)
    for _ in range(60):
        hit = rng.random(200) < np.where(labels >= 0, 0.6, 0.9)
        f1 = process_metrics(np.where(hit, labels, 7).tolist(), labels.tolist())["f1"]
        assert f1 is not None
        covered += f1.low <= truth <= f1.high
    assert 51 <= covered <= 60


def test_threshold_is_as_good_as_that_of_a_search_over_all_values():
    rng = np.random.default_rng(0)
    scores = [list(rng.random(rng.integers(1, 7))) for _ in range(60)]
    labels = [int(rng.integers(-1, len(each))) for each in scores]

    def f1(threshold: float) -> float:
        hits = [first_flagged(each, threshold) == label for each, label in zip(scores, labels, strict=True)]
        one, other = (
            [hit for hit, label in zip(hits, labels, strict=True) if (label >= 0) == erroneous]
            for erroneous in (True, False)
        )
        found, passed = sum(one) / len(one), sum(other) / len(other)
        return 2 * found * passed / (found + passed) if found + passed else 0.0

    best = max(f1(each) for each in np.linspace(0, 1.001, 4000))
    assert f1(best_threshold(scores, labels)) >= best - 1e-12


def test_step_scores_are_those_of_a_confusion_counted_by_hand():
    flagged = [[False, True, True], [False, False, True]]
    wrong = [[False, True, False], [False, True, True]]
    found = step_metrics(flagged, wrong)
    # right steps: 2 passed, 1 flagged, 1 wrong one passed; wrong steps: 2 flagged, 1 passed, 1 right one flagged
    for name, value in {"f1_right": 4 / 6, "f1_wrong": 4 / 6, "prm_score": 4 / 6}.items():
        estimate = found[name]
        assert estimate is not None
        assert estimate.value == pytest.approx(value)


def test_prm_score_without_wrong_steps_is_the_f1_of_right_steps():
    found = step_metrics([[False, True]], [[False, False]])
    assert found["f1_wrong"] is None
    assert found["prm_score"] is not None
    assert found["prm_score"].value == pytest.approx(2 / 3)


def test_auc_counts_pairs_and_half_of_ties():
    right, wrong = [0.9, 0.5, 0.5, 0.1], [0.5, 0.2, 0.1]
    pairs = [(r > w) + 0.5 * (r == w) for r in right for w in wrong]
    assert auc(right, wrong) == pytest.approx(sum(pairs) / len(pairs))
    assert auc([], wrong) is None


def test_auc_within_compares_no_steps_of_different_problems():
    assert auc_within([([0.9], [0.8]), ([0.2], [0.1]), ([0.5], [])]) == 1.0
    assert auc([0.9, 0.2], [0.8, 0.1]) == 0.75


def test_calibration_error_is_the_weighted_distance_of_each_bin():
    rows, error = calibration([0.05, 0.95, 0.95, 1.0], [False, True, True, False])
    assert [row["steps"] for row in rows] == [1, 3]
    assert rows[1]["right"] == pytest.approx(2 / 3)
    assert error == pytest.approx((0.05 + 3 * abs(2.9 / 3 - 2 / 3)) / 4)
