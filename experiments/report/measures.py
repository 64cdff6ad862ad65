"""Accuracy of runs per level and per subject, and the Pareto front of accuracy and cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from espalier.experiments.report.runs import Run
from espalier.experiments.runs.summary import grouped


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Accuracy per level or subject.

    Attributes:
        title: "level" or "subject".
        groups: the levels or subjects.
        cells: for each run, and each group, the number of right answers and of searches.
    """

    title: str
    groups: list[str]
    cells: list[list[tuple[int, int]]]


def breakdowns(runs: Sequence[Run]) -> list[Breakdown]:
    """Accuracy per level and per subject, as far as the benchmark has them."""
    found = []
    for title in ("level", "subject"):
        of_run = [grouped(run.samples, title) for run in runs]
        if groups := sorted(set().union(*of_run)):
            counts = [[right.get(group, []) for group in groups] for right in of_run]
            cells = [[(sum(each), len(each)) for each in row] for row in counts]
            found.append(Breakdown(title, [str(group) for group in groups], cells))
    return found


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (cost, accuracy) that no other point beats, by rising cost.

    A point is beaten by one that costs at most as much and is at least as accurate, and better in one of the two.
    """
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not front or points[index][1] > points[front[-1]][1] or points[index] == points[front[-1]]:
            front.append(index)
    return front
