"""Measures a trunk's evidence on the recorded paths of a run: how well it ranks them, and votes by it.

The run is one of `espalier eval --algorithm best-of-n --early-stop off --trees`, on problems that taught nothing.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from espalier.engine.errors import EspalierError
from espalier.experiments.runs.benchmarks import Problem
from espalier.experiments.runs.evaluate import checker_of
from espalier.experiments.runs.files import damage_named, read_lines
from espalier.experiments.runs.folder import TREES
from espalier.experiments.runs.statistics import paired_bootstrap_interval
from espalier.experiments.verifier_training.combining import LearnedEvidence, ranks
from espalier.experiments.verifier_training.features import Readings
from espalier.experiments.verifier_training.tree_file import TreeRecord
from espalier.prm.path_evidence import FEATURES, sigmoid
from espalier.search.common_fields import Vote
from espalier.search.grading.answers import extract_answer
from espalier.search.grading.math_verify import Grader
from espalier.search.result import Candidate
from espalier.search.rollout import RolloutStep, grade
from espalier.search.voting.vote import select

_DRAWS = 20
"""Draws of fewer paths than were recorded, which are averaged."""
_SCORES = {"likelihood": math.exp, "likelihood_ratio": sigmoid}
"""Scores of evidence that is no probability: those of the families of these names."""
MAJORITY = str(Vote.MAJORITY)
CONFIDENCE = "confidence"
"""The mean probability of a path's tokens as the generator sampled them, beside a trunk's evidence."""


def trees_of_run(folder: Path, problems: Mapping[str, Problem], grader: Grader) -> list[TreeRecord]:
    """The trees of a run of independent paths, graded, as rollouts of the same paths would be.

    Of a step's tokens a run keeps the sum of their log-probabilities, which is spread evenly here, and no ids.

    Args:
        folder: of the run; see `load_recorded_paths`.
        problems: those of its benchmark, by id.
        grader: grades the answers.

    Raises:
        EspalierError: a tree is damaged, or of another problem.
    """
    trees = list[TreeRecord]()
    for place, record in read_lines(folder / TREES):
        with damage_named(place):
            if (problem := problems.get(name := record["unique_id"])) is None:
                raise EspalierError(f"{place}: the run's benchmark has no problem {name!r}")
            steps = _steps(sorted(record["nodes"], key=lambda node: node["path"]))
            grade(steps, checker_of(problem, grader))
            trees.append(TreeRecord(name, problem.problem, problem.answer, steps=list(steps)))
    return trees


def _steps(nodes: Sequence[dict[str, Any]]) -> list[RolloutStep]:
    """The steps of a tree but its root, parents first."""
    places: dict[int | None, int] = {}
    steps, texts = list[RolloutStep](), [""]
    for node in nodes:
        if node["parent_id"] is None:
            continue
        above = places.get(node["parent_id"])
        places[node["node_id"]] = len(steps)
        texts.append((texts[above + 1] if above is not None else "") + node["text"])
        tokens, end = node["tokens"], node["termination"] or None
        spread = [node["log_probability"] / max(1, tokens)] * tokens
        answer = None if end in (None, "length") else extract_answer(texts[-1])
        steps.append(RolloutStep(above, node["text"], [0] * tokens, spread, node["multiplicity"], end, answer))
    return steps


def measure_on_run(learned: LearnedEvidence, trees: Sequence[TreeRecord], readings: Readings) -> dict[str, Any]:
    """Rank recorded paths by a trunk's evidence, and vote by it.

    Args:
        learned: what was learned on other problems.
        trees: of a run.
        readings: the trunk's, of these trees.

    Returns:
        The AUC within a problem of solutions and of siblings, for the score and for each kind of evidence; for 2, 4, …
        paths and for all, the share of problems that a majority solves, that hold a right path, and that a vote weighed
        by each kind solves, with its difference to the majority and that one's 95% interval; which problems each solves
        with all paths; and every problem's paths.

    Raises:
        EspalierError: scipy is not installed.
    """
    features = learned.features(readings)
    columns = dict(zip(FEATURES, features.T, strict=True))
    scores = {"score": learned.score(features)}
    scores |= {name: np.vectorize(_SCORES.get(name, float))(column) for name, column in columns.items()}
    scores[CONFIDENCE] = np.exp(columns["likelihood"] - columns["likelihood_ratio"])
    problems = [_paths(number, tree, readings, scores) for number, tree in enumerate(trees)]
    most = max((sum(path["samples"] for path in paths) for paths in problems), default=0)
    counts = [*(2**power for power in range(1, 16) if 2**power < most), most]
    solved = [_solved(problems, list(scores), count) for count in counts]
    return {
        "problems": len(trees),
        **ranks(scores, readings, np.arange(len(trees))),
        "votes": [_votes(its, count) for its, count in zip(solved, counts, strict=True)],
        "right": {"problem_ids": [tree.problem_id for tree in trees]}
        | {kind: its.astype(int).tolist() for kind, its in solved[-1].items()},
        "paths": [{"problem_id": tree.problem_id, "paths": paths} for tree, paths in zip(trees, problems, strict=True)],
    }


def _paths(number: int, tree: TreeRecord, readings: Readings, scores: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """The paths of a tree that end, with the trunk's scores of those that it reads."""
    rows = np.flatnonzero((readings.problems == number) & (readings.right >= 0))
    of_step = dict(zip(readings.steps[rows].tolist(), rows.tolist(), strict=True))
    paths = list[dict[str, Any]]()
    for index, step in enumerate(tree.steps):
        if step.end is not None:
            its = of_step.get(index)
            values = {name: None if its is None else round(float(column[its]), 6) for name, column in scores.items()}
            paths.append({"answer": step.answer or "", "right": bool(step.right), "samples": step.samples, **values})
    return paths


def _solved(problems: Sequence[Sequence[dict[str, Any]]], kinds: Sequence[str], count: int) -> dict[str, np.ndarray]:
    """The share of draws of `count` of a problem's paths that each vote solves, by its kind, one for each problem."""
    random = np.random.default_rng(0)
    solved = {kind: np.zeros(len(problems)) for kind in (MAJORITY, "any", *kinds)}
    for place, paths in enumerate(problems):
        numbers = np.repeat(np.arange(len(paths)), [path["samples"] for path in paths])
        draws = 1 if count >= len(numbers) else _DRAWS
        for _ in range(draws):
            drawn = Counter(random.choice(numbers, min(count, len(numbers)), replace=False).tolist())
            solved["any"][place] += any(paths[each]["right"] for each in drawn) / draws
            for kind, vote in ((MAJORITY, Vote.MAJORITY), *((kind, Vote.WEIGHTED) for kind in kinds)):
                candidates = [
                    Candidate(each, paths[each]["answer"], paths[each].get(kind), drawn[each], ())
                    for each in sorted(drawn)
                ]
                best = select(candidates, vote).best
                solved[kind][place] += (best is not None and paths[best.node_id]["right"]) / draws
    return solved


def _votes(solved: Mapping[str, np.ndarray], count: int) -> dict[str, Any]:
    """The accuracies of votes of `count` paths, and their differences to the majority."""
    row: dict[str, Any] = {"paths": count, MAJORITY: solved[MAJORITY].mean(), "any": solved["any"].mean()}
    for kind, its in solved.items():
        if kind not in row:
            ahead = (its - solved[MAJORITY]).tolist()
            row[kind] = {"accuracy": its.mean(), "ahead": float(np.mean(ahead))}
            row[kind]["interval"] = paired_bootstrap_interval(ahead)
    return row
