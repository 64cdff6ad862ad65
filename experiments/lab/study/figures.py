"""Figures of a study of memory and time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espalier.experiments.plots.figure import MARKERS, count_whole, make_logarithmic, panels, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Cell = dict[str, Any]

FIGURES = ("peak.svg", "sharing.svg", "time.svg", "fit.svg")
PHASES = {
    "decode": "decode (generator)",
    "scoring": "scoring (verifier)",
    "scheduling": "scheduling",
    "search": "search, votes, idle",
}
_MIB, _GIB = 2**20, 2**30


def draw_all(cells: list[Cell], folder: Path) -> None:
    """Draw all of `FIGURES` into `folder`."""
    for draw, name in zip((_draw_peak, _draw_sharing, _draw_time, _draw_fit), FIGURES, strict=True):
        draw(cells, folder / name)


def series_of(cells: list[Cell]) -> dict[str, list[Cell]]:
    """The cells by algorithm and M, each in order of N."""
    several = len({cell["algorithm"] for cell in cells}) > 1
    series: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: (cell["algorithm"], cell["expansion"], cell["beam_width"])):
        name = f"{cell['algorithm']}, M={cell['expansion']}" if several else f"M={cell['expansion']}"
        series.setdefault(name, []).append(cell)
    return series


@contextmanager
def _figure(path: Path, columns: int) -> "Iterator[tuple[Figure, list[Axes]]]":
    """A row of plots, saved at the end."""
    with panels(5.2 * columns, 4.2, 1, columns) as (figure, axes):
        yield figure, axes
        save(figure, path)


def _draw_lines(
    axes: "Axes", cells: list[Cell], value: Callable[[Cell], float | None], style: str = "-", marked: bool = True
) -> None:
    """One line per series over N; a cell without a value is left out."""
    for place, row in enumerate(series_of(cells).values()):
        points = [(cell["beam_width"], y) for cell in row if (y := value(cell)) is not None]
        if points:
            marker = MARKERS[place % len(MARKERS)] if marked else ""
            axes.plot(*zip(*points, strict=True), style, color=f"C{place}", marker=marker, markersize=5)
    widths = sorted({cell["beam_width"] for cell in cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    axes.set_xlabel("N")
    axes.grid(alpha=0.3)


def _legend(figure: "Figure", cells: list[Cell], styles: dict[str, Any]) -> None:
    """Colours of the series, and the meaning of the line styles, below the plots."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=f"C{place}", marker=MARKERS[place % len(MARKERS)], label=name)
        for place, name in enumerate(series_of(cells))
    ]
    handles += [Line2D([], [], color="dimgrey", linestyle=style, label=name) for name, style in styles.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 7), fontsize=9)


def _estimated(name: str, unit: float = 1.0) -> Callable[[Cell], float | None]:
    return lambda cell: cell["estimate"][name] / unit if cell["estimate"] else None


def _draw_peak(cells: list[Cell], path: Path) -> None:
    with _figure(path, 2) as (figure, (memory, blocks)):
        _draw_lines(memory, cells, lambda cell: cell["isolated"]["peak_kv_bytes"] / _MIB)
        _draw_lines(memory, cells, _estimated("peak_kv_bytes", _MIB), "--", marked=False)
        memory.set_ylabel("KV of one search at its peak, MiB")
        memory.set_ylim(bottom=0)
        _draw_lines(blocks, cells, lambda cell: cell["isolated"]["physical_blocks"])
        _draw_lines(blocks, cells, lambda cell: cell["isolated"]["logical_blocks"], ":")
        blocks.set_ylabel("live blocks at the peak")
        make_logarithmic(blocks, name="y")
        memory.set_title("memory")
        blocks.set_title("with and without sharing")
        _legend(figure, cells, {"measured": "-", "closed form": "--", "if nothing were shared": ":"})


def _draw_sharing(cells: list[Cell], path: Path) -> None:
    series = series_of(cells)
    with _figure(path, len(series)) as (_, plots):
        widths = sorted({cell["beam_width"] for cell in cells})
        for axes, (name, row) in zip(plots, series.items(), strict=True):
            for cell in row:
                logical, physical = (cell["isolated"][f"life_{kind}_blocks"] for kind in ("logical", "physical"))
                share = [100 * i / (len(logical) - 1) for i in range(len(logical))]
                ratio = [many / max(few, 1e-9) if few else 1.0 for many, few in zip(logical, physical, strict=True)]
                axes.plot(share, ratio, color=f"C{widths.index(cell['beam_width'])}", label=f"N={cell['beam_width']}")
            axes.set_title(name)
            axes.set_xlabel("engine steps of the search, %")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=9)
        top = max(axes.get_ylim()[1] for axes in plots)
        for axes in plots:
            axes.set_ylim(0.9, top)
        plots[0].set_ylabel("sharing: logical ÷ physical blocks")


def _draw_time(cells: list[Cell], path: Path) -> None:
    with _figure(path, 2) as (figure, (phases, rate)):
        ordered = [cell for row in series_of(cells).values() for cell in row]
        below = [0.0] * len(ordered)
        for colour, (name, label) in enumerate(PHASES.items()):
            milliseconds = [1e3 * cell["isolated"]["phases"][name] for cell in ordered]
            phases.bar(range(len(ordered)), milliseconds, bottom=below, label=label, color=f"C{colour + 4}")
            below = [one + other for one, other in zip(below, milliseconds, strict=True)]
        several = len({cell["algorithm"] for cell in cells}) > 1
        names = [
            (f"{cell['algorithm']} " if several else "") + f"N{cell['beam_width']} M{cell['expansion']}"
            for cell in ordered
        ]
        phases.set_xticks(range(len(ordered)), names, rotation=90, fontsize=8)
        phases.set_ylabel("one search alone, ms")
        phases.set_title("time by phase")
        phases.set_ylim(top=1.25 * max(below))  # room for the legend
        phases.legend(fontsize=8, ncols=2, loc="upper center")
        _draw_lines(rate, cells, lambda cell: cell["together"]["generated_tokens_per_second"])
        _draw_lines(
            rate, cells, lambda cell: cell["isolated"]["generated_tokens"] / cell["isolated"]["seconds"], "--", False
        )
        make_logarithmic(rate, name="y")
        rate.set_ylabel("sampled tokens/s")
        rate.set_title("throughput")
        _legend(figure, cells, {"all searches at once": "-", "one at a time": "--"})


def _draw_fit(cells: list[Cell], path: Path) -> None:
    with _figure(path, 2) as (figure, (fit, preemptions)):
        _draw_lines(fit, cells, lambda cell: _GIB / cell["isolated"]["peak_kv_bytes"])
        _draw_lines(fit, cells, lambda cell: cell["estimate"] and _GIB / cell["estimate"]["peak_kv_bytes"], "--", False)
        _draw_lines(fit, cells, lambda cell: _GIB / unshared_bytes(cell), ":", False)
        make_logarithmic(fit, name="y")
        fit.set_ylabel("searches at their peaks in 1 GiB")
        fit.set_title("searches that fit")
        _draw_lines(preemptions, cells, lambda cell: cell["together"]["preemptions"])
        preemptions.set_ylabel("preemptions, all searches at once")
        preemptions.set_title("preemptions")
        preemptions.set_ylim(0, max(1.0, preemptions.get_ylim()[1]))
        count_whole(preemptions.yaxis)
        _legend(figure, cells, {"measured": "-", "closed form": "--", "if nothing were shared": ":"})


def unshared_bytes(cell: Cell) -> float:
    """KV bytes at the peak if every sequence had its own blocks, by the peak's bytes per block."""
    isolated = cell["isolated"]
    return isolated["peak_kv_bytes"] * isolated["logical_blocks"] / isolated["physical_blocks"]
