"""What a report holds."""

from dataclasses import dataclass

from espalier.experiments.report.differences import Difference
from espalier.experiments.report.measures import Measures
from espalier.experiments.report.plots import Plot
from espalier.experiments.report.problems import ProblemRow

NOTES = (
    "Intervals of an accuracy are 95% Wilson intervals. With several searches of a problem, standard errors are "
    "clustered by problem, intervals use the effective number of trials, and pass@k is the unbiased estimate.",
    "Differences are over the problems that both runs searched; their intervals are 95% percentile bootstrap intervals "
    "over problems. p is of McNemar's exact test, and adjusted for all pairs by Benjamini and Hochberg.",
    "Tokens, seconds and memory are means over searches. Seconds are the run's wall time divided by its searches; "
    "peak KV is the memory of a search's KV blocks of both models at its peak. A dash: not measured, as in runs whose "
    "samples were derived from a search with more paths.",
)
"""How to read a report."""
_MIXED = (
    "the runs did not search the same problems, so their accuracies and costs are not of the same problems; the "
    "differences are, as each is over the problems that both runs searched"
)


@dataclass(frozen=True, slots=True)
class Report:
    """All that a report says.

    `problem_count` counts all problems; `problems` holds those that the page shows.
    """

    title: str
    measures: list[Measures]
    differences: list[Difference]
    problems: list[ProblemRow]
    problem_count: int
    plots: list[Plot]

    @property
    def mixed(self) -> str:
        """A warning if the runs searched different problems, else empty."""
        same = len({frozenset(m.run.by_problem) for m in self.measures}) == 1
        return "" if same else _MIXED
