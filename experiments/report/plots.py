"""Plots of runs side by side. Each works on light and on dark pages."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from espalier.experiments.plots.figure import (
    COLORS,
    count_whole,
    draw_calibration,
    error_bars,
    make_logarithmic,
    panels,
    save_for_page,
)
from espalier.experiments.report.runs import Run
from espalier.experiments.report.stopping import ReplayedRule
from espalier.experiments.runs.record import Sample
from espalier.experiments.runs.statistics import CALIBRATION_BINS, calibration
from espalier.experiments.runs.summary import Summary
from espalier.search.thoughts.stop_rule import StopRule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_RIGHT, _WRONG = COLORS[0], COLORS[1]
_MAX_GROUPS = 6
"""With more runs, those of one algorithm share a panel."""
_SIDES = ((9, 6), (9, -6), (-9, 6), (-9, -6), (19, 6), (19, -6), (-19, 6), (-19, -6))
"""Places of a number beside its point, in points, in the order in which they are tried."""
_COLUMNS = 3
_WIDE_RANGE = 8
"""Ratio of the largest to the smallest cost from which an axis is logarithmic."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot: its file name without suffix, title, caption, and SVG for a page with its own text color."""

    name: str
    title: str
    caption: str
    svg: str


def draw_plots(
    runs: Sequence[Run], folder: Path, replayed: Sequence[ReplayedRule] = (), chosen: StopRule | None = None
) -> list[Plot]:
    """Draw every plot that the runs and the rules replayed have data for, as `.svg` and `.png` in `folder`.

    Those of an earlier report that these runs have no data for are removed.
    """
    plots: list[Plot] = []
    for name, title, caption, draw in _all(runs, replayed, chosen):
        with ExitStack() as stack:
            if figure := draw(stack):
                plots.append(Plot(name, title, caption, save_for_page(figure, folder / name)))
            else:
                for suffix in (".svg", ".png"):
                    (folder / name).with_suffix(suffix).unlink(missing_ok=True)
    return plots


_Draw = Callable[[ExitStack], "Figure | None"]


def _all(
    runs: Sequence[Run], replayed: Sequence[ReplayedRule], chosen: StopRule | None
) -> Iterator[tuple[str, str, str, _Draw]]:
    """Name, title, caption and drawing function of each plot; the function returns None without data."""
    costs: list[tuple[str, str, Callable[[Summary], float | None]]] = [
        ("tokens", "generated tokens per search", lambda s: s.generated_tokens),
        ("seconds", "seconds per search", lambda s: s.wall_seconds),
        ("peak-kv", "peak KV memory of a search, MiB", lambda s: s.peak_kv_mib),
    ]
    for name, label, cost in costs:
        caption = "Dashed: Pareto front. Bars: 95% intervals. Numbers: rows of the table."
        yield f"accuracy-{name}", f"Accuracy and {label}", caption, partial(_cost, runs, cost, label)
    caption = (
        "A point for each rule: the change in accuracy, with its paired 95% interval, and the tokens saved, those of "
        "probes counted. A filled one was chosen."
    )
    yield "stopping", "Thoughts ended early", caption, partial(_stopping, replayed, chosen)
    caption = "Accuracy in percent; mean over runs that differ in nothing but the seed."
    yield "heat-map", "Accuracy over N and M", caption, partial(_heat_maps, runs)
    groups = _groups(runs)
    caption = (
        "Share of right answers among selected answers with a similar score, with 95% intervals; on the dotted line, "
        "scores are probabilities. Below: number of answers."
    )
    yield "calibration", "Calibration of the verifier", caption, partial(_calibration, groups)
    lengths = partial(_histograms, groups, lambda sample: len(sample.text), "characters", False)
    yield "answer-length", "Answer length, right and wrong", "Length of the selected path in characters.", lengths
    steps = partial(_histograms, groups, lambda sample: len(sample.steps), "steps", True)
    yield "steps", "Number of steps, right and wrong", "Steps of the selected path.", steps


def _by_algorithm(runs: Sequence[Run]) -> dict[str, str]:
    """A color for each algorithm."""
    names = dict.fromkeys(run.algorithm for run in runs)
    return {name: COLORS[place % len(COLORS)] for place, name in enumerate(names)}


def _groups(runs: Sequence[Run]) -> dict[str, list[Sample]]:
    """Samples by run if there are few runs, else by algorithm."""
    groups: dict[str, list[Sample]] = {}
    for run in runs:
        title = run.name if len(runs) <= _MAX_GROUPS else run.algorithm
        groups.setdefault(title, []).extend(run.samples)
    return groups


def _cost(
    runs: Sequence[Run], cost: Callable[[Summary], float | None], label: str, stack: ExitStack
) -> "Figure | None":
    points = [(number, value, run) for number, run in enumerate(runs, start=1) if (value := cost(run.summary))]
    if not points:
        return None
    figure, (axes,) = stack.enter_context(panels(6.4, 4.2))
    colors = _by_algorithm(runs)
    front = [points[i] for i in pareto_front([(value, run.summary.accuracy) for _, value, run in points])]
    shares = [100 * run.summary.accuracy for *_, run in front]
    axes.plot([value for _, value, _ in front], shares, ls="--", lw=1.2, color="grey")
    for _, value, run in points:
        s, color = run.summary, colors[run.algorithm]
        bars = error_bars([s.accuracy], [s.low], [s.high])
        axes.errorbar([value], [100 * s.accuracy], yerr=bars, color=color, lw=1, alpha=0.4)
        axes.plot([value], [100 * s.accuracy], "o", color=color, ms=6)
    values = [value for _, value, _ in points]
    if max(values) > _WIDE_RANGE * min(values) > 0:
        axes.margins(x=0.08)
        make_logarithmic(axes, max(values) / min(values))
    else:
        axes.set_xlim(0, 1.08 * max(values) or 1)
    axes.set_xlabel(label)
    axes.set_ylabel("accuracy, %")
    axes.grid(alpha=0.25)
    _legend(figure, axes, colors)
    _number(figure, axes, [(number, value, 100 * run.summary.accuracy) for number, value, run in points])
    return figure


def _stopping(rows: Sequence[ReplayedRule], chosen: StopRule | None, stack: ExitStack) -> "Figure | None":
    """Accuracy lost against tokens saved, a color for each run."""
    rows = [row for row in rows if row.rule]
    if not rows:
        return None
    figure, (axes,) = stack.enter_context(panels(6.4, 4.2))
    axes.axhline(0, ls=":", lw=1, color="grey")
    for place, run in enumerate(dict.fromkeys(row.run for row in rows)):
        of_run, color = [row for row in rows if row.run == run], COLORS[place % len(COLORS)]
        bars = error_bars(*([getattr(row, name) for row in of_run] for name in ("difference", "low", "high")))
        x, y = (
            [100 * value for value in values] for values in zip(*((r.saved, r.difference) for r in of_run), strict=True)
        )
        axes.errorbar(x, y, yerr=bars, color=color, lw=0, elinewidth=1, alpha=0.4)
        axes.plot(x, y, "o", color=color, mfc="none", ms=6, label=run)
        picked = [(px, py) for px, py, row in zip(x, y, of_run, strict=True) if row.rule == chosen]
        axes.plot([px for px, _ in picked], [py for _, py in picked], "o", color=color, ms=6)
    axes.set(xlabel="tokens saved, %", ylabel="accuracy gained, points")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside upper center", ncols=5)
    return figure


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (cost, accuracy) that no other point beats, by rising cost.

    A point is beaten by one that costs at most as much and is at least as accurate, and better in one of the two.
    """
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not front or points[index][1] > points[front[-1]][1] or points[index] == points[front[-1]]:
            front.append(index)
    return front


def _number(figure: "Figure", axes: "Axes", points: list[tuple[int, float, float]]) -> None:
    """Write each point's number beside it, on a side that is free."""
    figure.draw_without_rendering()  # sets the scale of the axes
    taken = [tuple(axes.transData.transform((x, y)) * 72 / figure.dpi) for _, x, y in points]
    for number, x, y in points:
        at = axes.transData.transform((x, y)) * 72 / figure.dpi
        places = [(at[0] + dx, at[1] + dy) for dx, dy in _SIDES]
        free = [min(abs(px - tx) / 10 + abs(py - ty) / 7 for tx, ty in taken) for px, py in places]
        best = next((i for i, room in enumerate(free) if room > 1), max(range(len(free)), key=free.__getitem__))
        taken.append(places[best])
        axes.annotate(
            str(number), (x, y), _SIDES[best], textcoords="offset points", fontsize=8, ha="center", va="center"
        )


def _legend(figure: "Figure", axes: "Axes", colors: dict[str, str]) -> None:
    from matplotlib.lines import Line2D

    if len(colors) > 1:
        handles = [Line2D([], [], color=color, marker="o", ls="", label=name) for name, color in colors.items()]
        figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 5))
    else:
        axes.set_title(next(iter(colors)))


def _heat_maps(runs: Sequence[Run], stack: ExitStack) -> "Figure | None":
    """One map for each set of runs that differ only in N, M and seed, with at least two values of N and of M.

    The runs of a map searched the same problems.
    """
    grids = _grids(runs)
    if not grids:
        return None
    figure, places = _small_multiples(stack, len(grids), 0, 4.2)
    low, high = (pick(v for _, cells in grids for v in cells.values()) for pick in (min, max))
    for axes, (title, cells) in zip(places, grids, strict=True):
        _heat_map(axes, cells, low, max(high, low + 0.01))
        axes.set_title(title)
    return figure


def _small_multiples(
    stack: ExitStack, count: int, inches: float, inches_a_row: float, **options: Any
) -> "tuple[Figure, list[Axes]]":
    """A figure with `count` panels in rows of three; for `options` see `panels`."""
    columns = min(_COLUMNS, count)
    rows = math.ceil(count / columns)
    figure, places = stack.enter_context(panels(6.4, inches + inches_a_row * rows, rows, columns, **options))
    for axes in places[count:]:
        axes.set_axis_off()
    return figure, places[:count]


def _grids(runs: Sequence[Run]) -> list[tuple[str, dict[tuple[int, int], float]]]:
    """Titles and accuracies by (N, M)."""
    groups: dict[tuple[str, frozenset[str]], list[Run]] = {}
    for run in runs:
        if run.setting("beam_width") is not None and run.setting("expansion") is not None:
            left_out = ("beam_width", "expansion", "seed")
            rest = {field: value for field, value in run.configuration.items() if field not in left_out}
            alike = repr(sorted(rest.items())), frozenset(run.by_problem)
            groups.setdefault(alike, []).append(run)
    grids = []
    for found in groups.values():
        accuracy: dict[tuple[int, int], list[float]] = {}
        for run in found:
            point = int(run.setting("beam_width")), int(run.setting("expansion"))
            accuracy.setdefault(point, []).append(run.summary.accuracy)
        if all(len({point[axis] for point in accuracy}) > 1 for axis in (0, 1)):
            grids.append((found[0].algorithm, {point: fmean(values) for point, values in accuracy.items()}))
    return grids


def _heat_map(axes: "Axes", cells: dict[tuple[int, int], float], low: float, high: float) -> None:
    import numpy as np

    widths, expansions = (sorted({point[axis] for point in cells}) for axis in (0, 1))
    values = np.array([[cells.get((n, m), np.nan) for m in expansions] for n in widths])
    axes.pcolormesh(np.ma.masked_invalid(values), cmap="cividis", vmin=low, vmax=high)
    for row, n in enumerate(widths):
        for column, m in enumerate(expansions):
            if (n, m) in cells:
                ink = "#ffffff" if cells[n, m] < (low + high) / 2 else "#000000"
                axes.text(column + 0.5, row + 0.5, f"{100 * cells[n, m]:.1f}", ha="center", va="center", color=ink)
    axes.set_xticks([column + 0.5 for column in range(len(expansions))], [str(m) for m in expansions])
    axes.set_yticks([row + 0.5 for row in range(len(widths))], [str(n) for n in widths])
    axes.set_xlabel("M")
    axes.set_ylabel("N")


def _calibration(groups: dict[str, list[Sample]], stack: ExitStack) -> "Figure | None":
    scored = {title: [(o.score, o.correct) for o in found if o.score is not None] for title, found in groups.items()}
    scored = {title: found for title, found in scored.items() if found}
    if not scored:
        return None
    figure, (axes, below) = stack.enter_context(panels(6.4, 5, 2, height_ratios=(3, 1), sharex=True))
    for place, (title, found) in enumerate(scored.items()):
        scores, right = zip(*found, strict=True)
        bins, error = calibration(scores, right)
        color = COLORS[place % len(COLORS)]
        draw_calibration(axes, bins, color, f"{title}, expected calibration error {100 * error:.1f} points")
        edges = [i / CALIBRATION_BINS for i in range(CALIBRATION_BINS + 1)]
        below.hist(scores, bins=edges, histtype="step", color=color)
    count_whole(below.yaxis)
    below.set(xlabel="score of the selected answer", ylabel="answers")
    below.grid(alpha=0.25)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", fontsize=8)
    return figure


def _histograms(
    groups: dict[str, list[Sample]], value: Callable[[Sample], int], label: str, whole: bool, stack: ExitStack
) -> "Figure | None":
    groups = {title: kept for title, found in groups.items() if (kept := [o for o in found if o.text])}
    if not groups:
        return None
    figure, grid = _small_multiples(stack, len(groups), 1.6, 1.9, sharex=True)
    for axes in grid[-_COLUMNS:]:
        axes.tick_params(labelbottom=True)  # also where there is no panel below
    values = [value(o) for found in groups.values() for o in found]
    edges = _edges(min(values), max(values), whole)
    for axes, (title, found) in zip(grid, groups.items(), strict=True):
        of_kind = [[value(o) for o in found if o.correct is right] for right in (True, False)]
        axes.hist(of_kind, bins=edges, stacked=True, color=(_RIGHT, _WRONG), alpha=0.7, label=("right", "wrong"))
        axes.set_title(title)
        axes.grid(alpha=0.25)
        for axis in (axes.xaxis, axes.yaxis):
            count_whole(axis)
    figure.supxlabel(label, fontsize=10)
    figure.supylabel("searches", fontsize=10)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    return figure


def _edges(low: int, high: int, whole: bool) -> list[float]:
    """Edges of the bins: one a whole number if there are few, else twenty."""
    if whole and high - low < 30:
        return [value - 0.5 for value in range(low, high + 2)]
    width = max(1, math.ceil((high - low + 1) / 20))
    return [low + width * place for place in range((high - low) // width + 2)]
