"""Plots of sweeps and evaluations."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from espalier.experiments.sweep import Cell


def plot_cells(cells: list[Cell], benchmark: str, path: Path) -> None:
    """Accuracy with its 95% interval against generated tokens a problem, one line per beam width N."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    by_width: dict[int, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_width[cell.beam_width].append(cell)
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for width, row in sorted(by_width.items()):
        row.sort(key=lambda cell: cell.summary.generated_tokens)
        tokens = [cell.summary.generated_tokens for cell in row]
        accuracy = [100 * cell.summary.accuracy for cell in row]
        below = [100 * (cell.summary.accuracy - cell.summary.low) for cell in row]
        above = [100 * (cell.summary.high - cell.summary.accuracy) for cell in row]
        axes.errorbar(tokens, accuracy, yerr=[below, above], marker="o", capsize=3, label=f"N = {width}")
        for cell, x, y in zip(row, tokens, accuracy, strict=True):
            axes.annotate(f"M={cell.expansion}", (x, y), textcoords="offset points", xytext=(6, -11), fontsize=8)
    if any(cell.summary.generated_tokens for cell in cells):
        axes.set_xscale("log")
    axes.set_xlabel("generated tokens per problem")
    axes.set_ylabel("accuracy, %")
    axes.set_ylim(0, 100)
    axes.set_title(f"Beam search on {benchmark}, {cells[0].summary.problems} problems, 95% intervals")
    axes.grid(alpha=0.3)
    axes.legend(title="beam width")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_algorithms(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Accuracy with its 95% interval against generated tokens a problem, one line per algorithm.

    Lines begin at the single chain, which is what any of them is with one path.

    Args:
        rows: of the benchmark `algorithms`.
        title: over the plot.
        path: an .svg, .png or .pdf.
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
        if name != "greedy" and name != "chain":
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
