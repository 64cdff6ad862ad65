"""The contents of a report."""

from collections.abc import Sequence
from dataclasses import dataclass

from espalier.experiments.report.differences import Difference
from espalier.experiments.report.plots import Plot
from espalier.experiments.report.problems import ProblemRow
from espalier.experiments.report.runs import Run
from espalier.experiments.runs.record import listed, unanswered_in
from espalier.experiments.runs.table import Table

_MIXED = (
    "the runs did not search the same problems, so their accuracies and costs are not of the same problems; the "
    "differences are, as each is over the problems that both runs searched"
)


@dataclass(frozen=True, slots=True)
class Report:
    """All that a report says.

    `problem_count` counts all problems; `problems` holds those that the page shows. `not_begun` names runs of a sweep
    that was interrupted before it came to them. `stopping` has rules for ending thoughts, replayed on runs that
    hold probes.
    """

    title: str
    runs: Sequence[Run]
    differences: list[Difference]
    problems: list[ProblemRow]
    problem_count: int
    plots: list[Plot]
    not_begun: Sequence[str] = ()
    stopping: Table | None = None

    @property
    def warnings(self) -> list[str]:
        """Warnings for who compares the runs: other problems, unfinished runs, searches without an answer."""
        same = len({frozenset(run.by_problem) for run in self.runs}) == 1
        found = [] if same else [_MIXED]
        if unfinished := [f"{run.name} has {run.unfinished}" for run in self.runs if run.unfinished]:
            found.append(f"{listed(unfinished)}: interrupted, or still running")
        if self.not_begun:
            found.append(f"not begun yet, or interrupted before: {listed(self.not_begun)}")
        unanswered = unanswered_in([(run.name, run.summary.unanswered, run.summary.searches) for run in self.runs])
        return [*found, *([unanswered] if unanswered else [])]
