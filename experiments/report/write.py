"""Writes a report: tables, plots, Markdown and one HTML page."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from espalier.engine.errors import EspalierError
from espalier.experiments.report import tables
from espalier.experiments.report.contents import Report
from espalier.experiments.report.differences import differences
from espalier.experiments.report.plots import draw_plots
from espalier.experiments.report.problems import problem_rows
from espalier.experiments.report.runs import Run
from espalier.experiments.report.stopping import ReplayedRule, stopping_table
from espalier.experiments.runs.benchmark_files import SUFFIXES
from espalier.experiments.runs.files import write_whole
from espalier.search.thoughts.stop_rule import StopRule

PAGE, MARKDOWN, TABLE, DIFFERENCES = "report.html", "report.md", "table.csv", "differences.csv"
STOPPING = "stopping.csv"


def write_report(
    runs: Sequence[Run],
    out: Path,
    *,
    not_begun: Sequence[str] = (),
    most_problems: int = 200,
    resamples: int = 10_000,
    seed: int = 0,
    replayed: Sequence[ReplayedRule] = (),
    chosen: StopRule | None = None,
) -> Report:
    """Compare `runs` and write the report to the folder `out`.

    Args:
        runs: the runs, in the order of the table.
        out: output folder; missing parents are created.
        not_begun: names of runs without samples; see `runs_not_begun`.
        most_problems: number of problems whose texts and trees are on the page.
        resamples: bootstrap resamples.
        seed: seed of the bootstrap.
        replayed: rules for ending thoughts, replayed on runs.
        chosen: the one of them that is marked.

    Raises:
        EspalierError: a file cannot be written, a file of trees is damaged, or scipy is not installed.
    """
    compared = differences(runs, resamples, seed)
    rows, count = problem_rows(runs, most_problems)
    try:
        out.mkdir(parents=True, exist_ok=True)
        plots = draw_plots(runs, out, replayed, chosen)
    except OSError as error:
        raise EspalierError(f"cannot write the report to {out}: {error.strerror}; name another --out") from error
    stopping = stopping_table(replayed, chosen) if replayed else None
    report = Report(_title(runs), runs, compared, rows, count, plots, not_begun, stopping)
    write_whole(out / TABLE, tables.data_table(runs).csv())
    write_whole(out / DIFFERENCES, tables.difference_data(compared).csv())
    if stopping:
        write_whole(out / STOPPING, stopping.csv())
    write_whole(out / MARKDOWN, _render("page.md.jinja", report))
    write_whole(out / PAGE, _render("page.html", report))
    return report


def _render(template: str, report: Report) -> str:
    """Render a template of this folder; in HTML, texts of problems and models are escaped."""
    environment = Environment(
        loader=PackageLoader("espalier.experiments.report", "."),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    numbers = {id(run): number for number, run in enumerate(report.runs, start=1)}
    return environment.get_template(template).render(
        report=report,
        main=tables.main_table(report.runs),
        breakdowns=tables.breakdown_tables(report.runs),
        differences=tables.difference_table(report.differences),
        differences_file=DIFFERENCES,
        pairs=[
            (found, numbers[id(found.first)], numbers[id(found.second)], tables.difference_cells(found))
            for found in report.differences
        ],
        places={row.sample.unique_id: place for place, row in enumerate(report.problems)},
    )


def _title(runs: Sequence[Run]) -> str:
    paths = (Path(run.benchmark) for run in runs)
    benchmarks = ", ".join(dict.fromkeys(p.stem if p.suffix.lower() in SUFFIXES else str(p) for p in paths))
    return f"{runs[0].name} on {benchmarks}" if len(runs) == 1 else f"{len(runs)} runs on {benchmarks}"
