"""Writes the solutions of rollouts with labels of their steps, in the forms that trainers of verifiers read.

A step is right where its value is above 0: a solution or a continuation that goes through it ends right, as in
Math-Shepherd's hard estimation. A solution that was drawn several times is written once; steps without text are left
out.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from espalier.experiments.runs.folder import write_whole
from espalier.experiments.verifier_training.tree_file import TreeRecord

_HEADING = re.compile(r"(?:#+\s*)?Step\s*\d+\s*:\s*")
_MARK = "ки"


def write_trl(path: Path, trees: Iterable[TreeRecord]) -> None:
    """Write TRL's stepwise supervision: `prompt`, `completions` and `labels`."""
    _write(path, ({"prompt": p, "completions": steps, "labels": right} for p, steps, right in _solutions(trees)))


def write_math_shepherd(path: Path, trees: Iterable[TreeRecord]) -> None:
    """Write Math-Shepherd's `input`, with a mark behind each step, and `label`, with + or - in its place."""

    def record(problem: str, steps: list[str], right: list[bool]) -> dict[str, Any]:
        texts = [f"Step {k}: {_HEADING.sub('', step, count=1)} " for k, step in enumerate(steps, start=1)]
        signs = ["+" if each else "-" for each in right]
        text, label = (
            "\n".join(map("".join, zip(texts, marks, strict=True))) for marks in ([_MARK] * len(texts), signs)
        )
        return {"input": f"{problem} {text}", "label": f"{problem} {label}"}

    _write(path, (record(*solution) for solution in _solutions(trees)))


def _solutions(trees: Iterable[TreeRecord]) -> Iterator[tuple[str, list[str], list[bool]]]:
    """Problem, steps and whether they are right, of every solution with a text."""
    for tree in trees:
        for index, last in enumerate(tree.steps):
            if last.end:
                path = [tree.steps[at] for at in tree.lineage(index)]
                said = [(step.text.strip(), step.value > 0) for step in path if step.text.strip()]
                if said:
                    yield tree.problem, [text for text, _ in said], [right for _, right in said]


def _write(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
