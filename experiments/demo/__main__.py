"""The recipe: `python -m espalier.experiments.demo STAGE`. Every stage is seeded and goes on where it stopped."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from espalier.experiments.demo import benchmark_path

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
_HERE = benchmark_path().parent

WorkDir = Annotated[Path, typer.Option(help="Checkpoints, samples and figures of a run; safe to delete.")]
Pair = Annotated[Path, typer.Option(help="Receives and holds generator/, verifier/ and training.json.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Steps = Annotated[int | None, typer.Option(help="Optimizer steps instead of the recipe's own number.")]
_WORK_DIR = Path("build/demo")


def _with_steps(plan: Any, steps: int | None) -> Any:
    return plan if steps is None else dataclasses.replace(plan, steps=steps)


@app.command()
def problems(seed: Seed = 0) -> None:
    """Write the benchmark: 500 held-out problems."""
    from espalier.experiments.demo.problems import write_benchmark

    typer.echo(f"{write_benchmark(benchmark_path(), seed)} problems in {benchmark_path()}")


@app.command()
def generator(
    work_dir: WorkDir = _WORK_DIR,
    pair: Pair = _HERE,
    seed: Seed = 0,
    base_steps: Steps = None,
    extension_steps: Steps = None,
) -> None:
    """Train the tokenizer and the generator, three-digit numbers first, then longer ones; export them."""
    from espalier.experiments.demo.export import export_generator
    from espalier.experiments.demo.train_generator import (
        BASE_SCHEDULE,
        EXTENSION_SCHEDULE,
        load_generator,
        load_tokenizer,
        train_base,
        train_extension,
    )

    train_base(work_dir, seed, _with_steps(BASE_SCHEDULE, base_steps))
    train_extension(work_dir, seed, _with_steps(EXTENSION_SCHEDULE, extension_steps))
    tokenizer = load_tokenizer(work_dir, seed)
    export_generator(load_generator(work_dir, tokenizer, "extension"), tokenizer, pair)


@app.command()
def sample(
    work_dir: WorkDir = _WORK_DIR,
    pair: Pair = _HERE,
    seed: Seed = 0,
    count: Annotated[int, typer.Option("--problems", help="Training problems to sample solutions of.")] = 4000,
) -> None:
    """Sample the generator's own solutions and label their steps."""
    from espalier.experiments.demo.samples import draw_samples

    typer.echo(f"solutions of {draw_samples(work_dir, pair, seed, count)} problems, labelled")


@app.command()
def trunk(work_dir: WorkDir = _WORK_DIR, seed: Seed = 0, steps: Steps = None) -> None:
    """Train a copy of the generator for longer; the verifier grows on it."""
    from espalier.experiments.demo.train_generator import TRUNK_SCHEDULE, train_trunk

    train_trunk(work_dir, seed, _with_steps(TRUNK_SCHEDULE, steps))


@app.command()
def verifier(
    work_dir: WorkDir = _WORK_DIR,
    pair: Pair = _HERE,
    seed: Seed = 0,
    layers_steps: Steps = None,
    whole_steps: Steps = None,
) -> None:
    """Train the verifier: the layers added to the trunk first, then everything; export it."""
    from espalier.experiments.demo.export import export_verifier, load_exported_tokenizer
    from espalier.experiments.demo.train_verifier import (
        LAYERS_SCHEDULE,
        WHOLE_SCHEDULE,
        load_verifier,
        train_verifier,
    )

    train_verifier(work_dir, seed, _with_steps(LAYERS_SCHEDULE, layers_steps), _with_steps(WHOLE_SCHEDULE, whole_steps))
    export_verifier(load_verifier(work_dir, seed), load_exported_tokenizer(pair), pair)


@app.command()
def evaluate(
    work_dir: WorkDir = _WORK_DIR,
    pair: Pair = _HERE,
    seed: Seed = 0,
    limit: Annotated[int, typer.Option(help="Problems of the benchmark to use.")] = 300,
) -> None:
    """Measure the exported pair, print the gates and write the record of its making."""
    from espalier.experiments.demo.acceptance import evaluate_pair, gates
    from espalier.experiments.demo.judge import plot_reliability
    from espalier.experiments.demo.record import write_summary

    figures = evaluate_pair(work_dir, pair, limit, seed)
    typer.echo(json.dumps(figures, indent=2))
    for name, met in gates(figures).items():
        typer.echo(f"{'met   ' if met else 'MISSED'} {name}")
    (work_dir / "figures.json").write_text(json.dumps(figures | {"gates": gates(figures)}, indent=2) + "\n")
    write_summary(work_dir, seed, pair)
    plot_reliability(figures["verifier"]["reliability"], work_dir / "reliability.svg")


@app.command(name="all")
def everything(work_dir: WorkDir = _WORK_DIR, pair: Pair = _HERE, seed: Seed = 0) -> None:
    """Run every stage in order."""
    problems(seed)
    generator(work_dir, pair, seed)
    sample(work_dir, pair, seed)
    trunk(work_dir, seed)
    verifier(work_dir, pair, seed)
    evaluate(work_dir, pair, seed)


if __name__ == "__main__":
    app()
