"""Paired differences between runs, over the problems that both searched."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean

from espalier.experiments.report.runs import Run
from espalier.experiments.runs.statistics import adjusted_p, mcnemar_p, paired_bootstrap_interval, paired_interval


@dataclass(frozen=True, slots=True)
class Difference:
    """The second run's accuracy less the first one's, over the problems of both.

    Attributes:
        first: one run.
        second: the other run.
        problems: number of problems of both.
        first_accuracy: accuracy of the first run on these; mean over problems.
        second_accuracy: the same for the second run.
        low: lower end of the 95% interval of the difference: the one that agrees with p, or a bootstrap's where there
            is no p; None for a bootstrap of fewer than two problems.
        high: upper end.
        only_first: ids of the problems that the first run solves and the second does not; with several epochs, that
            it solves more often.
        only_second: the same for the second run.
        p: McNemar's exact p; None if a run has several epochs.
        adjusted: p adjusted for the number of pairs in the report (Benjamini and Hochberg).
    """

    first: Run
    second: Run
    problems: int
    first_accuracy: float
    second_accuracy: float
    low: float | None
    high: float | None
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    p: float | None
    adjusted: float | None = None

    @property
    def difference(self) -> float:
        """Second accuracy less first accuracy."""
        return self.second_accuracy - self.first_accuracy


def differences(runs: Sequence[Run], resamples: int = 10_000, seed: int = 0) -> list[Difference]:
    """Compare each pair of runs that share problems.

    Args:
        runs: the runs.
        resamples: bootstrap resamples of the problems, for runs with several epochs.
        seed: seed of the bootstrap.

    Raises:
        EspalierError: scipy is not installed.
    """
    compared = (_compare(first, second, resamples, seed) for first, second in combinations(runs, 2))
    found = [difference for difference in compared if difference]
    tested = [difference for difference in found if difference.p is not None]
    adjusted = iter(adjusted_p([difference.p for difference in tested if difference.p is not None]))
    return [d if d.p is None else replace(d, adjusted=next(adjusted)) for d in found]


def _compare(first: Run, second: Run, resamples: int, seed: int) -> Difference | None:
    ours, theirs = first.by_problem, second.by_problem
    both = sorted(name for name in ours.keys() & theirs.keys() if ours[name][0].asked == theirs[name][0].asked)
    if not both:
        return None
    pairs = [(fmean(s.correct for s in ours[name]), fmean(s.correct for s in theirs[name])) for name in both]
    only_first = tuple(name for name, (a, b) in zip(both, pairs, strict=True) if a > b)
    only_second = tuple(name for name, (a, b) in zip(both, pairs, strict=True) if b > a)
    if once := first.summary.epochs == second.summary.epochs == 1:
        interval = paired_interval(len(only_first), len(only_second), len(both))
    else:
        interval = paired_bootstrap_interval([b - a for a, b in pairs], resamples, seed)
    return Difference(
        first=first,
        second=second,
        problems=len(both),
        first_accuracy=fmean(a for a, _ in pairs),
        second_accuracy=fmean(b for _, b in pairs),
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        only_first=only_first,
        only_second=only_second,
        p=mcnemar_p(len(only_first), len(only_second)) if once else None,
    )
