"""Reads solutions with labelled steps, in the formats of ProcessBench and PRMBench.

A file is JSON in UTF-8: one object per line, or one array of objects. In a folder, each such file is a subset.

- ProcessBench (Zheng et al. 2024, arXiv:2412.06559): `id`, `generator`, `problem`, `steps`, `final_answer_correct`, and
  `label`, the index from 0 of the first wrong step, or -1 if all are right. Later steps have no label.
- PRMBench (Song et al. 2025, arXiv:2501.03124): `idx`, `modified_question`, `modified_process`, `error_steps` (numbers
  from 1 of all wrong steps) and `classification`. Its original solutions are not scored: they do not enter PRMScore.
"""

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from espalier.experiments.runs.benchmark_files import BenchmarkError, is_path, read_json


class Format(StrEnum):
    """Format of a benchmark's records."""

    PROCESSBENCH = "processbench"
    PRMBENCH = "prmbench"


@dataclass(frozen=True, slots=True)
class Solution:
    """A solution with known wrong steps.

    Attributes:
        unique_id: unique within the benchmark.
        steps: texts of the steps, none blank.
        wrong: indices from 0 of the wrong steps, ascending; of ProcessBench, only the first.
        subset: name of the file.
        generator: name of the model that wrote it, empty if unknown.
        classification: kind of the planted error, empty if unknown.
    """

    unique_id: str
    problem: str
    steps: tuple[str, ...]
    wrong: tuple[int, ...]
    subset: str
    generator: str = ""
    classification: str = ""

    @property
    def label(self) -> int:
        """Index of the first wrong step, -1 if there is none."""
        return self.wrong[0] if self.wrong else -1


def choose(solutions: Sequence[Solution], limit: int | None, shuffle_seed: int | None = None) -> list[Solution]:
    """The first solutions of each subset.

    Args:
        solutions: all of a benchmark.
        limit: how many of each subset; None for all.
        shuffle_seed: seed of their order; None keeps the benchmark's.
    """
    in_order = solutions if shuffle_seed is None else random.Random(shuffle_seed).sample(solutions, len(solutions))
    counts: Counter[str] = Counter()
    chosen = []
    for solution in in_order:
        counts[solution.subset] += 1
        if limit is None or counts[solution.subset] <= limit:
            chosen.append(solution)
    return chosen


def read_solutions(path: Path, forced: Format | None = None) -> tuple[Format, list[Solution]]:
    """Read a file, or a folder with one file for each subset.

    Args:
        path: the file or folder.
        forced: format of the records; None recognizes it by the first record's fields.

    Returns:
        The format, and the solutions in the order of files (by name) and records.

    Raises:
        BenchmarkError: a file is missing or invalid.
    """
    files = [path]
    if is_path(Path.is_dir, path):
        files = sorted(each for each in path.iterdir() if each.suffix.lower() in (".json", ".jsonl"))
    if not files or not all(is_path(Path.is_file, file) for file in files):
        raise BenchmarkError(f"no benchmark {str(path)!r}: neither `demo`, a file, nor a folder of .json or .jsonl")
    form, solutions, places = forced, [], {}
    for file in files:
        for place, _, record in read_json(file):
            fields = _Fields(place, record)
            form = form or _recognized(fields)
            solution = _processbench(fields, file.stem) if form is Format.PROCESSBENCH else _prmbench(fields, file.stem)
            if earlier := places.get(solution.unique_id):
                if form is Format.PRMBENCH:
                    continue  # the published evaluation also keeps the first of these
                raise BenchmarkError(f"{place}: id: {solution.unique_id!r} is not unique, {earlier} has it too")
            places[solution.unique_id] = place
            solutions.append(solution)
    if form is None or not solutions:
        raise BenchmarkError(f"{path} holds no solutions")
    return form, solutions


class _Fields:
    """The fields of one record, checked for their types."""

    def __init__(self, place: str, record: Any) -> None:
        self._place = place
        if not isinstance(record, dict):
            raise BenchmarkError(f"{place}: the record is not an object")
        self.record: dict[str, Any] = record

    def text(self, name: str, default: str | None = None) -> str:
        value = self.record.get(name, default)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or (default is None and not value.strip()):
            raise self.error(name, "must be a text that is not blank")
        return value

    def steps(self, name: str) -> tuple[str, ...]:
        steps = self.record.get(name)
        if not isinstance(steps, list) or not steps:
            raise self.error(name, "must be a list of steps")
        for number, step in enumerate(steps, start=1):
            if not isinstance(step, str) or not step.strip():
                raise self.error(name, f"step {number} must be a text that is not blank")
        return tuple(steps)

    def integer(self, name: str, value: Any, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"must be a whole number from {low} to {high}, is {json.dumps(value)}")
        return value

    def error(self, name: str, rule: str) -> BenchmarkError:
        missing = "" if name in self.record else "; the record has no such field"
        return BenchmarkError(f"{self._place}: {name}: {rule}{missing}")


def _recognized(fields: _Fields) -> Format:
    if "modified_process" in fields.record:
        return Format.PRMBENCH
    if "steps" in fields.record:
        return Format.PROCESSBENCH
    raise fields.error("steps", "neither ProcessBench's `steps` nor PRMBench's `modified_process` is there")


def _processbench(fields: _Fields, subset: str) -> Solution:
    steps = fields.steps("steps")
    label = fields.integer("label", fields.record.get("label"), -1, len(steps) - 1)
    wrong = (label,) if label >= 0 else ()
    generator, problem = fields.text("generator", ""), fields.text("problem")
    return Solution(fields.text("id"), problem, steps, wrong, subset, generator)


def _prmbench(fields: _Fields, subset: str) -> Solution:
    steps = fields.steps("modified_process")
    errors = fields.record.get("error_steps")
    if not isinstance(errors, list):
        raise fields.error("error_steps", "must be a list of step numbers from 1")
    wrong = tuple(sorted({fields.integer("error_steps", each, 1, len(steps)) - 1 for each in errors}))
    kind = fields.text("classification")
    return Solution(
        f"{kind}_{fields.text('idx')}", fields.text("modified_question"), steps, wrong, subset, classification=kind
    )
