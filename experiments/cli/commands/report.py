"""`espalier report`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from annotated_types import Interval
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.text import Text
from typer import Argument

from espalier.experiments.cli.render import print_whole, table_of
from espalier.experiments.cli.schema_options import with_schema
from espalier.experiments.report.loggers import Tracker, check_installed, log_report
from espalier.experiments.report.runs import load_runs, runs_not_begun
from espalier.experiments.report.tables import main_table
from espalier.experiments.runs.files import folder_lock
from espalier.experiments.runs.table import Table
from espalier.search.schema import option, optional

_NUMBER = "#"


@with_schema
def report_command(
    runs: Annotated[
        list[Path],
        Argument(metavar="RUN...", help="Folders that eval wrote, or folders of such folders, as sweep writes."),
    ],
    out: Path = option(Path("report"), "Folder for the page, the tables and the plots."),
    problems: int = option(200, "Problems with texts and trees on the page, those in dispute first.", Interval(ge=0)),
    resamples: int = option(10_000, "Bootstrap resamples for each pair of runs with epochs.", Interval(ge=100)),
    seed: int = option(0, "Seed of the bootstrap.", Interval(ge=0)),
    log: Tracker | None = optional("Also send each run's figures to this experiment tracker."),
) -> None:
    """Compare runs: a table, paired differences, plots, and one HTML page that opens to problems and trees."""
    from espalier.experiments.report.write import MARKDOWN, PAGE, write_report

    if log:
        check_installed(log)  # before the work, not after it
    loaded = load_runs(runs)
    how = {"most_problems": problems, "resamples": resamples, "seed": seed}
    with folder_lock(out):
        report = write_report(loaded, out, not_begun=runs_not_begun(runs), **how)
    console = Console(highlight=False, markup=False)
    show_table(console, report.title, main_table(report.runs))
    for warning in report.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if log:
        log_report(log, report, out)
    console.print(f"page   {out / PAGE}\ntext   {out / MARKDOWN}\nplots  {out}/*.svg, *.png")


def show_table(console: Console, title: str, table: Table) -> None:
    """Print the table; columns that are the same for all runs go into the line above it."""
    above, kept = [title], dict[str, Sequence[str]]()
    for name, values in zip(table.columns, zip(*table.rows, strict=True), strict=True):
        same = len(set(values)) == 1
        if same and name == "problems" and values[0].isdecimal():
            above.append(f"{values[0]} {name}")
        elif same and name == "algorithm":
            above.append(values[0])
        elif name != _NUMBER:
            kept[name.replace(" ", "\n")] = values
    look = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "title": Text(", ".join(above)), "title_justify": "left"}
    print_whole(console, table_of(list(kept), zip(*kept.values(), strict=True), ("run", "algorithm", "rule"), **look))
