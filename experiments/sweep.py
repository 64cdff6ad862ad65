"""Sweeps of beam width N and expansion M: accuracy against compute, one table and one plot."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from espalier.experiments.benchmarks import Problem
from espalier.experiments.evaluate import RunFolder, Sample, Summary, evaluate
from espalier.search.grading import Grader
from espalier.search.orchestrator import Orchestrator
from espalier.search.request import SearchRequest


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid and what it came to."""

    beam_width: int
    expansion: int
    summary: Summary


def sweep(
    orchestrator: Orchestrator,
    problems: list[Problem],
    request: SearchRequest,
    grader: Grader,
    beam_widths: list[int],
    expansions: list[int],
    *,
    benchmark: str,
    folder: Path,
    settings: dict[str, Any],
    on_sample: Callable[[Sample], None] | None = None,
    on_cell: Callable[[Cell], None] | None = None,
) -> list[Cell]:
    """Evaluate every (N, M); cells and samples already in `folder` are not run again.

    Writes `cells.json` and, per cell, a run folder `N{n}-M{m}`; `settings` go into each folder's configuration beside
    the request's, so that results of other models are never taken for these.
    """
    cells: list[Cell] = []
    for n in beam_widths:
        for m in expansions:
            cell_request = replace(request, beam_width=n, expansion=m)
            configuration = {"benchmark": benchmark, **cell_request.to_dict(), **settings}
            run_folder = RunFolder(folder / f"N{n}-M{m}", configuration)
            summary = evaluate(
                orchestrator,
                problems,
                cell_request,
                grader,
                benchmark=benchmark,
                folder=run_folder,
                on_sample=on_sample,
            )
            cells.append(Cell(n, m, summary))
            if on_cell:
                on_cell(cells[-1])
            text = json.dumps([asdict(cell) for cell in cells], indent=2)
            (folder / "cells.json").write_text(text + "\n", encoding="utf-8")
    return cells
