"""A study of memory and time over a grid: a file for each cell, so that an interrupted study resumes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from espalier.engine.errors import EspalierError
from espalier.experiments.lab.study.figures import Cell
from espalier.experiments.lab.study.measure import measure_cell
from espalier.experiments.runs.files import write_whole
from espalier.experiments.runs.folder import RunFolder
from espalier.search.request import SearchRequest
from espalier.search.run.orchestrator import Orchestrator


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
        cells: their searches.
        folder: where the cells are kept.
        configuration: what the figures depend on besides the cell.
        on_cell: called with each cell.

    Raises:
        EspalierError: the folder cannot be used or holds a study or run of another configuration, or a search failed.
    """
    RunFolder(folder, configuration)
    (folder / "cells").mkdir(exist_ok=True)
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


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EspalierError(f"{file} is damaged: {error}; remove it") from error
    if not isinstance(found, dict):
        raise EspalierError(f"{file} is damaged: it is not a JSON object; remove it")
    return found
