"""`espalier rollouts`: samples solutions of problems as trees, with values of their steps."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from espalier.experiments.cli import options as opt
from espalier.experiments.cli.connection import ConnectionOptions, retries_shown
from espalier.experiments.cli.runs import load_problems, writing_to
from espalier.experiments.cli.schema_options import Without, with_schema
from espalier.search.rollout import RolloutSettings
from espalier.search.run.settings import RuntimeSettings
from espalier.search.schema import declared

if TYPE_CHECKING:
    from espalier.engine.engine import Engine
    from espalier.engine.models.model import Head
    from espalier.experiments.runs.benchmarks import Problem
    from espalier.experiments.verifier_training.rollouts import TreeSampler
    from espalier.experiments.verifier_training.tree_file import TreeRecord
    from espalier.search.run.generator import Generator

OF_VERIFIERS = (
    "verifier", "verifier_family", "verifier_reference", "verifier_quantization", "verify_incremental",
    "answer_equivalence",
)  # fmt: skip
"""Settings without an effect on sampling alone."""


@with_schema
def rollouts_command(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="File for the trees, JSON Lines; running the command again resumes.")],
    trl: Annotated[
        Path | None,
        typer.Option(
            help="Also write every solution with labels of its steps to this file, as TRL's stepwise supervision."
        ),
    ] = None,
    math_shepherd: Annotated[Path | None, typer.Option(help="The same in Math-Shepherd's form.")] = None,
    benchmark: opt.Benchmark = "demo-training",
    field_map: opt.FieldMap = None,
    grader: opt.GraderName = "math-verify",
    in_flight: opt.InFlight = 32,
    endpoint: opt.Endpoint = None,
    *,
    selection: opt.Selection,
    rollouts: RolloutSettings,
    runtime: Annotated[RuntimeSettings, Without(*OF_VERIFIERS)],
    connection: ConnectionOptions,
) -> None:
    """Sample solutions of every problem as a tree of steps, with tokens, log-probabilities, outcomes and values."""
    from espalier.experiments.verifier_training.labelled_steps import write_math_shepherd, write_trl

    if endpoint:
        own = {field.name for field in declared(RuntimeSettings)} - {"offline", "grader_memory"}
        opt.refuse(context, own, "only for models in this process; leave out --endpoint")
    else:
        of_server = {field.name for field in declared(ConnectionOptions)}
        opt.refuse(context, of_server, "only for a server's models; give --endpoint")
    problems = selection.of(load_problems(benchmark, field_map, runtime.offline))
    with writing_to(out, is_file=True):
        if endpoint:
            memory = runtime.grader_memory
            trees = fetch_rollouts(problems, rollouts, out, benchmark, grader, memory, in_flight, endpoint, connection)
        else:
            runtime = replace(runtime, max_running=in_flight)
            trees = sample_rollouts(problems, rollouts, out, benchmark, grader, runtime)[2]
    typer.echo(f"trees  {out}")
    for write, labelled in ((write_trl, trl), (write_math_shepherd, math_shepherd)):
        if labelled:
            with writing_to(labelled, is_file=True):
                write(labelled, trees)
            typer.echo(f"steps  {labelled}")


def fetch_rollouts(
    problems: "list[Problem]",
    rollouts: RolloutSettings,
    out: Path,
    benchmark: str,
    grader: str,
    grader_memory: int,
    in_flight: int,
    endpoint: str,
    connection: ConnectionOptions,
) -> "list[TreeRecord]":
    """Have a server sample what `out` lacks of the problems, `in_flight` at once; shows progress and totals.

    Returns:
        The trees of the problems, in their order.
    """
    from espalier.experiments.runs.graders import make_grader
    from espalier.experiments.verifier_training.remote import RemoteSampler, remote_configuration
    from espalier.experiments.verifier_training.tree_file import claim

    with (
        retries_shown(),
        connection.connect(endpoint) as client,
        make_grader(grader, grader_memory) as checker,
    ):
        sampler = RemoteSampler(client, rollouts, checker, in_flight)
        claim(out, remote_configuration(client.server_info(), benchmark, rollouts))
        return _write(sampler, rollouts, out, problems, in_flight)


def sample_rollouts(
    problems: "list[Problem]",
    rollouts: RolloutSettings,
    out: Path,
    benchmark: str,
    grader: str,
    runtime: RuntimeSettings,
    other_heads: "Mapping[str, Head]" = MappingProxyType({}),
) -> "tuple[Engine, Generator, list[TreeRecord]]":
    """Load a generator, and sample what `out` lacks of the problems, `max_running` at once; shows progress and totals.

    Returns:
        The engine, the generator with `other_heads`, and the trees of the problems, in their order.
    """
    from rich.console import Console

    from espalier.experiments.cli.loading import bytes_progress
    from espalier.experiments.runs.graders import make_grader
    from espalier.experiments.verifier_training.rollouts import RolloutSampler, configuration_of
    from espalier.experiments.verifier_training.tree_file import claim
    from espalier.search.run.load import load_generator_alone, with_quantizations

    runtime = with_quantizations(replace(runtime, verifier=""))
    with bytes_progress(Console(stderr=True)) as on_bytes:
        engine, generator = load_generator_alone(runtime, on_bytes, other_heads)
    claim(out, configuration_of(generator, benchmark, rollouts, runtime.generator_quantization))
    with make_grader(grader, runtime.grader_memory) as checker:
        sampler = RolloutSampler(engine, generator, rollouts, checker, runtime.max_running)
        return engine, generator, _write(sampler, rollouts, out, problems, runtime.max_running)


def _write(
    sampler: "TreeSampler", settings: RolloutSettings, out: Path, problems: "list[Problem]", at_once: int
) -> "list[TreeRecord]":
    """Sample what `out` lacks of the problems, `at_once` together; show progress and totals, and return all trees."""
    from espalier.experiments.cli.progress import share_progress
    from espalier.experiments.verifier_training.rollouts import cut_solutions
    from espalier.experiments.verifier_training.tree_file import read_trees

    asked = {problem.unique_id: place for place, problem in enumerate(problems)}
    done = sum(tree.problem_id in asked for tree in read_trees(out))
    with share_progress(len(asked), done, at_once) as advance:
        for tree in sampler.write(out, problems):
            advance(*tree.outcomes)
    trees = sorted(
        (tree for tree in read_trees(out) if tree.problem_id in asked), key=lambda tree: asked[tree.problem_id]
    )
    refused = [tree for tree in trees if tree.refused]
    steps = [step for tree in trees for step in tree.steps]
    right, solutions = (sum(counts) for counts in zip(*(tree.outcomes for tree in trees), strict=True))
    share = f"{100 * right / max(1, solutions):.1f}% right"
    typer.echo(f"{len(trees) - len(refused)} problems, {solutions:,} solutions, {share}")
    typer.echo(
        f"{len(steps):,} steps, {sum(len(step.token_ids) for step in steps):,} tokens, "
        f"{sum(step.continuations for step in steps):,} continuations"
    )
    if cut := str(cut_solutions(trees, settings)):
        typer.echo(cut)
    for tree in refused[:5]:
        typer.echo(f"refused {tree.problem_id}: {tree.refused}", err=True)
    return trees
