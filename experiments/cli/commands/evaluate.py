"""`espalier eval`."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from espalier.experiments.cli import options as opt
from espalier.experiments.cli.runs import both, kept_on_interrupt, say_what_was_verified, verifier_for
from espalier.experiments.cli.schema_options import with_schema
from espalier.search.request import SearchRequest
from espalier.search.run.load import RuntimeSettings

if TYPE_CHECKING:
    from espalier.experiments.evaluation.sample import Sample


@with_schema
def evaluate_command(
    benchmark: opt.Benchmark = "demo",
    field_map: opt.FieldMap = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first problems.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for samples.jsonl and summary.json; running the command again resumes.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    in_flight: opt.InFlight = 32,
    profile: opt.Profile = None,
    *,
    request: SearchRequest,
    runtime: RuntimeSettings,
) -> None:
    """Run a search on every problem of a benchmark and grade the answers."""
    from rich.console import Console

    from espalier.experiments.cli.loading import load_with_progress
    from espalier.experiments.cli.render import sample_progress, show_summary
    from espalier.experiments.evaluation.benchmarks import load_benchmark
    from espalier.experiments.evaluation.evaluate import evaluate, left_open, run_configuration
    from espalier.experiments.evaluation.provenance import describe_command
    from espalier.experiments.evaluation.run_folder import RunFolder
    from espalier.experiments.study.chrome_trace import profiled
    from espalier.search.voting.math_verify import Grader

    # The folder may hold samples of problems beyond the limit; the whole benchmark tells which of them are current.
    problems = load_benchmark(benchmark, None if out else limit, opt.parse_field_map(field_map))
    asked = problems[:limit]
    runtime = replace(runtime, verifier=verifier_for(request, runtime.verifier), max_running=in_flight)
    orchestrator = load_with_progress(runtime)
    fresh: list[Sample] = []
    folder, before = None, 0
    if out:
        command = describe_command(benchmark, runtime, orchestrator)
        folder = RunFolder(out, run_configuration(benchmark, request, orchestrator), left_open(request), command)
        before = sum(not sample.refused for sample in folder.samples_of(asked))
    grader = Grader(memory_bytes=runtime.grader_memory)
    progress = sample_progress(len(asked), before)
    profiling = profiled(orchestrator.engine, profile)
    with kept_on_interrupt(out), closing(orchestrator), profiling, grader, progress as on_sample:
        summary = evaluate(
            orchestrator, problems, request, grader,
            benchmark=benchmark, limit=limit, folder=folder, on_sample=both(fresh.append, on_sample),
        )  # fmt: skip
    if runtime.verify_incremental:
        say_what_was_verified(fresh, len(asked), runtime.verifier)
    if as_json:
        from dataclasses import asdict

        print(json.dumps(asdict(summary), indent=2))
    else:
        show_summary(Console(), summary, len(asked), out)
