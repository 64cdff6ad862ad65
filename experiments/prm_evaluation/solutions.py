"""Reads solutions with labelled steps, in the formats of benchmarks and of training data.

A file is JSON in UTF-8: one object per line, or one array of objects. In a folder, each such file is a subset.

- ProcessBench (Zheng et al. 2024, arXiv:2412.06559): `id`, `generator`, `problem`, `steps`, `final_answer_correct`, and
  `label`, the index from 0 of the first wrong step, or -1 if all are right. Later steps have no label.
- PRMBench (Song et al. 2025, arXiv:2501.03124): `idx`, `modified_question`, `modified_process`, `error_steps` (numbers
  from 1 of all wrong steps) and `classification`. Its original solutions are not scored: they do not enter PRMScore.
- TRL's stepwise supervision: `prompt`, `completions` (the steps) and `labels` (true or false for each).
- Math-Shepherd (Wang et al. 2024, arXiv:2312.08935): `input`, the problem and steps that begin with "Step 1:" and so
  on, each with a mark behind it, and `label`, the same with `+` or `-` in place of the mark.
- PRM800K (Lightman et al. 2023, arXiv:2305.20050): `question` with its `problem`, and `label` with `steps`. The
  solution is made of the completion that was chosen at each step, or the human's; where none was, of the first that is
  rated wrong, else of the first, and ends there. A rating of 0, neutral, counts as right, as in the paper.

Of all but PRMBench, only the first wrong step is read: what a right step behind it is, is not the same to all of them.
A record without an `id` is named by its file and its number there.
"""

import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from espalier.experiments.runs.benchmark_files import BenchmarkError, read_json


class Format(StrEnum):
    """Format of a benchmark's records."""

    PROCESSBENCH = "processbench"
    PRMBENCH = "prmbench"
    TRL = "trl"
    MATH_SHEPHERD = "math-shepherd"
    PRM800K = "prm800k"


@dataclass(frozen=True, slots=True)
class Solution:
    """A solution with known wrong steps.

    Attributes:
        unique_id: unique within the benchmark.
        steps: texts of the steps, none blank.
        wrong: indices from 0 of the wrong steps, ascending; of all formats but PRMBench's, only the first.
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
    if os.path.isdir(path):
        files = sorted(each for each in path.iterdir() if each.suffix.lower() in (".json", ".jsonl"))
    if not files or not all(map(os.path.isfile, files)):
        raise BenchmarkError(f"no benchmark {str(path)!r}: neither `demo`, a file, nor a folder of .json or .jsonl")
    form, solutions, places = forced, [], {}
    for file in files:
        for place, number, record in read_json(file):
            fields = _Fields(place, record, file.stem, f"{file.name}:{number}")
            form = form or _recognized(fields)
            _, read = _FORMATS[form]
            solution = read(fields)
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
    """The fields of one record, checked for their types, with its `subset`, and its `name` if it has no id."""

    def __init__(self, place: str, record: Any, subset: str, name: str, within: str = "") -> None:
        self._place, self._within, self.subset, self.name = place, within, subset, name
        if not isinstance(record, dict):
            raise BenchmarkError(f"{place}: {f'{within}: must be' if within else 'the record is not'} an object")
        self.record: dict[str, Any] = record

    def inner(self, name: str, value: Any) -> "_Fields":
        """The fields of an object, which stands in a field of this record."""
        within = f"{self._within}.{name}" if self._within else name
        return _Fields(self._place, value, self.subset, self.name, within)

    def listed(self, name: str, what: str) -> list[Any]:
        if not isinstance(found := self.record.get(name), list) or not found:
            raise self.error(name, f"must be a list of {what}")
        return found

    def text(self, name: str, default: str | None = None) -> str:
        value = self.record.get(name, default)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or (default is None and not value.strip()):
            raise self.error(name, "must be a text that is not blank")
        return value

    def steps(self, name: str) -> tuple[str, ...]:
        steps = self.listed(name, "steps")
        for number, step in enumerate(steps, start=1):
            if not isinstance(step, str) or not step.strip():
                raise self.error(name, f"step {number} must be a text that is not blank")
        return tuple(steps)

    def integer(self, name: str, value: Any, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"must be a whole number from {low} to {high}, is {json.dumps(value)}")
        return value

    def error(self, name: str, rule: str) -> BenchmarkError:
        missing = "" if name in self.record else f"; {self._within or 'the record'} has no such field"
        return BenchmarkError(f"{self._place}: {f'{self._within}.{name}' if self._within else name}: {rule}{missing}")


def _processbench(fields: _Fields) -> Solution:
    steps = fields.steps("steps")
    label = fields.integer("label", fields.record.get("label"), -1, len(steps) - 1)
    wrong = (label,) if label >= 0 else ()
    generator, problem = fields.text("generator", ""), fields.text("problem")
    return Solution(fields.text("id"), problem, steps, wrong, fields.subset, generator)


def _prmbench(fields: _Fields) -> Solution:
    steps = fields.steps("modified_process")
    errors = fields.record.get("error_steps")
    if not isinstance(errors, list):
        raise fields.error("error_steps", "must be a list of step numbers from 1")
    wrong = tuple(sorted({fields.integer("error_steps", each, 1, len(steps)) - 1 for each in errors}))
    kind, problem = fields.text("classification"), fields.text("modified_question")
    return Solution(f"{kind}_{fields.text('idx')}", problem, steps, wrong, fields.subset, classification=kind)


def _trl(fields: _Fields) -> Solution:
    steps, labels = fields.steps("completions"), fields.listed("labels", "true or false")
    if len(labels) != len(steps):
        raise fields.error("labels", f"must be as many as the completions, {len(steps)}, are {len(labels)}")
    for number, label in enumerate(labels, start=1):
        if label not in (True, False):
            raise fields.error("labels", f"label {number} must be true or false, is {json.dumps(label)}")
    return _labelled(fields, fields.text("prompt"), steps, list(map(bool, labels)))


_MARK = "ки"
"""Stands behind each step in Math-Shepherd's `input`."""
_FIRST_STEP = re.compile(r"Step\s*1\s*:")


def _math_shepherd(fields: _Fields) -> Solution:
    text, label = fields.text("input"), fields.text("label")
    parts = re.split(rf"(?<!\S){re.escape(_mark_in(text, label))}(?!\S)", text)
    if len(parts) < 2 or parts.pop().strip():
        raise fields.error("input", f"must have a mark, like {_MARK!r}, behind each step and nothing behind the last")
    if not (first := _FIRST_STEP.search(parts[0])):
        raise fields.error("input", "must have 'Step 1:' between the problem and the first step")
    problem, parts[0] = parts[0][: first.start()].strip(), parts[0][first.start() :]
    if not problem:
        raise fields.error("input", "must have a problem before 'Step 1:'")
    right, at = list[bool](), first.start()
    for number, part in enumerate(parts, start=1):
        if not part.strip():
            raise fields.error("input", f"step {number} must be a text that is not blank")
        sign = label[at + len(part) : at + len(part) + 1]
        if label[at : at + len(part)] != part or sign not in ("+", "-"):
            raise fields.error("label", f"must be the input with + or - for each mark; is not from step {number} on")
        right.append(sign == "+")
        at += len(part) + 1
    if label[at:].strip():
        raise fields.error("label", f"must be the input with + or - for each mark; has more behind step {len(parts)}")
    return _labelled(fields, problem, tuple(part.strip() for part in parts), right)


def _mark_in(text: str, label: str) -> str:
    """The mark behind steps: what the input has where the label has a sign; usually `_MARK`."""
    same = next((i for i, (one, other) in enumerate(zip(text, label, strict=False)) if one != other), len(text))
    found = re.match(r"\S+", text[same:])
    return found[0] if found and label[same : same + 1] in ("+", "-") else _MARK


def _prm800k(fields: _Fields) -> Solution:
    problem = fields.inner("question", fields.record.get("question")).text("problem")
    label = fields.inner("label", fields.record.get("label"))
    solution: list[tuple[str, bool]] = []
    for number, step in enumerate(label.listed("steps", "steps"), start=1):
        completion, goes_on = _chosen(label.inner(f"steps[{number}]", step))
        solution += completion
        if not goes_on:
            break
    if not solution:
        raise label.error("steps", "must have a completion in the first step")
    steps, right = zip(*solution, strict=True)
    return _labelled(fields, problem, steps, right)


def _chosen(step: _Fields) -> tuple[list[tuple[str, bool]], bool]:
    """The completion of a step that a solution goes on with or ends with, whether it is right, and whether it goes on.

    There is none in a step without any.
    """
    human, chosen = step.record.get("human_completion"), step.record.get("chosen_completion")
    given = step.record.get("completions")
    completions = [] if given in (None, []) else step.listed("completions", "completions")
    if chosen is not None:
        at = step.integer("chosen_completion", chosen, 0, len(completions) - 1)
        return [_rated(step.inner(f"completions[{at}]", completions[at]))], True
    if human is not None:
        text = {"text": human} if isinstance(human, str) else human
        return [(step.inner("human_completion", text).text("text"), True)], True
    rated = [_rated(step.inner(f"completions[{at}]", each)) for at, each in enumerate(completions)]
    return [each for each in rated if not each[1]][:1] or rated[:1], False


def _rated(completion: _Fields) -> tuple[str, bool]:
    """A completion's text, and whether it is right or neutral."""
    rating = completion.integer("rating", completion.record.get("rating"), -1, 1)
    return completion.text("text"), rating >= 0


def _labelled(fields: _Fields, problem: str, steps: tuple[str, ...], right: Sequence[bool]) -> Solution:
    """A solution of training data, of which the first wrong step counts."""
    wrong = (right.index(False),) if False in right else ()
    unique_id = fields.text("id", fields.name)
    return Solution(unique_id if unique_id.strip() else fields.name, problem, steps, wrong, fields.subset)


_FORMATS: Mapping[Format, tuple[str, Callable[[_Fields], Solution]]] = {
    Format.PRMBENCH: ("modified_process", _prmbench),
    Format.PROCESSBENCH: ("steps", _processbench),
    Format.TRL: ("completions", _trl),
    Format.MATH_SHEPHERD: ("input", _math_shepherd),
    Format.PRM800K: ("question", _prm800k),
}
"""The field by which a record of each format is recognized, and its reader."""


def _recognized(fields: _Fields) -> Format:
    for form, (field, _) in _FORMATS.items():
        if field in fields.record:
            return form
    raise fields.error(
        "steps",
        "neither ProcessBench's `steps`, PRMBench's `modified_process`, TRL's `completions`, Math-Shepherd's `input` "
        "nor PRM800K's `question` is there",
    )
