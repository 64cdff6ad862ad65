"""Search trees as lines of text, for the page and the terminal; and those of a run folder's `trees.jsonl`."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.experiments.report.runs import Run
from espalier.experiments.runs.files import damage_named, read_lines
from espalier.experiments.runs.folder import TREES
from espalier.search.result import NodeRecord
from espalier.search.tree import Probe, path_to

_MAX_PRUNED = 3
"""Leaves without an answer shown at each fork; the others are counted."""
COMPLETE = ("eos", "boxed")
"""Ends of complete paths."""
_DUPLICATE = "duplicate"
_ENDED = {
    "eos": "✓ complete",
    "boxed": "✓ complete",
    "pruned": "✗ pruned",
    "length": "✗ cut off",
    "degenerate": "✗ repeats itself",
    "budget": "✗ over budget",
    "unclosed": "✗ ended in its thought",
}
"""Endings of paths, in words."""
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
        left_out: number of steps that it stands for and that are not shown; 0 for a step.
    """

    depth: int
    text: str
    score: float | None = None
    note: str = ""
    selected: bool = False
    faded: bool = False
    left_out: int = 0


def load_trees(run: Run, problems: Collection[str]) -> dict[Key, list[NodeRecord]]:
    """Nodes of the searches of `problems`; see `trees_in`."""
    return trees_in(run.folder, problems)


def trees_in(folder: Path, problems: Collection[str]) -> dict[Key, list[NodeRecord]]:
    """Nodes of the searches of `problems` in a run folder; empty if the run kept no trees.

    Raises:
        EspalierError: the file is damaged.
    """
    found: dict[Key, list[NodeRecord]] = {}
    for place, record in read_lines(folder / TREES):
        with damage_named(place):
            if record["unique_id"] in problems:
                found[record["unique_id"], record["epoch"]] = list(map(_node, record["nodes"]))
    return found


def _node(record: dict[str, Any]) -> NodeRecord:
    probe = record.get("probe")
    return NodeRecord(**{**record, "probe": probe and Probe(**probe)})


def tree_lines(nodes: Sequence[NodeRecord], selected: Collection[int]) -> list[Line]:
    """Lay out a search's tree depth first; `selected` holds the nodes on the path of the answer.

    Of the steps at a fork that lead to no complete path, only the best are shown.
    """
    by_id = {node.node_id: node for node in nodes if node.termination != _DUPLICATE}
    children: dict[int | None, list[NodeRecord]] = defaultdict(list)
    for node in by_id.values():
        children[node.parent_id].append(node)
    ends = [node.node_id for node in by_id.values() if node.termination in COMPLETE]
    complete = {node.node_id for end in ends for node in path_to(by_id, end)}
    lines: list[Line] = []

    def draw(parent: int, depth: int) -> None:
        below = sorted(
            children[parent], key=lambda n: (n.node_id not in selected, n.node_id not in complete, -(n.score or 0))
        )
        dead = [n for n in below if n.node_id not in complete.union(selected) and not children[n.node_id]]
        for node in below:
            if node not in dead[_MAX_PRUNED:]:
                notes = [f"×{node.multiplicity}"] * (node.multiplicity > 1) + [_ENDED.get(node.termination, "")]
                text, chosen = node.text.strip() or "(end)", node.node_id in selected
                faded = not chosen and node.node_id not in complete
                lines.append(Line(depth, text, node.score, "  ".join(filter(None, notes)), chosen, faded))
                draw(node.node_id, depth + 1)
        if hidden := len(dead[_MAX_PRUNED:]):
            lines.append(Line(depth, f"and {hidden} more", faded=True, left_out=hidden))

    for root in children[None]:
        draw(root.node_id, 0)
    return lines


def selected_nodes(nodes: Sequence[NodeRecord], text: str) -> list[int]:
    """Nodes on the complete path that reads as `text`; empty if there is none."""
    by_id = {node.node_id: node for node in nodes if node.termination != _DUPLICATE}
    for node in by_id.values():
        path = path_to(by_id, node.node_id) if node.termination in COMPLETE else []
        if path and "".join(step.text for step in path) == text:
            return [step.node_id for step in path]
    return []
