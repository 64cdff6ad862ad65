"""Benchmarks: records of a problem and its gold answer, from a file or by name."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.engine.errors import EspalierError


class BenchmarkError(EspalierError):
    """A benchmark file is missing or holds a record in no known format."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One record. `answer` is the gold answer, LaTeX without dollars; `level` is None where there are none."""

    unique_id: str
    problem: str
    answer: str
    level: int | None


def load_benchmark(name: str, limit: int | None = None) -> list[Problem]:
    """Read a benchmark.

    Known formats, one JSON object a line: MATH-500 (`problem`, `answer`, optional `level`, `unique_id`), GSM8K
    (`question`, `answer` that ends in `#### gold`), and AMC as MATH-500 with a number for an answer.

    Args:
        name: `demo` for the bundled benchmark, or a path.
        limit: how many of the first records to take; None for all.

    Raises:
        BenchmarkError: naming the file and line at fault.
    """
    path = _demo_path() if name == "demo" else Path(name)
    if not path.is_file():
        raise BenchmarkError(f"no benchmark {name!r}: neither a file nor `demo`")
    try:
        # Not splitlines(), which also cuts at characters that may stand inside a record.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise BenchmarkError(f"{path} is not a text file in UTF-8: {error}") from error
    problems: list[Problem] = []
    for number, line in enumerate(lines, start=1):
        if limit is not None and len(problems) >= limit:
            break
        if line.strip():
            problems.append(_parse(line, f"{path}:{number}", f"{path.stem}/{number}"))
    if not problems:
        raise BenchmarkError(f"{path} holds no problems")
    if len({p.unique_id for p in problems}) != len(problems):
        raise BenchmarkError(f"{path}: unique_id is not unique")
    return problems


def _demo_path() -> Path:
    from espalier.experiments.demo import benchmark_path

    return benchmark_path()


def _parse(line: str, where: str, default_id: str) -> Problem:
    try:
        record: dict[str, Any] = json.loads(line)
        gsm8k = "problem" not in record and "question" in record
        problem = record["question"] if gsm8k else record["problem"]
        answer = _gsm8k_gold(record["answer"]) if gsm8k else _plain_number(record["answer"])
        if not isinstance(problem, str):
            raise TypeError("the problem is not text")
        return Problem(str(record.get("unique_id", default_id)), problem, answer, _level(record.get("level")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchmarkError(
            f"{where}: not a record with problem and answer, or question and answer: {error!r}"
        ) from error


def _level(level: Any) -> int | None:
    """A level as a number; MATH also spells it `Level 5`."""
    return None if level is None else int(str(level).removeprefix("Level "))


def _gsm8k_gold(answer: str) -> str:
    """The text after `#### `, without thousands commas."""
    _, mark, gold = answer.rpartition("####")
    if not mark:
        raise ValueError("a GSM8K answer ends in '#### gold'")
    return gold.strip().replace(",", "")


def _plain_number(answer: str | float) -> str:
    """A gold answer as text; 27.0 is written 27, as a solver would write it."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise TypeError("the answer is neither text nor a number")
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer)
