"""Reads run folders, as `espalier eval` and `espalier sweep` write them."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from espalier.engine.errors import EspalierError, InvalidRequestError
from espalier.experiments.evaluation.run_folder import ASKED, COMMANDS
from espalier.experiments.evaluation.sample import REFUSED, Unanswered
from espalier.search.algorithms import unused_fields
from espalier.search.request import SearchRequest
from espalier.search.schema import declared, from_values

CONFIG, SAMPLES, TREES = "config.json", "samples.jsonl", "trees.jsonl"
_SHORT_NAMES = {"beam_width": "N", "expansion": "M"}
_MODELS = ("generator", "verifier")
_LONGEST_VALUE = 24
_STEP_END = "\n\n"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One search of a run: a line of `samples.jsonl`, as far as a report needs it.

    `epoch` numbers the searches of one problem from 0. `asked` is a digest of the problem; empty in older runs.
    `unanswered` says why there is no answer; None if there is one, or the search was refused.
    `seconds` is the search's own time, during which others may have run; `wall_seconds` is its share of the run's time.
    These and the memory are None in a sample that was derived from a larger search.
    """

    unique_id: str
    epoch: int
    level: int | None
    subject: str | None
    asked: str
    gold: str
    answer: str
    correct: bool
    score: float | None
    text: str
    error: str
    refused: bool
    unanswered: Unanswered | None
    generated_tokens: float
    verifier_tokens: float
    seconds: float | None
    wall_seconds: float | None
    peak_kv_bytes: float | None

    @property
    def steps(self) -> list[str]:
        """Steps of the selected path; empty without one."""
        return [step for step in self.text.split(_STEP_END) if step.strip()]

    def same_problem(self, other: "Outcome") -> bool:
        """Whether both are of one problem: the same id, and the same digest or, in older runs, gold answer."""
        if self.asked and other.asked:
            return self.unique_id == other.unique_id and self.asked == other.asked
        return self.unique_id == other.unique_id and self.gold == other.gold


@dataclass(frozen=True)
class Run:
    """One run folder.

    Attributes:
        name: the part of the folder's path that sets it apart from the other runs.
        folder: the folder.
        configuration: what the samples depend on, by the names in `config.json`.
        models: names of the models by role; empty if the folder does not tell.
        outcomes: one per search, ordered as in the file.
        asked: how many searches its commands asked for; None if the folder does not tell.
        source: the benchmark as its last command found it, and the field map; empty if the folder does not tell.
    """

    name: str
    folder: Path
    configuration: dict[str, Any]
    models: dict[str, str]
    outcomes: tuple[Outcome, ...]
    asked: int | None = None
    source: tuple[str, tuple[tuple[str, str], ...]] = ("", ())

    @property
    def unfinished(self) -> str:
        """The share that an interrupted run has, like `37 of 60 searches`; empty for one that is done."""
        done = len(self.outcomes)
        return f"{done} of {self.asked} searches" if done < (self.asked or 0) else ""

    @cached_property
    def by_problem(self) -> dict[str, list[Outcome]]:
        """Outcomes of each problem, by its id."""
        found: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            found.setdefault(outcome.unique_id, []).append(outcome)
        return found

    @property
    def epochs(self) -> int:
        """Largest number of searches of one problem."""
        return max(len(found) for found in self.by_problem.values())

    @property
    def algorithm(self) -> str:
        """Name of the search algorithm."""
        return str(self.configuration.get("algorithm", "unknown"))

    @property
    def benchmark(self) -> str:
        """Name or path of the benchmark."""
        return str(self.configuration.get("benchmark", "unknown"))

    def setting(self, field: str) -> Any:
        """Value of a field of the configuration; None if it is missing or the algorithm does not use it."""
        return None if field in self._unused else self.configuration.get(field)

    @cached_property
    def _unused(self) -> frozenset[str]:
        """Fields that its algorithm does not use; none for an algorithm of the user's own, whose code is not loaded."""
        known = {field.name for field in declared(SearchRequest)}
        values = {name: value for name, value in self.configuration.items() if name in known}
        try:
            return unused_fields(from_values(SearchRequest, {**values, "problem": "-"}))
        except InvalidRequestError:
            return frozenset()

    def shown_setting(self, field: str) -> str:
        """Value of a field as text."""
        value = self.setting(field)
        if field in _MODELS and value is not None:
            return self.models.get(field) or str(value)[:8]
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
        found = list(_run_folders(path))
        if not found:
            raise EspalierError(f"{path} holds no run: neither it nor a folder in it has {CONFIG} and {SAMPLES}")
        folders |= dict.fromkeys(folder.resolve() for folder in found)
    return [_load(folder, name) for folder, name in zip(folders, _names(list(folders)), strict=True)]


def runs_not_begun(paths: Sequence[Path]) -> list[str]:
    """Names of the run folders in `paths` that an interrupted sweep has made, and not come to."""
    folders = sorted({config.parent.resolve() for path in paths for config in path.rglob(CONFIG)}, key=_natural)
    names = dict(zip(folders, _names(folders), strict=True)) if folders else {}
    return [names[folder] for folder in folders if not _size(folder / SAMPLES) and _asks(folder / CONFIG)]


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def _asks(config: Path) -> bool:
    """Return true for the configuration of a run that is to have searches."""
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # of something else
        return False
    return isinstance(found, dict) and bool(found.get(ASKED))


def differing_fields(runs: Sequence[Run]) -> list[str]:
    """Fields of the configuration with different values in those runs that have them, without the algorithm."""
    fields = dict.fromkeys(field for run in runs for field in run.configuration)
    values = {field: [run.setting(field) for run in runs] for field in fields if field != "algorithm"}
    return [
        field for field, found in values.items() if len({json.dumps(v) for v in found if v is not None}) > 1
    ]  # None: not used by that run


def field_title(field: str) -> str:
    """Column title of a field: N, M, or its name in words."""
    return _SHORT_NAMES.get(field, field.replace("_", " "))


def _run_folders(path: Path) -> Iterator[Path]:
    if (path / CONFIG).is_file() and (path / SAMPLES).is_file():
        yield path
        return
    inside = (file.parent for file in path.rglob(SAMPLES) if (file.parent / CONFIG).is_file() and _size(file))
    yield from sorted(inside, key=_natural)


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    """Sort key that orders numbers in names by value."""
    parts = re.split(r"(\d+)", str(path))
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _names(folders: list[Path]) -> list[str]:
    """Paths relative to the lowest folder that holds all of them."""
    if len(folders) == 1:
        return [folders[0].name]
    common = Path(os.path.commonpath(folders))
    return [folder.relative_to(common).as_posix() for folder in folders]


def _load(folder: Path, name: str) -> Run:
    try:
        configuration = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EspalierError(f"cannot read {folder / CONFIG}: {error}") from error
    if not isinstance(configuration, dict):
        raise EspalierError(f"{folder / CONFIG} is damaged: it is not a JSON object")
    commands, asked = configuration.pop(COMMANDS, None) or [{}], configuration.pop(ASKED, None)
    found: dict[tuple[str, int], Outcome] = {}
    for where, record in read_lines(folder / SAMPLES):
        try:
            outcome = _outcome(record)
        except KeyError as error:
            raise EspalierError(f"{where} is not a sample: it has no {error}") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise EspalierError(f"{where} is not a sample: {error}") from error
        found[outcome.unique_id, outcome.epoch] = outcome
    if not found:
        raise EspalierError(f"{folder / SAMPLES} holds no samples; run its command again to continue it")
    asked = asked if isinstance(asked, int) else None
    last = commands[-1] if isinstance(commands, list) and commands and isinstance(commands[-1], dict) else {}
    fields = last.get("field_map") or {}
    source = str(last.get("benchmark") or ""), tuple(fields.items()) if isinstance(fields, dict) else ()
    return Run(name, folder, configuration, _model_names(last), tuple(found.values()), asked, source)


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location and the object of each line of a JSONL file; skips an incomplete last line.

    Raises:
        EspalierError: the file cannot be read, or a line before the last is damaged.
    """
    damaged = ""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                if damaged:
                    raise EspalierError(f"{damaged}; repair or remove the line")
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    damaged = f"{path}:{number} is damaged: {error}"
                    continue
                if not isinstance(record, dict):
                    raise EspalierError(f"{path}:{number} is damaged: it is not a JSON object")
                yield f"{path}:{number}", record
    except OSError as error:
        raise EspalierError(f"cannot read {path}: {error.strerror}") from error


def _outcome(record: dict[str, Any]) -> Outcome:
    usage = record["usage"]
    derived, refused = bool(record.get("derived_from")), record.get("stop_reason") == REFUSED
    if not isinstance(record["correct"], bool):
        raise TypeError("correct must be true or false")
    return Outcome(
        unique_id=str(record["unique_id"]),
        epoch=int(record.get("epoch") or 0),
        level=record.get("level"),
        subject=record.get("subject"),
        asked=record.get("asked") or "",
        gold=str(record.get("gold", "")),
        answer=str(record.get("answer", "")),
        correct=record["correct"],
        score=record.get("score"),
        text=str(record.get("text", "")),
        error=str(record.get("error", "")),
        refused=refused,
        unanswered=None if refused or record.get("answer") else _unanswered(record),
        generated_tokens=float(usage.get("generated_tokens", 0)),
        verifier_tokens=float(usage.get("verifier_tokens", 0)),
        seconds=None if derived else float(usage.get("seconds", 0)),
        wall_seconds=None if derived else float(record.get("wall_seconds") or 0),
        peak_kv_bytes=None if derived else float(usage.get("peak_kv_bytes", 0)),
    )


def _unanswered(record: dict[str, Any]) -> Unanswered:
    """The reason for no answer; samples of older versions do not tell."""
    return Unanswered(record.get("unanswered") or Unanswered.UNKNOWN)


def _model_names(command: dict[str, Any]) -> dict[str, str]:
    """Names of the models in the last command of a run; empty if it does not tell."""
    models = command.get("models") or {}
    return {role: str(model["name"]) for role, model in models.items() if isinstance(model, dict) and "name" in model}
