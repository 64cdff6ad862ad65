"""Solutions of fresh demo problems with planted errors, in ProcessBench's format."""

import json
import random
from pathlib import Path
from typing import Any

from espalier.experiments.demo.problems import LEVELS, make_problem
from espalier.experiments.lab.recipe.corruptions import slipped_steps
from espalier.experiments.lab.recipe.oracle import label_steps

SUBSETS = ("demo-tuning", "demo-test")
"""The threshold is chosen on the first."""
_PER_SUBSET = 200


def demo_records(subset: str, count: int = _PER_SUBSET, seed: int = 0) -> list[dict[str, Any]]:
    """Make `count` ProcessBench records: half are right, half have a planted error; levels take turns.

    The problems are from the side of the split that the demo pair was not trained on.
    """
    rng = random.Random(f"{subset}-{seed}")
    levels = [difficulty for difficulties in LEVELS.values() for difficulty in difficulties]
    records: list[dict[str, Any]] = []
    while len(records) < count:
        index = len(records)
        problem = make_problem(rng, levels[index // 2 % len(levels)], held_out=True)
        steps = slipped_steps(rng, problem) if index % 2 else problem.steps
        labels = label_steps(problem.start, problem.operands, steps)
        if not steps or all(labels) != (index % 2 == 0):
            continue
        records.append({
            "id": f"{subset}-{index}",
            "generator": "planted" if index % 2 else "reference",
            "problem": problem.text,
            "steps": steps,
            "final_answer_correct": all(labels),
            "label": -1 if all(labels) else labels.index(False),
        })  # fmt: skip
    return records


def write_planted_errors(folder: Path) -> None:
    """Write a file of records for each subset, always the same ones."""
    folder.mkdir(exist_ok=True)
    for subset in SUBSETS:
        lines = (json.dumps(record) + "\n" for record in demo_records(subset))
        (folder / f"{subset}.jsonl").write_text("".join(lines), encoding="utf-8")
