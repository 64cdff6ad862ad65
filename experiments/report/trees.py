"""Search trees as lines of text, for the page and the terminal; and what each run of a report made of each problem."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.engine.errors import EspalierError
from espalier.experiments.report.runs import Run
from espalier.experiments.runs.benchmarks import load_benchmark
from espalier.experiments.runs.files import damage_named, read_lines
from espalier.experiments.runs.folder import TREES
from espalier.experiments.runs.record import Sample
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


def trees_in(folder: Path, problems: Collection[str]) -> dict[Key, list[NodeRecord]]:
    """Nodes of the searches of `problems` in a run folder; empty if the run kept no trees.

    Raises:
        EspalierError: the file is damaged.
    """
    found: dict[Key, list[NodeRecord]] = {}
    for place, record in read_lines(folder / TREES):
        with damage_named(place):
            if record["unique_id"] in problems:
                nodes = (node | {"probe": node.get("probe") and Probe(**node["probe"])} for node in record["nodes"])
                found[record["unique_id"], record["epoch"]] = [NodeRecord(**node) for node in nodes]
    return found


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

    def rank(node: NodeRecord) -> tuple[bool, bool, float]:
        return node.node_id not in selected, node.node_id not in complete, -(node.score or 0)

    def drawn(parent: int, depth: int) -> Iterator[Line]:
        below = sorted(children[parent], key=rank)
        dead = [node for node in below if all(rank(node)[:2]) and not children[node.node_id]]
        hidden = dead[_MAX_PRUNED:]
        for node in below:
            if node not in hidden:
                notes = [f"×{node.multiplicity}"] * (node.multiplicity > 1) + [_ENDED.get(node.termination, "")]
                chosen = node.node_id in selected
                faded, note = not chosen and node.node_id not in complete, "  ".join(filter(None, notes))
                yield Line(depth, node.text.strip() or "(end)", node.score, note, chosen, faded)
                yield from drawn(node.node_id, depth + 1)
        if hidden:
            yield Line(depth, f"and {len(hidden)} more", faded=True, left_out=len(hidden))

    return [line for root in children[None] for line in drawn(root.node_id, 0)]


def selected_nodes(nodes: Sequence[NodeRecord], text: str) -> list[int]:
    """Nodes on the complete path that reads as `text`; empty if there is none."""
    by_id = {node.node_id: node for node in nodes if node.termination != _DUPLICATE}
    for node in by_id.values():
        path = path_to(by_id, node.node_id) if node.termination in COMPLETE else []
        if path and "".join(step.text for step in path) == text:
            return [step.node_id for step in path]
    return []


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run's search of a problem: the run's number in the table, the sample, its tree, whether it is whole."""

    number: int
    run: Run
    sample: Sample
    lines: list[Line]
    whole_tree: bool


@dataclass(frozen=True, slots=True)
class ProblemRow:
    """A problem with the attempts of all runs; `text` is empty if the benchmark is not at hand.

    `sample` is one of it, which tells its id, gold answer, level and subject. `solved` holds for each run the right
    answers and the searches.
    """

    sample: Sample
    text: str
    solved: list[tuple[int, int]]
    attempts: list[Attempt]


def problem_rows(runs: Sequence[Run], most: int) -> tuple[list[ProblemRow], int]:
    """Rows of at most `most` problems, those on which runs disagree first, and the number of all problems.

    Raises:
        EspalierError: a file of trees is damaged.
    """
    found = list(dict.fromkeys(name for run in runs for name in run.by_problem))
    verdicts = {name: {sample.correct for run in runs for sample in run.by_problem.get(name, [])} for name in found}
    kept = sorted(found, key=lambda name: len(verdicts[name]) == 1)[:most]
    attempts: dict[str, list[Attempt]] = {name: [] for name in kept}
    for number, run in enumerate(runs, start=1):
        trees = trees_in(run.folder, attempts.keys())  # one run's trees at a time, as they may be large
        for name in kept:
            for sample in run.by_problem.get(name, []):
                nodes = trees.get((name, sample.epoch))
                if nodes:
                    lines = tree_lines(nodes, selected_nodes(nodes, sample.text))
                else:
                    lines = [Line(depth, step, selected=True) for depth, step in enumerate(sample.steps)]
                attempts[name].append(Attempt(number, run, sample, lines, bool(nodes)))
    texts = _texts(runs)
    rows: list[ProblemRow] = []
    for name, its in attempts.items():
        by_run = [run.by_problem.get(name, []) for run in runs]
        solved = [(sum(sample.correct for sample in samples), len(samples)) for samples in by_run]
        first = its[0].sample
        rows.append(ProblemRow(first, texts.get((name, first.gold), ""), solved, its))
    return rows, len(found)


def _texts(runs: Sequence[Run]) -> dict[tuple[str, str], str]:
    """Texts of the problems by id and gold answers; a benchmark that cannot be loaded adds none."""
    texts: dict[tuple[str, str], str] = {}
    for benchmark, fields in dict.fromkeys(run.source for run in runs):
        try:
            problems = load_benchmark(benchmark, field_map=dict(fields), offline=True, notify=lambda _: None)
        except EspalierError:  # moved since the run; samples do not hold the problems
            continue
        texts |= {(problem.unique_id, " or ".join(problem.golds)): problem.problem for problem in problems}
    return texts
