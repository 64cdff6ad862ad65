"""Plots of runs side by side. Each works on light and on dark pages."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from espalier.experiments.plots import figure as shared
from espalier.experiments.report.runs import Run
from espalier.experiments.runs.record import Sample
from espalier.experiments.runs.statistics import CALIBRATION_BINS, calibration

_RIGHT, _WRONG = shared.COLORS[0], shared.COLORS[1]
_MAX_GROUPS = 6
"""With more runs, those of one algorithm share a panel."""
_SIDES = ((9, 6), (9, -6), (-9, 6), (-9, -6), (19, 6), (19, -6), (-19, 6), (-19, -6))
"""Places of a number beside its point, in points, in the order in which they are tried."""
_COLUMNS = 3
_WIDE_RANGE = 8
"""Ratio of the largest to the smallest cost from which an axis is logarithmic."""
_FEW_VALUES = 30
"""Range of whole numbers below which each has a bin of its own."""
_COSTS = {
    "accuracy-tokens": ("generated tokens per search", "generated_tokens"),
    "accuracy-seconds": ("seconds per search", "wall_seconds"),
    "accuracy-peak-kv": ("peak KV memory of a search, MiB", "peak_kv_mib"),
}
"""Plots of accuracy against a cost: what the axis says, and the figure of a summary."""
_COST_CAPTION = "Dashed: Pareto front. Bars: 95% intervals. Numbers: rows of the table."
_PLOTS = {name: (f"Accuracy and {label}", _COST_CAPTION) for name, (label, _) in _COSTS.items()} | {
    "heat-map": ("Accuracy over N and M", "Accuracy in percent; mean over runs that differ in nothing but the seed."),
    "calibration": (
        "Calibration of the verifier",
        "Share of right answers among selected answers with a similar score, with 95% intervals; on the dotted line, "
        "scores are probabilities. Below: number of answers.",
    ),
    "answer-length": ("Answer length, right and wrong", "Length of the selected path in characters."),
    "steps": ("Number of steps, right and wrong", "Steps of the selected path."),
}
"""Title and caption of each plot, by the name of its files, in the order of the page."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot: its file name without suffix, title, caption, and SVG for a page with its own text color."""

    name: str
    title: str
    caption: str
    svg: str


class _Drawing:
    """The folder of a report, and the plots that were drawn in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.plots: list[Plot] = []

    @contextmanager
    def plot(
        self, name: str, width: float, height: float, *grid: int, **options: Any
    ) -> Iterator[tuple[Figure, list[Axes]]]:
        """Draw a plot in the block; for its size and `options` see `panels`."""
        with shared.panels(width, height, *grid, **options) as (figure, axes):
            yield figure, axes
            self.plots.append(Plot(name, *_PLOTS[name], shared.save_for_page(figure, self._folder / name)))

    @contextmanager
    def small_multiples(
        self, name: str, titles: Iterable[str], inches: float, inches_a_row: float, **options: Any
    ) -> Iterator[tuple[Figure, list[Axes]]]:
        """Draw a plot with a panel for each title, in rows of three."""
        columns = min(_COLUMNS, len(titles := list(titles)))
        rows = math.ceil(len(titles) / columns)
        with self.plot(name, 6.4, inches + inches_a_row * rows, rows, columns, **options) as (figure, places):
            for axes in places[len(titles) :]:
                axes.set_axis_off()
            for axes, title in zip(places, titles, strict=False):
                axes.set_title(title)
            yield figure, places[: len(titles)]


def draw_plots(runs: Sequence[Run], folder: Path) -> list[Plot]:
    """Draw every plot that the runs have data for, as `.svg` and `.png` in `folder`.

    Those of an earlier report that these runs have no data for are removed.
    """
    drawing = _Drawing(folder)
    for name in _COSTS:
        _draw_cost(drawing, name, runs)
    _draw_heat_maps(drawing, _grids(runs))
    groups: dict[str, list[Sample]] = {}
    for run in runs:
        groups.setdefault(run.name if len(runs) <= _MAX_GROUPS else run.algorithm, []).extend(run.samples)
    _draw_calibration(drawing, groups)
    _draw_histograms(drawing, groups, "answer-length", "characters", lambda sample: len(sample.text))
    _draw_histograms(drawing, groups, "steps", "steps", lambda sample: len(sample.steps))
    for name in _PLOTS.keys() - {plot.name for plot in drawing.plots}:
        for suffix in (".svg", ".png"):
            (folder / name).with_suffix(suffix).unlink(missing_ok=True)
    return drawing.plots


def _draw_cost(drawing: _Drawing, name: str, runs: Sequence[Run]) -> None:
    """Accuracy against a cost, a color for each algorithm."""
    label, cost = _COSTS[name]
    points = [(number, value, run) for number, run in enumerate(runs, start=1) if (value := getattr(run.summary, cost))]
    if not points:
        return
    algorithms = dict.fromkeys(run.algorithm for run in runs)
    colors = {algorithm: shared.COLORS[place % len(shared.COLORS)] for place, algorithm in enumerate(algorithms)}
    with drawing.plot(name, 6.4, 4.2) as (figure, (axes,)):
        front = [points[i] for i in pareto_front([(value, run.summary.accuracy) for _, value, run in points])]
        shares = [100 * run.summary.accuracy for *_, run in front]
        axes.plot([value for _, value, _ in front], shares, ls="--", lw=1.2, color="grey")
        for _, value, run in points:
            s, color = run.summary, colors[run.algorithm]
            bars = shared.error_bars([s.accuracy], [s.low], [s.high])
            axes.errorbar([value], [100 * s.accuracy], yerr=bars, color=color, lw=1, alpha=0.4)
            axes.plot([value], [100 * s.accuracy], "o", color=color, ms=6)
        values = [value for _, value, _ in points]
        if max(values) > _WIDE_RANGE * min(values) > 0:
            axes.margins(x=0.08)
            shared.make_logarithmic(axes, max(values) / min(values))
        else:
            axes.set_xlim(0, 1.08 * max(values) or 1)
        axes.set(xlabel=label, ylabel="accuracy, %")
        axes.grid(alpha=0.25)
        if len(colors) > 1:
            handles = [Line2D([], [], color=color, marker="o", ls="", label=name) for name, color in colors.items()]
            figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 5))
        else:
            axes.set_title(next(iter(colors)))
        _number(figure, axes, [(number, value, 100 * run.summary.accuracy) for number, value, run in points])


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (cost, accuracy) that no other point beats, by rising cost.

    A point is beaten by one that costs at most as much and is at least as accurate, and better in one of the two.
    """
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not front or points[index][1] > points[front[-1]][1] or points[index] == points[front[-1]]:
            front.append(index)
    return front


def _number(figure: Figure, axes: Axes, points: list[tuple[int, float, float]]) -> None:
    """Write each point's number beside it, on a side that is free."""
    figure.draw_without_rendering()  # sets the scale of the axes
    places = axes.transData.transform([(x, y) for _, x, y in points]) * 72 / figure.dpi
    taken = list(places)
    for (number, x, y), at in zip(points, places, strict=True):
        sides = at + np.array(_SIDES)
        rooms = [min((abs(place - other) / (10, 7)).sum() for other in taken) for place in sides]
        best = next((i for i, room in enumerate(rooms) if room > 1), int(np.argmax(rooms)))
        taken.append(sides[best])
        how = {"textcoords": "offset points", "fontsize": 8, "ha": "center", "va": "center"}
        axes.annotate(str(number), (x, y), _SIDES[best], **how)


def _grids(runs: Sequence[Run]) -> list[tuple[str, dict[tuple[int, int], float]]]:
    """Algorithm, and accuracies by N and M, of runs of the same problems that differ only in N, M and seed.

    There are at least two values of N and of M.
    """
    groups: dict[tuple[str, frozenset[str]], list[Run]] = defaultdict(list)
    for run in runs:
        if run.setting("beam_width") is not None and run.setting("expansion") is not None:
            left_out = ("beam_width", "expansion", "seed")
            rest = {field: value for field, value in run.configuration.items() if field not in left_out}
            groups[repr(sorted(rest.items())), frozenset(run.by_problem)].append(run)
    grids = []
    for found in groups.values():
        accuracy: dict[tuple[int, int], list[float]] = defaultdict(list)
        for run in found:
            accuracy[int(run.setting("beam_width")), int(run.setting("expansion"))].append(run.summary.accuracy)
        if all(len(set(values)) > 1 for values in zip(*accuracy, strict=True)):
            grids.append((found[0].algorithm, {point: fmean(values) for point, values in accuracy.items()}))
    return grids


def _draw_heat_maps(drawing: _Drawing, grids: list[tuple[str, dict[tuple[int, int], float]]]) -> None:
    if not grids:
        return
    shares = [share for _, cells in grids for share in cells.values()]
    low, high = min(shares), max(*shares, min(shares) + 0.01)
    with drawing.small_multiples("heat-map", [title for title, _ in grids], 0, 4.2) as (_, places):
        for axes, (_, cells) in zip(places, grids, strict=True):
            widths, expansions = (sorted(set(values)) for values in zip(*cells, strict=True))
            values = np.array([[cells.get((n, m), np.nan) for m in expansions] for n in widths])
            axes.pcolormesh(np.ma.masked_invalid(values), cmap="cividis", vmin=low, vmax=high)
            for (n, m), share in cells.items():
                ink = "#ffffff" if share < (low + high) / 2 else "#000000"
                place = expansions.index(m) + 0.5, widths.index(n) + 0.5
                axes.text(*place, f"{100 * share:.1f}", ha="center", va="center", color=ink)
            axes.set_xticks(np.arange(len(expansions)) + 0.5, list(map(str, expansions)))
            axes.set_yticks(np.arange(len(widths)) + 0.5, list(map(str, widths)))
            axes.set(xlabel="M", ylabel="N")


def _draw_calibration(drawing: _Drawing, groups: dict[str, list[Sample]]) -> None:
    scored = {title: [(o.score, o.correct) for o in found if o.score is not None] for title, found in groups.items()}
    scored = {title: found for title, found in scored.items() if found}
    if not scored:
        return
    with drawing.plot("calibration", 6.4, 5, 2, height_ratios=(3, 1), sharex=True) as (figure, (axes, below)):
        for place, (title, found) in enumerate(scored.items()):
            scores, right = zip(*found, strict=True)
            bins, error = calibration(scores, right)
            color = shared.COLORS[place % len(shared.COLORS)]
            shared.draw_calibration(axes, bins, color, f"{title}, expected calibration error {100 * error:.1f} points")
            below.hist(scores, bins=list(np.linspace(0, 1, CALIBRATION_BINS + 1)), histtype="step", color=color)
        shared.count_whole(below.yaxis)
        below.set(xlabel="score of the selected answer", ylabel="answers")
        below.grid(alpha=0.25)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", fontsize=8)


def _draw_histograms(
    drawing: _Drawing, groups: dict[str, list[Sample]], name: str, label: str, value: Callable[[Sample], int]
) -> None:
    """Histograms of a value of the selected paths that there are, right and wrong, a panel for each group."""
    groups = {title: kept for title, found in groups.items() if (kept := [o for o in found if o.text])}
    if not groups:
        return
    edges = _edges([value(o) for found in groups.values() for o in found])
    with drawing.small_multiples(name, groups, 1.6, 1.9, sharex=True) as (figure, grid):
        for axes, found in zip(grid, groups.values(), strict=True):
            of_kind = [[value(o) for o in found if o.correct is right] for right in (True, False)]
            axes.hist(of_kind, bins=edges, stacked=True, color=(_RIGHT, _WRONG), alpha=0.7, label=("right", "wrong"))
            axes.grid(alpha=0.25)
            shared.count_whole(axes.xaxis)
            shared.count_whole(axes.yaxis)
        for axes in grid[-_COLUMNS:]:
            axes.tick_params(labelbottom=True)  # also where there is no panel below
        figure.supxlabel(label, fontsize=10)
        figure.supylabel("searches", fontsize=10)
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)


def _edges(values: Sequence[int]) -> list[float]:
    """Edges of the bins: one a whole number if there are few, else twenty."""
    low, high = min(values), max(values)
    if high - low < _FEW_VALUES:
        return [value - 0.5 for value in range(low, high + 2)]
    width = math.ceil((high - low + 1) / 20)
    return [low + width * place for place in range((high - low) // width + 2)]
