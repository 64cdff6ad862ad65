"""`espalier learn-verifier`: from a generator and problems with answers, a verifier on its trunk."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from espalier.engine.models.options import Quantization
from espalier.experiments.cli import options as opt
from espalier.experiments.cli.commands.rollouts import OF_VERIFIERS, sample_rollouts
from espalier.experiments.cli.runs import load_problems, writing_to
from espalier.experiments.cli.schema_options import Without, with_schema
from espalier.search.rollout import RolloutSettings
from espalier.search.run.load import RuntimeSettings

if TYPE_CHECKING:
    from espalier.experiments.verifier_training.tree_file import TreeRecord

_RANKS = 0.55
"""AUC within a problem from which a verifier is worth a search."""
_RANKS_BADLY = (
    "warning: within a problem it tells right from wrong steps hardly better than chance, so a search with it will not "
    "be better than a majority vote; more problems may help, or a larger generator"
)


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
    trunk: Annotated[
        str,
        typer.Option(
            help="A model that reads the solutions: folder, hub id or GGUF file. The verifier is then evidence from "
            "it: --verifier TRUNK --verifier-family OUT/verifier. Default: a head on the generator's own states.",
            show_default=False,
        ),
    ] = "",
    trunk_quantization: Annotated[
        Quantization, typer.Option(help="Quantization of the trunk's weights; run it with the same.")
    ] = Quantization.AUTO,
    *,
    selection: opt.Selection,
    rollouts: RolloutSettings,
    runtime: Annotated[RuntimeSettings, Without(*OF_VERIFIERS)],
) -> None:
    """Learn a verifier for a generator: sample solutions, value their steps, and train a head on its hidden states."""
    from espalier.engine.roles import GENERATOR
    from espalier.experiments.cli.progress import count_progress
    from espalier.experiments.verifier_training.combining import train_own_evidence
    from espalier.experiments.verifier_training.features import HIDDEN, take_features, tap_candidates

    problems = selection.of(load_problems(benchmark, field_map, runtime.offline))
    started = time.perf_counter()
    with writing_to(out):
        file, runtime = out / "rollouts.jsonl", replace(runtime, max_running=in_flight)
        engine, generator, trees = sample_rollouts(
            problems, rollouts, file, benchmark, grader, runtime, {HIDDEN: lambda hidden: hidden}
        )
        sampled = time.perf_counter()
        if trunk:
            engine.close()
            del engine, generator  # whose weights would stay in memory beside the trunk's
            record = {"benchmark": benchmark, "problems": len(trees), "labels": str(rollouts.labels)}
            of_trunk = replace(runtime, generator=trunk, generator_quantization=trunk_quantization, system_prompt=None)
            _learn_from_trunk(trees, out, of_trunk, record, rollouts.seed)
            typer.echo(f"{time.perf_counter() - started:.0f} s in all")
            return
        tap_candidates(engine.model(GENERATOR).decoder)
        with count_progress("problems", len(trees)) as advance:
            features = take_features(engine, trees, out / "features", advance)
        taken = time.perf_counter()
        typer.echo(f"{len(features.values):,} steps with hidden states of {features.hidden} values")
        of_generator = {"name": runtime.generator, "digest": generator.model.digest}
        seconds = {"rollouts": round(sampled - started, 1), "features": round(taken - sampled, 1)}
        record = {"benchmark": benchmark, "problems": len(trees), "labels": str(rollouts.labels), "seconds": seconds}
        summary = train_own_evidence(features, out / "verifier", of_generator, record, rollouts.seed)
    measured, chosen = summary["measured"], summary["chosen"]
    where = f"the states that enter layer {summary['layer']}" if "layer" in summary else "the last states"
    score = "evidence of the whole path" if "weights" in summary else "the newest step's probability"
    typer.echo(f"the score is {score}")
    typer.echo(
        f"head of {chosen['layers']} layer{'s' * (chosen['layers'] > 1)} on {where}; on {measured['problems']} other "
        f"problems: AUC {_figure(measured['auc'])}, within a problem {_figure(measured['auc_within_a_problem'])}, "
        f"calibration error {measured['expected_calibration_error']:.3f}"
    )
    if (measured["auc_within_a_problem"] or 0.5) < _RANKS:
        typer.echo(_RANKS_BADLY, err=True)
    typer.echo(f"{time.perf_counter() - started:.0f} s in all")
    typer.echo(f"verifier  {out / 'verifier'}")


def _learn_from_trunk(
    trees: "list[TreeRecord]", out: Path, runtime: RuntimeSettings, record: dict[str, Any], seed: int
) -> None:
    """Have a trunk, the generator of `runtime`, read the trees, and write what is learned into `out`."""
    from rich.console import Console

    from espalier.experiments.cli.loading import bytes_progress
    from espalier.experiments.cli.progress import count_progress
    from espalier.experiments.verifier_training.combining import train_trunk_evidence
    from espalier.experiments.verifier_training.features import tap_candidates
    from espalier.experiments.verifier_training.trunk_reading import TOKENS_AND_STATES, StatesHead, read_trees
    from espalier.search.run.load import load_generator_alone

    head = StatesHead()
    with bytes_progress(Console(stderr=True)) as on_bytes:
        engine, reader = load_generator_alone(runtime, on_bytes, {TOKENS_AND_STATES: head})
    head.model = reader.model
    tap_candidates(reader.model.decoder)
    with count_progress("problems", len(trees)) as advance:
        readings = read_trees(engine, reader.system_prompt, trees, out / "readings", advance)
    typer.echo(f"{len(readings.values):,} steps, each read once")
    name_and_digest = {"name": runtime.generator, "digest": reader.model.digest}
    measured = train_trunk_evidence(readings, out / "verifier", name_and_digest, record, seed)["measured"]
    for kind in ("solutions", "siblings"):
        figures = ", ".join(f"{name} {_figure(value)}" for name, value in measured[f"auc_{kind}"].items())
        typer.echo(f"AUC within a problem, {kind} of {measured['problems']} other problems: {figures}")
    if (measured["auc_solutions"]["score"] or 0.5) < _RANKS:
        typer.echo(_RANKS_BADLY, err=True)
    typer.echo(f"verifier  {out / 'verifier'}, with --verifier {runtime.generator} and --verifier-family")


def _figure(value: float | None) -> str:
    return "unknown (all are right, or all wrong)" if value is None else f"{value:.3f}"
