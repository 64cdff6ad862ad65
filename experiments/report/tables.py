"""The tables of a report: one row per run, and one per pair of runs; paired differences over what both searched."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean

from espalier.experiments.report.runs import Run, differing_fields, field_title
from espalier.experiments.runs.statistics import adjusted_p, mcnemar_p, paired_bootstrap_interval, paired_interval
from espalier.experiments.runs.summary import Summary, grouped
from espalier.experiments.runs.table import Table
from espalier.search.result import USAGE_COUNTERS


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
    found = list(filter(None, (_compare(first, second, resamples, seed) for first, second in combinations(runs, 2))))
    adjusted = iter(adjusted_p([difference.p for difference in found if difference.p is not None]))
    return [d if d.p is None else replace(d, adjusted=next(adjusted)) for d in found]


def _compare(first: Run, second: Run, resamples: int, seed: int) -> Difference | None:
    ours, theirs = first.by_problem, second.by_problem
    both = sorted(name for name in ours.keys() & theirs.keys() if ours[name][0].asked == theirs[name][0].asked)
    if not both:
        return None
    before, after = ({name: fmean(s.correct for s in its[name]) for name in both} for its in (ours, theirs))
    only_first = tuple(name for name in both if before[name] > after[name])
    only_second = tuple(name for name in both if after[name] > before[name])
    counts, p = (len(only_first), len(only_second)), None
    if first.summary.epochs == second.summary.epochs == 1:
        interval, p = paired_interval(*counts, len(both)), mcnemar_p(*counts)
    else:
        interval = paired_bootstrap_interval([after[name] - before[name] for name in both], resamples, seed)
    low, high = interval or (None, None)
    means = fmean(before.values()), fmean(after.values())
    return Difference(first, second, len(both), *means, low, high, only_first, only_second, p)


def main_table(runs: Sequence[Run]) -> Table:
    """One row per run, for readers: the settings that differ, accuracy, and cost."""
    found = [run.summary for run in runs]
    several = any(s.standard_error is not None for s in found)
    of_epochs = {
        "searches": [_counted(run, run.summary.searches, True) for run in runs],
        "clustered SE, points": [_or_dash(s.standard_error, 100) for s in found],
    }
    refused, unanswered = [s.refused for s in found], [sum(s.unanswered.values()) for s in found]
    return Table.of({
        **_named(runs),
        "algorithm": [run.algorithm for run in runs],
        **{field_title(field): [run.shown_setting(field) for run in runs] for field in differing_fields(runs)},
        "problems": [_counted(run, run.summary.problems, not several) for run in runs],
        "accuracy %": [f"{100 * s.accuracy:.1f}" if s.is_graded else "not graded" for s in found],
        "95% interval": [f"{100 * s.low:.1f}–{100 * s.high:.1f}" if s.is_graded else "–" for s in found],
        **(of_epochs if several else {}),
        **{f"pass@{k} %": [_or_dash(s.pass_at.get(k), 100) for s in found] for k in _ks(runs)},
        **({"refused": map(str, refused)} if any(refused) else {}),
        **({"no answer": map(str, unanswered)} if any(unanswered) else {}),
        "generated tokens": [f"{s.generated_tokens:.0f}" for s in found],
        "verifier tokens": [f"{s.verifier_tokens:.0f}" for s in found],
        **_further_columns(found),
        "seconds": [_three_digits(s.wall_seconds) for s in found],
        "peak KV MiB": [_three_digits(s.peak_kv_mib) for s in found],
    })  # fmt: skip


def _further_columns(found: Sequence[Summary]) -> dict[str, Sequence[str]]:
    """Columns of the counters that have a `Counter.column`, without those that are 0 in all runs."""
    columns: dict[str, Sequence[str]] = {}
    for name, declared in USAGE_COUNTERS.items():
        pairs = [(s.further.get(name, 0.0), s.further.get(declared.share_of or name, 0.0)) for s in found]
        if not declared.column or not any(whole for _, whole in pairs):
            continue
        if declared.share_of:
            columns[declared.column] = [_or_dash(part / whole if whole else None, 100) for part, whole in pairs]
        else:
            columns[declared.column] = [f"{mean:.0f}" for mean, _ in pairs]
    return columns


def _named(runs: Sequence[Run]) -> dict[str, Sequence[str]]:
    """The first columns of a table with a row per run."""
    return {"#": [str(number) for number in range(1, len(runs) + 1)], "run": [run.name for run in runs]}


def _counted(run: Run, count: int, tells: bool) -> str:
    """A number of problems or searches; the one that `tells` also says how many an unfinished run is to have."""
    return f"{count} of {run.asked}, unfinished" if tells and run.unfinished else str(count)


FIGURES = (
    "problems", "searches", "refused", "unanswered", "accuracy", "low", "high", "standard_error", "generated_tokens",
    "verifier_tokens", "wall_seconds", "search_seconds", "peak_kv_mib",
)  # fmt: skip
"""Figures of a run for programs, by their names in its summary."""


def figures(run: Run) -> dict[str, float]:
    """The figures of a run by name, nothing rounded; those without a value are left out."""
    ungraded = () if run.summary.is_graded else ("accuracy", "low", "high", "standard_error")
    values = {name: getattr(run.summary, name) for name in FIGURES} | dict.fromkeys(ungraded)
    values["unanswered"] = sum(run.summary.unanswered.values())
    values |= {f"pass_at_{k}": value for k, value in run.summary.pass_at.items()}
    return {name: value for name, value in values.items() if value is not None}


def data_table(runs: Sequence[Run]) -> Table:
    """One row per run, for programs: shares as fractions, nothing rounded, empty where there is no value."""
    found = [figures(run) for run in runs]
    return Table.of({
        "run": [run.name for run in runs],
        "folder": [run.folder for run in runs],
        "benchmark": [run.benchmark for run in runs],
        "algorithm": [run.algorithm for run in runs],
        **{field: [run.setting(field) for run in runs] for field in differing_fields(runs)},
        **{name: [values.get(name) for values in found] for name in FIGURES},
        "asked": [run.asked for run in runs],
        **{f"pass_at_{k}": [values.get(f"pass_at_{k}") for values in found] for k in _ks(runs)},
    })  # fmt: skip


def difference_data(found: Sequence[Difference]) -> Table:
    """One row per pair, for programs; the last two columns list the problems, separated by spaces."""
    figures = ("problems", "first_accuracy", "second_accuracy", "difference", "low", "high")
    return Table.of({
        "first": [d.first.name for d in found],
        "second": [d.second.name for d in found],
        **{name: [getattr(d, name) for d in found] for name in figures},
        "only_first": [len(d.only_first) for d in found],
        "only_second": [len(d.only_second) for d in found],
        "mcnemar_p": [d.p for d in found],
        "adjusted_p": [d.adjusted for d in found],
        "only_first_problems": [" ".join(d.only_first) for d in found],
        "only_second_problems": [" ".join(d.only_second) for d in found],
    })  # fmt: skip


def difference_table(found: Sequence[Difference]) -> Table:
    """One row per pair, for readers."""
    solved = "only first solves", "only second solves"
    names = "problems", "second − first, points", "95% interval", *solved, "McNemar p", "adjusted p"
    rows = [[d.first.name, d.second.name, str(d.problems), *difference_cells(d)] for d in found]
    return Table(("first", "second", *names), rows)


def difference_cells(d: Difference) -> list[str]:
    """Formatted difference, interval, counts of disagreements, and p."""
    interval = "–" if d.low is None or d.high is None else f"[{_points(d.low)}, {_points(d.high)}]"
    counts = str(len(d.only_first)), str(len(d.only_second))
    return [_points(d.difference), interval, *counts, _probability(d.p), _probability(d.adjusted)]


def breakdown_tables(runs: Sequence[Run]) -> list[tuple[str, Table]]:
    """Accuracy in percent per level and per subject, as far as the benchmark has them, one row per run.

    The number of searches stands in a title where it is that of all runs, else in each cell.
    """
    found = []
    for field in ("level", "subject"):
        by_run = [grouped(run.samples, field) for run in runs]
        columns: dict[str, list[str]] = {}
        for group in sorted(set().union(*by_run)):
            solved = [right.get(group, []) for right in by_run]
            counts = [f" (n={len(each)})" for each in solved]
            alike = len(set(counts)) == 1
            columns[f"{group}{counts[0] * alike}"] = [
                f"{100 * fmean(each):.0f}{count * (not alike)}" if each else "–"
                for each, count in zip(solved, counts, strict=True)
            ]
        if columns:
            found.append((field, Table.of({**_named(runs), **columns})))
    return found


def _ks(runs: Sequence[Run]) -> list[int]:
    return sorted({k for run in runs for k in run.summary.pass_at if k > 1})


def _or_dash(value: float | None, factor: float = 1) -> str:
    return "–" if value is None else f"{factor * value:.1f}"


def _three_digits(value: float | None) -> str:
    return "–" if value is None else f"{value:#.3g}"


def _points(share: float) -> str:
    points = round(100 * share, 1) + 0.0
    return f"{points:+.1f}" if points else "0.0"


def _probability(p: float | None) -> str:
    return "–" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"
