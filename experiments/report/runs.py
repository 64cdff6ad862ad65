"""Reads run folders, as `espalier eval` and `espalier sweep` write them."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from espalier.engine.errors import EspalierError, InvalidRequestError
from espalier.experiments.runs.folder import CONFIG, SAMPLES, TREES, read_configuration, read_samples
from espalier.experiments.runs.record import Sample
from espalier.experiments.runs.summary import Summary, summarise
from espalier.search.algorithms import ALGORITHMS, has_independent_paths, unused_fields
from espalier.search.common_fields import CommonFields
from espalier.search.request import SearchRequest
from espalier.search.schema import declared, from_values

_SHORT_NAMES = {"beam_width": "N", "expansion": "M"}
_MODELS = ("generator", "verifier")
_INDEPENDENT = [name for name in ALGORITHMS if has_independent_paths(CommonFields("-", name))]
"""Searches whose paths are the same whatever scores them."""
_LONGEST_VALUE = 24


@dataclass(frozen=True)
class Run:
    """One run folder.

    Attributes:
        name: the part of the folder's path that sets it apart from the other runs.
        folder: the folder.
        configuration: what the samples depend on, by the names in `config.json`.
        command: the last command that ran in it; empty if it tells none.
        samples: one per search, ordered as in the file.
        asked: how many searches its commands asked for; None if the folder does not tell.
    """

    name: str
    folder: Path
    configuration: Mapping[str, Any]
    command: Mapping[str, Any]
    samples: Sequence[Sample]
    asked: int | None

    @cached_property
    def summary(self) -> Summary:
        """Totals over the samples."""
        return summarise(self.samples, self.benchmark, self.configuration)

    @property
    def unfinished(self) -> str:
        """The share that an interrupted run has, like `37 of 60 searches`; empty for one that is done."""
        done = len(self.samples)
        return f"{done} of {self.asked} searches" if done < (self.asked or 0) else ""

    @cached_property
    def by_problem(self) -> dict[str, list[Sample]]:
        """Samples of each problem, by its id."""
        found: dict[str, list[Sample]] = defaultdict(list)
        for sample in self.samples:
            found[sample.unique_id].append(sample)
        return dict(found)

    @property
    def algorithm(self) -> str:
        """Name of the search algorithm."""
        return str(self.configuration.get("algorithm", "unknown"))

    @property
    def benchmark(self) -> str:
        """Name or path of the benchmark."""
        return str(self.configuration.get("benchmark", "unknown"))

    @property
    def source(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """The benchmark as the last command found it, and its field map."""
        return self.command.get("benchmark", self.benchmark), tuple(self.command.get("field_map", {}).items())

    def setting(self, field: str) -> Any:
        """Value of a field of the configuration; None if it is missing or the algorithm does not use it."""
        return None if field in self._unused else self.configuration.get(field)

    @cached_property
    def request(self) -> SearchRequest | None:
        """The search of a problem; None for an algorithm of the user's own, whose code is not loaded."""
        known = {field.name for field in declared(SearchRequest)}
        values = {name: value for name, value in self.configuration.items() if name in known}
        try:
            return from_values(SearchRequest, {**values, "problem": "-"})
        except InvalidRequestError:
            return None

    @cached_property
    def _unused(self) -> frozenset[str]:
        """Fields that its algorithm does not use; none where that is not known."""
        return unused_fields(self.request) if self.request else frozenset()

    def shown_setting(self, field: str) -> str:
        """Value of a field as text."""
        value = self.setting(field)
        if field in _MODELS and value is not None:
            return self.command.get("models", {}).get(field, {}).get("name") or str(value)[:8]
        text = "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Load the runs in `paths`: run folders, and folders that hold run folders at any depth.

    Raises:
        EspalierError: a path holds no run, a file is damaged, or a run has no samples.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise EspalierError(f"no folder {str(path)!r}; name folders that `espalier eval --out` or sweep wrote")
        itself = (path / CONFIG).is_file() and (path / SAMPLES).is_file()
        found = [path] if itself else list(filter(_is_begun, _configured(path)))
        if not found:
            raise EspalierError(f"{path} holds no run: neither it nor a folder in it has {CONFIG} and {SAMPLES}")
        folders |= dict.fromkeys(folder.resolve() for folder in found)
    return [_load(folder, name) for folder, name in zip(folders, _names(list(folders)), strict=True)]


def load_recorded_paths(folder: Path) -> Run:
    """Load the run in `folder`, whose trees are kept and whose paths are the same whatever scores them.

    Raises:
        EspalierError: there is not one such run.
    """
    runs = load_runs([folder])
    if len(runs) > 1:
        raise EspalierError(f"{folder} holds {len(runs)} runs; name the folder of one")
    (run,) = runs
    if run.algorithm not in _INDEPENDENT:
        what = f"is a run of {run.algorithm}, whose paths depend on the verifier"
        raise EspalierError(f"{run.folder} {what}; other verifiers need paths of {' or '.join(_INDEPENDENT)}")
    if not (run.folder / TREES).is_file():
        raise EspalierError(f"{folder} holds no trees; run its command with --trees and another --out")
    return run


def runs_not_begun(paths: Sequence[Path]) -> list[str]:
    """Names of the run folders in `paths` that an interrupted sweep has made, and not come to."""
    folders = list(dict.fromkeys(folder.resolve() for path in paths for folder in _configured(path)))
    named = zip(folders, _names(folders), strict=True)
    return [name for folder, name in named if not _is_begun(folder) and _asks(folder)]


def _is_begun(folder: Path) -> bool:
    samples = folder / SAMPLES
    return samples.is_file() and samples.stat().st_size > 0


def _asks(folder: Path) -> bool:
    """Return true for a run that is to have searches."""
    try:
        stored = read_configuration(folder)
    except EspalierError:  # of something else
        return False
    return stored is not None and bool(stored.asked)


def differing_fields(runs: Sequence[Run]) -> list[str]:
    """Fields of the configuration with different values in those runs that have them, without the algorithm."""
    fields = dict.fromkeys(field for run in runs for field in run.configuration)
    values = {field: [run.setting(field) for run in runs] for field in fields if field != "algorithm"}
    used = {field: {json.dumps(value) for value in found if value is not None} for field, found in values.items()}
    return [field for field, found in used.items() if len(found) > 1]


def field_title(field: str) -> str:
    """Column title of a field: N, M, or its name in words."""
    return _SHORT_NAMES.get(field, field.replace("_", " "))


def _configured(path: Path) -> list[Path]:
    """Folders in `path`, and itself, that have a configuration."""
    return sorted((config.parent for config in path.rglob(CONFIG)), key=_natural)


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    """Sort key that orders numbers in names by value."""
    parts = re.split(r"(\d+)", str(path))
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _names(folders: list[Path]) -> list[str]:
    """Paths relative to the lowest folder that holds all of them."""
    if len(folders) < 2:
        return [folder.name for folder in folders]
    common = os.path.commonpath(folders)
    return [folder.relative_to(common).as_posix() for folder in folders]


def _load(folder: Path, name: str) -> Run:
    stored, samples = read_configuration(folder), read_samples(folder)
    if not stored or not samples:
        raise EspalierError(f"{folder / SAMPLES} holds no samples; run its command again to continue it")
    return Run(name, folder, stored.values, stored.commands[-1] if stored.commands else {}, samples, stored.asked)
