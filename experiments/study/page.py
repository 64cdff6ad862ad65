"""The table and the page of a study of memory and time."""

from pathlib import Path
from typing import Any

from espalier.experiments.runs.folder import write_whole
from espalier.experiments.runs.table import Table
from espalier.experiments.study.figures import PHASES, draw_all, unshared_bytes
from espalier.search.algorithms import ALGORITHMS
from espalier.search.algorithms.base import Growth

Cell = dict[str, Any]

TABLE, CELLS, PAGE = "cells.csv", "cells.json", "README.md"
_MIB, _GIB = 2**20, 2**30
SHARING = """\
In every round the ratio rises while children branch off shared paths, and falls when their parents and the pruned are
released. It grows with N: more sequences read the same prompt, and the same steps where they have a common ancestor."""


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
    rows = [row_of(cell) for cell in cells]
    shown = [
        "algorithm", "N", "M", "peak KV MiB", "closed form MiB", "physical blocks", "logical blocks",
        "searches in 1 GiB", "ms alone", "tokens/s at once", "preemptions",
    ]  # fmt: skip
    ran = "".join(f"- {name}: {value}\n" for name, value in configuration.items() if value not in (None, ""))
    table = Table(shown, [[_cell_text(row[name]) for name in shown] for row in rows]).markdown()
    return f"""# Memory and time against N and M

Means over {cells[0]["problems"]} problems. Memory and phases: one search at a time. Throughput and preemptions: all at
once, in one KV pool. No search shares a prompt with another.

![Peak KV and live blocks against N](peak.svg)

{findings(cells)}
![Sharing over a search's life](sharing.svg)

{SHARING}

![Time by phase, and throughput](time.svg)

Launches and waits of a model's batches are decode and scoring; `scheduling` chooses rows and blocks and takes results
in; the rest is the tree, the tokenization of steps and the vote.

![Searches that fit, and preemptions](fit.svg)

{table}

All columns are in `{TABLE}`, all values in `{CELLS}`. The closed form takes each search's own lengths (prompt, mean
step, depth, merged share); it assumes that all paths reach that depth, and that the kept ones are a random choice.

## What ran

{ran}"""


def findings(cells: list[Cell]) -> str:
    """The M that holds the most KV at each N, and why, and the error of the closed form."""
    lines = []
    beam = [cell for cell in cells if ALGORITHMS[cell["algorithm"]].growth is Growth.BEST]
    for width in sorted({cell["beam_width"] for cell in beam}):
        row = sorted((cell for cell in beam if cell["beam_width"] == width), key=lambda cell: cell["expansion"])
        if len(row) > 1:
            held = ", ".join(_held(cell) for cell in row)
            most = max(row, key=lambda cell: cell["isolated"]["peak_kv_bytes"])
            lines.append(f"- N={width}: {held}; the most at M={most['expansion']}")
    text = "\n".join(lines) + "\n\n" if lines else ""
    if any(cell["expansion"] == 1 and cell["beam_width"] > 1 for cell in beam):
        text += (
            "With M=1 nothing is pruned: a search is N chains that share the prompt, and each keeps all of its own\n"
            "steps. With M>1 the N best of N·M children have few parents and fewer grandparents, so most of a path\n"
            "is shared; against that stand N·M new steps instead of N.\n"
        )
        if any(cell["isolated"]["duplicates"] for cell in beam):
            text += (
                "Merging often decides it: equal siblings are one path in several of the N places, and what scores\n"
                "best is often what was sampled most, so that fewer different paths are kept than with M=1, where\n"
                "each stays. `--no-merge-duplicates` shows pruning without merging.\n"
            )
        text += "\n"
    ratios = [
        cell["estimate"]["peak_kv_bytes"] / cell["isolated"]["peak_kv_bytes"] for cell in cells if cell["estimate"]
    ]
    if ratios:
        text += f"The closed form is {min(ratios):.2f} to {max(ratios):.2f} times what was measured"
        text += f", over {len(ratios)} cells.\n"
    return text


def _held(cell: Cell) -> str:
    alone = cell["isolated"]
    merged = f" ({100 * alone['duplicates'] / alone['nodes']:.0f}% merged)" if alone["duplicates"] else ""
    return f"{alone['peak_kv_bytes'] / _MIB:.1f} MiB at M={cell['expansion']}{merged}"


def _cell_text(value: Any) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
