"""What a report says of a single run: accuracy and cost, in total, per level and per subject."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from espalier.experiments.evaluation.statistics import (
    clustered_standard_error,
    effective_trials,
    pass_at_k,
    wilson_interval,
)
from espalier.experiments.report.runs import Outcome, Run

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Measures:
    """Accuracy and cost of one run.

    Attributes:
        run: the run.
        problems: number of its problems.
        searches: number of its searches, more than `problems` with several epochs.
        refused: searches that could not be run; they count as wrong, and are left out of the cost.
        unanswered: searches that ended without an answer, by reason; see `Unanswered`. They count as wrong.
        accuracy: share of searches with a right answer; `low` and `high` are its 95% Wilson interval. With several
            epochs, the interval is of the effective number of trials, as searches of one problem depend on each other.
        standard_error: of the accuracy, clustered by problem; None with one epoch.
        pass_at: unbiased pass@k by k, mean over problems; empty with one epoch.
        generated_tokens: mean tokens sampled per search.
        verifier_tokens: mean tokens computed by the verifier per search.
        wall_seconds: time of the run per search; None if it was not measured, like the two below if any of the run's
            samples was derived from a larger search.
        search_seconds: mean time from a search's start to its end; others may have run at the same time.
        peak_kv_mib: mean peak KV memory of a search, both models together, in MiB.
    """

    run: Run
    problems: int
    searches: int
    refused: int
    unanswered: dict[str, int]
    accuracy: float
    low: float
    high: float
    standard_error: float | None
    pass_at: dict[int, float]
    generated_tokens: float
    verifier_tokens: float
    wall_seconds: float | None
    search_seconds: float | None
    peak_kv_mib: float | None


def measure(run: Run) -> Measures:
    """Compute the measures of a run."""
    clusters = [[float(outcome.correct) for outcome in found] for found in run.by_problem.values()]
    ran = [outcome for outcome in run.outcomes if not outcome.refused]
    accuracy = fmean(float(outcome.correct) for outcome in run.outcomes)
    trials = effective_trials(clusters) if run.epochs > 1 else len(run.outcomes)
    low, high = wilson_interval(sum(o.correct for o in run.outcomes) * trials / len(run.outcomes), trials)
    wall, peak = _mean(run.outcomes, lambda o: o.wall_seconds), _mean(ran, lambda o: o.peak_kv_bytes)

    return Measures(
        run=run,
        problems=len(clusters),
        searches=len(run.outcomes),
        refused=len(run.outcomes) - len(ran),
        unanswered=dict(Counter(str(outcome.unanswered) for outcome in run.outcomes if outcome.unanswered)),
        accuracy=accuracy,
        low=low if accuracy else 0.0,
        high=high if accuracy < 1 else 1.0,
        standard_error=clustered_standard_error(clusters) if run.epochs > 1 else None,
        pass_at=_pass_at(run),
        generated_tokens=_mean(ran, lambda o: o.generated_tokens) or 0.0,
        verifier_tokens=_mean(ran, lambda o: o.verifier_tokens) or 0.0,
        wall_seconds=wall * len(run.outcomes) / len(ran) if wall and ran else None,
        search_seconds=_mean(ran, lambda o: o.seconds),
        peak_kv_mib=None if peak is None else peak / _MIB,
    )


def _mean(outcomes: Sequence[Outcome], value: Callable[[Outcome], float | None]) -> float | None:
    """Mean over outcomes, 0 without any; None if one of them has no value."""
    values = [value(outcome) for outcome in outcomes]
    known = [each for each in values if each is not None]
    return None if len(known) < len(values) else fmean(known) if known else 0.0


def _pass_at(run: Run) -> dict[int, float]:
    """pass@k for powers of 2 and the smallest number of searches of a problem; empty with one epoch."""
    counts = [(len(found), sum(o.correct for o in found)) for found in run.by_problem.values()]
    most = min(count for count, _ in counts)
    ks = sorted({2**i for i in range(most.bit_length())} | {most}) if most > 1 else []
    return {k: fmean(pass_at_k(count, correct, k) for count, correct in counts) for k in ks}


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Accuracy per level or subject.

    Attributes:
        title: "level" or "subject".
        groups: the levels or subjects.
        cells: for each run, and each group, the number of right answers and of searches.
    """

    title: str
    groups: list[str]
    cells: list[list[tuple[int, int]]]


def breakdowns(runs: Sequence[Run]) -> list[Breakdown]:
    """Accuracy per level and per subject, as far as the benchmark has them."""
    ways: list[tuple[str, Callable[[Outcome], int | str | None]]] = [
        ("level", lambda outcome: outcome.level),
        ("subject", lambda outcome: outcome.subject),
    ]
    found = []
    for title, group_of in ways:
        groups = {group for run in runs for o in run.outcomes if (group := group_of(o)) is not None}
        ordered = sorted(groups, key=lambda group: (isinstance(group, str), group))
        if ordered:
            cells = [[_count(run, group, group_of) for group in ordered] for run in runs]
            found.append(Breakdown(title, [str(group) for group in ordered], cells))
    return found


def _count(run: Run, group: int | str, group_of: Callable[[Outcome], int | str | None]) -> tuple[int, int]:
    right = [outcome.correct for outcome in run.outcomes if group_of(outcome) == group]
    return sum(right), len(right)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (cost, accuracy) that no other point beats, by rising cost.

    A point is beaten by one that costs at most as much and is at least as accurate, and better in one of the two.
    """
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not front or points[index][1] > points[front[-1]][1] or points[index] == points[front[-1]]:
            front.append(index)
    return front
