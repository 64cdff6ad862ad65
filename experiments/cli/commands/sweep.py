"""`espalier sweep`."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from espalier.experiments.cli import options as opt
from espalier.experiments.cli.runs import both, exit_code, kept_on_interrupt, say_what_was_verified
from espalier.experiments.cli.schema_options import with_schema
from espalier.search.request import SearchRequest
from espalier.search.run.load import RuntimeSettings

if TYPE_CHECKING:
    from espalier.experiments.evaluation.sample import Sample


@with_schema
def sweep_command(
    beam_width: Annotated[str, typer.Option("--beam-width", "-N", help="Values of N, like 1,2,4.")] = "1,2,4",
    expansion: Annotated[str, typer.Option("--expansion", "-M", help="Values of M, like 1,2,4.")] = "1,2,4",
    benchmark: opt.Benchmark = "demo",
    field_map: opt.FieldMap = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first problems.")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the cells, the table and the plot; running the command again resumes.")
    ] = Path("runs/sweep"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the cells as JSON.")] = False,
    in_flight: opt.InFlight = 32,
    *,
    request: SearchRequest,
    runtime: RuntimeSettings,
) -> None:
    """Evaluate beam search over a grid of N and M; writes a table and a plot of accuracy against tokens."""
    from dataclasses import asdict

    from rich.console import Console

    from espalier.experiments.cli.loading import load_with_progress
    from espalier.experiments.cli.plots import plot_cells
    from espalier.experiments.cli.render import sample_progress, show_cells
    from espalier.experiments.evaluation.benchmarks import load_benchmark
    from espalier.experiments.evaluation.provenance import describe_command
    from espalier.experiments.evaluation.sweep import TABLE, sweep
    from espalier.search.voting.math_verify import Grader

    widths, expansions = opt.parse_int_list(beam_width, "-N"), opt.parse_int_list(expansion, "-M")
    problems = load_benchmark(benchmark, field_map=opt.parse_field_map(field_map))
    runtime = replace(runtime, max_running=in_flight)
    orchestrator = load_with_progress(runtime)
    total = len(problems[:limit]) * len(widths) * len(expansions)
    fresh: list[Sample] = []
    grader = Grader(memory_bytes=runtime.grader_memory)
    with kept_on_interrupt(out), closing(orchestrator), grader, sample_progress(total, 0) as on_sample:
        cells = sweep(
            orchestrator, problems, request, grader, widths, expansions,
            benchmark=benchmark, folder=out, limit=limit, on_sample=both(fresh.append, on_sample),
            command=describe_command(benchmark, runtime, orchestrator),
        )  # fmt: skip
    plot_cells(cells, benchmark, out / "accuracy.png")
    if runtime.verify_incremental:
        say_what_was_verified(fresh, total, runtime.verifier)
    if as_json:
        print(json.dumps([asdict(cell) for cell in cells], indent=2))
    else:
        console = Console()
        show_cells(console, cells, out)
        console.print(f"table {out / TABLE}\nplot  {out / 'accuracy.png'}", highlight=False, markup=False)
    if code := exit_code(cell.summary for cell in cells):
        raise typer.Exit(code)
