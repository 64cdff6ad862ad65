"""The folder of an evaluation run: its configuration, samples and summary."""

import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TextIO

from espalier.engine.errors import EspalierError
from espalier.experiments.evaluation.benchmarks import Problem
from espalier.experiments.evaluation.folder_lock import folder_lock
from espalier.experiments.evaluation.sample import Sample
from espalier.experiments.evaluation.summary import Summary
from espalier.search.request import AnswerEquivalence, SearchRequest

_BEFORE: dict[str, Any] = {
    **{f.name: f.default for f in fields(SearchRequest) if f.default not in (MISSING, None)},
    "top_k": 0,
    "min_p": 0.0,
    "answer_equivalence": str(AnswerEquivalence.EXACT_MATCH),
}
"""Values assumed for fields that are missing in an older version's `config.json`: how searches ran at that time.

These are the request's defaults, except for fields whose introduction changed the behavior when left open.
"""
_FOLLOWED = ("verifier_family",)
"""Fields missing in older versions because they followed from other fields, which are compared."""
COMMANDS, ASKED = "commands", "asked"
"""Keys of what is not compared: the commands that ran in the folder, and how many searches they asked for together."""
_REQUEST = frozenset(field.name for field in fields(SearchRequest))
_PARTIAL = ".partial"
"""Suffix of a file that is being written; the id of the process that writes it comes before."""
_LACKING = object()
_LONGEST_SHOWN = 60


class RunFolder:
    """A folder with one run's `config.json`, `samples.jsonl` and `summary.json`; running the command again resumes.

    `config.json` holds everything that the samples depend on, and the commands that ran, with versions and models.
    """

    def __init__(
        self,
        folder: Path,
        configuration: dict[str, Any],
        left_open: Collection[str] = (),
        command: Mapping[str, Any] | None = None,
    ) -> None:
        """Open or create `folder`.

        A run of an older version is resumed if the fields missing in its `config.json` had the values assumed for them;
        they are then added.

        Args:
            folder: path of the folder; missing parents are created.
            configuration: what the samples depend on; see `run_configuration`.
            left_open: fields of the request left at their default, which older versions stored as null.
            command: further information on this command; None for none.

        Raises:
            EspalierError: the folder cannot be created or read, is in use by another process, holds a run of another
                configuration, or holds samples without a configuration.
        """
        self.folder = folder
        self._samples = folder / "samples.jsonl"
        self._trees = folder / "trees.jsonl"
        with folder_lock(folder):
            self._configure(configuration, left_open, command)

    def _configure(
        self, configuration: dict[str, Any], left_open: Collection[str], command: Mapping[str, Any] | None
    ) -> None:
        """Compare the configuration with the stored one, and store it with the command; see `__init__`."""
        folder = self.folder
        config = folder / "config.json"
        try:
            remove_partial_files(folder)
            found = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else configuration
        except OSError as error:
            raise EspalierError(f"cannot use {folder} for a run: {error}") from error
        except ValueError as error:
            raise EspalierError(f"{config} is damaged: {error}; name another --out") from error
        if self._samples.exists() and not config.is_file():
            raise EspalierError(f"{folder} holds samples without a config.json; name another --out")
        if not isinstance(found, dict):
            raise EspalierError(f"{config} is damaged: it is not a JSON object; name another --out")
        stored = found is not configuration
        commands, asked = (found.pop(COMMANDS, []), found.pop(ASKED, None)) if stored else ([], None)
        if differing := _differing(found, configuration, left_open, _models_of(commands[-1:]), _models_of([command])):
            raise EspalierError(
                f"{folder} holds a run of another configuration: {'; '.join(differing)}; name another --out"
            )
        if command and command not in commands:
            commands = [*commands, command]
        self._configuration = configuration | ({COMMANDS: commands} if commands else {})
        self._asked: int | None = asked if isinstance(asked, int) else None
        self._write_configuration()

    def _write_configuration(self) -> None:
        asked = {} if self._asked is None else {ASKED: self._asked}
        write_whole(self.folder / "config.json", self._configuration | asked)

    def ask(self, searches: int) -> None:
        """Store that the run is to have so many searches, so that a report can tell an interrupted one.

        Raises:
            EspalierError: another process writes to the folder.
        """
        if searches > (self._asked or 0):
            self._asked = searches
            with folder_lock(self.folder):
                self._write_configuration()

    def done(self) -> list[Sample]:
        """Load the samples of earlier runs, one per problem and epoch; an incomplete last line is skipped.

        Raises:
            EspalierError: a line before the last is damaged.
        """
        return read_samples(self.folder)

    def samples_of(self, problems: Iterable[Problem]) -> list[Sample]:
        """Samples of earlier runs for `problems`, without those of a different problem with the same id.

        Raises:
            EspalierError: see `done`.
        """
        by_id = {problem.unique_id: problem for problem in problems}
        return [s for s in self.done() if s.unique_id in by_id and s.is_of(by_id[s.unique_id])]

    def open_samples(self) -> TextIO:
        """Open `samples.jsonl` for appending, after removing an incomplete last line."""
        if self._samples.is_file():
            text = self._samples.read_text(encoding="utf-8", errors="replace")
            last = text[text.rfind("\n") + 1 :]
            if last:
                whole = text + "\n" if last in (json.dumps(asdict(s)) for s in self.done()) else text[: -len(last)]
                _replace(self._samples, whole)
        return self._samples.open("a", encoding="utf-8")

    def open_trees(self, wanted: Collection[tuple[str, int]] = ()) -> TextIO:
        """Open `trees.jsonl`, the search tree of each sample, for appending.

        Each tree is written before its sample, so that an interruption may leave a tree without one. Trees without a
        sample, trees of the searches `wanted`, which run again, and an incomplete last line are removed before; of
        several trees of one search, the last is kept.

        Raises:
            EspalierError: a line before the last is damaged, or the file cannot be written.
        """
        if self._trees.is_file():
            keep = {sample.key for sample in self.done() if not sample.refused}.difference(wanted)
            self._keep_trees(keep)
        return self._trees.open("a", encoding="utf-8")

    def _keep_trees(self, keep: Collection[tuple[str, int]]) -> None:
        """Remove all lines of `trees.jsonl` but the last one of each key in `keep`."""
        last: dict[tuple[str, int], int] = {}
        with self._trees.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    tree = json.loads(line)
                    last[tree["unique_id"], tree.get("epoch", 0)] = number
                except (ValueError, TypeError, KeyError) as error:
                    raise EspalierError(
                        f"{self._trees}:{number} is damaged: {error}; repair or remove the line"
                    ) from error
            kept = {number for key, number in last.items() if key in keep}
            stream.seek(0)
            _replace(self._trees, (line for number, line in enumerate(stream, start=1) if number in kept))

    def write_summary(self, summary: Summary) -> None:
        """Write `summary.json`."""
        write_whole(self.folder / "summary.json", asdict(summary))


def read_samples(folder: Path) -> list[Sample]:
    """Load the samples of a run folder without opening it for a run; see `RunFolder.done`."""
    path = folder / "samples.jsonl"
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []
    by_key: dict[tuple[str, int], Sample] = {}
    for number, line in enumerate(lines, start=1):
        try:
            sample = Sample(**json.loads(line)) if line.strip() else None
        except (ValueError, TypeError) as error:
            if number == len(lines):
                break
            raise EspalierError(f"{path}:{number} is damaged: {error}; repair or remove the line") from error
        if sample:
            by_key[sample.key] = sample
    return list(by_key.values())


def write_whole(path: Path, value: Any) -> None:
    """Write `value` to `path` atomically, a string as text and anything else as JSON."""
    _replace(path, value if isinstance(value, str) else json.dumps(value, indent=2) + "\n")


def remove_partial_files(folder: Path) -> None:
    """Remove files that processes were writing to `folder` when they were killed."""
    for path in folder.glob(f"*{_PARTIAL}"):
        writer = path.name.removesuffix(_PARTIAL).rpartition(".")[2]
        if writer.isdecimal() and (int(writer) == os.getpid() or not _is_running(int(writer))):
            path.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # not ours, but there
        pass
    return True


def _replace(path: Path, content: str | Iterable[bytes]) -> None:
    """Replace `path` atomically by a text, or by lines of bytes."""
    partial = path.with_name(f"{path.name}.{os.getpid()}{_PARTIAL}")
    try:
        if isinstance(content, str):
            partial.write_text(content, encoding="utf-8")
        else:
            with partial.open("wb") as stream:
                stream.writelines(content)
        partial.replace(path)
    except OSError as error:
        raise EspalierError(f"cannot write {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


_Models = Mapping[str, Mapping[str, Any]]
_OPTIONS = {"name": "--{}", "quantization": "--{}-quantization", "folder": "the folder of the {}"}
"""Options by the names under which a command records a model; only the digest of its files is compared."""


def _models_of(commands: Iterable[Any]) -> _Models:
    """The models of a command, by role."""
    return next((each["models"] for each in commands if isinstance(each, Mapping) and "models" in each), {})


def _why_another(role: str, there: _Models, now: _Models) -> list[str]:
    """Describe how the model of a role differs from that of the last command, as far as the commands tell."""
    before, after = there.get(role, {}), now.get(role, {})
    return [
        f"{option.format(role)} is {_shown(before, name, after)} there, {_shown(after, name, before)} now"
        for name, option in _OPTIONS.items()
        if name in before and name in after and before[name] != after[name]
    ][:2]


def _differing(
    found: dict[str, Any],
    configuration: dict[str, Any],
    left_open: Collection[str],
    models_there: _Models,
    models_now: _Models,
) -> list[str]:
    """Describe each field whose value in the stored configuration differs from `configuration`, with both values.

    A digest says little, so a model is described by the options of the last command and of this one where they differ.
    """
    now = json.loads(json.dumps(configuration))
    there = {name: value for name, value in found.items() if value is not None or name not in _REQUEST}
    there = {name: value for name, value in _BEFORE.items() if name in now and name not in found} | there
    there |= {name: now[name] for name in _FOLLOWED if name in now and name not in found}
    there |= {name: now[name] for name in left_open if name in now and name not in there}
    names = sorted(name for name in there.keys() | now if name not in there or there[name] != now.get(name, _LACKING))
    described = {name: _why_another(name, models_there, models_now) for name in names}
    return [
        line
        for name in names
        for line in described[name] or [f"{name} is {_shown(there, name, now)} there, {_shown(now, name, there)} now"]
    ]


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
