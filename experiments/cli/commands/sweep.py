"""`espalier sweep`."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from espalier.experiments.cli import options as opt
from espalier.experiments.cli.runs import (
    evaluating,
    exit_code,
    load_problems,
    searches_for,
    searches_shown,
    verifier_for,
    writing_to,
)
from espalier.experiments.cli.schema_options import Lists, with_schema
from espalier.experiments.executors.settings import ExecutorSettings
from espalier.experiments.runs.grid import distinct, read_grid, requests_of
from espalier.search.run.settings import RuntimeSettings

_USUAL = {"beam_width": [1, 2, 4], "expansion": [1, 2, 4]}
"""The grid without --grid, for fields that are not given."""
REPORT = "report"
"""Folder of the report in the sweep's folder."""


@with_schema
def sweep_command(
    grid: Annotated[
        Path | None,
        typer.Option(
            help="Fields with lists of values, or a list of such mappings, from a .yaml, .toml or .json file; other "
            "options multiply them.",
            show_default=False,
        ),
    ] = None,
    benchmark: opt.Benchmark = "demo",
    field_map: opt.FieldMap = None,
    epochs: opt.Epochs = 1,
    trees: opt.Trees = False,
    grader: opt.GraderName = "math-verify",
    out: Annotated[
        Path, typer.Option(help="Folder for the cells, the table and the plot; running the command again resumes.")
    ] = Path("runs/sweep"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the cells and what they are expected to cost; runs nothing.")
    ] = False,
    isolated: Annotated[
        bool,
        typer.Option(
            "--isolated",
            help="One search at a time, so that the seconds of a cell are its own. Without it, --in-flight searches "
            "run at once and share the machine and the KV pool. Searches never share cached prompts.",
        ),
    ] = False,
    share_work: Annotated[
        bool,
        typer.Option(
            "--share-work",
            help="Derive best-of-n and majority cells from those that differ in a larger N only: their first paths are "
            "the same. All but seconds and KV memory is exact; those are left empty. No search stops early.",
        ),
    ] = False,
    report: Annotated[
        bool,
        typer.Option(
            "--report", help="Also write the report of all cells in the folder, as `espalier report` does, to report/."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the cells as JSON.")] = False,
    in_flight: opt.InFlight = 32,
    *,
    selection: opt.Selection,
    values: Annotated[dict[str, list[Any]], Lists(_USUAL, {"seed": "--seeds"})],
    runtime: RuntimeSettings,
    where: ExecutorSettings,
) -> None:
    """Evaluate a grid of searches over any fields; writes tables and a plot of accuracy against tokens.

    Running the command again resumes. Exits with 3 if problems were refused, and 1 if all were.
    """
    from rich.console import Console

    from espalier.experiments.cli.render import show_cells, show_estimates
    from espalier.experiments.planning.sweep_cost import estimates
    from espalier.experiments.plots.cells import plot_cells
    from espalier.experiments.report.runs import load_runs, runs_not_begun
    from espalier.experiments.report.write import PAGE, write_report
    from espalier.experiments.runs.fewer_paths import without_early_stop
    from espalier.experiments.runs.statistics import require_scipy
    from espalier.experiments.runs.sweep import TABLE, Cell, sweep

    if share_work and isolated:
        raise typer.BadParameter(
            "a derived cell has no seconds of its own; leave out one of both", param_hint="--share-work"
        )
    if report:
        require_scipy()  # before the work, not after it
    requests = requests_of(values, read_grid(grid)) if grid else requests_of(_USUAL | values)
    requests = searches_for(requests, runtime)
    if share_work:
        requests = without_early_stop(requests)
    if dry_run:
        problems = load_problems(benchmark, field_map, runtime.offline)
        rows = estimates(requests, problems, selection.of(problems), out, runtime, epochs=epochs, share_work=share_work)
        if as_json:
            print(json.dumps([asdict(each) for each in rows], indent=2))
        else:
            show_estimates(Console(), rows)
        return
    runtime = replace(runtime, verifier=verifier_for(requests, runtime), max_running=1 if isolated else in_flight)
    requested: list[Cell] = []
    given = benchmark, field_map, selection, grader, runtime, where, out
    with writing_to(out):
        with evaluating(*given, epochs=epochs, keep_trees=trees) as (evaluation, command):
            executor = evaluation.executor
            total = len(evaluation.searches) * len(distinct(requests, executor.defaults.fill))
            with searches_shown(total, 0, executor.max_running, runtime) as on_sample:
                cells = sweep(
                    replace(evaluation, on_sample=on_sample), requests, out,
                    isolated=isolated, share_work=share_work, command=command, on_cell=requested.append,
                )  # fmt: skip
        plot_cells(cells, benchmark, out / "accuracy.png")
        if report:
            write_report(load_runs([out]), out / REPORT, not_begun=runs_not_begun([out]))
    if as_json:
        print(json.dumps([cell.to_dict() for cell in cells], indent=2))
    else:
        console = Console()
        show_cells(console, cells, out)
        console.print(f"table {out / TABLE}\nplot  {out / 'accuracy.png'}", highlight=False, markup=False)
        if report:
            console.print(f"page  {out / REPORT / PAGE}", highlight=False, markup=False)
    if code := exit_code(cell.summary for cell in requested):
        raise typer.Exit(code)
