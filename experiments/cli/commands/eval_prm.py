"""`espalier eval-prm`."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from annotated_types import Interval
from rich.console import Console
from typer import Option

from espalier.experiments.cli import options as opt
from espalier.experiments.cli.progress import bytes_progress, count_progress
from espalier.experiments.cli.runs import EXIT_PARTIAL, writing_to
from espalier.experiments.cli.schema_options import Fields, Outcome, with_schema
from espalier.experiments.demo import planted_errors_path
from espalier.experiments.prm_evaluation.solutions import Format, choose, read_solutions
from espalier.search.run.settings import RuntimeSettings
from espalier.search.schema import option, optional

_UNUSED = (
    "system_prompt", "answer_equivalence", "grader_memory", "reserved_share", "expected_tokens", "draft",
    "draft_tokens", "draft_quantization",
)  # fmt: skip
"""Settings of what samples steps, votes or admits searches."""


@with_schema
def eval_prm_command(
    benchmark: str = option(
        "demo",
        "demo (solutions with planted errors), or a file or folder of subsets (.json, .jsonl) in the format of "
        "ProcessBench, PRMBench, TRL's stepwise supervision, Math-Shepherd or PRM800K.",
    ),
    form: Annotated[
        Format | None, Option("--format", help="Format of the records; default: recognized by their fields.")
    ] = None,
    threshold: float | None = optional(
        "Steps below it are flagged; default: the highest F1 on --tune-on, 0.5 for PRMBench.",
        Interval(ge=0, le=1),
    ),
    tune_on: str | None = optional("Subset on which the threshold is chosen; default: gsm8k, demo-tuning for demo."),
    out: Path | None = optional("Folder for scores.jsonl, summary.json, reliability.svg; running again resumes."),
    in_flight: opt.InFlight = 32,
    *,
    selection: Annotated[opt.Selection, Fields(only=("limit", "shuffle", "shuffle_seed"))],
    runtime: Annotated[RuntimeSettings, Fields(without=_UNUSED)],
) -> Outcome:
    """Measure how well a verifier finds the wrong steps of solutions; loads no generator."""
    from espalier.experiments.prm_evaluation.report import make_records, plot_reliability, show_summary, summarize
    from espalier.experiments.prm_evaluation.scoring import Scored, ScoreFolder, load_scoring
    from espalier.experiments.runs.provenance import describe_models

    path = Path(benchmark)
    if benchmark == "demo":
        if form not in (None, Format.PROCESSBENCH):
            raise typer.BadParameter("demo is in ProcessBench's format", param_hint="--format")
        path, tune_on = planted_errors_path(), tune_on or "demo-tuning"
    found, solutions = read_solutions(path, form)
    subsets = sorted({solution.subset for solution in solutions})
    if tune_on and tune_on not in subsets:
        raise typer.BadParameter(f"no subset {tune_on!r}; there are {', '.join(subsets)}", param_hint="--tune-on")
    tune_on = tune_on or "gsm8k"
    asked = choose(solutions, selection.limit, selection.shuffle_seed if selection.shuffle else None)
    with writing_to(out):
        with bytes_progress(Console(stderr=True)) as on_bytes:
            score, identity = load_scoring(runtime, in_flight, on_bytes)
        folder = None
        if out:
            text = json.dumps([asdict(solution) for solution in solutions])
            digest = hashlib.sha256(text.encode()).hexdigest()
            configuration = {"benchmark": digest, "format": str(found), **identity}
            folder = ScoreFolder(out, configuration, solutions, {"models": describe_models(runtime)})
        scored = dict(folder.done) if folder else {}

        def keep(each: Scored) -> None:
            scored[each.unique_id] = each
            if folder:
                folder.append(each)
            advance()

        waiting = [solution for solution in asked if solution.unique_id not in scored]
        with count_progress("solutions", len(asked), len(asked) - len(waiting)) as advance:
            score(waiting, keep)
        summary = summarize(asked, scored, found, tune_on, threshold)
        summary = {"benchmark": benchmark, **identity, **summary}
        if folder and out:
            folder.finish(make_records(asked, scored, summary["threshold"]), summary)
            plot_reliability(summary, out / "reliability.svg")
    return Outcome(summary, lambda console: show_summary(console, summary), EXIT_PARTIAL if summary["refused"] else 0)
