"""Problems of the recipe: the benchmark, and training problems without end."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from espalier.experiments.demo.problems import (
    DELIMITER,
    LEVELS,
    MAX_OPERATIONS,
    MIN_OPERATIONS,
    TRAINING_OPERANDS,
    Difficulty,
    Problem,
    make_problem,
)


def training_difficulty(
    rng: random.Random, operations: int, operand_caps: tuple[int, ...] = TRAINING_OPERANDS
) -> Difficulty:
    """Draws an operand size for a training problem of the given length."""
    return Difficulty(operations, rng.choice(operand_caps))


def make_benchmark(seed: int = 0, per_level: int = 100) -> list[dict[str, object]]:
    """Returns the held-out problems as records in MATH-500's format, levels in turn so that any prefix is balanced."""
    rng = random.Random(f"benchmark-{seed}")
    records: list[dict[str, object]] = []
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for index in range(per_level):
        for level, difficulties in LEVELS.items():
            problem = make_problem(rng, difficulties[index % len(difficulties)], held_out=True)
            while (problem.start, problem.operands) in seen:
                problem = make_problem(rng, difficulties[index % len(difficulties)], held_out=True)
            seen.add((problem.start, problem.operands))
            records.append(
                {
                    "problem": problem.text,
                    "solution": DELIMITER.join(problem.steps),
                    "answer": problem.answer,
                    "subject": problem.subject,
                    "level": level,
                    "unique_id": f"demo/level-{level}/{index:03d}",
                }
            )
    return records


def write_benchmark(path: Path, seed: int = 0) -> int:
    """Writes the benchmark as JSON lines and returns the number of records."""
    records = make_benchmark(seed)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return len(records)


def training_problems(rng: random.Random) -> Iterator[Problem]:
    """Yields training problems of every length and operand size, without end."""
    while True:
        yield make_problem(rng, training_difficulty(rng, rng.randint(MIN_OPERATIONS, MAX_OPERATIONS)))
