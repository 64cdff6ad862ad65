"""A study of memory and time over a grid: a file for each cell, so that an interrupted study resumes."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from espalier.engine.errors import EspalierError
from espalier.experiments.runs.folder import write_whole
from espalier.experiments.study.measure import measure_cell
from espalier.search.request import AlgorithmName, SearchRequest, validate
from espalier.search.run.orchestrator import Orchestrator

Cell = dict[str, Any]


def grid_of(
    request: SearchRequest, algorithms: Sequence[AlgorithmName], widths: Sequence[int], expansions: Sequence[int]
) -> list[SearchRequest]:
    """The searches of a grid, all of them valid.

    Raises:
        InvalidRequestError: a cell's search is invalid.
    """
    cells = [
        replace(request, problem="-", algorithm=algorithm, beam_width=n, expansion=m)
        for algorithm in algorithms
        for n in widths
        for m in expansions
    ]
    for cell in cells:
        validate(cell)
    return cells


def run_grid(
    orchestrator: Orchestrator,
    problems: list[str],
    cells: list[SearchRequest],
    folder: Path,
    configuration: dict[str, Any],
    on_cell: Callable[[Cell], None],
) -> list[Cell]:
    """Measure the cells that `folder` does not hold yet, and return all.

    Args:
        orchestrator: idle; each cell has it alone.
        problems: the problems of every cell.
        cells: from `grid_of`.
        folder: where the cells are kept.
        configuration: what the figures depend on besides the cell.
        on_cell: called with each cell.

    Raises:
        EspalierError: the folder cannot be used or holds a study of another configuration, or a search failed.
    """
    _require_same(folder, configuration)
    longest = max(problems, key=len)
    for request in cells:  # what does not fit is refused before anything runs
        orchestrator.check(replace(request, problem=longest))
    found = []
    for request in cells:
        file = folder / "cells" / f"{request.algorithm}-N{request.beam_width}-M{request.expansion}.json"
        if file.is_file():
            cell = _read(file)
        else:
            cell = measure_cell(orchestrator, problems, request)
            write_whole(file, cell)
        found.append(cell)
        on_cell(cell)
    return found


def _require_same(folder: Path, configuration: dict[str, Any]) -> None:
    config = folder / "config.json"
    try:
        (folder / "cells").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EspalierError(f"cannot use {folder} for a study: {error.strerror}; name another --out") from error
    now = json.loads(json.dumps(configuration))
    there = _read(config) if config.is_file() else now
    if differing := sorted(name for name in there.keys() | now if there.get(name) != now.get(name)):
        shown = "; ".join(f"{name} is {there.get(name)!r} there, {now.get(name)!r} now" for name in differing)
        raise EspalierError(f"{folder} holds a study of another configuration: {shown}; name another --out")
    write_whole(config, now)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EspalierError(f"{file} is damaged: {error}; remove it") from error
    if not isinstance(found, dict):
        raise EspalierError(f"{file} is damaged: it is not a JSON object; remove it")
    return found
