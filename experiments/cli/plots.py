"""Plots of sweeps and evaluations."""

import textwrap
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espalier.experiments.report.plots import make_logarithmic
from espalier.experiments.runs.grid import N_AND_M, settings_text
from espalier.experiments.runs.sweep import Cell
from espalier.search.result import NodeRecord, SearchResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_MARKERS = "osD^vP*Xph"
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
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    drawn = [cell for cell in cells if not cell.refused]
    lines_of: dict[str, list[Cell]] = defaultdict(list)
    for cell in drawn:
        lines_of[_line_of(cell)].append(cell)
    palette = mpl.colormaps["tab10" if len(lines_of) <= _COLOURS else "turbo"]
    colours = {line: palette(i if len(lines_of) <= _COLOURS else i / len(lines_of)) for i, line in enumerate(lines_of)}
    expansions = sorted({_expansion(cell) for cell in drawn})
    markers = {m: _MARKERS[i % len(_MARKERS)] for i, m in enumerate(expansions)}
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    if tokens := [cell.summary.generated_tokens for cell in drawn if cell.summary.generated_tokens]:
        make_logarithmic(axes, max(tokens) / min(tokens))
        axes.set_xlim(min(tokens) / _MARGIN, max(tokens) * _MARGIN)  # autoscaling ignores offset lines
    apart = min(1.0, _COLOURS / max(1, len(lines_of)))
    for place, (line, row) in enumerate(lines_of.items()):
        _draw_line(axes, row, markers, colours[line], apart * ((len(lines_of) - 1) / 2 - place))
    axes.set_xlabel("generated tokens per problem (lines are slightly offset)")
    axes.set_ylabel("accuracy, %")
    axes.set_ylim(-3, 103)  # markers at 0 and 100% are fully visible
    problems = {cell.summary.problems for cell in cells}
    many = "–".join(str(count) for count in sorted({min(problems), max(problems)}))
    axes.set_title(f"Accuracy on {benchmark}, {many} problems, 95% intervals", parse_math=False)
    axes.grid(alpha=0.3)
    lines = [Line2D([], [], color=colour, label=line) for line, colour in colours.items()]
    shapes = [
        Line2D([], [], color="dimgrey", ls="", marker=marker, label=f"M = {m}" if m else "M not used")
        for m, marker in markers.items()
    ]
    if drawn:
        figure.legend(handles=[*lines, *shapes], loc="outside right center")
    if refused := [_refusal(cell) for cell in cells if cell.summary.refused]:
        figure.supxlabel(textwrap.fill(f"refused: {', '.join(refused)}", 100), fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


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


def _draw_line(axes: "Axes", cells: list[Cell], markers: dict[int, str], colour: Any, aside: float) -> None:
    """Draw the cells of one line, offset horizontally by `aside` times `_APART`."""
    from matplotlib.transforms import ScaledTranslation

    figure = axes.get_figure()
    assert figure is not None
    where = axes.transData + ScaledTranslation(aside * _APART / 72, 0, figure.dpi_scale_trans)
    cells = sorted(cells, key=lambda cell: cell.summary.generated_tokens)
    tokens = [cell.summary.generated_tokens for cell in cells]
    accuracy = [100 * cell.summary.accuracy for cell in cells]
    below = [100 * (cell.summary.accuracy - cell.summary.low) for cell in cells]
    above = [100 * (cell.summary.high - cell.summary.accuracy) for cell in cells]
    axes.errorbar(tokens, accuracy, yerr=[below, above], color=colour, capsize=3, elinewidth=1, transform=where)
    for cell, x, y in zip(cells, tokens, accuracy, strict=True):
        axes.plot([x], [y], marker=markers[_expansion(cell)], color=colour, transform=where)


def plot_algorithms(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Plot accuracy with its 95% interval against generated tokens per problem, one line per algorithm.

    All lines start at the single chain, which every algorithm is with one path.

    Args:
        rows: rows of the benchmark `algorithms`.
        title: title of the plot.
        path: output file, .svg, .png or .pdf.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_name[row["algorithm"]].append(row)
    figure, axes = plt.subplots(figsize=(8.5, 5.5), layout="constrained")
    colours = mpl.colormaps["tab20"]
    for i, (name, points) in enumerate(by_name.items()):
        if any(row["paths"] > 1 for row in points):
            points += by_name.get("chain", [])
        points.sort(key=lambda row: row["paths"])
        tokens, accuracy, half = ([row[key] for row in points] for key in ("generated tokens", "accuracy %", "95% +-"))
        style = "--" if name == "pass@N" else "-"
        axes.errorbar(tokens, accuracy, yerr=half, marker="o", capsize=2, linestyle=style, label=name, color=colours(i))
    axes.set_xscale("log")
    axes.set_xlabel("generated tokens per problem")
    axes.set_ylabel("accuracy, %")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)
    plt.close(figure)


if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_LABEL = 22
_POINTS = 72
"""Points per inch."""


def plot_tree(result: SearchResult, title: str, path: Path) -> None:
    """Draw the tree of `result` to `path` (.svg, .png or .pdf), root on the left; duplicates are only counted."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    nodes = [node for node in result.nodes if node.termination != "duplicate"]
    children: dict[int | None, list[NodeRecord]] = defaultdict(list)
    for node in nodes:
        children[node.parent_id].append(node)
    rows = _rows(children)
    depth, height = max(node.depth for node in nodes), max(rows.values())
    width = 1.75 * (depth + 1)
    size = min(max(9.0, 0.9 * width), 18.0)  # keeps a wide tree readable when scaled down
    a_line = max(20, int(width * _POINTS / (0.6 * size)))  # characters per line, each 0.6 of the font size wide
    heading = textwrap.fill(title, a_line)
    tall = 0.32 * max(6.0, height + 2) + 1.4 * size / _POINTS * (heading.count("\n") + 1)
    figure, axes = plt.subplots(figsize=(width, tall), layout="constrained")
    for node in nodes:
        selected = node.node_id in result.selected_path
        if node.parent_id is not None:
            ends = [node.depth - 1, node.depth], [rows[node.parent_id], rows[node.node_id]]
            axes.plot(*ends, color="black" if selected else "silver", lw=2.0 if selected else 0.8, zorder=1)
        _draw_box(axes, node, rows[node.node_id], selected)
    axes.set_xlim(-0.5, depth + 0.5)
    axes.set_ylim(-1, height + 1)
    axes.axis("off")
    axes.set_title(heading, fontsize=size, parse_math=False)
    with mpl.rc_context({"svg.hashsalt": "espalier"}):  # deterministic output
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    plt.close(figure)


def _draw_box(axes: "Axes", node: NodeRecord, row: float, selected: bool) -> None:
    from matplotlib import colormaps

    pruned = node.termination == "pruned"
    red, green, blue, _ = (1.0, 1.0, 1.0, 1.0) if node.score is None else colormaps["RdYlGn"](node.score)
    fade = 0.3 if pruned else 0.45  # blend with white to keep text readable
    axes.text(
        node.depth,
        row,
        _label(node),
        ha="center",
        va="center",
        fontsize=7,
        family="monospace",
        color="black",
        fontweight="bold" if selected else "normal",
        bbox={
            "boxstyle": "round,pad=0.3",
            "facecolor": tuple(1 - fade * (1 - channel) for channel in (red, green, blue)),
            "edgecolor": "black" if selected else "darkgrey",
            "linestyle": ":" if pruned else "-",
        },
        zorder=2,
        parse_math=False,
    )


def _rows(children: dict[int | None, list[NodeRecord]]) -> dict[int, float]:
    """Vertical position of every node: leaves one below another, parents centered on their children."""
    rows: dict[int, float] = {}
    leaves = 0

    def place(node: NodeRecord) -> float:
        nonlocal leaves
        below = sorted(children[node.node_id], key=lambda n: n.score or 0.0)
        if below:
            places = [place(child) for child in below]
            rows[node.node_id] = (places[0] + places[-1]) / 2
        else:
            rows[node.node_id] = float(leaves)
            leaves += 1
        return rows[node.node_id]

    place(children[None][0])
    return rows


def _label(node: NodeRecord) -> str:
    if node.parent_id is None:
        return "problem"
    text = " ".join(node.text.split()) or "(end)"
    text = text if len(text) <= _MAX_LABEL else text[: _MAX_LABEL - 1] + "…"
    score = "" if node.score is None else f"  {node.score:.2f}"
    return f"{text}{score}" + (f" ×{node.multiplicity}" if node.multiplicity > 1 else "")
