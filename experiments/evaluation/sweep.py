"""Sweeps over beam width N and expansion M: accuracy against compute, as a table and a plot."""

import csv
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from espalier.experiments.evaluation.benchmarks import Problem
from espalier.experiments.evaluation.evaluate import evaluate, left_open, run_configuration
from espalier.experiments.evaluation.run_folder import RunFolder, write_whole
from espalier.experiments.evaluation.sample import Sample
from espalier.experiments.evaluation.summary import Summary, summarise
from espalier.search.request import SearchRequest, validate
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.voting.math_verify import Grader

_NAME = re.compile(r"N([1-9]\d*)-M([1-9]\d*)")
CELLS, TABLE = "cells.json", "sweep.csv"
"""File names of a sweep's tables."""
_COLUMNS = (
    "benchmark", "problems", "refused", "ungraded", "correct", "accuracy", "low", "high", "generated_tokens",
    "verifier_tokens", "verifier_redundancy", "generator_redundancy", "blocks_shared", "seconds",
    "problems_per_minute", "grader",
)  # fmt: skip
"""Fields of a summary in the table, after N and M."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid, with its summary."""

    beam_width: int
    expansion: int
    summary: Summary

    @property
    def name(self) -> str:
        """Name of its run folder."""
        return _name(self.beam_width, self.expansion)

    @property
    def refused(self) -> bool:
        """Whether none of its problems could be searched."""
        return self.summary.refused == self.summary.problems


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
    limit: int | None = None,
    command: Mapping[str, Any] | None = None,
    on_sample: Callable[[Sample], None] | None = None,
    on_cell: Callable[[Cell], None] | None = None,
) -> list[Cell]:
    """Evaluate every (N, M); cells and samples already in `folder` are not run again.

    Writes a run folder `N{n}-M{m}` per cell, and after each cell the tables of all cells in `folder`: `sweep.csv`, and
    `cells.json` with every value. All cells of a folder have the same search except for N and M.

    Args:
        orchestrator: runs the searches; it decides how many run at once.
        problems: the problems of the benchmark.
        request: the search; N and M are replaced for each cell.
        grader: grades the answers.
        beam_widths: values of N.
        expansions: values of M.
        benchmark: name of the benchmark.
        folder: output folder.
        limit: number of problems to search from the start; None for all.
        command: see `RunFolder`.
        on_sample: called with each new sample.
        on_cell: called with each requested cell.

    Returns:
        All cells in `folder`, ordered by N and M.

    Raises:
        InvalidRequestError: a cell's request is invalid; no search has started.
        EspalierError: the folder has a cell of another search; no search has started.
    """
    asked = list(product(beam_widths, expansions))
    held = _held(folder)
    requests = {(n, m): replace(request, beam_width=n, expansion=m) for n, m in [*asked, *held]}
    for point in asked:
        validate(requests[point])
    cells: dict[tuple[int, int], Cell] = {}
    for point in held:
        samples = _run_folder(folder, requests[point], benchmark, orchestrator).samples_of(problems)
        if samples:
            effective = orchestrator.effective(requests[point])
            cells[point] = Cell(*point, summarise(samples, benchmark, effective, grader.name))
    for point in asked:
        summary = evaluate(
            orchestrator, problems, requests[point], grader,
            benchmark=benchmark, limit=limit, on_sample=on_sample,
            folder=_run_folder(folder, requests[point], benchmark, orchestrator, command),
        )  # fmt: skip
        cells[point] = Cell(*point, summary)
        if on_cell:
            on_cell(cells[point])
        _write(folder, _in_order(cells))
    return _in_order(cells)


def _held(folder: Path) -> list[tuple[int, int]]:
    """N and M of the cells in `folder`."""
    names = (_NAME.fullmatch(config.parent.name) for config in folder.glob("N*-M*/config.json"))
    return sorted((int(name[1]), int(name[2])) for name in names if name)


def _run_folder(
    folder: Path,
    request: SearchRequest,
    benchmark: str,
    orchestrator: Orchestrator,
    command: Mapping[str, Any] | None = None,
) -> RunFolder:
    configuration = run_configuration(benchmark, request, orchestrator)
    path = folder / _name(request.beam_width, request.expansion)
    return RunFolder(path, configuration, left_open(request), command)


def _name(beam_width: int, expansion: int) -> str:
    return f"N{beam_width}-M{expansion}"


def _in_order(cells: dict[tuple[int, int], Cell]) -> list[Cell]:
    return [cells[point] for point in sorted(cells)]


def _write(folder: Path, cells: list[Cell]) -> None:
    write_whole(folder / CELLS, [asdict(cell) for cell in cells])
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(("beam_width", "expansion", *_COLUMNS))
    for cell in cells:
        figures = (getattr(cell.summary, column) for column in _COLUMNS)
        writer.writerow((cell.beam_width, cell.expansion, *figures))
    write_whole(folder / TABLE, table.getvalue())
