"""`lab study memory-and-time`."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from espalier.experiments.cli import options as opt
from espalier.experiments.cli.runs import verifier_for, writing_to
from espalier.experiments.cli.schema_options import Fields, with_schema
from espalier.experiments.runs.grid import FIELDS, requests_of
from espalier.search.request import SearchRequest
from espalier.search.run.load import with_quantizations
from espalier.search.run.settings import RuntimeSettings
from espalier.search.schema import CodeName

_USUAL: dict[str, list[Any]] = {"algorithm": ["beam"], "beam_width": [1, 2, 4, 8], "expansion": [1, 2, 4]}
"""The grid, for fields that are not given."""


@with_schema
def command(
    limit: Annotated[int, typer.Option(min=1, help="Only the first problems.")] = 24,
    out: Annotated[
        Path, typer.Option(help="Folder for cells, tables, figures and a page; running the command again resumes.")
    ] = Path("runs/memory-and-time"),
    in_flight: opt.InFlight = 32,
    *,
    selection: Annotated[opt.Selection, Fields(only=("benchmark", "field_map"))],
    values: Annotated[dict[str, list[Any]], Fields(only=_USUAL, lists=True, defaults=_USUAL)],
    request: Annotated[SearchRequest, Fields(without=_USUAL)],
    runtime: RuntimeSettings,
) -> None:
    """Measure memory and time against N and M, each beside its closed form: figures, tables and a page.

    Every cell runs its searches one at a time, for the memory and the phases of one search, and then all at once in one
    KV pool, for throughput and preemptions. A small --kv-memory shows preemptions. The same command runs on a GPU with
    --device cuda, and with --load-format dummy for real shapes without their weights.
    """
    from espalier.experiments.cli.progress import count_progress, load_with_progress
    from espalier.experiments.lab.study.grid import run_grid
    from espalier.experiments.lab.study.page import PAGE, TABLE, write_study

    cells = requests_of({name: [getattr(request, name)] for name in FIELDS} | _USUAL | values)
    if any(isinstance(cell.algorithm, CodeName) for cell in cells):
        raise typer.BadParameter("a study measures the algorithms that Espalier has", param_hint="-a")
    loaded = selection.load(runtime.offline)[:limit]
    if any(problem.history for problem in loaded):
        raise typer.BadParameter("a study reads no messages before a problem", param_hint="--benchmark")
    problems = [problem.problem for problem in loaded]
    runtime = with_quantizations(replace(runtime, verifier=verifier_for(cells, runtime), max_running=in_flight))
    with writing_to(out), closing(load_with_progress(runtime)) as orchestrator:
        effective = orchestrator.defaults.fill(replace(cells[0], problem="-"))
        left_out = ("problem", "history", "algorithm", "beam_width", "expansion")
        configuration = {
            "benchmark": selection.benchmark,
            "problems": len(problems),
            **{name: value for name, value in effective.to_dict().items() if name not in left_out},
            **orchestrator.describe_models(),
            "generator_quantization": str(runtime.generator_quantization),
            "verifier_quantization": str(runtime.verifier_quantization),
            "kv_memory": orchestrator.engine.kv_pool.num_bytes,
            "block_size": runtime.block_size,
            "reserved_share": runtime.reserved_share,
            "max_batch_tokens": runtime.max_batch_tokens,
            "launch_ahead": orchestrator.engine.settings.launch_ahead,
            "in_flight": in_flight,
            "threads": runtime.threads,
        }
        with count_progress("cells", len(cells)) as advance:
            found = run_grid(orchestrator, problems, cells, out, configuration, lambda _: advance())
        write_study(found, configuration, out)
    _show(found)
    print(f"page  {out / PAGE}\ntable {out / TABLE}")


def _show(cells: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from espalier.experiments.lab.study.page import row_of

    shown = (
        "algorithm",
        "N",
        "M",
        "peak KV MiB",
        "closed form MiB",
        "searches in 1 GiB",
        "ms alone",
        "tokens/s at once",
    )
    table = Table(*shown, "preemptions")
    for cell in cells:
        row = row_of(cell)
        table.add_row(*(str("" if row[name] is None else row[name]) for name in (*shown, "preemptions")))
    Console().print(table)
