"""A picture of one search tree: steps as boxes, coloured by the verifier's score, the elected path in bold."""

import textwrap
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from espalier.search.result import NodeRecord, SearchResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_LABEL = 22
_POINTS = 72
"""Of print, in an inch."""


def plot_tree(result: SearchResult, title: str, path: Path) -> None:
    """Draw `result`'s tree to `path` (.svg, .png or .pdf), its root to the left; merged duplicates are only counted."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "espalier"  # the same tree gives the same file
    import matplotlib.pyplot as plt

    nodes = [node for node in result.nodes if node.termination != "duplicate"]
    children: dict[int | None, list[NodeRecord]] = defaultdict(list)
    for node in nodes:
        children[node.parent_id].append(node)
    rows = _rows(children)
    depth, height = max(node.depth for node in nodes), max(rows.values())
    width = 1.75 * (depth + 1)
    size = min(max(9.0, 0.9 * width), 18.0)  # readable too where a wide tree is shown small
    a_line = max(20, int(width * _POINTS / (0.6 * size)))  # characters, one 0.6 of the size wide
    heading = textwrap.fill(title, a_line)
    tall = 0.32 * max(6.0, height + 2) + 1.4 * size / _POINTS * (heading.count("\n") + 1)
    figure, axes = plt.subplots(figsize=(width, tall), layout="constrained")
    for node in nodes:
        elected = node.node_id in result.elected_path
        if node.parent_id is not None:
            ends = [node.depth - 1, node.depth], [rows[node.parent_id], rows[node.node_id]]
            axes.plot(*ends, color="black" if elected else "silver", lw=2.0 if elected else 0.8, zorder=1)
        _draw_box(axes, node, rows[node.node_id], elected)
    axes.set_xlim(-0.5, depth + 0.5)
    axes.set_ylim(-1, height + 1)
    axes.axis("off")
    axes.set_title(heading, fontsize=size, parse_math=False)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    plt.close(figure)


def _draw_box(axes: "Axes", node: NodeRecord, row: float, elected: bool) -> None:
    from matplotlib import colormaps

    pruned = node.termination == "pruned"
    red, green, blue, _ = (1.0, 1.0, 1.0, 1.0) if node.score is None else colormaps["RdYlGn"](node.score)
    fade = 0.3 if pruned else 0.45  # towards white, so that text stays readable on every score
    axes.text(
        node.depth,
        row,
        _label(node),
        ha="center",
        va="center",
        fontsize=7,
        family="monospace",
        color="black",
        fontweight="bold" if elected else "normal",
        bbox={
            "boxstyle": "round,pad=0.3",
            "facecolor": tuple(1 - fade * (1 - channel) for channel in (red, green, blue)),
            "edgecolor": "black" if elected else "darkgrey",
            "linestyle": ":" if pruned else "-",
        },
        zorder=2,
        parse_math=False,
    )


def _rows(children: dict[int | None, list[NodeRecord]]) -> dict[int, float]:
    """A vertical place for every node: leaves one under another, parents in the middle of their children."""
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
