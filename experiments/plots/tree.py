"""The picture of a search tree."""

import textwrap
from collections import defaultdict
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes

from espalier.experiments.plots.figure import panels, save
from espalier.search.result import NodeRecord, SearchResult

_MAX_LABEL = 22
_POINTS = 72
"""Points per inch."""


def plot_tree(result: SearchResult, title: str, path: Path) -> None:
    """Draw the tree of `result` to `path` (.svg, .png or .pdf), root on the left; duplicates are only counted."""
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
    with panels(width, tall) as (figure, (axes,)):
        for node in nodes:
            selected = node.node_id in result.selected_path
            if node.parent_id is not None:
                ends = [node.depth - 1, node.depth], [rows[node.parent_id], rows[node.node_id]]
                axes.plot(*ends, color="black" if selected else "silver", lw=2.0 if selected else 0.8, zorder=1)
            _draw_box(axes, node, rows[node.node_id], selected)
        axes.set(xlim=(-0.5, depth + 0.5), ylim=(-1, height + 1))
        axes.axis("off")
        axes.set_title(heading, fontsize=size)
        save(figure, path)


def _draw_box(axes: Axes, node: NodeRecord, row: float, selected: bool) -> None:
    pruned = node.termination == "pruned"
    red, green, blue, _ = (1.0, 1.0, 1.0, 1.0) if node.score is None else colormaps["RdYlGn"](node.score)
    fade = 0.3 if pruned else 0.45  # blend with white to keep text readable
    box = {
        "boxstyle": "round,pad=0.3",
        "facecolor": tuple(1 - fade * (1 - channel) for channel in (red, green, blue)),
        "edgecolor": "black" if selected else "darkgrey",
        "linestyle": ":" if pruned else "-",
    }
    text = {"fontsize": 7, "family": "monospace", "color": "black", "fontweight": "bold" if selected else "normal"}
    axes.text(node.depth, row, _label(node), text, ha="center", va="center", bbox=box, zorder=2)


def _rows(children: dict[int | None, list[NodeRecord]]) -> dict[int, float]:
    """Vertical position of every node: leaves one below another, parents centered on their children."""
    rows: dict[int, float] = {}
    leaves = 0

    def place(node: NodeRecord) -> float:
        nonlocal leaves
        below = [place(child) for child in sorted(children[node.node_id], key=lambda n: n.score or 0.0)]
        rows[node.node_id] = (below[0] + below[-1]) / 2 if below else float(leaves)
        leaves += not below
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
