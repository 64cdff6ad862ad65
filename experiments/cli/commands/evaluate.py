"""`espalier eval`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from espalier.experiments.cli import options as opt
from espalier.experiments.cli.runs import (
    evaluating,
    exit_code,
    searches_for,
    searches_shown,
    verifier_for,
)
from espalier.experiments.cli.schema_options import with_schema
from espalier.experiments.executors.settings import ExecutorSettings
from espalier.search.request import SearchRequest
from espalier.search.run.settings import RuntimeSettings


@with_schema
def evaluate_command(
    benchmark: opt.Benchmark = "demo",
    field_map: opt.FieldMap = None,
    epochs: opt.Epochs = 1,
    trees: opt.Trees = False,
    grader: opt.GraderName = "math-verify",
    out: Annotated[
        Path | None, typer.Option(help="Folder for samples.jsonl and summary.json; running the command again resumes.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    in_flight: opt.InFlight = 32,
    profile: opt.Profile = None,
    *,
    selection: opt.Selection,
    request: SearchRequest,
    runtime: RuntimeSettings,
    where: ExecutorSettings,
) -> None:
    """Run a search on every problem of a benchmark and grade the answers."""
    from rich.console import Console

    from espalier.experiments.cli.render import show_summary
    from espalier.experiments.runs.chrome_trace import profiled
    from espalier.experiments.runs.folder import RunFolder

    if trees and out is None:
        raise typer.BadParameter("needs a folder, --out", param_hint="--trees")
    (request,) = searches_for([request], runtime)
    runtime = replace(runtime, verifier=verifier_for([request], runtime), max_running=in_flight)
    folder, before = None, 0
    given = benchmark, field_map, selection, grader, runtime, where, out
    with evaluating(*given, epochs=epochs, keep_trees=trees) as (evaluation, command):
        executor, asked = evaluation.executor, evaluation.asked or ()
        if out:
            folder = RunFolder(out, evaluation.configuration(request), command)
            before = sum(not sample.refused and sample.epoch < epochs for sample in folder.samples_of(asked))
        total = len(evaluation.searches)
        with (
            profiled(executor, profile),
            searches_shown(total, before, executor.max_running, runtime) as on_sample,
        ):
            summary = replace(evaluation, on_sample=on_sample).run(request, folder)
    if as_json:
        print(json.dumps(summary.to_dict(), indent=2))
    else:
        show_summary(Console(), summary, len(asked), out)
    if code := exit_code([summary]):
        raise typer.Exit(code)
