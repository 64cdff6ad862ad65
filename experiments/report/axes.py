"""Axes of plots: whole numbers where something is counted, plain numbers where the scale is logarithmic."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

_FEW_DECADES = 200
"""Ratio of the largest to the smallest value up to which a decade has three numbers."""


def count_whole(axis: "Axis") -> None:
    """Put no fractions on an axis that counts."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(
        MaxNLocator("auto", integer=True, min_n_ticks=1)
    )  # with 2, one number gets fractions beside it


def make_logarithmic(axes: "Axes", ratio: float) -> None:
    """Make the x axis logarithmic, with plain numbers; `ratio` is that of its largest to its smallest value."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if ratio < _FEW_DECADES else (1,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.xaxis.set_minor_locator(NullLocator())
