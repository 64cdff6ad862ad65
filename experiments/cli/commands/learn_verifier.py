"""`espalier learn-verifier`: from a generator and problems with answers, a verifier on its trunk."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from espalier.engine.errors import EspalierError
from espalier.engine.models.options import Quantization
from espalier.experiments.cli import options as opt
from espalier.experiments.cli.commands.rollouts import OF_VERIFIERS, RolloutFile
from espalier.experiments.cli.runs import load_problems, writing_to
from espalier.experiments.cli.schema_options import Without, with_schema
from espalier.search.rollout import RolloutSettings
from espalier.search.run.settings import RuntimeSettings

if TYPE_CHECKING:
    from espalier.engine.engine import Engine
    from espalier.engine.models.model import Head
    from espalier.experiments.runs.record import CutPaths
    from espalier.experiments.verifier_training.combining import LearnedEvidence, TaughtHead
    from espalier.experiments.verifier_training.features import Readings, StatesHead, TreeReader
    from espalier.experiments.verifier_training.tree_file import TreeRecord
    from espalier.search.run.generator import Generator

_RANKS = 0.55
"""AUC within a problem from which a verifier is worth a search."""
_FEWEST = 10
"""Problems with right and wrong steps below which their AUC says nothing."""
_RANKS_BADLY = (
    "warning: within a problem it tells right from wrong steps hardly better than chance, so a search with it will not "
    "be better than a majority vote; more problems may help, or a larger generator"
)


TrunkQuantization = Annotated[
    Quantization, typer.Option(help="Quantization of the trunk's weights; run it with the same.")
]
TestRun = Annotated[
    Path | None,
    typer.Option(
        help="With --trunk: folder of a run on other problems, `espalier eval --algorithm best-of-n --early-stop "
        "off --trees`, whose paths are read, ranked and voted on, too; written to verifier/test.json.",
        show_default=False,
    ),
]


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
    trunk_quantization: TrunkQuantization = Quantization.AUTO,
    test: TestRun = None,
    *,
    selection: opt.Selection,
    rollouts: RolloutSettings,
    runtime: Annotated[RuntimeSettings, Without(*OF_VERIFIERS)],
) -> None:
    """Learn a verifier for a generator: sample solutions, value their steps, and train a head on its hidden states."""
    from espalier.experiments.verifier_training.features import HIDDEN

    if test and not trunk:
        raise EspalierError("--test needs --trunk; a head on the generator's states scores as it samples: run eval")
    problems = selection.of(load_problems(benchmark, field_map, runtime.offline))
    tests = recorded_trees(test, runtime.offline) if test else []
    of_trunk = replace(runtime, generator=trunk, generator_quantization=trunk_quantization, system_prompt=None)
    started = time.perf_counter()
    with writing_to(out):
        file = RolloutFile(problems, rollouts, out / "rollouts.jsonl", benchmark, grader)
        runtime = replace(runtime, max_running=in_flight)
        engine, generator, trees = file.sample(runtime, {HIDDEN: lambda hidden: hidden})
        seconds = {"rollouts": round(time.perf_counter() - started, 1)}
        record = {"benchmark": benchmark, "problems": len(trees), "labels": str(rollouts.labels), "seconds": seconds}
        learning = Learning(trees, tests, out, record, rollouts)
        if not trunk:
            learning.from_own_states(engine, {"name": runtime.generator, "digest": generator.model.digest})
        else:
            engine.close()
            del engine, generator  # whose weights would stay in memory beside the trunk's
            learning.from_trunk(replace(of_trunk, max_running=in_flight))
    typer.echo(f"{time.perf_counter() - started:.0f} s in all")


def recorded_trees(run: Path, offline: bool) -> "list[TreeRecord]":
    """The recorded trees of a run, graded."""
    from espalier.experiments.report.runs import load_recorded_paths
    from espalier.experiments.runs.benchmarks import load_benchmark
    from espalier.experiments.runs.graders import make_grader
    from espalier.experiments.verifier_training.testing import trees_of_run

    recorded = load_recorded_paths(run)
    benchmark, fields = recorded.source
    problems = {problem.unique_id: problem for problem in load_benchmark(benchmark, None, dict(fields), offline)}
    with make_grader() as grader:
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

    trees: "list[TreeRecord]"
    tests: "list[TreeRecord]"
    out: Path
    record: dict[str, Any]
    rollouts: RolloutSettings

    def from_own_states(self, engine: "Engine", of_generator: dict[str, str]) -> None:
        """Teach a head on the states of the generator that sampled the trees."""
        from espalier.engine.roles import GENERATOR
        from espalier.experiments.cli.progress import count_progress
        from espalier.experiments.verifier_training.combining import train_own_evidence
        from espalier.experiments.verifier_training.features import OwnReader, tap_candidates

        started = time.perf_counter()
        tap_candidates(engine.model(GENERATOR).decoder)
        with count_progress("problems", len(self.trees)) as advance:
            features = OwnReader(engine, self.trees, self.out / "features").read(advance)
        self.record["seconds"]["features"] = round(time.perf_counter() - started, 1)
        typer.echo(f"{len(features.values):,} steps with hidden states of {features.hidden} values")
        verifier = self.out / "verifier"
        summary = train_own_evidence(features, verifier, of_generator, self.record, self.rollouts.seed)
        measured = summary["measured"]
        where = f"the states that enter layer {summary['layer']}" if "layer" in summary else "the last states"
        score = "evidence of the whole path" if "weights" in summary else "the newest step's probability"
        typer.echo(f"the score is {score}")
        typer.echo(
            f"head on {where}; on {measured['problems']} other problems: AUC {_figure(measured['auc'])}, "
            f"within a problem {_figure(measured['auc_within_a_problem'])}, "
            f"calibration error {measured['expected_calibration_error']:.3f}"
        )
        _judge(measured, self._cut())
        typer.echo(f"verifier  {verifier}")

    def from_trunk(self, runtime: RuntimeSettings) -> None:
        """Have a trunk, the generator of `runtime`, read the trees."""
        readings, trunk = read_by_trunk(self.trees, self.out / "readings", runtime)
        self._test(self._learned(readings, "verifier", trunk), runtime)
        typer.echo(f"verifier  {self.out / 'verifier'}, with --verifier {runtime.generator} and --verifier-family")

    def _cut(self) -> "CutPaths":
        from espalier.experiments.verifier_training.rollouts import cut_solutions

        return cut_solutions(self.trees, self.rollouts)

    def _learned(
        self, readings: "Readings", name: str, trunk: dict[str, str], taught: "TaughtHead | None" = None
    ) -> "LearnedEvidence":
        """Learn from what a trunk read, into the folder called `name`, and print how well it ranks."""
        from espalier.experiments.verifier_training.combining import train_trunk_evidence

        seed = self.rollouts.seed
        learned = train_trunk_evidence(readings, self.out / name, trunk, self.record, seed, taught)
        measured = learned.summary["measured"]
        for kind in ("solutions", "siblings"):
            figures = ", ".join(f"{name} {_figure(value)}" for name, value in measured[f"auc_{kind}"].items())
            typer.echo(f"AUC within a problem, {kind} of {measured['problems']} other problems: {figures}")
        _judge(measured, self._cut())
        return learned

    def _test(self, learned: "LearnedEvidence", runtime: RuntimeSettings) -> None:
        """Measure what was learned on the trees of --test, if there are any, as the trunk of `runtime` reads them."""
        if not self.tests:
            return
        from rich.console import Console

        from espalier.experiments.cli.render import table_of
        from espalier.experiments.runs.files import write_whole
        from espalier.experiments.verifier_training.testing import measure_on_run

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
    runtime: RuntimeSettings, heads_of: "Callable[[StatesHead], dict[str, Head]] | None" = None
) -> "Iterator[tuple[Engine, Generator]]":
    """Load a trunk, the generator of `runtime`, with the heads by which trees are read; see `heads_for`."""
    from rich.console import Console

    from espalier.experiments.cli.loading import bytes_progress
    from espalier.experiments.verifier_training.features import StatesHead, heads_for, tap_candidates
    from espalier.search.run.load import load_generator_alone

    trunk = StatesHead()
    with bytes_progress(Console(stderr=True)) as on_bytes:
        engine, generator = load_generator_alone(runtime, on_bytes, (heads_of or heads_for)(trunk))
    trunk.model = generator.model
    tap_candidates(generator.model.decoder)
    yield engine, generator
    engine.close()


def read_shown(reader: "TreeReader") -> "Readings":
    """Read all trees of a reader, and show progress."""
    from espalier.experiments.cli.progress import count_progress

    with count_progress("problems", len(reader.trees)) as advance:
        readings = reader.read(advance)
    typer.echo(f"{len(readings.values):,} steps, each read once")
    return readings


def read_by_trunk(
    trees: "list[TreeRecord]", folder: Path, runtime: RuntimeSettings
) -> "tuple[Readings, dict[str, str]]":
    """Readings of a trunk, the generator of `runtime`, kept in `folder`; and its name and digest."""
    from espalier.experiments.verifier_training.features import TrunkReader

    with open_trunk(runtime) as (engine, generator):
        readings = read_shown(TrunkReader(engine, generator.system_prompt, trees, folder))
    return readings, {"name": runtime.generator, "digest": generator.model.digest}


def _judge(measured: dict[str, Any], cut: "CutPaths") -> None:
    """Say that a verifier ranks badly, or that what was sampled does not tell whether it does."""
    found: dict[str, Any] = measured["ranks"] or {"trials": 0, "low": 0.0, "high": 1.0}
    if cut.many:
        typer.echo(f"no verdict on it, as too many solutions did not come to their end: {cut}", err=True)
    elif (enough := found["trials"] >= _FEWEST) and found["high"] < _RANKS:
        typer.echo(_RANKS_BADLY, err=True)
    elif not enough or found["low"] < _RANKS:
        of_these = f" ({found['low']:.2f} to {found['high']:.2f})" if enough else ""
        typer.echo(
            f"no verdict on it: {found['trials']} of the {measured['problems']} other problems have right and wrong "
            f"solutions, too few to tell whether it ranks better than chance{of_these}; raise --limit or -N",
            err=True,
        )


def _figure(value: float | None) -> str:
    return "unknown (all are right, or all wrong)" if value is None else f"{value:.3f}"
