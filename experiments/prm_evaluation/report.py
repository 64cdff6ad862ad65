"""Turns scores into records and a summary, and shows that: tables on a console, and the reliability diagram."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from espalier.engine.errors import EspalierError
from espalier.experiments.plots.figure import COLORS, draw_calibration, panels, save
from espalier.experiments.prm_evaluation.metrics import (
    Estimate,
    auc,
    auc_within,
    best_threshold,
    first_flagged,
    process_metrics,
    step_metrics,
)
from espalier.experiments.prm_evaluation.scoring import Scored
from espalier.experiments.prm_evaluation.solutions import Format, Solution
from espalier.experiments.runs.statistics import calibration

DEFAULT_THRESHOLD = 0.5
_OF_FIRST_WRONG = {"erroneous": "accuracy, erroneous", "correct": "accuracy, correct", "f1": "F1"}
_OF_STEPS = {"f1_right": "F1, right steps", "f1_wrong": "F1, wrong steps", "prm_score": "PRMScore"}
_MAX_NAMED = 5
_GROUPED_BY = "subset", "generator", "classification"

Pairs = Sequence[tuple[Solution, Scored]]


def choose_threshold(pairs: Pairs, form: Format, tune_on: str, given: float | None) -> tuple[float, str]:
    """The threshold, and where it is from.

    Args:
        pairs: scored solutions.
        form: PRMBench has no tuning subset and gets 0.5.
        tune_on: name of the subset that maximizes ProcessBench's F1.
        given: a threshold that overrules everything.
    """
    if given is not None:
        return given, "given with --threshold"
    tuning = [(solution, scored) for solution, scored in pairs if solution.subset == tune_on]
    if form is Format.PRMBENCH or len({solution.label >= 0 for solution, _ in tuning}) < 2:
        return DEFAULT_THRESHOLD, f"the default: no subset {tune_on!r} with right and wrong solutions to choose it on"
    scores, labels = [scored.scores for _, scored in tuning], [solution.label for solution, _ in tuning]
    return best_threshold(scores, labels), f"highest F1 on subset {tune_on!r} ({len(tuning)} samples)"


def make_records(solutions: Sequence[Solution], scored: Mapping[str, Scored], threshold: float) -> list[dict[str, Any]]:
    """One record for each solution: id, scores, label, prediction; a refused one has `refused` and no prediction."""
    records: list[dict[str, Any]] = []
    for solution in solutions:
        found = scored[solution.unique_id]
        record: dict[str, Any] = {"id": solution.unique_id, "scores": found.scores, "label": solution.label}
        if found.refused:
            record |= {"prediction": None, "refused": found.refused}
        else:
            record["prediction"] = first_flagged(found.scores, threshold)
        records.append(record)
    return records


def summarize(
    solutions: Sequence[Solution],
    scored: Mapping[str, Scored],
    form: Format,
    tune_on: str,
    given: float | None,
) -> dict[str, Any]:
    """Everything that `summary.json` holds: the threshold, metrics by group, AUC, calibration, refused solutions.

    Raises:
        EspalierError: no solution was scored.
    """
    pairs = [(each, scored[each.unique_id]) for each in solutions if not scored[each.unique_id].refused]
    refused = {each.unique_id: why for each in solutions if (why := scored[each.unique_id].refused)}
    if not pairs:
        first, why = next(iter(refused.items()))
        raise EspalierError(f"all {len(refused)} solutions were refused; {first}: {why}")
    threshold, source = choose_threshold(pairs, form, tune_on, given)
    steps = [(score, right) for pair in pairs for score, right in _labelled(*pair)]
    bins, error = calibration([score for score, _ in steps], [right for _, right in steps])
    return {
        "format": str(form),
        "samples": len(solutions),
        "scored": len(pairs),
        "refused": refused,
        "threshold": threshold,
        "threshold_source": source,
        "overall": _metrics(pairs, form, threshold),
        "by": {name: its for name in _GROUPED_BY if (its := _by(pairs, name, form, threshold))},
        "auc": auc([s for s, right in steps if right], [s for s, right in steps if not right]),
        "auc_within_problems": auc_within(_groups(pairs)),
        "calibration": bins,
        "expected_calibration_error": error,
    }


def _labelled(solution: Solution, scored: Scored) -> list[tuple[float, bool]]:
    """Scores of the steps with a label, and whether they are right; ProcessBench labels none after the first error."""
    end = len(solution.steps) if solution.classification or not solution.wrong else solution.label + 1
    return [(score, i not in solution.wrong) for i, score in enumerate(scored.scores[:end])]


def _groups(pairs: Pairs) -> list[tuple[list[float], list[float]]]:
    by_problem: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for solution, scored in pairs:
        for score, right in _labelled(solution, scored):
            by_problem[solution.problem][0 if right else 1].append(score)
    return list(by_problem.values())


def _by(pairs: Pairs, name: str, form: Format, threshold: float) -> dict[str, Any]:
    groups: dict[str, list[tuple[Solution, Scored]]] = defaultdict(list)
    for solution, scored in pairs:
        if key := getattr(solution, name):
            groups[key].append((solution, scored))
    return {key: _metrics(its, form, threshold) for key, its in sorted(groups.items())}


def _metrics(pairs: Pairs, form: Format, threshold: float) -> dict[str, Any]:
    found: dict[str, Estimate | None]
    if form is not Format.PRMBENCH:
        predictions = [first_flagged(scored.scores, threshold) for _, scored in pairs]
        found = process_metrics(predictions, [solution.label for solution, _ in pairs])
    else:
        flagged = [[score < threshold for score in scored.scores] for _, scored in pairs]
        found = step_metrics(flagged, [[i in s.wrong for i in range(len(s.steps))] for s, _ in pairs])
    return {"samples": len(pairs)} | {name: asdict(each) if each else None for name, each in found.items()}


def show_summary(console: Console, summary: dict[str, Any]) -> None:
    """Print metrics with 95% intervals by group, the threshold, AUC, calibration, and refused solutions."""
    console.print(f"threshold {summary['threshold']:.4f}: {summary['threshold_source']}", markup=False)
    columns = _OF_STEPS if summary["format"] == Format.PRMBENCH else _OF_FIRST_WRONG
    table = Table("", "samples", *columns.values(), title="in %, with 95% intervals")
    for by, groups in [*summary["by"].items(), ("all", {"": summary["overall"]})]:
        for name, row in groups.items():
            table.add_row(f"{by} {name}", str(row["samples"]), *(_percent(row[column]) for column in columns))
        table.add_section()
    console.print(table)
    within = _number(summary["auc_within_problems"])
    console.print(f"AUC of steps: {_number(summary['auc'])} pooled, {within} within a problem")
    bins = Table("score", "steps", "mean score", "right steps, %", title="calibration of labelled steps")
    for row in summary["calibration"]:
        right = _percent({"value": row["right"], "low": row["low"], "high": row["high"]})
        bins.add_row(f"{row['from']:.1f}-{row['to']:.1f}", str(row["steps"]), f"{row['mean_score']:.3f}", right)
    console.print(bins)
    console.print(f"expected calibration error {summary['expected_calibration_error']:.3f}")
    if refused := summary["refused"]:
        console.print(f"refused, and not in these figures: {len(refused)} of {summary['samples']}")
        for name, why in list(refused.items())[:_MAX_NAMED]:
            console.print(f"  {name}: {why}", markup=False)


def plot_reliability(summary: dict[str, Any], path: Path) -> None:
    """Draw the share of right steps against the mean score of each bin, with 95% intervals and numbers of steps."""
    rows = summary["calibration"]
    with panels(5.5, 6, 2, height_ratios=(3, 1), sharex=True) as (figure, (axes, counts)):
        draw_calibration(axes, rows, COLORS[0], "verifier")
        axes.axvline(summary["threshold"], color=COLORS[1], linestyle=":", label="threshold")
        axes.set_title(f"Calibration, error {summary['expected_calibration_error']:.3f}")
        axes.legend()
        width = rows[0]["to"] - rows[0]["from"]
        counts.bar([row["from"] for row in rows], [row["steps"] for row in rows], width=width, align="edge")
        counts.set(xlabel="score of a step", ylabel="steps", yscale="log")
        counts.set_ylim(bottom=0.5)  # so that one step is seen
        save(figure, path)


def _percent(estimate: dict[str, Any] | None) -> str:
    if estimate is None:
        return "-"
    return f"{100 * estimate['value']:.1f} ({100 * estimate['low']:.1f} to {100 * estimate['high']:.1f})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
