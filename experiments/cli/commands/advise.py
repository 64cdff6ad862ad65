"""`espalier advise`: from paths sampled once, the search that a problem's seconds or tokens are best spent on."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from espalier.experiments.cli import options as opt
from espalier.experiments.cli.runs import evaluating, searches_shown, verifier_for
from espalier.experiments.cli.schema_options import Lists, with_schema
from espalier.experiments.executors.settings import ExecutorSettings
from espalier.experiments.runs.grid import requests_of
from espalier.search.algorithms import algorithms_that_run, unscored_default
from espalier.search.run.settings import RuntimeSettings

if TYPE_CHECKING:
    from espalier.experiments.advice.advise import Report
    from espalier.search.run.executor import Executor

_USUAL = {"algorithm": ["greedy", "majority", "best-of-n", "beam", "dvts"], "beam_width": [1, 4, 16], "expansion": [4]}
"""The searches to choose from, where these fields are not given."""


@with_schema
def advise_command(
    benchmark: opt.Benchmark = "demo",
    field_map: opt.FieldMap = None,
    grader: opt.GraderName = "math-verify",
    out: Annotated[
        Path,
        typer.Option(help="Folder for the sampled paths and advice.json; running the command again samples no more."),
    ] = Path("runs/advice"),
    paths: Annotated[int, typer.Option(min=2, max=256, help="Paths sampled of each problem.")] = 16,
    target: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Accuracy wanted, like 0.8: advise the cheapest search that reaches it."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="What a problem may cost: seconds, like 2.5s, or tokens of both models, like 3000."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print advice.json.")] = False,
    in_flight: opt.InFlight = 32,
    *,
    selection: opt.Selection,
    values: Annotated[dict[str, list[Any]], Lists(_USUAL)],
    runtime: RuntimeSettings,
    where: ExecutorSettings,
) -> None:
    """Sample paths once, and advise what search to spend on: accuracy and cost of many, most of which are not run."""
    from espalier.experiments.advice.advise import ADVICE, Sampling, advise, sampling_request
    from espalier.experiments.advice.forecast import Forecaster
    from espalier.experiments.advice.recommend import read_budget
    from espalier.experiments.runs.files import write_whole

    limits = None if budget is None else read_budget(budget)
    requests = requests_of(_usual(runtime, values) | values)
    sampled = sampling_request(requests, paths)
    runtime = replace(runtime, verifier=verifier_for([*requests, sampled], runtime), max_running=in_flight)
    given = benchmark, field_map, selection, grader, runtime, where, out
    with evaluating(*given, keep_trees=True) as (evaluation, command):
        executor = evaluation.executor
        shown = partial(searches_shown, at_once=executor.max_running, runtime=runtime)
        seconds = partial(_step_seconds, executor)
        sampling = Sampling(evaluation, out, command, shown)
        trees, costs, cut = sampling.record_paths(sampled, seconds)
        forecaster = Forecaster(trees, costs)
        run = sampling.run_some(forecaster, requests)
        report = advise(forecaster, requests, executor.defaults.fill, target, limits, run, cut)
    found = {"command": command, "benchmark": benchmark} | report.to_dict()
    write_whole(out / ADVICE, found)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _show(report, out / ADVICE)


def _usual(runtime: RuntimeSettings, given: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The searches to choose from: where there is no verifier and none are named, those that need none."""
    if runtime.verifier or "algorithm" in given:
        return _USUAL
    running = algorithms_that_run("none")
    names = [name for name in _USUAL["algorithm"] if name in running]
    notice = unscored_default(f"the searches to choose from are {' and '.join(names)}")
    print(f"notice: {notice}", file=sys.stderr)
    return _USUAL | {"algorithm": names}


def _step_seconds(executor: "Executor") -> dict[str, float]:
    """Seconds of the engine's steps by role; empty where workers run them."""
    from espalier.search.run.orchestrator import Orchestrator

    if not isinstance(executor, Orchestrator):
        return {}
    return {role: stats.step_seconds.sum for role, stats in executor.engine.stats().items()}


def _show(report: "Report", file: Path) -> None:
    from rich.console import Console

    from espalier.experiments.cli.render import print_whole, table_of

    console, found = Console(), report.findings
    for line in (
        f"{report.problems} problems, {report.paths} paths each",
        *filter(None, [str(report.cut)]),
        "right in any of k paths: " + ", ".join(f"{k}: {share:.1%}" for k, share in found.pass_at.items()),
        *_verifier_lines(report),
    ):
        console.print(line, highlight=False, markup=False)
    left = "search", "N", "M", ""
    figures = "accuracy\n%", "95%\ninterval", "generator\ntokens", "verifier\ntokens", "seconds"
    rows: list[list[str]] = []
    for each in report.searches:
        settings = (each.settings.get(name) for name in ("algorithm", "beam_width", "expansion"))
        rows.append([
            *("" if value is None else str(value) for value in settings), f"{100 * each.accuracy:.1f}",
            f"[{100 * each.low:.1f}, {100 * each.high:.1f}]", f"{each.generator_tokens:.0f}",
            f"{each.verifier_tokens:.0f}", f"{each.seconds:.3g}", str(each.basis),
        ])  # fmt: skip
    print_whole(console, table_of((*left[:3], *figures, ""), rows, left))
    chosen = report.advice.search
    name = _name(chosen.settings) if chosen else "withheld" if report.advice.withheld else "none"
    lines = [f"advice  {name}", *(f"  {reason}" for reason in report.advice.reasons)]
    lines += [f"  not forecast: {name}: {why}" for name, why in report.skipped.items()]
    for line in [*lines, f"file    {file}"]:
        console.print(line, highlight=False, markup=False)


def _name(settings: Any) -> str:
    flags = {"algorithm": "--algorithm", "beam_width": "-N", "expansion": "-M", "vote": "--vote"}
    return " ".join(f"{flag} {settings[name]}" for name, flag in flags.items() if settings.get(name) is not None)


def _verifier_lines(report: "Report") -> list[str]:
    found = report.findings
    if found.useful_width is None:
        return []
    rank = [f"{value:.2f}" if value is not None else "unknown" for value in (found.path_rank, found.sibling_rank)]
    width = f"{found.useful_width}" if found.useful_width < report.paths else f"{report.paths} or more"
    return [
        f"the verifier ranks: AUC within a problem {rank[0]}, among siblings {rank[1]} ({found.sibling_pairs} pairs); "
        f"useful width {width} paths"
    ]
