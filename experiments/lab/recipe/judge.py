"""Accuracy of the verifier on what a beam search asks it: which next step is right."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.experiments.demo.problems import Problem
from espalier.experiments.lab.recipe.oracle import label_steps
from espalier.experiments.runs.statistics import wilson_interval
from espalier.search.result import SearchResult

_BINS = 10


@dataclass(frozen=True, slots=True)
class Judged:
    """A step that follows right ones alone: its problem, its parent's path, its score, and whether it is right."""

    problem: int
    parent: tuple[int, ...]
    score: float
    right: bool


def judged_steps(problems: Sequence[Problem], results: Sequence[SearchResult]) -> list[Judged]:
    """The scored steps of beam searches that follow right ones, each of a parent's different steps once."""
    judged: list[Judged] = []
    for index, (problem, result) in enumerate(zip(problems, results, strict=True)):
        nodes = {node.path: node for node in result.nodes}
        for node in result.nodes:
            if not node.path or node.score is None:
                continue
            steps = [nodes[node.path[:depth]].text.strip() for depth in range(1, node.depth + 1)]
            labels = label_steps(problem.start, problem.operands, steps)
            if all(labels[:-1]):
                judged.append(Judged(index, node.path[:-1], node.score, labels[-1]))
    return judged


def figures(judged: Sequence[Judged]) -> dict[str, Any]:
    """Shares of pairs whose right step scores above the wrong one, and of rounds whose best step is right.

    Pairs are of one problem (at any depth) and of one parent; a tie counts half. A round is all steps of one depth of a
    problem, of which at least one is right and one is wrong. The reliability is of the verifier's scores as
    probabilities: for each tenth, its steps, their mean score and the share of right ones with its 95% interval.
    """
    problems, parents, rounds = defaultdict(list), defaultdict(list), defaultdict(list)
    for step in judged:
        problems[step.problem].append(step)
        parents[step.problem, step.parent].append(step)
        rounds[step.problem, len(step.parent)].append(step)
    mixed = [r for r in rounds.values() if len({step.right for step in r}) == 2]
    best = [max(r, key=lambda step: step.score).right for r in mixed]
    return {
        "ranking within a problem": _ranking(problems.values()),
        "ranking among siblings": _ranking(parents.values()),
        "best of a round is right": {"share": round(sum(best) / max(1, len(best)), 4), "rounds": len(best)},
        "reliability": _reliability(judged),
    }


def _ranking(groups: Any) -> dict[str, float]:
    won, pairs = 0.0, 0
    for group in groups:
        right, wrong = ([step.score for step in group if step.right is label] for label in (True, False))
        won += sum((r > w) + 0.5 * (r == w) for r in right for w in wrong)
        pairs += len(right) * len(wrong)
    return {"share": round(won / max(1, pairs), 4), "pairs": pairs}


def _reliability(judged: Sequence[Judged]) -> list[dict[str, float]]:
    bins: dict[int, list[Judged]] = defaultdict(list)
    for step in judged:
        bins[min(_BINS - 1, int(step.score * _BINS))].append(step)
    rows = []
    for _, steps in sorted(bins.items()):
        right = sum(step.right for step in steps)
        low, high = wilson_interval(right, len(steps))
        score = sum(step.score for step in steps) / len(steps)
        rows.append({"steps": len(steps), "score": score, "right": right / len(steps), "low": low, "high": high})
    return [{name: round(value, 4) for name, value in row.items()} for row in rows]


def plot_reliability(rows: Sequence[dict[str, float]], path: Path) -> None:
    """Draw the share of right steps against the mean score of each tenth."""
    from matplotlib import pyplot

    size = {"figsize": (5, 5.5), "layout": "constrained"}
    figure, (above, below) = pyplot.subplots(2, sharex=True, height_ratios=(3, 1), **size)
    scores, right = ([row[name] for row in rows] for name in ("score", "right"))
    errors = [[row["right"] - row["low"] for row in rows], [row["high"] - row["right"] for row in rows]]
    above.plot([0, 1], [0, 1], color="0.6", linestyle=":", label="a perfect probability")
    above.errorbar(scores, right, errors, fmt="o-", capsize=3, label="steps of beam searches, 95% intervals")
    above.set(ylabel="share of right steps", ylim=(-0.02, 1.02), title="The demo verifier's scores as probabilities")
    above.legend(loc="upper left")
    below.bar(scores, [row["steps"] for row in rows], width=0.06)
    below.set(xlabel="mean score", ylabel="steps", yscale="log", xlim=(-0.02, 1.02))
    figure.savefig(path)
    pyplot.close(figure)
