"""`espalier learn-verifier`: from a generator and problems with answers, a verifier on its trunk."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from espalier.experiments.cli import options as opt
from espalier.experiments.cli.commands.rollouts import OF_VERIFIERS, sample_rollouts
from espalier.experiments.cli.runs import load_problems, writing_to
from espalier.experiments.cli.schema_options import Without, with_schema
from espalier.experiments.verifier_training.settings import RolloutSettings
from espalier.search.run.load import RuntimeSettings

_RANKS = 0.55
"""AUC within a problem from which a verifier is worth a search."""


@with_schema
def learn_verifier_command(
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for rollouts.jsonl, features/ and, in the end, verifier/, which --verifier takes; running the "
            "command again resumes."
        ),
    ],
    benchmark: opt.Benchmark = "demo-training",
    field_map: opt.FieldMap = None,
    grader: opt.GraderName = "math-verify",
    in_flight: opt.InFlight = 32,
    *,
    selection: opt.Selection,
    rollouts: RolloutSettings,
    runtime: Annotated[RuntimeSettings, Without(*OF_VERIFIERS)],
) -> None:
    """Learn a verifier for a generator: sample solutions, value their steps, and train a head on its hidden states."""
    from espalier.experiments.cli.progress import count_progress
    from espalier.experiments.verifier_training.features import HIDDEN, take_features
    from espalier.experiments.verifier_training.training import train_head

    problems = selection.of(load_problems(benchmark, field_map, runtime.offline))
    started = time.perf_counter()
    with writing_to(out):
        file, runtime = out / "rollouts.jsonl", replace(runtime, max_running=in_flight)
        engine, generator, trees = sample_rollouts(
            problems, rollouts, file, benchmark, grader, runtime, {HIDDEN: lambda hidden: hidden}
        )
        sampled = time.perf_counter()
        with count_progress("problems", len(trees)) as advance:
            features = take_features(engine, trees, out / "features", advance)
        taken = time.perf_counter()
        typer.echo(f"{len(features.values):,} steps with hidden states of {features.states.shape[1]} values")
        trunk = {"name": runtime.generator, "digest": generator.model.digest}
        seconds = {"rollouts": round(sampled - started, 1), "features": round(taken - sampled, 1)}
        record = {"benchmark": benchmark, "problems": len(trees), "labels": str(rollouts.labels), "seconds": seconds}
        summary = train_head(features, out / "verifier", trunk, record, rollouts.seed)
    measured, chosen = summary["measured"], summary["chosen"]
    typer.echo(
        f"head of {chosen['layers']} layer{'s' * (chosen['layers'] > 1)}; on {measured['problems']} other problems: "
        f"AUC {_figure(measured['auc'])}, within a problem {_figure(measured['auc_within_a_problem'])}, "
        f"calibration error {measured['expected_calibration_error']:.3f}"
    )
    if (measured["auc_within_a_problem"] or 0.5) < _RANKS:
        typer.echo(
            "warning: within a problem it tells right from wrong steps hardly better than chance, so a search with it "
            "will not be better than a majority vote; more problems may help, or a larger generator",
            err=True,
        )
    typer.echo(f"{time.perf_counter() - started:.0f} s in all")
    typer.echo(f"verifier  {out / 'verifier'}")


def _figure(value: float | None) -> str:
    return "unknown (all are right, or all wrong)" if value is None else f"{value:.3f}"
