"""`espalier report`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from espalier.experiments.report.loggers import Tracker, check_installed, log_report

if TYPE_CHECKING:
    from rich.console import Console

    from espalier.experiments.runs.table import Table
    from espalier.search.thoughts.stop_rule import StopRule

_NUMBER = "#"
_MAY_BE_COMMON = ("algorithm", "problems")


def report_command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders that eval wrote, or folders of such folders, as sweep writes."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the page, the tables and the plots.")] = Path("report"),
    problems: Annotated[
        int, typer.Option(min=0, help="Problems whose texts and trees are on the page, those in dispute first.")
    ] = 200,
    resamples: Annotated[
        int, typer.Option(min=100, help="Bootstrap resamples for each pair of runs with epochs.")
    ] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap.")] = 0,
    stop_when: Annotated[
        list[str] | None,
        typer.Option(
            help="Replay this rule for ending thoughts on runs that hold probes, see --stop-when of eval; may be "
            "repeated. Default: rules of several strictness."
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Choose the rule on this run of other problems: of those that lose at most --max-loss there, the one "
            "that saves most tokens."
        ),
    ] = None,
    max_loss: Annotated[
        float, typer.Option(min=0, max=100, help="Accuracy in points that the rule chosen by --calibrate may lose.")
    ] = 1.0,
    log: Annotated[
        Tracker | None, typer.Option(help="Also send each run's figures to this experiment tracker.")
    ] = None,
) -> None:
    """Compare runs: a table, paired differences, plots, and one HTML page that opens to problems and trees."""
    from rich.console import Console

    from espalier.experiments.report.runs import load_runs, runs_not_begun
    from espalier.experiments.report.stopping import choose_rule, holds_probes, replay_rules, stopping_table
    from espalier.experiments.report.tables import main_table
    from espalier.experiments.report.write import MARKDOWN, PAGE, write_report
    from espalier.experiments.runs.files import folder_lock

    if log:
        check_installed(log)  # before the work, not after it
    rules = _read_rules(stop_when or [])
    loaded = load_runs(runs)
    calibrating = load_runs([calibrate]) if calibrate else []
    probed, calibrating_probed = list(filter(holds_probes, loaded)), list(filter(holds_probes, calibrating))
    for option, given, found in (
        ("--stop-when", rules, probed),
        ("--calibrate", calibrate, probed),
        ("--calibrate", calibrate, calibrating_probed),
    ):
        if given and not found:
            raise typer.BadParameter(
                "no run holds probes of independent paths; eval with --probe-every and --trees, and without "
                "--stop-when",
                param_hint=option,
            )
    replayed, chosen = replay_rules(calibrating_probed, rules), None
    if calibrate:
        rules = list(dict.fromkeys(row.rule for row in replayed if row.rule))
        chosen = choose_rule(replayed, max_loss / 100)
    replayed += replay_rules(probed, rules)
    with folder_lock(out):
        report = write_report(
            loaded,
            out,
            not_begun=runs_not_begun(runs),
            most_problems=problems,
            resamples=resamples,
            seed=seed,
            replayed=replayed,
            chosen=chosen,
        )
    console = Console()
    _show(console, report.title, main_table(report.runs))
    if replayed:
        _show(console, "Thoughts ended early, replayed", stopping_table(replayed, chosen))
    if calibrate and not chosen:
        typer.echo(f"warning: no rule saves tokens on {calibrate} and loses at most {max_loss:g} points", err=True)
    for warning in report.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if log:
        log_report(log, report, out)
    console.print(
        f"page   {out / PAGE}\ntext   {out / MARKDOWN}\nplots  {out}/*.svg, *.png", highlight=False, markup=False
    )


def _read_rules(texts: list[str]) -> "list[StopRule]":
    from espalier.search.thoughts.stop_rule import read_stop_rule

    try:
        return [read_stop_rule(text) for text in texts]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--stop-when") from None


def _show(console: "Console", title: str, table: "Table") -> None:
    """Print the table; columns that are the same for all runs go into the line above it."""
    from rich.box import SIMPLE_HEAD
    from rich.text import Text

    from espalier.experiments.cli.render import print_whole, table_of

    columns = list(zip(table.columns, zip(*table.rows, strict=True), strict=True))
    columns = [column for column in columns if column[0] != _NUMBER]
    common = [
        name
        for name, values in columns
        if name in _MAY_BE_COMMON and len(set(values)) == 1 and (name != "problems" or values[0].isdecimal())
    ]
    above = [
        title,
        *(f"{values[0]} {name}" if name == "problems" else values[0] for name, values in columns if name in common),
    ]
    kept = {name.replace(" ", "\n"): values for name, values in columns if name not in common}
    look = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "title": Text(", ".join(above)), "title_justify": "left"}
    print_whole(console, table_of(list(kept), zip(*kept.values(), strict=True), ("run", "algorithm", "rule"), **look))
