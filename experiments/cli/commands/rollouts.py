"""`espalier rollouts`: solutions as trees, with values of their steps; and `espalier learn-verifier`, from them."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from espalier.engine.errors import EspalierError
from espalier.engine.models.options import Quantization
from espalier.experiments.cli import options as opt
from espalier.experiments.cli.runs import writing_to
from espalier.experiments.cli.schema_options import Fields, with_schema
from espalier.experiments.verifier_training.tree_file import write_math_shepherd, write_trl
from espalier.search.rollout import RolloutSettings
from espalier.search.run.settings import RuntimeSettings
from espalier.search.schema import option, optional

OF_VERIFIERS = (
    "verifier", "verifier_family", "verifier_reference", "verifier_quantization", "verify_incremental",
    "answer_equivalence",
)  # fmt: skip
"""Settings without an effect on sampling alone."""
Runtime = Annotated[RuntimeSettings, Fields(without=OF_VERIFIERS)]
Selection = Annotated[opt.Selection, Fields(defaults={"benchmark": "demo-training"})]
TrunkQuantization = Annotated[Quantization, Option(help="Quantization of the trunk's weights; run it with the same.")]
TestRun = Annotated[
    Path | None,
    Option(
        help="With --trunk: folder of `espalier eval --algorithm best-of-n --early-stop off --trees` on other "
        "problems, whose paths are ranked and voted on, to verifier/test.json."
    ),
]


@with_schema
def rollouts_command(
    context: typer.Context,
    out: Annotated[Path, Option(help="File for the trees, JSON Lines; running the command again resumes.")],
    trl: Path | None = optional("Also write solutions with labels of their steps, as TRL's stepwise supervision."),
    math_shepherd: Path | None = optional("The same in Math-Shepherd's form."),
    in_flight: opt.InFlight = 32,
    endpoint: opt.Endpoint = None,
    *,
    selection: Selection,
    rollouts: RolloutSettings,
    runtime: Runtime,
    connection: opt.ConnectionOptions,
) -> None:
    """Sample solutions of every problem as a tree of steps, with tokens, log-probabilities, outcomes and values."""
    opt.check_place(context, endpoint, "models", {"offline", "grader_memory"})
    problems = selection.of(selection.load(runtime.offline))
    runtime = replace(runtime, max_running=in_flight)
    with writing_to(out, is_file=True):
        from espalier.experiments.cli.commands.learning import RolloutFile

        file = RolloutFile(problems, rollouts, out, selection)
        trees = file.fetch(endpoint, connection, runtime) if endpoint else file.sample(runtime)[2]
    typer.echo(f"trees  {out}")
    for write, labelled in ((write_trl, trl), (write_math_shepherd, math_shepherd)):
        if labelled:
            with writing_to(labelled, is_file=True):
                write(labelled, trees)
            typer.echo(f"steps  {labelled}")


@with_schema
def learn_verifier_command(
    out: Annotated[
        Path, Option(help="Folder for rollouts.jsonl, features/ and verifier/ (for --verifier); running again resumes.")
    ],
    in_flight: opt.InFlight = 32,
    trunk: str = option(
        "",
        "A model that reads the solutions, for --verifier TRUNK --verifier-family OUT/verifier: folder, hub id or GGUF "
        "file. Default: a head on the generator's own states.",
    ),
    trunk_quantization: TrunkQuantization = Quantization.AUTO,
    test: TestRun = None,
    *,
    selection: Selection,
    rollouts: RolloutSettings,
    runtime: Runtime,
) -> None:
    """Learn a verifier for a generator: sample solutions, value their steps, and train a head on its hidden states."""
    if test and not trunk:
        raise EspalierError("--test needs --trunk; a head on the generator's states scores as it samples: run eval")
    from espalier.experiments.cli.commands.learning import Learning, RolloutFile, recorded_trees

    runtime = replace(runtime, max_running=in_flight)
    of_trunk = replace(runtime, generator=trunk, generator_quantization=trunk_quantization, system_prompt=None)
    problems = selection.of(selection.load(runtime.offline))
    tests = recorded_trees(test, runtime.offline) if test else []
    started = time.perf_counter()
    with writing_to(out):
        file = RolloutFile(problems, rollouts, out / "rollouts.jsonl", selection)
        engine, generator, learning = Learning.sampled(file, tests, runtime)
        if not trunk:
            learning.from_own_states(engine, {"name": runtime.generator, "digest": generator.model.digest})
        else:
            engine.close()
            del engine, generator  # whose weights would stay in memory beside the trunk's
            learning.from_trunk(of_trunk)
    typer.echo(f"{time.perf_counter() - started:.0f} s in all")
