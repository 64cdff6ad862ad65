"""The plot of a sweep: accuracy of its cells against tokens."""

import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation

from espalier.experiments.plots.figure import MARKERS, error_bars, make_logarithmic, panels, save
from espalier.experiments.runs.grid import N_AND_M, settings_text
from espalier.experiments.runs.sweep import Cell

_COLOURS = 10
"""Lines told apart by the usual palette; more take theirs from a continuous one and lie closer."""
_APART = 7.0
"""Offset between lines in points, so that cells of the same cost do not cover each other."""
_MARGIN = 1.2
"""Factor by which the token axis extends beyond its cells on each side."""


def plot_cells(cells: list[Cell], benchmark: str, path: Path) -> None:
    """Plot accuracy with its 95% interval against generated tokens per problem, one marker per M.

    If the cells differ in N and M only, there is a line per N; else a line through all N and M of each other setting.
    Cells with refused problems are listed below the plot; a cell with only refused problems is not drawn.
    """
    drawn = [cell for cell in cells if not cell.refused]
    lines_of: dict[str, list[Cell]] = defaultdict(list)
    for cell in drawn:
        lines_of[_line_of(cell)].append(cell)
    many = len(lines_of) > _COLOURS
    colours = [colormaps["turbo"](i / len(lines_of)) if many else colormaps["tab10"](i) for i in range(len(lines_of))]
    markers = dict(zip(sorted({_expansion(cell) for cell in drawn}), MARKERS * len(drawn), strict=False))
    apart = _APART * min(1.0, _COLOURS / max(1, len(lines_of)))
    with panels(8, 4.5) as (figure, (axes,)):
        if tokens := [cell.summary.generated_tokens for cell in drawn if cell.summary.generated_tokens]:
            make_logarithmic(axes, max(tokens) / min(tokens))
            axes.set_xlim(min(tokens) / _MARGIN, max(tokens) * _MARGIN)  # autoscaling ignores offset lines
        for place, (row, colour) in enumerate(zip(lines_of.values(), colours, strict=True)):
            aside = apart / 72 * ((len(lines_of) - 1) / 2 - place)
            _draw_line(axes, row, markers, colour, axes.transData + ScaledTranslation(aside, 0, figure.dpi_scale_trans))
        problems = [cell.summary.problems for cell in cells]
        counts = "–".join(map(str, sorted({min(problems), max(problems)})))
        axes.set(
            xlabel="generated tokens per problem (lines are slightly offset)",
            ylabel="accuracy, %",
            ylim=(-3, 103),  # markers at 0 and 100% are fully visible
            title=f"Accuracy on {benchmark}, {counts} problems, 95% intervals",
        )
        axes.grid(alpha=0.3)
        handles = [Line2D([], [], color=colour, label=line) for line, colour in zip(lines_of, colours, strict=True)]
        for m, marker in markers.items():
            label = f"M = {m}" if m else "M not used"
            handles.append(Line2D([], [], color="dimgrey", ls="", marker=marker, label=label))
        if drawn:
            figure.legend(handles=handles, loc="outside right center")
        if refused := [_refusal(cell) for cell in cells if cell.summary.refused]:
            figure.supxlabel(textwrap.fill(f"refused: {', '.join(refused)}", 100), fontsize=9)
        save(figure, path)


def _refusal(cell: Cell) -> str:
    count = "all, not drawn" if cell.refused else f"{cell.summary.refused} of {cell.summary.problems}"
    return f"{settings_text(cell.settings)} ({count})"


def _expansion(cell: Cell) -> int:
    """M; 0 if the search does not use it."""
    return cell.settings["expansion"] or 0


def _line_of(cell: Cell) -> str:
    """Label of the line that a cell is on."""
    others = {name: value for name, value in cell.settings.items() if name not in N_AND_M and value is not None}
    if not others:
        return f"N = {cell.settings['beam_width']}"
    return ", ".join(str(v) if name == "algorithm" else f"{name.replace('_', ' ')} {v}" for name, v in others.items())


def _draw_line(axes: Axes, cells: list[Cell], markers: dict[int, str], colour: Any, where: Any) -> None:
    """Draw the cells of one line, in the transformed coordinates `where`."""
    cells = sorted(cells, key=lambda cell: cell.summary.generated_tokens)
    names = "generated_tokens", "accuracy", "low", "high"
    tokens, shares, low, high = ([getattr(cell.summary, name) for cell in cells] for name in names)
    accuracy = [100 * share for share in shares]
    bars = error_bars(shares, low, high)
    axes.errorbar(tokens, accuracy, yerr=bars, color=colour, capsize=3, elinewidth=1, transform=where)
    for cell, x, y in zip(cells, tokens, accuracy, strict=True):
        axes.plot([x], [y], marker=markers[_expansion(cell)], color=colour, transform=where)
