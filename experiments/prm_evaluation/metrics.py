"""Metrics of step scores: ProcessBench's F1, PRMBench's PRMScore, AUC and calibration.

A step is flagged as wrong if its score is below the threshold.

- ProcessBench (Zheng et al. 2024, arXiv:2412.06559): accuracy on erroneous samples (the first flagged step is the first
  wrong one), accuracy on correct samples (no step is flagged), and F1, the harmonic mean of both. For models that give
  scores, the threshold is the one with the highest F1 on the GSM8K subset.
- PRMBench (Song et al. 2025, arXiv:2501.03124): PRMScore is the mean of the F1 of right and of wrong steps, over
  all steps; where no step is wrong, the F1 of right steps alone.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from espalier.experiments.runs.statistics import wilson_interval

_RESAMPLES = 1000
Floats = Sequence[float] | np.ndarray


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95% interval; `trials` is the number of samples or steps behind it."""

    value: float
    low: float
    high: float
    trials: int


def first_flagged(scores: Sequence[float], threshold: float) -> int:
    """Index of the first score below `threshold`, -1 if there is none."""
    return next((i for i, score in enumerate(scores) if score < threshold), -1)


def best_threshold(scores: Sequence[Sequence[float]], labels: Sequence[int]) -> float:
    """The threshold with the highest ProcessBench F1; halfway between the scores beside it, the lowest of equals."""
    longest = max(map(len, scores))
    padded = np.full((len(scores), longest), np.inf)
    for row, its in zip(padded, scores, strict=True):
        row[: len(its)] = its
    known = np.unique(padded[np.isfinite(padded)])
    candidates = np.concatenate([[known[0]], (known[1:] + known[:-1]) / 2, [np.nextafter(known[-1], np.inf)]])
    wanted = np.asarray(labels)
    best, best_f1 = float(candidates[0]), -1.0
    for candidate in candidates:
        flagged = padded < candidate
        hits = np.where(flagged.any(axis=1), flagged.argmax(axis=1), -1) == wanted
        f1 = _process_f1(_process_counts(hits, wanted).sum(axis=0))
        if f1 > best_f1:
            best, best_f1 = float(candidate), float(f1)
    return best


def process_metrics(predictions: Sequence[int], labels: Sequence[int]) -> dict[str, Estimate | None]:
    """ProcessBench's accuracies (Wilson intervals) and F1 (bootstrap over samples); None without such samples."""
    wanted = np.asarray(labels)
    counts = _process_counts(np.asarray(predictions) == wanted, wanted)
    found, erroneous, passed, correct = (int(count) for count in counts.sum(axis=0))
    f1 = _bootstrap(counts, _process_f1) if erroneous and correct else None
    return {"erroneous": _proportion(found, erroneous), "correct": _proportion(passed, correct), "f1": f1}


def step_metrics(flagged: Sequence[Sequence[bool]], wrong: Sequence[Sequence[bool]]) -> dict[str, Estimate | None]:
    """PRMBench's F1 of right and wrong steps and PRMScore, with bootstrap intervals over samples.

    Args:
        flagged: for each sample, whether each step is flagged.
        wrong: for each sample, whether each step is wrong.
    """
    # Of each sample, its right steps passed and flagged, its wrong steps passed and flagged.
    kinds = ([2 * w + f for f, w in zip(*each, strict=True)] for each in zip(flagged, wrong, strict=True))
    counts = np.array([np.bincount(each, minlength=4) for each in kinds], float).reshape(-1, 4)
    total = counts.sum(axis=0)
    return {
        "f1_right": _bootstrap(counts, _f1_right) if total[0] + total[1] else None,
        "f1_wrong": _bootstrap(counts, _f1_wrong) if total[2] + total[3] else None,
        "prm_score": _bootstrap(counts, _prm_score) if total.sum() else None,
    }


def auc(right: Floats, wrong: Floats) -> float | None:
    """Probability that a right step scores higher than a wrong one, ties counting half; None without either."""
    if not (len(right) and len(wrong)):
        return None
    below = np.sort(wrong)
    ranks = np.searchsorted(below, right, "left") + np.searchsorted(below, right, "right")
    return float(ranks.sum() / (2 * len(right) * len(wrong)))


def auc_within(groups: Iterable[tuple[Floats, Floats]]) -> float | None:
    """AUC over pairs of a right and a wrong step of the same problem; each problem counts by its pairs.

    Args:
        groups: for each problem, the scores of its right and of its wrong steps.
    """
    found = auc_of_problems([(auc(right, wrong), len(right) * len(wrong)) for right, wrong in groups])
    return found and found.value


def auc_of_problems(problems: Sequence[tuple[float | None, float]]) -> Estimate | None:
    """The mean AUC of those problems that have one, given each one's and its weight; a bootstrap over problems.

    None where no problem has one.
    """
    known = [(value * weight, weight) for value, weight in problems if value is not None]
    return _bootstrap(np.array(known), lambda total: total[..., 0] / total[..., 1]) if known else None


def _proportion(successes: int, trials: int) -> Estimate | None:
    return Estimate(successes / trials, *wilson_interval(successes, trials), trials) if trials else None


def _process_counts(hits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Per sample: found, erroneous, passed, correct; `[n, 4]`."""
    erroneous = labels >= 0
    return np.stack([hits & erroneous, erroneous, hits & ~erroneous, ~erroneous], axis=1).astype(float)


def _process_f1(total: np.ndarray) -> np.ndarray:
    found, erroneous, passed, correct = np.moveaxis(total, -1, 0)
    one, other = _ratio(found, erroneous), _ratio(passed, correct)
    return _ratio(2 * one * other, one + other)


def _f1_right(total: np.ndarray) -> np.ndarray:
    right_passed, right_flagged, wrong_passed, _ = np.moveaxis(total, -1, 0)
    return _ratio(2 * right_passed, 2 * right_passed + right_flagged + wrong_passed)


def _f1_wrong(total: np.ndarray) -> np.ndarray:
    return _f1_right(total[..., ::-1])


def _prm_score(total: np.ndarray) -> np.ndarray:
    none_wrong = total[..., 2] + total[..., 3] == 0
    return np.where(none_wrong, _f1_right(total), (_f1_right(total) + _f1_wrong(total)) / 2)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Quotient, 0 where the divisor is 0."""
    return np.divide(above, below, out=np.zeros_like(np.asarray(below, float)), where=np.asarray(below) != 0)


def _bootstrap(counts: np.ndarray, metric: Callable[[np.ndarray], np.ndarray]) -> Estimate:
    """A metric of summed counts `[n, k]`, with its percentile interval over resampled rows (seed fixed)."""
    rng, samples = np.random.default_rng(0), len(counts)
    sums = np.stack([counts[rng.integers(samples, size=samples)].sum(axis=0) for _ in range(_RESAMPLES)])
    low, high = np.percentile(metric(sums), [2.5, 97.5])
    return Estimate(float(metric(counts.sum(axis=0))), float(low), float(high), samples)
