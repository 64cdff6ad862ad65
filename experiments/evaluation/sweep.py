"""Sweeps of beam width N and expansion M: accuracy against compute, one table and one plot."""

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
"""What a sweep writes beside its run folders."""
_COLUMNS = (
    "benchmark", "problems", "refused", "ungraded", "correct", "accuracy", "low", "high", "generated_tokens",
    "verifier_tokens", "verifier_redundancy", "generator_redundancy", "blocks_shared", "seconds",
    "problems_per_minute", "grader",
)  # fmt: skip
"""Fields of a summary that the table has behind N and M."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid and what it came to."""

    beam_width: int
    expansion: int
    summary: Summary

    @property
    def name(self) -> str:
        """Of its run folder."""
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

    Writes, per cell, a run folder `N{n}-M{m}`, and after each the table of all that `folder` holds, as `sweep.csv` and
    with every figure as `cells.json`. All cells of a folder are of one search but for N and M.

    Args:
        orchestrator: how many run at once is its to decide.
        problems: those of the benchmark.
        request: the search; N and M are each cell's.
        grader: judges the answers.
        beam_widths: values of N.
        expansions: values of M.
        benchmark: its name.
        folder: where all is kept.
        limit: how many of the first problems to search; None for all.
        command: see `RunFolder`.
        on_sample: called with each new sample.
        on_cell: called with each cell that was asked for.

    Returns:
        All cells that `folder` holds, by N and M.

    Raises:
        InvalidRequestError: when a cell breaks a rule, before any runs.
        EspalierError: when the folder holds a cell of another search, before any runs.
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
    """N and M of the cells that `folder` holds."""
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
