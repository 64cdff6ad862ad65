"""`lab study tune-verifier`: `espalier learn-verifier` on a trunk whose last layers are tuned to rank solutions."""

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from torch import nn

from espalier.engine.models.options import Quantization
from espalier.experiments.cli import options as opt
from espalier.experiments.cli.commands.learning import (
    Learning,
    RolloutFile,
    open_trunk,
    read_by_trunk,
    read_shown,
    recorded_trees,
)
from espalier.experiments.cli.commands.rollouts import Runtime, Selection, TestRun, TrunkQuantization
from espalier.experiments.cli.progress import count_progress
from espalier.experiments.cli.runs import writing_to
from espalier.experiments.cli.schema_options import with_schema
from espalier.experiments.lab.tuning.entering import KeptStates
from espalier.experiments.lab.tuning.reader import EnteringReader, heads_for
from espalier.experiments.lab.tuning.tuning import LastLayers, Tuner, identity_of
from espalier.experiments.verifier_training.features import LAST, Readings
from espalier.experiments.verifier_training.training import (
    TaughtHead,
    fit_line,
    logits_of,
    rescale,
    sigmoid,
    split,
)
from espalier.search.rollout import RolloutSettings
from espalier.search.run.load import open_generator
from espalier.search.run.settings import RuntimeSettings

_CHOOSE = 0.2
"""Share of the problems that choose an epoch of tuning, and calibrate: tuned layers trust what they were taught."""
_TUNED_IN_VAIN = (
    "warning: no epoch ranked the choosing problems better than the trunk as it is, so the adapter adds nothing; more "
    "problems may help, or take the verifier without it"
)


@with_schema
def command(
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for rollouts.jsonl, readings/ and, in the end, adapter/, verifier/ and untuned/; running the "
            "command again resumes."
        ),
    ],
    trunk: Annotated[str, typer.Option(help="A model that reads the solutions: folder, hub id or GGUF file.")],
    tune: Annotated[
        int,
        typer.Option(
            metavar="K",
            min=1,
            help="Tune its last K layers to rank solutions, as a LoRA adapter, OUT/adapter, and learn the verifier on "
            "what the tuned trunk reads: --verifier OUT/adapter --verifier-family OUT/verifier. The states of all "
            "tokens that enter these layers are kept in OUT/readings.",
        ),
    ] = 4,
    in_flight: opt.InFlight = 32,
    trunk_quantization: TrunkQuantization = Quantization.AUTO,
    test: TestRun = None,
    *,
    selection: Selection,
    rollouts: RolloutSettings,
    runtime: Runtime,
) -> None:
    """Learn a verifier on a trunk whose last layers are tuned to rank solutions."""
    problems = selection.of(selection.load(runtime.offline))
    tests = recorded_trees(test, runtime.offline) if test else []
    of_trunk = replace(runtime, generator=trunk, generator_quantization=trunk_quantization, system_prompt=None)
    LastLayers(open_generator(of_trunk), tune)  # whose faults are found before hours of sampling
    started = time.perf_counter()
    with writing_to(out):
        file = RolloutFile(problems, rollouts, out / "rollouts.jsonl", selection)
        engine, _, learning = TunedLearning.sampled(file, tests, replace(runtime, max_running=in_flight))
        engine.close()
        del engine, _  # whose weights would stay in memory beside the trunk's
        learning.tune(replace(of_trunk, max_running=in_flight), tune)
    typer.echo(f"{time.perf_counter() - started:.0f} s in all")


class TunedLearning(Learning):
    """Learning from a trunk whose last layers are tuned."""

    __slots__ = ()

    def tune(self, runtime: RuntimeSettings, count: int) -> None:
        """Tune the last `count` layers; writes the adapter, and what is learned with and without it."""
        layers, seed, adapter = LastLayers(open_generator(runtime), count), self.rollouts.seed, self.out / "adapter"
        readings, trunk, files = self._read_entering(runtime, layers.first)
        typer.echo("the trunk as it is:")
        self.learn(readings, "untuned", trunk)
        teach, choose = split_for_tuning(readings, seed)
        identity = identity_of(trunk["digest"], layers.first, files)
        kept, parts = KeptStates(files, readings), (teach.tolist(), choose.tolist())
        tuner = Tuner(layers, readings, kept, parts, self.out / "tuning.pt", identity, seed)
        for epoch in tuner.epochs:
            typer.echo(f"{epoch}, from before")
        while not tuner.done:
            with count_progress("problems", tuner.epoch_problems) as advance:
                epoch = tuner.run_epoch(advance)
            typer.echo(str(epoch))
        head = tuner.finish()
        if not tuner.best.number:
            typer.echo(_TUNED_IN_VAIN, err=True)
        name = Path(runtime.generator).expanduser()
        layers.write(adapter, str(name.resolve()) if name.exists() else runtime.generator)
        epochs = [asdict(epoch) for epoch in tuner.epochs]
        self.record.update(tuned_layers=count, tuned_on=tuner.problems, epochs=epochs)
        del layers, tuner, kept  # whose memory the tuned trunk may need
        of_adapted = replace(runtime, generator=str(adapter))
        tuned, adapted = read_by_trunk(self.trees, self.out / "readings", of_adapted)
        typer.echo("the tuned trunk:")
        self.test(self.learn(tuned, "verifier", adapted, calibrated(head, tuned, seed)), of_adapted)
        typer.echo(f"verifier  --verifier {adapter} --verifier-family {self.out / 'verifier'}")
        typer.echo(f"untuned   --verifier {runtime.generator} --verifier-family {self.out / 'untuned'}")

    def _read_entering(self, runtime: RuntimeSettings, layer: int) -> tuple[Readings, dict[str, str], list[Path]]:
        """Readings of the trunk, its name and digest, and the files of the states that enter a layer."""
        with open_trunk(runtime, heads_for) as (engine, generator):
            folder = self.out / "readings"
            reader = EnteringReader(engine, generator.system_prompt, self.trees, folder, layer)
            tokens, needed = reader.require_room()
            typer.echo(f"states of {tokens:,} tokens that enter layer {layer}: {needed / 2**30:.2f} GiB in {folder}")
            readings = read_shown(reader)
        return readings, {"name": runtime.generator, "digest": generator.model.digest}, reader.entering_files


def split_for_tuning(readings: Readings, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split the problems that teach, see `split`, into those that tune layers, and those that choose the epoch."""
    teach, _ = split(readings, seed)
    chooses = max(1, round(_CHOOSE * len(teach)))
    return teach[chooses:], teach[:chooses]


def calibrated(head: nn.Linear, readings: Readings, seed: int) -> TaughtHead:
    """A head that was tuned with layers, calibrated on what the tuned trunk reads of the problems that chose."""
    tuned, chose = split_for_tuning(readings, seed)
    states = readings.states_of(LAST)
    rescale(head, *fit_line(logits_of(head, states), readings, np.isin(readings.problems, chose)))
    return TaughtHead(head, sigmoid(logits_of(head, states)), chose, {"tuned_problems": len(tuned)})
