"""Loads benchmarks: problems with their gold answers, from a file or by name.

A file is JSON in UTF-8: one object per line, or one array of objects. These fields of an object are read:

- the problem: `problem`, `Body` and `Question` together, `question`, or `prompt`;
- the gold answer: `answer`, `final_answer`, or `solution`;
- optionally an id, `unique_id` or `id`, a `level`, and a `subject`, `category` or `type`.

The first of these names that exists is used, ignoring case; a field map gives other names.

A gold answer is a number, or LaTeX without dollars. In a worked solution, it is the text after the last `####`, as in
GSM8K, or the content of the last box, as in MATH. A list holds several accepted answers, any of which is right.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from espalier.engine.errors import EspalierError
from espalier.search.voting.answers import last_boxed

FIELDS: dict[str, tuple[str, ...]] = {
    "problem": ("problem", "Body+Question", "question", "prompt"),
    "answer": ("answer", "final_answer", "solution"),
    "id": ("unique_id", "id"),
    "level": ("level",),
    "subject": ("subject", "category", "type"),
}
"""Fields read from a record and their possible names; a plus joins the texts of two fields."""

_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
_SHOWN_FIELDS = 12
_BLANKS = re.compile(r"[ \t\r\n]*+")


class BenchmarkError(EspalierError):
    """A benchmark file is missing or has a record in an unknown format."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One record. `answer` is the gold answer, LaTeX without dollars; `level` and `subject` are None if absent.

    `alternatives` are further accepted answers.
    """

    unique_id: str
    problem: str
    answer: str
    level: int | None
    alternatives: tuple[str, ...] = ()
    subject: str | None = None

    @property
    def golds(self) -> tuple[str, ...]:
        """All accepted answers."""
        return self.answer, *self.alternatives


def load_benchmark(name: str, limit: int | None = None, field_map: Mapping[str, str] | None = None) -> list[Problem]:
    """Load a benchmark; see this module for the format.

    Args:
        name: `demo` for the bundled benchmark, or a path.
        limit: number of records to load from the start; None for all.
        field_map: the record's names for the keys of `FIELDS`, if they differ.

    Raises:
        BenchmarkError: the file is missing or invalid; names the file and the line.
    """
    path = _demo_path() if name == "demo" else Path(name)
    if not path.is_file():
        raise BenchmarkError(f"no benchmark {name!r}: neither a file nor `demo`")
    problems: list[Problem] = []
    places: dict[str, str] = {}
    for place, number, record in _records(path, _read(path)):
        if limit is not None and len(problems) >= limit:
            break
        problem = _Reading(record, place, field_map or {}).problem(f"{path.stem}/{number}")
        if earlier := places.get(problem.unique_id):
            raise BenchmarkError(f"{place}: its unique_id {problem.unique_id!r} is not unique, {earlier} has it too")
        places[problem.unique_id] = place
        problems.append(problem)
    if not problems:
        raise BenchmarkError(f"{path} holds no problems")
    return problems


def _demo_path() -> Path:
    from espalier.experiments.demo import benchmark_path

    return benchmark_path()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BenchmarkError(f"{path} is not a text file in UTF-8: {error}") from error
    except OSError as error:
        raise BenchmarkError(f"cannot read {path}: {error.strerror}") from error


def _records(path: Path, text: str) -> Iterator[tuple[str, int, Any]]:
    """Yield each record with its location in the file and its number: the line, or the index in an array from 1."""
    if text.lstrip().startswith("["):
        yield from _records_of_array(path, text)
        return
    # Not splitlines(), which also splits at characters that may occur in a record.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            with _json_errors(path, number):
                record = json.loads(line)
            yield f"{path}:{number}", number, record


def _records_of_array(path: Path, text: str) -> Iterator[tuple[str, int, Any]]:
    """Parse records one by one, so that each has its line number, and stop when no more are needed."""
    decoder = json.JSONDecoder()
    position, line, counted, number = _past_blanks(text, text.index("[") + 1), 1, 0, 0
    while number or not text.startswith("]", position):
        number += 1
        line, counted = line + text.count("\n", counted, position), position
        with _json_errors(path, 1):
            record, end = decoder.raw_decode(text, position)
        yield f"{path}:{line} (record {number})", number, record
        position = _past_blanks(text, end)
        if text.startswith("]", position):
            break
        if not text.startswith(",", position):
            raise BenchmarkError(f"{path}:{line}: record {number} of the array is not followed by a comma or bracket")
        position = _past_blanks(text, position + 1)
    if text[position + 1 :].strip():
        raise BenchmarkError(f"{path}: there is text after the array of records")


def _past_blanks(text: str, position: int) -> int:
    blanks = _BLANKS.match(text, position)
    return blanks.end() if blanks else position


@contextmanager
def _json_errors(path: Path, first_line: int) -> Iterator[None]:
    """Turn JSON errors into BenchmarkErrors with file and line; the text starts on `first_line`."""
    try:
        yield
    except json.JSONDecodeError as error:
        place = f"{path}:{first_line + error.lineno - 1}"
        wanted = "one JSON object per line, or one array of objects"
        raise BenchmarkError(f"{place}: not JSON: {error.msg} (column {error.colno}); expected {wanted}") from error
    except (ValueError, RecursionError) as error:
        raise BenchmarkError(f"{path}:{first_line}: JSON that cannot be read: {error}") from error


class _Reading:
    """Reads the fields of one record."""

    def __init__(self, record: Any, place: str, field_map: Mapping[str, str]) -> None:
        self._place = place
        self._map = field_map
        if not isinstance(record, dict):
            raise self._error(f"{_kind(record)}, not an object with a problem and its answer")
        self._record: dict[str, Any] = record
        self._folded = {name.lower(): value for name, value in reversed(record.items())}

    def problem(self, default_id: str) -> Problem:
        name, text = self._take("problem")
        if not isinstance(text, str):
            raise self._error(f"its {name} is {_kind(text)}, not text")
        if not text.strip():
            raise self._error(f"its {name} is empty")
        golds = self._golds(*self._take("answer"))
        return Problem(self._id(default_id), text, golds[0], self._level(), golds[1:], self._subject())

    def _take(self, what: str) -> tuple[str, Any]:
        """The first name under which the record has a field, and its value."""
        for name, value in self._candidates(what):
            if value is not None:
                return name, value
        found = list(self._record)
        shown = ", ".join(found[:_SHOWN_FIELDS]) + (", …" if len(found) > _SHOWN_FIELDS else "")
        wanted = ", ".join(self._names(what)).replace("+", " and ")
        flag = f"name it with --field-map {what}=NAME"
        raise self._error(f"no {what}: the record has {shown or 'no fields'}; wanted: {wanted}; {flag}")

    def _names(self, what: str) -> Sequence[str]:
        return (self._map[what],) if what in self._map else FIELDS[what]

    def _candidates(self, what: str) -> Iterator[tuple[str, Any]]:
        fields = self._record if what in self._map else self._folded
        for name in self._names(what):
            folded = name if what in self._map else name.lower()
            values = [fields.get(part) for part in folded.split("+")]
            if len(values) == 1:
                yield name, values[0]
            elif all(isinstance(value, str) for value in values):
                yield name, " ".join(str(value).strip() for value in values)

    def _golds(self, name: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, list):
            if not value:
                raise self._error(f"its {name} is an empty list")
            return tuple(dict.fromkeys(self._gold(name, one) for one in value))
        return (self._gold(name, value),)

    def _gold(self, name: str, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self._error(f"its {name} is {_kind(value)}, not a text, a number or a list of these")
        if not isinstance(value, str):
            if not math.isfinite(value):
                raise self._error(f"its {name} is {value}, not a number")
            return _plain_number(value)
        if not (gold := self._gold_of_text(name, value)):
            raise self._error(f"its {name} is empty: a problem needs a gold answer")
        return gold

    def _gold_of_text(self, name: str, text: str) -> str:
        _, mark, behind = text.rpartition("####")
        if mark:
            return behind.strip().replace(",", "")
        if (boxed := last_boxed(text)) is not None:
            return boxed
        if "\n" in text.strip() and "\\begin" not in text:
            how = "'#### gold' or \\boxed{gold}"
            raise self._error(f"its {name} has several lines and must give the answer as {how}")
        return text.strip()

    def _id(self, default: str) -> str:
        for name, value in [self._take("id")] if "id" in self._map else self._candidates("id"):
            if value is None or value == "":
                continue
            if isinstance(value, bool) or not isinstance(value, str | int):
                raise self._error(f"its {name} is {_kind(value)}, not a text or a whole number")
            return str(value)
        return default

    def _level(self) -> int | None:
        """The level as a number, also from MATH's `Level 5`; None without one."""
        _, value = self._take("level") if "level" in self._map else next(self._candidates("level"))
        text = str(value).removeprefix("Level ").removesuffix(".0")
        return int(text) if text.isdecimal() else None

    def _subject(self) -> str | None:
        """The subject as text; None without one."""
        for _, value in [self._take("subject")] if "subject" in self._map else self._candidates("subject"):
            if isinstance(value, str) and value.strip():
                return value.strip()
        return None

    def _error(self, what: str) -> BenchmarkError:
        return BenchmarkError(f"{self._place}: {what}")


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS[type(value)]


def _plain_number(number: float) -> str:
    """Format a number as a solver would write it: 27.0 becomes 27, and there are no exponents."""
    whole = isinstance(number, int) or number.is_integer()
    return str(int(number)) if whole else format(Decimal(repr(number)), "f")
