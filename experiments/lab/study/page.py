"""The table and the page of a study of memory and time."""

from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from espalier.experiments.lab.study.figures import PHASES, Cell, draw_all, unshared_bytes
from espalier.experiments.runs.files import write_whole
from espalier.experiments.runs.table import Table
from espalier.search.algorithms import ALGORITHMS
from espalier.search.algorithms.base import Growth

TABLE, CELLS, PAGE = "cells.csv", "cells.json", "README.md"
_MIB, _GIB = 2**20, 2**30


def write_study(cells: list[Cell], configuration: dict[str, Any], folder: Path) -> None:
    """Write `cells.csv`, `cells.json`, the figures and the page into `folder`.

    Raises:
        EspalierError: a file cannot be written.
    """
    rows = [row_of(cell) for cell in cells]
    write_whole(folder / TABLE, Table(list(rows[0]), [list(row.values()) for row in rows]).csv())
    write_whole(folder / CELLS, cells)
    draw_all(cells, folder)
    write_whole(folder / PAGE, page(cells, configuration))


def row_of(cell: Cell) -> dict[str, Any]:
    """A cell as a row of the table: means over the problems."""
    alone, together, estimate = cell["isolated"], cell["together"], cell["estimate"] or {}
    bytes_of = estimate.get("peak_kv_bytes")
    return {
        "algorithm": cell["algorithm"],
        "N": cell["beam_width"],
        "M": cell["expansion"],
        "problems": cell["problems"],
        "peak KV MiB": round(alone["peak_kv_bytes"] / _MIB, 3),
        "closed form MiB": bytes_of and round(bytes_of / _MIB, 3),
        "closed form / measured": bytes_of and round(bytes_of / alone["peak_kv_bytes"], 3),
        "generator MiB": round(alone["generator_peak_kv_bytes"] / _MIB, 3),
        "verifier MiB": round(alone["verifier_peak_kv_bytes"] / _MIB, 3),
        "peak within a round MiB": round(alone["peak_step_bytes"] / _MIB, 3),
        "physical blocks": round(alone["physical_blocks"], 1),
        "logical blocks": round(alone["logical_blocks"], 1),
        "merged %": round(100 * alone["duplicates"] / alone["nodes"], 1),
        "searches in 1 GiB": int(_GIB / alone["peak_kv_bytes"]),
        "in 1 GiB without sharing": int(_GIB / unshared_bytes(cell)),
        "ms alone": round(1e3 * alone["seconds"], 1),
        **{f"{name} ms": round(1e3 * alone["phases"][name], 1) for name in PHASES},
        "sampled tokens": round(alone["generated_tokens"]),
        "tokens/s at once": round(together["generated_tokens_per_second"]),
        "searches/min at once": round(together["searches_per_minute"], 1),
        "running at once": together["most_running"],
        "preemptions": together["preemptions"],
    }


def page(cells: list[Cell], configuration: dict[str, Any]) -> str:
    """The page: what was run, the figures, what they say, and the table."""
    shown = [
        "algorithm", "N", "M", "peak KV MiB", "closed form MiB", "physical blocks", "logical blocks",
        "searches in 1 GiB", "ms alone", "tokens/s at once", "preemptions",
    ]  # fmt: skip
    rows = [[_cell_text(row[name]) for name in shown] for row in map(row_of, cells)]
    beam = [cell for cell in cells if ALGORITHMS[cell["algorithm"]].growth is Growth.BEST]
    by_width = groupby(sorted(beam, key=lambda cell: (cell["beam_width"], cell["expansion"])), itemgetter("beam_width"))
    estimated = [cell for cell in cells if cell["estimate"]]
    environment = Environment(
        loader=PackageLoader("espalier.experiments.lab.study", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.jinja").render(
        problems=cells[0]["problems"],
        widths=[(width, row) for width, found in by_width if len(row := list(found)) > 1],
        has_chains=any(cell["expansion"] == 1 and cell["beam_width"] > 1 for cell in beam),
        merges=any(cell["isolated"]["duplicates"] for cell in beam),
        ratios=[cell["estimate"]["peak_kv_bytes"] / cell["isolated"]["peak_kv_bytes"] for cell in estimated],
        table=Table(shown, rows).markdown(),
        configuration={name: value for name, value in configuration.items() if value not in (None, "")},
        files=(TABLE, CELLS),
    )


def _cell_text(value: Any) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
