"""The stages of the recipe: each is seeded and resumes where it stopped."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from espalier.experiments.demo import benchmark_path, planted_errors_path

_HERE = benchmark_path().parent

WorkDir = Annotated[Path, typer.Option(help="Checkpoints, samples and figures of a run; safe to delete.")]
Pair = Annotated[Path, typer.Option(help="Receives and holds generator/, verifier/ and training.json.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Steps = Annotated[int | None, typer.Option(help="Optimizer steps instead of the recipe's own number.")]
_WORK_DIR = Path("build/demo")


def _with_steps(plan: Any, steps: int | None) -> Any:
    return plan if steps is None else dataclasses.replace(plan, steps=steps)


def problems(seed: Seed = 0) -> None:
    """Write the benchmark, 500 held-out problems, and solutions of others with planted errors."""
    from espalier.experiments.lab.recipe.planted_errors import write_planted_errors
    from espalier.experiments.lab.recipe.problems import write_benchmark

    typer.echo(f"{write_benchmark(benchmark_path(), seed)} problems in {benchmark_path()}")
    write_planted_errors(planted_errors_path())


def generator(work_dir: WorkDir = _WORK_DIR, pair: Pair = _HERE, seed: Seed = 0, steps: Steps = None) -> None:
    """Train the tokenizer and the generator; export them."""
    from espalier.experiments.lab.recipe.networks import GENERATOR, export_generator
    from espalier.experiments.lab.recipe.train_generator import PHASES, load_language_model, load_tokenizer, train

    for name in ("generator-base", "generator-reading"):
        train(work_dir, seed, name, _with_steps(PHASES[name].schedule, steps))
    tokenizer = load_tokenizer(work_dir, seed)
    export_generator(load_language_model(work_dir, tokenizer, "generator-reading"), tokenizer, pair / GENERATOR)


def sample(
    work_dir: WorkDir = _WORK_DIR,
    pair: Pair = _HERE,
    seed: Seed = 0,
    count: Annotated[int, typer.Option("--problems", help="Training problems to sample solutions of.")] = 4000,
) -> None:
    """Sample the generator's own solutions and label their steps."""
    from espalier.experiments.lab.recipe.samples import draw_samples

    typer.echo(f"solutions of {draw_samples(work_dir, pair, seed, count)} problems, labelled")


def trunk(work_dir: WorkDir = _WORK_DIR, seed: Seed = 0, steps: Steps = None) -> None:
    """Train the larger language model that the verifier grows on."""
    from espalier.experiments.lab.recipe.train_generator import PHASES, train

    for name in ("trunk-base", "trunk-long"):
        train(work_dir, seed, name, _with_steps(PHASES[name].schedule, steps))


def verifier(
    work_dir: WorkDir = _WORK_DIR,
    pair: Pair = _HERE,
    seed: Seed = 0,
    layers_steps: Steps = None,
    whole_steps: Steps = None,
) -> None:
    """Train the verifier: the layers added to the trunk first, then everything; export it."""
    from espalier.experiments.lab.recipe.networks import export_verifier, load_exported_tokenizer
    from espalier.experiments.lab.recipe.train_verifier import (
        LAYERS_SCHEDULE,
        WHOLE_SCHEDULE,
        load_verifier,
        train_verifier,
    )

    train_verifier(work_dir, seed, _with_steps(LAYERS_SCHEDULE, layers_steps), _with_steps(WHOLE_SCHEDULE, whole_steps))
    export_verifier(load_verifier(work_dir, seed), load_exported_tokenizer(pair), pair)


def thinking(work_dir: WorkDir = _WORK_DIR, pair: Pair = _HERE, seed: Seed = 0, steps: Steps = None) -> None:
    """Teach the generator to think before it answers; export the result as another one, and add it to the record."""
    from espalier.experiments.lab.recipe.acceptance import write_summary
    from espalier.experiments.lab.recipe.train_thinking import (
        export_thinking_generator,
        load_thinking_generator,
        thinking_tokenizer,
        train_thinking,
    )

    train_thinking(work_dir, pair, seed, steps)
    tokenizer = thinking_tokenizer(pair)
    export_thinking_generator(load_thinking_generator(work_dir, pair, tokenizer), tokenizer, pair)
    write_summary(work_dir, seed, pair)


def evaluate(
    work_dir: WorkDir = _WORK_DIR,
    pair: Pair = _HERE,
    seed: Seed = 0,
    limit: Annotated[int, typer.Option(help="Problems of the benchmark to use.")] = 300,
) -> None:
    """Measure the exported pair, print the gates and write the record of its making."""
    from espalier.experiments.lab.recipe.acceptance import evaluate_pair, gates, write_summary
    from espalier.experiments.lab.recipe.judge import plot_reliability

    figures = evaluate_pair(work_dir, pair, limit, seed)
    typer.echo(json.dumps(figures, indent=2))
    for name, met in gates(figures).items():
        typer.echo(f"{'met   ' if met else 'MISSED'} {name}")
    (work_dir / "figures.json").write_text(json.dumps(figures | {"gates": gates(figures)}, indent=2) + "\n")
    write_summary(work_dir, seed, pair)
    plot_reliability(figures["verifier"]["reliability"], work_dir / "reliability.svg")


def everything(work_dir: WorkDir = _WORK_DIR, pair: Pair = _HERE, seed: Seed = 0) -> None:
    """Run every stage in order."""
    problems(seed)
    generator(work_dir, pair, seed)
    sample(work_dir, pair, seed)
    trunk(work_dir, seed)
    verifier(work_dir, pair, seed)
    evaluate(work_dir, pair, seed)
    thinking(work_dir, pair, seed)
