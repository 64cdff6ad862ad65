"""The folder that keeps an evaluation: its configuration, its samples, and the summary of all of them."""

import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TextIO

from espalier.engine.errors import EspalierError
from espalier.experiments.evaluation.benchmarks import Problem
from espalier.experiments.evaluation.sample import Sample
from espalier.experiments.evaluation.summary import Summary
from espalier.search.request import AnswerEquivalence, SearchRequest

_BEFORE: dict[str, Any] = {
    **{f.name: f.default for f in fields(SearchRequest) if f.default not in (MISSING, None)},
    "top_k": 0,
    "min_p": 0.0,
    "answer_equivalence": str(AnswerEquivalence.EXACT_MATCH),
}
"""What counts for a field that an older version's `config.json` lacks: how searches ran before there was the field.

That is a request's default, unless the field's coming changed what is done where it is left open; such fields are
named here.
"""
_FOLLOWED = ("verifier_family",)
"""Fields that older versions lack because they followed from others, which are compared."""
_COMMANDS = "commands"
"""Key of what is told and never compared: the commands that worked in the folder."""
_REQUEST = frozenset(field.name for field in fields(SearchRequest))
_LACKING = object()
_LONGEST_SHOWN = 60


class RunFolder:
    """A folder with one run's `config.json`, `samples.jsonl` and `summary.json`; running again resumes it.

    `config.json` says all that the samples depend on, and which commands worked here, with which versions and models.
    """

    def __init__(
        self,
        folder: Path,
        configuration: dict[str, Any],
        left_open: Collection[str] = (),
        command: Mapping[str, Any] | None = None,
    ) -> None:
        """Open or create `folder`.

        A run of an older version goes on where all that its `config.json` lacks is as it was before there was the
        field, and is written with it then.

        Args:
            folder: where; its parents are made too.
            configuration: what the samples depend on; see `run_configuration`.
            left_open: fields of it that have their default, which older versions wrote as null.
            command: what else is worth knowing of this command; None for nothing.

        Raises:
            EspalierError: when it cannot be made, or holds a run of another configuration or of none, or one that
                cannot be read.
        """
        self.folder = folder
        self._samples = folder / "samples.jsonl"
        config = folder / "config.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            found = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else configuration
        except OSError as error:
            raise EspalierError(f"cannot use {folder} for a run: {error}") from error
        except ValueError as error:
            raise EspalierError(f"{config} is damaged: {error}; name another --out") from error
        if self._samples.exists() and not config.is_file():
            raise EspalierError(f"{folder} holds samples and no config.json to say of what run; name another --out")
        if not isinstance(found, dict):
            raise EspalierError(f"{config} is damaged: it holds no object; name another --out")
        commands = found.pop(_COMMANDS, []) if found is not configuration else []
        if differing := _differing(found, configuration, left_open):
            raise EspalierError(
                f"{folder} holds a run of another configuration: {'; '.join(differing)}; name another --out"
            )
        if command and command not in commands:
            commands = [*commands, command]
        write_whole(config, configuration | ({_COMMANDS: commands} if commands else {}))

    def done(self) -> list[Sample]:
        """Samples of earlier runs, one for each problem; a last line cut short by a crash is left out.

        Raises:
            EspalierError: when a line before the last is damaged.
        """
        lines = (
            self._samples.read_text(encoding="utf-8", errors="replace").split("\n") if self._samples.is_file() else []
        )
        by_id: dict[str, Sample] = {}
        for number, line in enumerate(lines, start=1):
            try:
                sample = Sample(**json.loads(line)) if line.strip() else None
            except (ValueError, TypeError) as error:
                if number == len(lines):
                    break
                raise EspalierError(f"{self._samples}:{number} is damaged: {error}; mend or remove the line") from error
            if sample:
                by_id[sample.unique_id] = sample
        return list(by_id.values())

    def samples_of(self, problems: Iterable[Problem]) -> list[Sample]:
        """Samples of earlier runs for `problems`; not those of others, nor of what had the same name once.

        Raises:
            EspalierError: as `done` does.
        """
        by_id = {problem.unique_id: problem for problem in problems}
        return [s for s in self.done() if s.unique_id in by_id and s.is_of(by_id[s.unique_id])]

    def open_samples(self) -> TextIO:
        """`samples.jsonl`, to append to; what follows its last whole line is cut off first."""
        if self._samples.is_file():
            text = self._samples.read_text(encoding="utf-8", errors="replace")
            last = text[text.rfind("\n") + 1 :]
            if last:
                whole = text + "\n" if last in (json.dumps(asdict(s)) for s in self.done()) else text[: -len(last)]
                _replace(self._samples, whole)
        return self._samples.open("a", encoding="utf-8")

    def write_summary(self, summary: Summary) -> None:
        """Write `summary.json`."""
        write_whole(self.folder / "summary.json", asdict(summary))


def write_whole(path: Path, value: Any) -> None:
    """Write `value` to `path`, as text if it is text and else as JSON; who reads it finds all of it or none."""
    _replace(path, value if isinstance(value, str) else json.dumps(value, indent=2) + "\n")


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise EspalierError(f"cannot write {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def _differing(found: dict[str, Any], configuration: dict[str, Any], left_open: Collection[str]) -> list[str]:
    """Each field in which a configuration read from a file is another than `configuration`, with both values."""
    now = json.loads(json.dumps(configuration))
    there = {name: value for name, value in found.items() if value is not None or name not in _REQUEST}
    there = {name: value for name, value in _BEFORE.items() if name in now and name not in found} | there
    there |= {name: now[name] for name in _FOLLOWED if name in now and name not in found}
    there |= {name: now[name] for name in left_open if name in now and name not in there}
    names = sorted(name for name in there.keys() | now if name not in there or there[name] != now.get(name, _LACKING))
    return [f"{name} is {_shown(there, name, now)} there, {_shown(now, name, there)} now" for name in names]


def _shown(values: Mapping[str, Any], name: str, others: Mapping[str, Any]) -> str:
    """The value of `name`; of a long text the part from which on it is another than that of `others`."""
    if name not in values:
        return "not set"
    text, other = (json.dumps(each.get(name), ensure_ascii=False) for each in (values, others))
    if len(text) <= _LONGEST_SHOWN:
        return text
    alike = next((i for i, (one, two) in enumerate(zip(text, other, strict=False)) if one != two), 0)
    start = max(0, alike - _LONGEST_SHOWN // 3)
    part = text[start : start + _LONGEST_SHOWN]
    return "…" * (start > 0) + part + "…" * (start + _LONGEST_SHOWN < len(text))
