"""The recipe: `python -m espalier.experiments.demo STAGE`. Every stage is seeded and goes on where it stopped."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from espalier.experiments.demo import benchmark_path, generator_path, verifier_path

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
_HERE = benchmark_path().parent

WorkDir = Annotated[Path, typer.Option(help="Checkpoints, samples and figures of a run; safe to delete.")]
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
    work_dir: WorkDir = _WORK_DIR, seed: Seed = 0, base_steps: Steps = None, extension_steps: Steps = None
) -> None:
    """Train the tokenizer and the generator: three-digit numbers first, then longer problems and numbers."""
    from espalier.experiments.demo.train_generator import (
        BASE_SCHEDULE,
        EXTENSION_SCHEDULE,
        train_base,
        train_extension,
    )

    train_base(work_dir, seed, _with_steps(BASE_SCHEDULE, base_steps))
    train_extension(work_dir, seed, _with_steps(EXTENSION_SCHEDULE, extension_steps))


@app.command()
def sample(
    work_dir: WorkDir = _WORK_DIR,
    seed: Seed = 0,
    count: Annotated[int, typer.Option("--problems", help="Training problems to sample solutions of.")] = 700,
    copies: Annotated[int, typer.Option(help="Solutions of each problem.")] = 8,
) -> None:
    """Sample the generator's own solutions and label their steps."""
    from espalier.experiments.demo.samples import draw_samples

    typer.echo(f"{draw_samples(work_dir, seed, count, copies)} labelled solutions")


@app.command()
def verifier(
    work_dir: WorkDir = _WORK_DIR, seed: Seed = 0, equation_steps: Steps = None, context_steps: Steps = None
) -> None:
    """Train the verifier: single equations first, then steps in context."""
    from espalier.experiments.demo.train_verifier import (
        EQUATION_SCHEDULE,
        STEP_SCHEDULE,
        train_equations,
        train_steps,
    )

    train_equations(work_dir, seed, _with_steps(EQUATION_SCHEDULE, equation_steps))
    train_steps(work_dir, seed, _with_steps(STEP_SCHEDULE, context_steps))


@app.command()
def evaluate(
    work_dir: WorkDir = _WORK_DIR,
    seed: Seed = 0,
    limit: Annotated[int, typer.Option(help="Problems of the benchmark to use.")] = 200,
) -> None:
    """Measure the pair as it will be exported, rounded to bfloat16, and print the gates."""
    from espalier.experiments.demo.batches import RowMaker
    from espalier.experiments.demo.export import rounded
    from espalier.experiments.demo.gates import (
        evaluate_generator,
        evaluate_verifier,
        gates,
        print_figures,
        read_cases,
    )
    from espalier.experiments.demo.train_generator import load_calibrated_generator, load_tokenizer
    from espalier.experiments.demo.train_verifier import load_verifier, verifier_checkpoint
    from espalier.experiments.demo.training import pick_device

    started = time.perf_counter()
    device = pick_device()
    maker = RowMaker(load_tokenizer(work_dir, seed))
    cases = read_cases(benchmark_path(), limit)
    model = rounded(load_calibrated_generator(work_dir, maker.tokenizer)).to(device)
    figures: dict[str, Any] = {"problems": len(cases)} | evaluate_generator(model, maker, cases, seed)
    if verifier_checkpoint(work_dir, "equations").exists():
        judge = rounded(load_verifier(work_dir, seed)).to(device)
        figures |= evaluate_verifier(model, judge, maker, cases, seed)
    print_figures(figures, started)
    (work_dir / "figures.json").write_text(json.dumps(figures | {"gates": gates(figures)}, indent=2) + "\n")


@app.command()
def export(
    work_dir: WorkDir = _WORK_DIR,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Receives generator/, verifier/ and training.json.")] = _HERE,
) -> None:
    """Write the pair as Hugging Face checkpoints, with a summary of its training."""
    from espalier.experiments.demo.export import export_generator, export_verifier, write_summary
    from espalier.experiments.demo.train_generator import load_calibrated_generator, load_tokenizer
    from espalier.experiments.demo.train_verifier import load_verifier

    tokenizer = load_tokenizer(work_dir, seed)
    export_generator(load_calibrated_generator(work_dir, tokenizer), tokenizer, out / generator_path().name)
    export_verifier(load_verifier(work_dir, seed), tokenizer, out / verifier_path().name)
    write_summary(work_dir, seed, out)
    typer.echo(f"exported to {out}")


@app.command(name="all")
def everything(work_dir: WorkDir = _WORK_DIR, seed: Seed = 0) -> None:
    """Run every stage in order."""
    problems(seed)
    generator(work_dir, seed)
    sample(work_dir, seed)
    verifier(work_dir, seed)
    evaluate(work_dir, seed)
    export(work_dir, seed)


if __name__ == "__main__":
    app()
