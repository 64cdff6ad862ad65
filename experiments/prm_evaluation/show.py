"""Shows a summary: tables on a console, and the reliability diagram."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from espalier.experiments.plots.figure import COLORS, draw_calibration, panels, save
from espalier.experiments.prm_evaluation.solutions import Format

_OF_FIRST_WRONG = {"erroneous": "accuracy, erroneous", "correct": "accuracy, correct", "f1": "F1"}
_OF_STEPS = {"f1_right": "F1, right steps", "f1_wrong": "F1, wrong steps", "prm_score": "PRMScore"}
_MAX_NAMED = 5


def show_summary(console: Console, summary: dict[str, Any]) -> None:
    """Print metrics with 95% intervals by group, the threshold, AUC, calibration, and refused solutions."""
    console.print(f"threshold {summary['threshold']:.4f}: {summary['threshold_source']}", markup=False)
    columns = _OF_STEPS if summary["format"] == Format.PRMBENCH else _OF_FIRST_WRONG
    table = Table("", "samples", *columns.values(), title="in %, with 95% intervals")
    for by, groups in summary["by"].items():
        for name, row in groups.items():
            table.add_row(f"{by} {name}", str(row["samples"]), *(_percent(row[column]) for column in columns))
        table.add_section()
    overall = summary["overall"]
    table.add_row("all", str(overall["samples"]), *(_percent(overall[column]) for column in columns))
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
