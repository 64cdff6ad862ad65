"""`espalier rollouts`: samples solutions of problems as trees, with values of their steps."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    from espalier.experiments.verifier_training.rollouts import Sample
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
    from espalier.experiments.verifier_training.tree_file import write_math_shepherd, write_trl

    if endpoint:
        own = {field.name for field in declared(RuntimeSettings)} - {"offline", "grader_memory"}
        opt.refuse(context, own, "only for models in this process; leave out --endpoint")
    else:
        of_server = {field.name for field in declared(ConnectionOptions)}
        opt.refuse(context, of_server, "only for a server's models; give --endpoint")
    problems = selection.of(load_problems(benchmark, field_map, runtime.offline))
    runtime = replace(runtime, max_running=in_flight)
    asked = RolloutFile(problems, rollouts, out, benchmark, grader)
    with writing_to(out, is_file=True):
        trees = asked.fetch(endpoint, connection, runtime) if endpoint else asked.sample(runtime)[2]
    typer.echo(f"trees  {out}")
    for write, labelled in ((write_trl, trl), (write_math_shepherd, math_shepherd)):
        if labelled:
            with writing_to(labelled, is_file=True):
                write(labelled, trees)
            typer.echo(f"steps  {labelled}")


@dataclass(frozen=True, slots=True)
class RolloutFile:
    """A file of rollouts, and the problems that it is to hold.

    Attributes:
        problems: whose solutions are sampled.
        settings: how they are sampled.
        out: the file.
        benchmark: name of the problems' benchmark.
        grader: name of the grader.
    """

    problems: "list[Problem]"
    settings: RolloutSettings
    out: Path
    benchmark: str
    grader: str

    def fetch(self, endpoint: str, connection: ConnectionOptions, runtime: RuntimeSettings) -> "list[TreeRecord]":
        """Have a server sample what the file lacks, `max_running` problems at once; shows progress and totals.

        Returns:
            The trees of the problems, in their order.
        """
        from espalier.experiments.runs.graders import make_grader
        from espalier.experiments.verifier_training.rollouts import RemoteSampler, remote_configuration
        from espalier.experiments.verifier_training.tree_file import claim

        with (
            retries_shown(),
            connection.connect(endpoint) as client,
            make_grader(self.grader, runtime.grader_memory) as checker,
        ):
            sampler = RemoteSampler(client, self.settings, checker, runtime.max_running)
            claim(self.out, remote_configuration(client.server_info(), self.benchmark, self.settings))
            return self._write(sampler.sample, runtime.max_running)

    def sample(
        self, runtime: RuntimeSettings, other_heads: "Mapping[str, Head]" = MappingProxyType({})
    ) -> "tuple[Engine, Generator, list[TreeRecord]]":
        """Load a generator, and sample what the file lacks, `max_running` problems at once; shows progress and totals.

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
        claim(self.out, configuration_of(generator, self.benchmark, self.settings, runtime.generator_quantization))
        with make_grader(self.grader, runtime.grader_memory) as checker:
            sampler = RolloutSampler(engine, generator, self.settings, checker, runtime.max_running)
            return engine, generator, self._write(sampler.sample, runtime.max_running)

    def _write(self, sample: "Sample", at_once: int) -> "list[TreeRecord]":
        """Sample what the file lacks, `at_once` problems together; show progress and totals, and return all trees."""
        from espalier.experiments.cli.progress import share_progress
        from espalier.experiments.verifier_training.rollouts import cut_solutions, sample_into
        from espalier.experiments.verifier_training.tree_file import read_trees

        places = {problem.unique_id: place for place, problem in enumerate(self.problems)}
        done = sum(tree.problem_id in places for tree in read_trees(self.out))
        with share_progress(len(places), done, at_once) as advance:
            for tree in sample_into(self.out, self.problems, sample):
                advance(*tree.outcomes)
        trees = [tree for tree in read_trees(self.out) if tree.problem_id in places]
        trees.sort(key=lambda tree: places[tree.problem_id])
        refused = [tree for tree in trees if tree.refused]
        steps = [step for tree in trees for step in tree.steps]
        right, solutions = (sum(counts) for counts in zip(*(tree.outcomes for tree in trees), strict=True))
        share = f"{100 * right / max(1, solutions):.1f}% right"
        typer.echo(f"{len(trees) - len(refused)} problems, {solutions:,} solutions, {share}")
        typer.echo(
            f"{len(steps):,} steps, {sum(len(step.token_ids) for step in steps):,} tokens, "
            f"{sum(step.continuations for step in steps):,} continuations"
        )
        if cut := str(cut_solutions(trees, self.settings)):
            typer.echo(cut)
        for tree in refused[:5]:
            typer.echo(f"refused {tree.problem_id}: {tree.refused}", err=True)
        return trees
