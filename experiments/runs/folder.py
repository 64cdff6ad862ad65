"""The folder of an evaluation run: its configuration, samples and summary."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from espalier.engine.errors import EspalierError
from espalier.experiments.runs import files
from espalier.experiments.runs.benchmarks import Problem
from espalier.experiments.runs.record import Sample
from espalier.experiments.runs.summary import Summary

CONFIG, SAMPLES, TREES = "config.json", "samples.jsonl", "trees.jsonl"
COMMANDS, ASKED = "commands", "asked"
"""Keys of what is not compared: the commands that ran in the folder, and how many searches they asked for together."""
_LACKING = object()
_LONGEST_SHOWN = 60


class RunFolder:
    """A folder with one run's `config.json`, `samples.jsonl` and `summary.json`; running the command again resumes.

    `config.json` holds everything that the samples depend on, and the commands that ran, with versions and models.
    """

    def __init__(self, folder: Path, configuration: dict[str, Any], command: Mapping[str, Any] | None = None) -> None:
        """Open or create `folder`.

        Args:
            folder: path of the folder; missing parents are created.
            configuration: what the samples depend on; see `Evaluation.configuration`.
            command: further information on this command; None for none.

        Raises:
            EspalierError: the folder cannot be created or read, is in use by another process, holds a run of another
                configuration, or holds samples without a configuration.
        """
        self.folder = folder
        self._samples = folder / SAMPLES
        self._trees = folder / TREES
        with files.folder_lock(folder):
            files.remove_partial_files(folder)
            if (stored := read_configuration(folder)) is None and self._samples.exists():
                raise EspalierError(f"{folder} holds samples without a {CONFIG}; name another --out")
            stored = stored or StoredConfiguration(configuration)
            models = [(each or {}).get("models", {}) for each in ((stored.commands or [None])[-1], command)]
            if differing := _differing(stored.values, configuration, *models):
                what = f"a run of another configuration: {'; '.join(differing)}"
                raise EspalierError(f"{folder} holds {what}; name another --out")
            commands = [*stored.commands, *([command] if command and command not in stored.commands else [])]
            self._configuration = configuration | ({COMMANDS: commands} if commands else {})
            self._asked = stored.asked
            self._write_configuration()

    def _write_configuration(self) -> None:
        asked = {} if self._asked is None else {ASKED: self._asked}
        files.write_whole(self.folder / CONFIG, self._configuration | asked)

    def ask(self, searches: int) -> None:
        """Store that the run is to have so many searches, so that a report can tell an interrupted one.

        Raises:
            EspalierError: another process writes to the folder.
        """
        if searches > (self._asked or 0):
            self._asked = searches
            with files.folder_lock(self.folder):
                self._write_configuration()

    def done(self) -> list[Sample]:
        """Load the samples of earlier commands; see `read_samples`."""
        return read_samples(self.folder)

    def samples_of(self, problems: Iterable[Problem]) -> list[Sample]:
        """Samples of earlier runs for `problems`, without those of a different problem with the same id.

        Raises:
            EspalierError: see `done`.
        """
        by_id = {problem.unique_id: problem for problem in problems}
        return [s for s in self.done() if s.unique_id in by_id and s.is_of(by_id[s.unique_id])]

    def open_samples(self) -> FileIO:
        """Open `samples.jsonl` for appending; see `open_lines`."""
        return files.open_lines(self._samples)

    def open_trees(self, wanted: Collection[tuple[str, int]] = ()) -> FileIO:
        """Open `trees.jsonl`, the search tree of each sample, for appending.

        Each tree is written before its sample, so that an interruption may leave a tree without one. Trees without a
        sample, trees of the searches `wanted`, which run again, and an incomplete last line are removed before; of
        several trees of one search, the last is kept.

        Raises:
            EspalierError: a line before the last is damaged, or the file cannot be written.
        """
        keep = {sample.key for sample in self.done() if not sample.refused}.difference(wanted)
        last: dict[tuple[str, int], str] = {}
        for place, tree in files.read_lines(self._trees):
            with files.damage_named(place):
                last[tree["unique_id"], tree["epoch"]] = place
        kept = {place for key, place in last.items() if key in keep}
        if self._trees.is_file():
            with self._trees.open("rb") as stream, files.replacing(self._trees) as partial, partial.open("wb") as whole:
                lines = enumerate(stream, start=1)
                whole.writelines(line for number, line in lines if f"{self._trees}:{number}" in kept)
        return files.open_lines(self._trees)

    def write_summary(self, summary: Summary) -> None:
        """Write `summary.json`."""
        files.write_whole(self.folder / "summary.json", summary.to_dict())


def read_samples(folder: Path) -> list[Sample]:
    """Load the samples of a run folder, the last of each problem and epoch; an incomplete last line is skipped.

    Raises:
        EspalierError: a line is damaged.
    """
    by_key: dict[tuple[str, int], Sample] = {}
    for place, record in files.read_lines(folder / SAMPLES):
        with files.damage_named(place):
            sample = Sample(**record)
        by_key[sample.key] = sample
    return list(by_key.values())


@dataclass(frozen=True, slots=True)
class StoredConfiguration:
    """The content of a `config.json`.

    Attributes:
        values: everything that the samples depend on.
        commands: the commands that ran in the folder.
        asked: how many searches they asked for together; None if they have not yet.
    """

    values: dict[str, Any]
    commands: list[dict[str, Any]] = field(default_factory=list)
    asked: int | None = None


def read_configuration(folder: Path) -> StoredConfiguration | None:
    """Load a run folder's configuration; None without one.

    Raises:
        EspalierError: it cannot be read, or is none.
    """
    config = folder / CONFIG
    try:
        if not config.is_file():
            return None
        values = json.loads(config.read_text(encoding="utf-8"))
        commands, asked = values.pop(COMMANDS, []), values.pop(ASKED, None)
        return StoredConfiguration(values, list(map(dict, commands)), None if asked is None else int(asked))
    except OSError as error:
        raise EspalierError(f"cannot use {folder} for a run: {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise EspalierError(f"{config} is damaged: {error}; name another --out") from error


_Models = Mapping[str, Mapping[str, Any]]
_OPTIONS = {"name": "--{}", "quantization": "--{}-quantization", "folder": "the folder of the {}"}
"""Options by the names under which a command records a model; only the digest of its files is compared."""


def _why_another(role: str, there: _Models, now: _Models) -> list[str]:
    """Describe how the model of a role differs from that of the last command, as far as the commands tell."""
    before, after = there.get(role, {}), now.get(role, {})
    return [
        f"{option.format(role)} is {_shown(before, name, after)} there, {_shown(after, name, before)} now"
        for name, option in _OPTIONS.items()
        if name in before and name in after and before[name] != after[name]
    ][:2]


def _differing(
    there: dict[str, Any], configuration: dict[str, Any], models_there: _Models, models_now: _Models
) -> list[str]:
    """Describe each field whose value in the stored configuration differs from `configuration`, with both values.

    A digest says little, so a model is described by the options of the last command and of this one where they differ.
    """
    now = json.loads(json.dumps(configuration))
    found: list[str] = []
    for name in sorted(there.keys() | now):
        if there.get(name, _LACKING) != now.get(name, _LACKING):
            values = f"{name} is {_shown(there, name, now)} there, {_shown(now, name, there)} now"
            found += _why_another(name, models_there, models_now) or [values]
    return found


def _shown(values: Mapping[str, Any], name: str, others: Mapping[str, Any]) -> str:
    """Format the value of `name`; of a long text, the part around the first difference."""
    if name not in values:
        return "not set"
    text, other = (json.dumps(each.get(name), ensure_ascii=False) for each in (values, others))
    if len(text) <= _LONGEST_SHOWN:
        return text
    alike = next((i for i, (one, two) in enumerate(zip(text, other, strict=False)) if one != two), 0)
    start = max(0, alike - _LONGEST_SHOWN // 3)
    part = text[start : start + _LONGEST_SHOWN]
    return "…" * (start > 0) + part + "…" * (start + _LONGEST_SHOWN < len(text))
