"""`espalier learn-verifier`: from a generator and problems with answers, a verifier on its trunk."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from espalier.experiments.cli import options as opt
from espalier.experiments.cli.commands.rollouts import OF_VERIFIERS, problems_of, sample_rollouts
from espalier.experiments.cli.runs import writing_to
from espalier.experiments.cli.schema_options import Without, with_schema
from espalier.experiments.verifier_training.settings import RolloutSettings
from espalier.search.run.load import RuntimeSettings

if TYPE_CHECKING:
    import torch

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
    selection: opt.SelectionOptions,
    rollouts: RolloutSettings,
    runtime: Annotated[RuntimeSettings, Without(*OF_VERIFIERS)],
) -> None:
    """Learn a verifier for a generator: sample solutions, value their steps, and train a head on its hidden states."""
    from rich.console import Console

    from espalier.experiments.cli.loading import bytes_progress
    from espalier.experiments.cli.progress import share_progress
    from espalier.experiments.verifier_training.features import HIDDEN, take_features
    from espalier.experiments.verifier_training.training import train_head
    from espalier.search.run.load import load_generator_alone

    problems = problems_of(benchmark, field_map, runtime, selection.parse())
    started = time.perf_counter()
    with writing_to(out):
        with bytes_progress(Console(stderr=True)) as on_bytes:
            alone = replace(runtime, verifier="", max_running=in_flight)
            engine, generator = load_generator_alone(alone, on_bytes, {HIDDEN: _as_it_is})
        file = out / "rollouts.jsonl"
        trees = sample_rollouts(engine, generator, problems, rollouts, file, benchmark, grader, runtime, in_flight)
        sampled = time.perf_counter()
        with share_progress(len(trees), 0) as advance:
            features = take_features(engine, trees, out / "features", lambda: advance(0, 0))
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


def _as_it_is(hidden: "torch.Tensor") -> "torch.Tensor":
    return hidden
