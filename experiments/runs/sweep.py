"""Runs the cells of a sweep, each in a run folder of its own, and writes tables of all cells of the sweep's folder."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from espalier.engine.errors import EspalierError
from espalier.experiments.runs import grid
from espalier.experiments.runs.evaluate import Evaluation
from espalier.experiments.runs.fewer_paths import holds_the_paths_of
from espalier.experiments.runs.files import LOCK, remove_partial_files, write_whole
from espalier.experiments.runs.folder import CONFIG, RunFolder, read_configuration, read_samples
from espalier.experiments.runs.summary import Summary
from espalier.experiments.runs.table import Table
from espalier.search.algorithms import unused_fields
from espalier.search.request import SearchRequest, with_own_code
from espalier.search.schema import CodeName, from_values

CELLS, TABLE = "cells.json", "sweep.csv"
"""File names of a sweep's tables."""
_COLUMNS = (
    "benchmark", "problems", "refused", "ungraded", "unanswered", "correct", "accuracy", "low", "high",
    "generated_tokens", "verifier_tokens", "verifier_redundancy", "generator_redundancy", "blocks_shared", "seconds",
    "problems_per_minute", "grader", "derived", "search_seconds", "peak_kv_bytes",
)  # fmt: skip
"""Fields of a summary in the table, after the varied fields."""


_CELL = re.compile(r"(?:[a-z-]+-)?[NM]\d")
"""Start of the names of most cells' run folders."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid, with its summary.

    Attributes:
        name: name of its run folder.
        settings: N, M and all fields in which cells of the sweep differ; None for those that its search does not use.
        summary: summary of its samples.
    """

    name: str
    settings: dict[str, Any]
    summary: Summary

    @property
    def refused(self) -> bool:
        """True if none of its problems could be searched."""
        return self.summary.refused == self.summary.problems

    def to_dict(self) -> dict[str, Any]:
        """Return the cell as JSON-serializable values, its settings beside its name."""
        fields = asdict(self)
        return {"name": fields.pop("name"), **fields.pop("settings"), **fields}


@dataclass(frozen=True, slots=True)
class Place:
    """A run folder of the sweep: its path, its search, and the search with every default filled in."""

    path: Path
    request: SearchRequest
    effective: SearchRequest


def sweep(
    evaluation: Evaluation,
    requests: Sequence[SearchRequest],
    folder: Path,
    *,
    isolated: bool = False,
    share_work: bool = False,
    command: Mapping[str, Any] | None = None,
    on_cell: Callable[[Cell], None] | None = None,
) -> list[Cell]:
    """Evaluate every distinct search; cells and samples already in `folder` are not run again.

    Searches that differ only in fields that they do not use are one cell. Writes a run folder per cell, and after each
    cell the tables of all cells in `folder`: `sweep.csv`, and `cells.json` with every value.

    Args:
        evaluation: the problems, what searches them, and what grades the answers.
        requests: the searches, validated; see `requests_of`.
        folder: output folder.
        isolated: refuse samples of commands that searched several problems at once, and derived ones.
        share_work: derive samples from searches that differ in a larger N only, where that is exact; see `fewer_paths`.
        command: see `RunFolder`.
        on_cell: called with each requested cell.

    Returns:
        All cells in `folder`, ordered by algorithm, N, M and the other varied fields.

    Raises:
        InvalidRequestError: a cell's request is invalid; no search has started.
        EspalierError: the folder has a cell of other models or of another benchmark, or one that was not searched in
            isolation; no search has started.
    """
    for path in (folder, *folder.glob("*/")):
        remove_partial_files(path)  # also of a cell that was killed before it had a configuration
    fill = evaluation.executor.defaults.fill
    held = [Place(path, request, fill(request)) for path, request in held_requests(folder)]
    places = places_of(folder, grid.distinct(requests, fill), held, fill)
    if isolated:
        _require_isolated(places)
    asked_paths = {place.path for place in places}
    everything = [*(place for place in held if place.path not in asked_paths), *places]
    names = grid.column_names(grid.varied_fields(place.effective for place in everything))
    cells: dict[Path, Cell] = {}
    for place in everything:
        if (place.path / CONFIG).is_file():
            run_folder = RunFolder(place.path, evaluation.configuration(place.request))
            if samples := run_folder.samples_of(evaluation.problems):
                cells[place.path] = _cell(place, names, evaluation.summary(place.request, samples))
    if share_work:
        places.sort(key=lambda place: -place.effective.beam_width)
    # All before the first, so that a report of an interrupted sweep knows of every cell.
    folders = {each.path: RunFolder(each.path, evaluation.configuration(each.request), command) for each in places}
    for run_folder in folders.values():
        run_folder.ask(len(evaluation.searches))
    for place in places:
        others = [each for each in places if share_work and holds_the_paths_of(place.effective, each.effective)]
        smaller = [(folders[each.path], each.effective.beam_width) for each in others]
        summary = evaluation.run(place.request, folders[place.path], smaller)
        cells[place.path] = _cell(place, names, summary)
        if on_cell:
            on_cell(cells[place.path])
        _write(folder, _in_order(cells.values(), names), names)
    return _in_order(cells.values(), names)


def held_requests(folder: Path) -> list[tuple[Path, SearchRequest]]:
    """Run folders in `folder` with their searches, as far as their configurations say.

    Raises:
        EspalierError: a configuration cannot be read.
    """
    found: list[tuple[Path, SearchRequest]] = []
    for path in sorted(folder.glob("*/")):
        try:
            stored = read_configuration(path)
            values = {name: value for name, value in stored.values.items() if name in grid.FIELDS} if stored else {}
            request = from_values(SearchRequest, {"problem": "-", **with_own_code(values)})
        except EspalierError as error:
            if _CELL.match(path.name):
                raise EspalierError(f"{path} is no cell of a sweep: {error}; name another --out") from error
            continue  # not of a sweep
        if stored and grid.is_cell_name(path.name, request):
            found.append((path, request))
    return found


def places_of(
    folder: Path,
    requests: Sequence[SearchRequest],
    held: Sequence[Place],
    fill: Callable[[SearchRequest], SearchRequest],
) -> list[Place]:
    """The run folder of each search: the one that has it, else a new one."""
    by_key = {grid.key_of(place.effective): place for place in reversed(held)}
    effective = [fill(request) for request in requests]
    varied = grid.varied_fields([*(place.effective for place in held), *effective])
    taken = {path.name for path in folder.glob("*/") if any(file.name != LOCK for file in path.iterdir())}
    places: list[Place] = []
    for request, full in zip(requests, effective, strict=True):
        if there := by_key.get(grid.key_of(full)):
            kept = replace(request, **{name: getattr(there.request, name) for name in unused_fields(request)})
            places.append(Place(there.path, kept, fill(kept)))
            continue
        name = first = grid.cell_name(full, varied)
        number = 2
        while name in taken:
            name, number = f"{first}-{number}", number + 1
        taken.add(name)
        places.append(Place(folder / name, request, full))
    return places


def _require_isolated(places: Iterable[Place]) -> None:
    """Check that no samples were searched beside others.

    Raises:
        EspalierError: names the first cell that has such samples.
    """
    for place in places:
        if (samples := read_samples(place.path)) and (stored := read_configuration(place.path)):
            beside = not stored.commands or any(each.get("in_flight") != 1 for each in stored.commands)
            if beside or any(sample.derived_from for sample in samples):
                what = "of searches that ran beside others" if beside else "derived from a larger search"
                raise EspalierError(f"--isolated: {place.path} holds samples {what}; name another --out")


def _cell(place: Place, names: Sequence[str], summary: Summary) -> Cell:
    settings = grid.settings_of(place.effective)
    return Cell(place.path.name, {name: settings[name] for name in names}, summary)


def _in_order(cells: Iterable[Cell], names: Sequence[str]) -> list[Cell]:
    """Cells by their settings; values of a choice in the order of their declaration."""

    def rank(name: str, value: Any) -> tuple[bool, bool, Any]:
        choices = list(kind) if issubclass(kind := grid.FIELDS[name].kind, StrEnum) else []
        known = choices.index(value) if value in choices else value or 0
        return value is not None, isinstance(value, CodeName), known

    return sorted(cells, key=lambda cell: [rank(name, cell.settings[name]) for name in names])


def _write(folder: Path, cells: Sequence[Cell], names: Sequence[str]) -> None:
    write_whole(folder / CELLS, [cell.to_dict() for cell in cells])
    rows = []
    for cell in cells:
        summary = asdict(cell.summary) | {"unanswered": sum(cell.summary.unanswered.values())}
        summary |= {} if cell.summary.is_graded else dict.fromkeys(("accuracy", "low", "high"))
        rows.append([*(cell.settings[name] for name in names), *(summary[column] for column in _COLUMNS)])
    write_whole(folder / TABLE, Table([*names, *_COLUMNS], rows).csv())
