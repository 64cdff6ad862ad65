"""Writes a report: tables, plots, Markdown and one HTML page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from espalier.engine.errors import EspalierError
from espalier.experiments.report import tables
from espalier.experiments.report.plots import Plot, draw_plots
from espalier.experiments.report.runs import Run
from espalier.experiments.report.trees import ProblemRow, problem_rows
from espalier.experiments.runs.benchmark_files import SUFFIXES
from espalier.experiments.runs.files import write_whole
from espalier.experiments.runs.record import listed, unanswered_in

PAGE, MARKDOWN, TABLE, DIFFERENCES = "report.html", "report.md", "table.csv", "differences.csv"
_MIXED = "the runs did not search the same problems; only differences are over the problems that both runs searched"


@dataclass(frozen=True, slots=True)
class Report:
    """All that a report says.

    `problem_count` counts all problems; `problems` holds those that the page shows. `not_begun` names runs of a sweep
    that was interrupted before it came to them.
    """

    title: str
    runs: Sequence[Run]
    differences: list[tables.Difference]
    problems: list[ProblemRow]
    problem_count: int
    plots: list[Plot]
    not_begun: Sequence[str] = ()

    @property
    def warnings(self) -> list[str]:
        """Warnings for who compares the runs: other problems, unfinished runs, searches without an answer."""
        same = len({frozenset(run.by_problem) for run in self.runs}) == 1
        unfinished = [f"{run.name} has {run.unfinished}" for run in self.runs if run.unfinished]
        found = [
            "" if same else _MIXED,
            unfinished and f"{listed(unfinished)}: interrupted, or still running",
            self.not_begun and f"not begun yet, or interrupted before: {listed(self.not_begun)}",
            unanswered_in([(run.name, run.summary.unanswered, run.summary.searches) for run in self.runs]),
        ]
        return [str(warning) for warning in found if warning]


def write_report(
    runs: Sequence[Run],
    out: Path,
    *,
    not_begun: Sequence[str] = (),
    most_problems: int = 200,
    resamples: int = 10_000,
    seed: int = 0,
) -> Report:
    """Compare `runs` and write the report to the folder `out`.

    Args:
        runs: the runs, in the order of the table.
        out: output folder; missing parents are created.
        not_begun: names of runs without samples; see `runs_not_begun`.
        most_problems: number of problems whose texts and trees are on the page.
        resamples: bootstrap resamples.
        seed: seed of the bootstrap.

    Raises:
        EspalierError: a file cannot be written, a file of trees is damaged, or scipy is not installed.
    """
    compared = tables.differences(runs, resamples, seed)
    rows, count = problem_rows(runs, most_problems)
    try:
        out.mkdir(parents=True, exist_ok=True)
        plots = draw_plots(runs, out)
    except OSError as error:
        raise EspalierError(f"cannot write the report to {out}: {error.strerror}; name another --out") from error
    report = Report(_title(runs), runs, compared, rows, count, plots, not_begun)
    write_whole(out / TABLE, tables.data_table(runs).csv())
    write_whole(out / DIFFERENCES, tables.difference_data(compared).csv())
    environment = Environment(
        loader=PackageLoader("espalier.experiments.report", "."),
        autoescape=select_autoescape(["html"]),  # texts of problems and models
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    numbers = {id(run): number for number, run in enumerate(runs, start=1)}
    values = {
        "report": report,
        "main": tables.main_table(runs),
        "breakdowns": tables.breakdown_tables(runs),
        "differences": tables.difference_table(compared),
        "differences_file": DIFFERENCES,
        "pairs": [(d, numbers[id(d.first)], numbers[id(d.second)], tables.difference_cells(d)) for d in compared],
        "places": {row.sample.unique_id: place for place, row in enumerate(rows)},
    }
    for file, template in ((MARKDOWN, "page.md.jinja"), (PAGE, "page.html")):
        write_whole(out / file, environment.get_template(template).render(values))
    return report


def _title(runs: Sequence[Run]) -> str:
    paths = (Path(run.benchmark) for run in runs)
    benchmarks = ", ".join(dict.fromkeys(p.stem if p.suffix.lower() in SUFFIXES else str(p) for p in paths))
    return f"{runs[0].name} on {benchmarks}" if len(runs) == 1 else f"{len(runs)} runs on {benchmarks}"
