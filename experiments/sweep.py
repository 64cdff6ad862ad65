"""Sweeps of beam width N and expansion M: accuracy against compute, one table and one plot."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from espalier.experiments.benchmarks import Problem
from espalier.experiments.evaluate import RunFolder, Sample, Summary, evaluate, run_configuration
from espalier.search.grading import Grader
from espalier.search.orchestrator import Orchestrator
from espalier.search.request import SearchRequest, validate


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
    on_sample: Callable[[Sample], None] | None = None,
    on_cell: Callable[[Cell], None] | None = None,
) -> list[Cell]:
    """Evaluate every (N, M); cells and samples already in `folder` are not run again.

    Writes `cells.json` and, per cell, a run folder `N{n}-M{m}`.

    Raises:
        InvalidRequestError: when a cell breaks a rule, before any runs.
    """
    cells: list[Cell] = []
    for n, m in product(beam_widths, expansions):
        validate(replace(request, beam_width=n, expansion=m), orchestrator.limits)
    for n, m in product(beam_widths, expansions):
        cell_request = replace(request, beam_width=n, expansion=m)
        configuration = run_configuration(benchmark, cell_request, orchestrator)
        run_folder = RunFolder(folder / f"N{n}-M{m}", configuration)
        summary = evaluate(
            orchestrator, problems, cell_request, grader, benchmark=benchmark, folder=run_folder, on_sample=on_sample
        )
        cells.append(Cell(n, m, summary))
        if on_cell:
            on_cell(cells[-1])
        text = json.dumps([asdict(cell) for cell in cells], indent=2)
        (folder / "cells.json").write_text(text + "\n", encoding="utf-8")
    return cells
