"""Search trees of a run folder's `trees.jsonl`, laid out as lines of text."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from espalier.experiments.report.runs import Run
from espalier.experiments.runs.folder import TREES
from espalier.experiments.runs.jsonl import read_lines
from espalier.experiments.runs.record import Sample

_MAX_PRUNED = 3
"""Leaves without an answer shown at each fork; the others are counted."""
_COMPLETE = ("eos", "boxed")
_DUPLICATE = "duplicate"
_ENDED = {
    "eos": "complete",
    "boxed": "complete",
    "pruned": "pruned",
    "length": "cut off",
    "degenerate": "repeats itself",
    "budget": "over budget",
}
"""How a path ended, in words."""

Path = tuple[int, ...]
Key = tuple[str, int]
"""Id of a problem, and epoch."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a drawn tree: a step, or a count of steps left out.

    Attributes:
        depth: steps above it, 0 for a first step.
        text: the step.
        score: the verifier's score; None without one.
        note: how it ended and how often it was sampled; empty for an inner step sampled once.
        selected: whether it is on the path of the selected answer.
        faded: whether it leads to no complete path.
    """

    depth: int
    text: str
    score: float | None
    note: str
    selected: bool
    faded: bool


def load_trees(run: Run, problems: Collection[str]) -> dict[Key, list[dict[str, Any]]]:
    """Node records of the searches of `problems`; empty if the run kept no trees.

    Raises:
        EspalierError: the file is damaged.
    """
    return {
        (record["unique_id"], record["epoch"]): record["nodes"]
        for _, record in read_lines(run.folder / TREES)
        if record["unique_id"] in problems
    }


def tree_lines(sample: Sample, nodes: list[dict[str, Any]] | None) -> list[Line]:
    """Lay out a search's tree depth first, or without `nodes` its selected path.

    Of the steps at a fork that lead to no complete path, only the best are shown.
    """
    if not nodes:
        return [Line(depth, step, None, "", True, False) for depth, step in enumerate(sample.steps)]
    by_path = {tuple(node["path"]): node for node in nodes if node.get("termination") != _DUPLICATE}
    children: dict[Path, list[Path]] = defaultdict(list)
    for path in by_path:
        if path:
            children[path[:-1]].append(path)
    complete = {
        path[:length]
        for path, node in by_path.items()
        if node.get("termination") in _COMPLETE
        for length in range(1, len(path) + 1)
    }
    selected = _selected(by_path, sample.text)
    lines: list[Line] = []
    todo: list[Path | Line] = [()]  # drawn last first; a line counts the steps left out at a fork
    while todo:
        path = todo.pop()
        if isinstance(path, Line):
            lines.append(path)
            continue
        if path:
            lines.append(_line(by_path[path], path in selected, path in selected or path in complete))
        below = sorted(
            children[path], key=lambda p: (p not in selected, p not in complete, -(by_path[p].get("score") or 0))
        )
        dead = [p for p in below if p not in selected and p not in complete and not children[p]]
        if hidden := len(dead[_MAX_PRUNED:]):
            todo.append(Line(len(path), f"and {hidden} more", None, "", False, True))
        todo += [p for p in reversed(below) if p not in dead[_MAX_PRUNED:]]
    return lines


def _line(node: dict[str, Any], selected: bool, alive: bool) -> Line:
    ended = str(node.get("termination") or "")
    many = int(node.get("multiplicity") or 1)
    notes = [f"×{many}"] * (many > 1) + [_ENDED.get(ended, ended)] * bool(ended)
    text = str(node.get("text", "")).strip() or "(end)"
    return Line(len(node["path"]) - 1, text, node.get("score"), "  ".join(notes), selected, not alive)


def _selected(by_path: dict[Path, dict[str, Any]], text: str) -> set[Path]:
    """Nodes on the complete path that reads as `text`; empty if there is none."""
    for path, node in by_path.items():
        if path and node.get("termination") in _COMPLETE:
            ancestors = [path[:length] for length in range(1, len(path) + 1)]
            if "".join(str(by_path[p].get("text", "")) for p in ancestors if p in by_path) == text:
                return set(ancestors)
    return set()
