"""The work of `espalier rollouts` and `espalier learn-verifier`, and its figures on the terminal; imports torch."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import typer
from rich.console import Console

from espalier.engine.engine import Engine
from espalier.engine.models.model import Head
from espalier.engine.roles import GENERATOR
from espalier.experiments.cli.options import ConnectionOptions, Selection, retries_shown
from espalier.experiments.cli.progress import bytes_progress, count_progress, share_progress
from espalier.experiments.cli.render import table_of
from espalier.experiments.report.runs import load_recorded_paths
from espalier.experiments.runs import graders
from espalier.experiments.runs.benchmarks import Problem, load_benchmark
from espalier.experiments.runs.files import write_whole
from espalier.experiments.runs.record import CutPaths
from espalier.experiments.verifier_training import combining, features, rollouts
from espalier.experiments.verifier_training.testing import measure_on_run, trees_of_run
from espalier.experiments.verifier_training.training import TaughtHead
from espalier.experiments.verifier_training.tree_file import TreeRecord, claim, read_trees
from espalier.search.grading.math_verify import Grader
from espalier.search.rollout import RolloutSettings
from espalier.search.run.generator import Generator
from espalier.search.run.load import load_generator_alone, with_quantizations
from espalier.search.run.settings import RuntimeSettings

_RANKS = 0.55
"""AUC within a problem from which a verifier is worth a search."""
_FEWEST = 10
"""Problems with right and wrong steps below which their AUC says nothing."""
_RANKS_BADLY = (
    "warning: within a problem it tells right from wrong steps hardly better than chance, so a search with it will not "
    "be better than a majority vote; more problems may help, or a larger generator"
)


@dataclass(frozen=True, slots=True)
class RolloutFile:
    """A file of rollouts, and the problems that it is to hold.

    Attributes:
        problems: whose solutions are sampled.
        settings: how they are sampled.
        out: the file.
        selection: the benchmark that they are of, and its grader.
    """

    problems: list[Problem]
    settings: RolloutSettings
    out: Path
    selection: Selection

    def fetch(self, endpoint: str, connection: ConnectionOptions, runtime: RuntimeSettings) -> list[TreeRecord]:
        """Have a server sample what the file lacks, `max_running` problems at once; shows progress and totals.

        Returns:
            The trees of the problems, in their order.
        """
        with retries_shown(), connection.connect(endpoint) as client, self._grader(runtime) as checker:
            sampler = rollouts.RemoteSampler(client, self.settings, checker, runtime.max_running)
            info = client.server_info()
            claim(self.out, rollouts.remote_configuration(info, self.selection.benchmark, self.settings))
            return self._write(sampler.sample, runtime.max_running)

    def sample(
        self, runtime: RuntimeSettings, other_heads: Mapping[str, Head] = MappingProxyType({})
    ) -> tuple[Engine, Generator, list[TreeRecord]]:
        """Load a generator, and sample what the file lacks, `max_running` problems at once; shows progress and totals.

        Returns:
            The engine, the generator with `other_heads`, and the trees of the problems, in their order.
        """
        runtime = with_quantizations(replace(runtime, verifier=""))
        with bytes_progress(Console(stderr=True)) as on_bytes:
            engine, generator = load_generator_alone(runtime, on_bytes, other_heads)
        quantization = runtime.generator_quantization
        claim(self.out, rollouts.configuration_of(generator, self.selection.benchmark, self.settings, quantization))
        with self._grader(runtime) as checker:
            sampler = rollouts.RolloutSampler(engine, generator, self.settings, checker, runtime.max_running)
            return engine, generator, self._write(sampler.sample, runtime.max_running)

    def _grader(self, runtime: RuntimeSettings) -> Grader:
        return graders.make_grader(self.selection.grader, runtime.grader_memory)

    def _write(self, sample: rollouts.Sample, at_once: int) -> list[TreeRecord]:
        """Sample what the file lacks, `at_once` problems together; show progress and totals, and return all trees."""
        places = {problem.unique_id: place for place, problem in enumerate(self.problems)}
        done = sum(tree.problem_id in places for tree in read_trees(self.out))
        with share_progress(len(places), done, at_once) as advance:
            for tree in rollouts.sample_into(self.out, self.problems, sample):
                advance(*tree.outcomes)
        trees = [tree for tree in read_trees(self.out) if tree.problem_id in places]
        trees.sort(key=lambda tree: places[tree.problem_id])
        refused = [tree for tree in trees if tree.refused]
        steps = [step for tree in trees for step in tree.steps]
        right, solutions = (sum(counts) for counts in zip(*(tree.outcomes for tree in trees), strict=True))
        share = f"{100 * right / max(1, solutions):.1f}% right"
        typer.echo(f"{len(trees) - len(refused)} problems, {solutions:,} solutions, {share}")
        tokens, continuations = (sum(len(s.token_ids) for s in steps), sum(s.continuations for s in steps))
        typer.echo(f"{len(steps):,} steps, {tokens:,} tokens, {continuations:,} continuations")
        if cut := str(rollouts.cut_solutions(trees, self.settings)):
            typer.echo(cut)
        for tree in refused[:5]:
            typer.echo(f"refused {tree.problem_id}: {tree.refused}", err=True)
        return trees


def recorded_trees(run: Path, offline: bool) -> list[TreeRecord]:
    """The recorded trees of a run, graded."""
    recorded = load_recorded_paths(run)
    benchmark, fields = recorded.source
    problems = {problem.unique_id: problem for problem in load_benchmark(benchmark, None, dict(fields), offline)}
    with graders.make_grader() as grader:
        return trees_of_run(recorded.folder, problems, grader)


@dataclass(frozen=True, slots=True)
class Learning:
    """The solutions that a verifier is learned from, and the folder it is written to.

    Attributes:
        trees: the sampled solutions.
        tests: recorded trees on which a verifier from a trunk is only measured.
        out: the folder that gets it.
        record: what `training.json` is to say.
        rollouts: how the trees were sampled.
    """

    trees: list[TreeRecord]
    tests: list[TreeRecord]
    out: Path
    record: dict[str, Any]
    rollouts: RolloutSettings

    @classmethod
    def sampled(
        cls, file: RolloutFile, tests: list[TreeRecord], runtime: RuntimeSettings
    ) -> tuple[Engine, Generator, Self]:
        """Fill a file of rollouts; returns the engine and the generator that did, and what is learned beside it."""
        started = time.perf_counter()
        engine, generator, trees = file.sample(runtime, {features.HIDDEN: lambda hidden: hidden})
        record = {
            "benchmark": file.selection.benchmark,
            "problems": len(trees),
            "labels": str(file.settings.labels),
            "seconds": {"rollouts": round(time.perf_counter() - started, 1)},
        }
        return engine, generator, cls(trees, tests, file.out.parent, record, file.settings)

    def from_own_states(self, engine: Engine, of_generator: dict[str, str]) -> None:
        """Teach a head on the states of the generator that sampled the trees."""
        started = time.perf_counter()
        features.tap_candidates(engine.model(GENERATOR).decoder)
        with count_progress("problems", len(self.trees)) as advance:
            steps = features.OwnReader(engine, self.trees, self.out / "features").read(advance)
        self.record["seconds"]["features"] = round(time.perf_counter() - started, 1)
        typer.echo(f"{len(steps.values):,} steps with hidden states of {steps.hidden} values")
        verifier = self.out / "verifier"
        summary = combining.train_own_evidence(steps, verifier, of_generator, self.record, self.rollouts.seed)
        measured = summary["measured"]
        where = f"the states that enter layer {summary['layer']}" if "layer" in summary else "the last states"
        score = "evidence of the whole path" if "weights" in summary else "the newest step's probability"
        typer.echo(f"the score is {score}")
        auc = f"AUC {_figure(measured['auc'])}, within a problem {_figure(measured['auc_within_a_problem'])}"
        error = f"calibration error {measured['expected_calibration_error']:.3f}"
        typer.echo(f"head on {where}; on {measured['problems']} other problems: {auc}, {error}")
        judge(measured, rollouts.cut_solutions(self.trees, self.rollouts))
        typer.echo(f"verifier  {verifier}")

    def from_trunk(self, runtime: RuntimeSettings) -> None:
        """Have a trunk, the generator of `runtime`, read the trees."""
        readings, trunk = read_by_trunk(self.trees, self.out / "readings", runtime)
        self.test(self.learn(readings, "verifier", trunk), runtime)
        typer.echo(f"verifier  {self.out / 'verifier'}, with --verifier {runtime.generator} and --verifier-family")

    def learn(
        self, readings: features.Readings, name: str, trunk: dict[str, str], taught: TaughtHead | None = None
    ) -> combining.LearnedEvidence:
        """Learn from what a trunk read, into the folder called `name`, and print how well it ranks."""
        learned = combining.train_trunk_evidence(
            readings, self.out / name, trunk, self.record, self.rollouts.seed, taught
        )
        measured = learned.summary["measured"]
        for kind in ("solutions", "siblings"):
            figures = ", ".join(f"{name} {_figure(value)}" for name, value in measured[f"auc_{kind}"].items())
            typer.echo(f"AUC within a problem, {kind} of {measured['problems']} other problems: {figures}")
        judge(measured, rollouts.cut_solutions(self.trees, self.rollouts))
        return learned

    def test(self, learned: combining.LearnedEvidence, runtime: RuntimeSettings) -> None:
        """Measure what was learned on the trees of --test, if there are any, as the trunk of `runtime` reads them."""
        if not self.tests:
            return
        readings, _ = read_by_trunk(self.tests, self.out / "test-readings", runtime)
        found = measure_on_run(learned, self.tests, readings)
        write_whole(self.out / "verifier" / "test.json", found)
        most = found["votes"][-1]
        rows = [["majority", "", "", f"{most['majority']:.1%}", ""]]
        for kind, solutions in found["auc_solutions"].items():
            vote, siblings = most[kind], found["auc_siblings"][kind]
            low, high = (100 * end for end in vote["interval"] or (math.nan, math.nan))
            ahead = f"{100 * vote['ahead']:+.1f} ({low:+.1f} to {high:+.1f})"
            rows.append([kind, _figure(solutions), _figure(siblings), f"{vote['accuracy']:.1%}", ahead])
        rows.append(["right in any", "", "", f"{most['any']:.1%}", ""])
        names = "weighed by", "AUC, paths", "siblings", "vote", "minus majority, points"
        title = f"{found['problems']} problems, {most['paths']} paths each"
        Console().print(table_of(names, rows, title=title))
        ends = [step for tree in self.tests for step in tree.steps if step.end]
        if cut := sum(step.samples for step in ends if step.end in ("length", "budget")):
            typer.echo(f"{cut:,} of these {sum(step.samples for step in ends):,} paths were cut, and count as wrong")


@contextmanager
def open_trunk(
    runtime: RuntimeSettings, heads_of: Callable[[features.StatesHead], dict[str, Head]] = features.heads_for
) -> Iterator[tuple[Engine, Generator]]:
    """Load a trunk, the generator of `runtime`, with the heads by which trees are read."""
    trunk = features.StatesHead()
    with bytes_progress(Console(stderr=True)) as on_bytes:
        engine, generator = load_generator_alone(runtime, on_bytes, heads_of(trunk))
    trunk.model = generator.model
    features.tap_candidates(generator.model.decoder)
    yield engine, generator
    engine.close()


def read_shown(reader: features.TreeReader) -> features.Readings:
    """Read all trees of a reader, and show progress."""
    with count_progress("problems", len(reader.trees)) as advance:
        readings = reader.read(advance)
    typer.echo(f"{len(readings.values):,} steps, each read once")
    return readings


def read_by_trunk(
    trees: list[TreeRecord], folder: Path, runtime: RuntimeSettings
) -> tuple[features.Readings, dict[str, str]]:
    """Readings of a trunk, the generator of `runtime`, kept in `folder`; and its name and digest."""
    with open_trunk(runtime) as (engine, generator):
        readings = read_shown(features.TrunkReader(engine, generator.system_prompt, trees, folder))
    return readings, {"name": runtime.generator, "digest": generator.model.digest}


def judge(measured: dict[str, Any], cut: CutPaths) -> None:
    """Say that a verifier ranks badly, or that what was sampled does not tell whether it does."""
    found: dict[str, Any] = measured["ranks"] or {"trials": 0, "low": 0.0, "high": 1.0}
    if cut.many:
        typer.echo(f"no verdict on it, as too many solutions did not come to their end: {cut}", err=True)
    elif (enough := found["trials"] >= _FEWEST) and found["high"] < _RANKS:
        typer.echo(_RANKS_BADLY, err=True)
    elif not enough or found["low"] < _RANKS:
        of_these = f" ({found['low']:.2f} to {found['high']:.2f})" if enough else ""
        counts = f"{found['trials']} of the {measured['problems']} other problems have right and wrong solutions"
        why = f"too few to tell whether it ranks better than chance{of_these}; raise --limit or -N"
        typer.echo(f"no verdict on it: {counts}, {why}", err=True)


def _figure(value: float | None) -> str:
    return "unknown (all are right, or all wrong)" if value is None else f"{value:.3f}"
