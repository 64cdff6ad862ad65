"""`espalier eval`, `sweep` and `advise`: a search, a grid, and those that pay, on every problem of a benchmark."""

import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from annotated_types import Interval
from rich.console import Console

from espalier.experiments.cli import options as opt
from espalier.experiments.cli.render import percents, print_whole, show_cells, show_estimates, show_summary, table_of
from espalier.experiments.cli.runs import evaluating, exit_code, searches_for, searches_shown, verifier_for, writing_to
from espalier.experiments.cli.schema_options import Fields, Outcome, with_schema
from espalier.experiments.executors.settings import ExecutorSettings
from espalier.experiments.report.runs import load_runs, runs_not_begun
from espalier.experiments.runs.fewer_paths import without_early_stop
from espalier.experiments.runs.files import write_whole
from espalier.experiments.runs.folder import RunFolder
from espalier.experiments.runs.grid import distinct, read_grid, requests_of
from espalier.experiments.runs.statistics import require_scipy
from espalier.search.algorithms import algorithms_that_run, unscored_default
from espalier.search.request import SearchRequest
from espalier.search.run.settings import RuntimeSettings
from espalier.search.schema import option, optional

if TYPE_CHECKING:
    from espalier.experiments.advice.advise import Report

_GRID = {"beam_width": [1, 2, 4], "expansion": [1, 2, 4]}
"""The grid without --grid, for fields that are not given."""
_ALGORITHMS = ["greedy", "majority", "best-of-n", "beam", "dvts"]
_CANDIDATES = {"algorithm": _ALGORITHMS, "beam_width": [1, 4, 16], "expansion": [4]}
"""The searches to choose from, where these fields are not given."""
REPORT = "report"
"""Folder of the report in the sweep's folder."""


@with_schema
def evaluate_command(
    epochs: opt.Epochs = 1,
    trees: opt.Trees = False,
    out: Path | None = optional("Folder for samples.jsonl and summary.json; running the command again resumes."),
    in_flight: opt.InFlight = 32,
    profile: opt.Profile = None,
    *,
    selection: opt.Selection,
    request: SearchRequest,
    runtime: RuntimeSettings,
    where: ExecutorSettings,
) -> Outcome:
    """Run a search on every problem of a benchmark and grade the answers."""
    from espalier.experiments.runs.chrome_trace import profiled

    if trees and out is None:
        raise typer.BadParameter("needs a folder, --out", param_hint="--trees")
    (request,) = searches_for([request], runtime)
    runtime = replace(runtime, verifier=verifier_for([request], runtime), max_running=in_flight)
    folder, before = None, 0
    with evaluating(selection, runtime, where, out, epochs=epochs, keep_trees=trees) as (evaluation, command):
        executor, asked = evaluation.executor, evaluation.asked or ()
        if out:
            folder = RunFolder(out, evaluation.configuration(request), command)
            before = sum(not sample.refused and sample.epoch < epochs for sample in folder.samples_of(asked))
        total = len(evaluation.searches)
        with profiled(executor, profile), searches_shown(total, before, executor.max_running, runtime) as on_sample:
            summary = replace(evaluation, on_sample=on_sample).run(request, folder)
    show = partial(show_summary, summary=summary, asked=len(asked), folder=out)
    return Outcome(summary.to_dict(), show, exit_code([summary]))


@with_schema
def sweep_command(
    grid: Path | None = optional(
        "A .yaml, .toml or .json file of fields with lists of values, or a list of such; options multiply it."
    ),
    epochs: opt.Epochs = 1,
    trees: opt.Trees = False,
    out: Path = option(Path("runs/sweep"), "Folder for the cells, the table and the plot; running again resumes."),
    dry_run: bool = option(False, "Only print the cells and what they are expected to cost; runs nothing."),
    isolated: bool = option(
        False, "One search at a time instead of --in-flight, so that the seconds of a cell are its own."
    ),
    share_work: bool = option(
        False,
        "Derive best-of-n and majority cells from those with a larger N, whose first paths are the same; they have no "
        "seconds and KV memory of their own. No search stops early.",
    ),
    report: bool = option(False, "Also write the report of all cells, as `espalier report` does, to report/."),
    in_flight: opt.InFlight = 32,
    *,
    selection: opt.Selection,
    values: Annotated[dict[str, list[Any]], Fields(lists=True, defaults=_GRID, also={"seed": "--seeds"})],
    runtime: RuntimeSettings,
    where: ExecutorSettings,
) -> Outcome:
    """Evaluate a grid of searches over any fields; writes tables and a plot of accuracy against tokens.

    Running the command again resumes. Exits with 3 if problems were refused, and 1 if all were.
    """
    if share_work and isolated:
        raise typer.BadParameter("a derived cell has no seconds of its own; leave out one", param_hint="--share-work")
    if report:
        require_scipy()  # before the work, not after it
    requests = requests_of(values, read_grid(grid)) if grid else requests_of(_GRID | values)
    requests = searches_for(requests, runtime)
    if share_work:
        requests = without_early_stop(requests)
    if dry_run:
        from espalier.experiments.planning.sweep_cost import estimates

        problems = selection.load(runtime.offline)
        rows = estimates(requests, problems, selection.of(problems), out, runtime, epochs=epochs, share_work=share_work)
        return Outcome([asdict(each) for each in rows], partial(show_estimates, estimates=rows))
    from espalier.experiments.plots.cells import plot_cells
    from espalier.experiments.report.write import PAGE, write_report
    from espalier.experiments.runs.sweep import TABLE, Cell, sweep

    runtime = replace(runtime, verifier=verifier_for(requests, runtime), max_running=1 if isolated else in_flight)
    requested: list[Cell] = []
    plot, page = out / "accuracy.png", out / REPORT / PAGE
    with writing_to(out):
        with evaluating(selection, runtime, where, out, epochs=epochs, keep_trees=trees) as (evaluation, command):
            executor = evaluation.executor
            total = len(evaluation.searches) * len(distinct(requests, executor.defaults.fill))
            with searches_shown(total, 0, executor.max_running, runtime) as on_sample:
                cells = sweep(
                    replace(evaluation, on_sample=on_sample), requests, out,
                    isolated=isolated, share_work=share_work, command=command, on_cell=requested.append,
                )  # fmt: skip
        plot_cells(cells, selection.benchmark, plot)
        if report:
            write_report(load_runs([out]), page.parent, not_begun=runs_not_begun([out]))

    def show(console: Console) -> None:
        show_cells(console, cells, out)
        console.print(f"table {out / TABLE}\nplot  {plot}" + f"\npage  {page}" * report)

    return Outcome([cell.to_dict() for cell in cells], show, exit_code(cell.summary for cell in requested))


@with_schema
def advise_command(
    out: Path = option(
        Path("runs/advice"), "Folder for the sampled paths and advice.json; running the command again samples no more."
    ),
    paths: int = option(16, "Paths sampled of each problem.", Interval(ge=2, le=256)),
    target: float | None = optional(
        "Accuracy wanted, like 0.8: advise the cheapest search that reaches it.", Interval(ge=0, le=1)
    ),
    budget: str | None = optional("What a problem may cost: seconds, like 2.5s, or tokens of both models, like 3000."),
    in_flight: opt.InFlight = 32,
    *,
    selection: opt.Selection,
    values: Annotated[dict[str, list[Any]], Fields(lists=True, defaults=_CANDIDATES)],
    runtime: RuntimeSettings,
    where: ExecutorSettings,
) -> Outcome:
    """Sample paths once, and advise what search to spend on: accuracy and cost of many, most of which are not run."""
    from espalier.experiments.advice.advise import ADVICE, Sampling, advise, sampling_request
    from espalier.experiments.advice.forecast import Forecaster
    from espalier.experiments.advice.recommend import read_budget

    limits = None if budget is None else read_budget(budget)
    requests = requests_of(_candidates(runtime, values) | values)
    sampled = sampling_request(requests, paths)
    runtime = replace(runtime, verifier=verifier_for([*requests, sampled], runtime), max_running=in_flight)
    with evaluating(selection, runtime, where, out, keep_trees=True) as (evaluation, command):
        executor = evaluation.executor
        shown = partial(searches_shown, at_once=executor.max_running, runtime=runtime)
        sampling = Sampling(evaluation, out, command, shown)
        trees, costs, cut = sampling.record_paths(sampled)
        forecaster = Forecaster(trees, costs)
        run = sampling.run_some(forecaster, requests)
        report = advise(forecaster, requests, executor.defaults.fill, target, limits, run, cut)
    found = {"command": command, "benchmark": selection.benchmark} | report.to_dict()
    write_whole(out / ADVICE, found)
    return Outcome(found, partial(_show_advice, report, out / ADVICE))


def _candidates(runtime: RuntimeSettings, given: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The searches to choose from: where there is no verifier and none are named, those that need none."""
    if runtime.verifier or "algorithm" in given:
        return _CANDIDATES
    names = [name for name in _ALGORITHMS if name in algorithms_that_run("none")]
    notice = unscored_default(f"the searches to choose from are {' and '.join(names)}")
    print(f"notice: {notice}", file=sys.stderr)
    return _CANDIDATES | {"algorithm": names}


def _show_advice(report: "Report", file: Path, console: Console) -> None:
    found = report.findings
    console.print(f"{report.problems} problems, {report.paths} paths each")
    if cut := str(report.cut):
        console.print(cut)
    console.print("right in any of k paths: " + ", ".join(f"{k}: {share:.1%}" for k, share in found.pass_at.items()))
    if found.useful_width is not None:
        ranks = found.path_rank, found.sibling_rank
        path, sibling = ("unknown" if auc is None else f"{auc:.2f}" for auc in ranks)
        width = f"{found.useful_width}" if found.useful_width < report.paths else f"{report.paths} or more"
        auc = f"AUC within a problem {path}, among siblings {sibling} ({found.sibling_pairs} pairs)"
        console.print(f"the verifier ranks: {auc}; useful width {width} paths")
    left = "search", "N", "M", ""
    figures = "accuracy\n%", "95%\ninterval", "generator\ntokens", "verifier\ntokens", "seconds"
    rows: list[list[str]] = []
    for each in report.searches:
        settings = (each.settings.get(name) for name in _CANDIDATES)
        rows.append([
            *("" if value is None else str(value) for value in settings),
            *percents(each.accuracy, each.low, each.high),
            *(f"{each.generator_tokens:.0f}", f"{each.verifier_tokens:.0f}", f"{each.seconds:.3g}", str(each.basis)),
        ])  # fmt: skip
    print_whole(console, table_of((*left[:3], *figures, ""), rows, left))
    name = "withheld" if report.advice.withheld else "none"
    if chosen := report.advice.search:
        flags = {"algorithm": "--algorithm", "beam_width": "-N", "expansion": "-M", "vote": "--vote"}
        values = {flag: chosen.settings.get(name) for name, flag in flags.items()}
        name = " ".join(f"{flag} {value}" for flag, value in values.items() if value is not None)
    reasons = [f"  {reason}" for reason in report.advice.reasons]
    skipped = [f"  not forecast: {name}: {why}" for name, why in report.skipped.items()]
    console.print("\n".join([f"advice  {name}", *reasons, *skipped, f"file    {file}"]))
