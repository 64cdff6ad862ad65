"""Pairs of steps of one problem of which one should have the higher score, and the share of them in which it has."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from espalier.experiments.verifier_training.features import Readings


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of rows of which the first should have the higher score, and what each weighs."""

    better: np.ndarray
    worse: np.ndarray
    weights: np.ndarray


def solution_pairs(readings: Readings, problems: Iterable[int]) -> Pairs:
    """Right and wrong solutions of one problem; each problem's pairs weigh 1 together."""
    better, worse, weights = [], [], []
    for problem in problems:
        ends = np.flatnonzero((readings.problems == problem) & (readings.right >= 0))
        right, wrong = ends[readings.right[ends] == 1], ends[readings.right[ends] == 0]
        its = np.outer(readings.samples[right], readings.samples[wrong]).astype(float)
        if its.size:
            better.append(np.repeat(right, len(wrong)))
            worse.append(np.tile(wrong, len(right)))
            weights.append((its / its.sum()).ravel())
    return _joined(better, worse, weights)


def sibling_pairs(readings: Readings, problems: Iterable[int]) -> Pairs:
    """Steps behind one step of which one ends right more often, by how much; each problem's pairs weigh 1 together."""
    better, worse, weights = [], [], []
    for problem in problems:
        rows = np.flatnonzero(readings.problems == problem)
        alike = readings.parents[rows][:, None] == readings.parents[rows][None]
        ahead = readings.values[rows][:, None] - readings.values[rows][None]
        one, other = np.nonzero(alike & (ahead > 0))
        if len(one):
            its = ahead[one, other].astype(float)
            better.append(rows[one])
            worse.append(rows[other])
            weights.append(its / its.sum())
    return _joined(better, worse, weights)


def _joined(better: list[np.ndarray], worse: list[np.ndarray], weights: list[np.ndarray]) -> Pairs:
    if not better:
        return Pairs(np.zeros(0, int), np.zeros(0, int), np.zeros(0))
    return Pairs(np.concatenate(better), np.concatenate(worse), np.concatenate(weights))


def share_ahead(column: np.ndarray, pairs: Pairs) -> float | None:
    """The weighed share of pairs whose better row has the higher value; equal values count half."""
    if not len(pairs.weights):
        return None
    ahead = column[pairs.better] - column[pairs.worse]
    return float(((ahead > 0) + 0.5 * (ahead == 0)) @ pairs.weights / pairs.weights.sum())
