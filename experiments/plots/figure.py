"""Figures and what they have in common: style, files that do not change with time, axes, intervals, calibration."""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

INK = "#1b1e24"
"""Color of text and axes; on a page, the page's own text color takes its place."""
COLORS = ("#3b82c4", "#e0793a", "#2f9e77", "#c2568f", "#8a6fd1", "#a88f1d", "#4aa3b5", "#d0534f", "#7d8790")
"""Colors that can be told apart on white and on black."""
MARKERS = "osD^vP*Xph"
_STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "legend.labelcolor"), INK),
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "espalier",  # the same picture is the same file
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "text.parse_math": False,
}
_UNDATED = {"Date": None, "Creator": None}
"""Metadata of an SVG."""
_PAPER = '<rect width="100%" height="100%" fill="#ffffff"/>'
"""Background of an SVG in a file of its own."""
_FEW_DECADES = 200
"""Ratio of the largest to the smallest value up to which a decade has three numbers."""


@contextmanager
def panels(
    width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure of `width` by `height` inches and its axes, row by row, to be drawn and saved in the block.

    `options` are those of `matplotlib.figure.Figure.subplots`.
    """
    with rc_context(_STYLE):
        figure = Figure((width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def save(figure: Figure, path: Path) -> None:
    """Write a figure on white paper, whole or not at all; the suffix of `path` says its format."""
    metadata = _UNDATED if path.suffix.lower() == ".svg" else None
    try:
        figure.savefig(path, dpi=150, facecolor="white", metadata=metadata)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def save_for_page(figure: Figure, path: Path) -> str:
    """Write a figure as `.svg` and `.png`; returns SVG for an HTML page, in the page's text color."""
    save(figure, path.with_suffix(".png"))
    figure.set_layout_engine("none")  # what was laid out stays, which saves time
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata=_UNDATED)
    svg = text.getvalue()
    path.with_suffix(".svg").write_text(re.sub(r"<svg[^>]*>", rf"\g<0>{_PAPER}", svg, count=1), encoding="utf-8")
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg([^>]*?) width="[^"]*"', r"<svg\1", svg, count=1)
    svg = re.sub(r'<svg([^>]*?) height="[^"]*"', r'<svg role="img"\1', svg, count=1)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{path.name}-", svg)
    return svg.replace(INK, "currentColor")


def count_whole(axis: Axis) -> None:
    """Put no fractions on an axis that counts."""
    # With two ticks at least, one number gets fractions beside it.
    axis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def make_logarithmic(axes: Axes, ratio: float = 1.0, name: str = "x") -> None:
    """Make an axis logarithmic, with plain numbers; `ratio` is that of its largest to its smallest value."""
    axes.set(**{f"{name}scale": "log"})
    axis: Axis = getattr(axes, f"{name}axis")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if ratio < _FEW_DECADES else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_locator(NullLocator())


def error_bars(shares: Sequence[float], low: Sequence[float], high: Sequence[float]) -> list[list[float]]:
    """Lengths of the bars below and above `shares`, in percent; rounding may put an interval's end inside."""
    return [
        [max(0.0, 100 * (share - end)) for share, end in zip(shares, low, strict=True)],
        [max(0.0, 100 * (end - share)) for share, end in zip(shares, high, strict=True)],
    ]


def draw_calibration(axes: Axes, bins: Sequence[dict[str, float]], color: str, label: str) -> None:
    """Draw the share of right ones against the mean score of each bin, with 95% intervals; see `calibration`."""
    scores, right, low, high = ([each[name] for each in bins] for name in ("mean_score", "right", "low", "high"))
    axes.plot([0, 1], [0, 100], ls=":", color="grey", lw=1)
    style = {"lw": 1.2, "marker": "o", "ms": 4, "elinewidth": 0.8}
    shares = [100 * share for share in right]
    axes.errorbar(scores, shares, yerr=error_bars(right, low, high), color=color, label=label, **style)
    axes.set(ylabel="right, %", ylim=(-4, 104))
    axes.grid(alpha=0.25)
