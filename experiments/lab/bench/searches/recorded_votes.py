"""Votes of other verifiers over a run's paths: by its scores, by confidence, and by simulated scores.

The run is one of `espalier eval --algorithm best-of-n --early-stop off --trees`. Simulated scores are drawn for each
path by itself: those of right and of wrong paths from two normal distributions, as far apart as it takes to rank a
right path above a wrong one in a given share of pairs (the AUC), and calibrated to how many paths are right. They say
how well a verifier would have to rank to be worth something on these paths.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from espalier.engine.errors import EspalierError
from espalier.experiments.lab.bench.options import JsonPath
from espalier.experiments.lab.bench.report import Report
from espalier.experiments.prm_evaluation.metrics import auc_within
from espalier.experiments.report.runs import load_recorded_paths
from espalier.experiments.runs.files import read_lines
from espalier.experiments.runs.folder import TREES, read_samples
from espalier.experiments.runs.graders import make_grader
from espalier.search.common_fields import Aggregation, Vote
from espalier.search.grading.answers import extract_answer
from espalier.search.grading.math_verify import Grader
from espalier.search.result import Candidate
from espalier.search.tree import aggregate
from espalier.search.voting.vote import select

_AUCS = (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9)
_DRAWS = 20
"""Draws of simulated scores of each AUC, which are averaged."""
_QUARTERS = ("right in the best quarter", "second", "third", "worst")


@dataclass(frozen=True, slots=True)
class RecordedPath:
    """A complete path of a tree.

    Attributes:
        candidate: its answer and how many samples it stands for, without a score.
        right: whether the answer is the gold one.
        scores: the verifier's, of its steps that have one.
        confidences: geometric mean of the probabilities of each step's tokens.
    """

    candidate: Candidate
    right: bool
    scores: list[float]
    confidences: list[float]


Weigh = Callable[[RecordedPath], float | None]


def read_paths(folder: Path, grader: Grader) -> list[list[RecordedPath]]:
    """The complete paths of each problem of a run whose trees are kept."""
    golds = {sample.unique_id: sample.gold for sample in read_samples(folder)}
    trees = [tree for _, tree in read_lines(folder / TREES) if tree["unique_id"] in golds]
    return [list(_paths(tree["nodes"], golds[tree["unique_id"]], grader)) for tree in trees]


def _paths(nodes: Sequence[dict[str, Any]], gold: str, grader: Grader) -> Iterator[RecordedPath]:
    of_id, right = {node["node_id"]: node for node in nodes}, dict[str, bool]()
    for end in nodes:
        if not end["termination"]:
            continue
        steps, node = [], end
        while node["parent_id"] is not None:
            steps.insert(0, node)
            node = of_id[node["parent_id"]]
        answer = extract_answer("".join(step["text"] for step in steps))
        if answer not in right:
            right[answer] = bool(answer) and grader.grade(gold, answer).correct
        yield RecordedPath(
            Candidate(end["node_id"], answer, None, end["multiplicity"], ()),
            right[answer],
            [step["score"] for step in steps if step["score"] is not None],
            [math.exp(step["log_probability"] / max(1, step["tokens"])) for step in steps],
        )


def share_right(problems: Sequence[Sequence[RecordedPath]], vote: Vote, weigh: Weigh) -> float:
    """The share of the problems that a vote solves whose paths have the scores that `weigh` gives."""
    solved = 0
    for paths in problems:
        of_id = {path.candidate.node_id: path.right for path in paths}
        best = select([replace(path.candidate, score=weigh(path)) for path in paths], vote).best
        solved += best is not None and of_id[best.node_id]
    return solved / len(problems)


def simulated(problems: Sequence[Sequence[RecordedPath]], auc: float, seed: int) -> Weigh:
    """Scores that rank a right path above a wrong one in a share `auc` of pairs, drawn once for each path."""
    apart = statistics.NormalDist().inv_cdf(auc) * math.sqrt(2)
    random = np.random.default_rng(seed)
    count = sum(path.candidate.multiplicity for paths in problems for path in paths)
    right = sum(path.candidate.multiplicity for paths in problems for path in paths if path.right)
    start = math.log(right / (count - right))
    drawn = {
        id(path): 1 / (1 + math.exp(-(start + apart * (random.normal() + apart * path.right) - apart**2 / 2)))
        for paths in problems
        for path in paths
    }
    return lambda path: drawn[id(path)]


def right_by_quarter(problems: Sequence[Sequence[RecordedPath]], weigh: Weigh) -> list[float]:
    """The share of right paths in each quarter of a problem's paths, those that weigh most in the first.

    Counted are answers of problems with right and wrong ones. Even shares in the first quarters mean that the scores
    tell the worst paths from the others, and not which of the others is right.
    """
    counts = np.zeros((4, 2))  # paths, and right ones
    for paths in problems:
        answered = [path for path in paths if path.candidate.answer]
        if len({path.right for path in answered}) < 2:
            continue
        ranked = sorted(answered, key=lambda path: weigh(path) or 0.0, reverse=True)
        right = [path.right for path in ranked for _ in range(path.candidate.multiplicity)]
        for rank, of_rank in enumerate(right):
            counts[4 * rank // len(right)] += 1, of_rank
    return (counts[:, 1] / np.maximum(counts[:, 0], 1)).tolist()


def run(folder: Path) -> list[dict[str, Any]]:
    """Vote over the paths of a run, whose folder holds its trees.

    Returns:
        A row for each verifier and vote: how many of the problems it solves, its AUC within a problem, and the share of
        right paths in each quarter of a problem's, best-scored first.

    Raises:
        EspalierError: the folder holds no run, one of another algorithm, no trees, or not both right and wrong paths.
    """
    folder = load_recorded_paths(folder).folder
    with make_grader() as grader:
        problems = [paths for paths in read_paths(folder, grader) if paths]
    if len({path.right for paths in problems for path in paths}) < 2:
        raise EspalierError(f"{folder} has not both right and wrong paths, so that verifiers cannot differ on them")
    weighed: list[tuple[str, float | None, list[Weigh]]] = []
    for how in Aggregation:
        kinds: tuple[tuple[str, Weigh], ...] = (
            ("its scores", lambda path, how=how: aggregate(path.scores, how)),
            ("confidence", lambda path, how=how: aggregate(path.confidences, how)),
        )
        weighed += [(f"{kind}, {how}", _ranks(problems, weigh), [weigh]) for kind, weigh in kinds]
    weighed += [("simulated", auc, [simulated(problems, auc, seed) for seed in range(_DRAWS)]) for auc in _AUCS]
    rows: list[dict[str, Any]] = []
    for name, ranks, draws in weighed:
        row: dict[str, Any] = {"verifier": name, "AUC within a problem": ranks}
        row["weighted"] = statistics.mean(share_right(problems, Vote.WEIGHTED, weigh) for weigh in draws)
        row["naive"] = statistics.mean(share_right(problems, Vote.NAIVE, weigh) for weigh in draws)
        quarters = np.mean([right_by_quarter(problems, weigh) for weigh in draws], axis=0)
        rows.append(row | dict(zip(_QUARTERS, quarters.tolist(), strict=True)))
    majority = share_right(problems, Vote.MAJORITY, lambda _: None)
    return [dict.fromkeys(rows[0]) | {"verifier": "none, majority", "weighted": majority}, *rows]


def _ranks(problems: Sequence[Sequence[RecordedPath]], weigh: Weigh) -> float | None:
    """The share of pairs of a right and a wrong path of a problem in which the right one weighs more."""
    found = [[(weigh(path) or 0.0, path.right) for path in paths] for paths in problems]
    return auc_within([([s for s, right in one if right], [s for s, right in one if not right]) for one in found])


def command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run with --trees.")],
    json_path: JsonPath = None,
) -> None:
    """Share of problems that other verifiers would have solved with a run's paths, simulated ones among them."""
    Report(f"votes over the paths of {folder.name}", json_path).finish(run(folder), {})
