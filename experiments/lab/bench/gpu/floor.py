"""Tables of the least time that a step, and a round of a search, can take on a GPU; see `planning.roofline`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from espalier.experiments.lab.bench.options import JsonPath
from espalier.experiments.lab.bench.report import Report
from espalier.experiments.planning.roofline import (
    CARDS,
    MODELS,
    PAIRS,
    Card,
    ModelShape,
    decode_seconds,
    scoring_seconds,
)


def step_rows(
    generator: ModelShape, verifier: ModelShape, card: Card, context: int, shared: int
) -> list[dict[str, Any]]:
    """The floor of a decode step of the generator, and of scoring as many steps of 50 tokens, for 1 to 256 rows."""
    found = []
    for rows in (1, 16, 64, 256):
        decode = decode_seconds(generator, card, rows, context, min(shared, context))
        score = scoring_seconds(verifier, card, 50 * rows, context)
        found.append(
            {
                "generator": generator.name,
                "rows": rows,
                "decode step, ms": 1e3 * decode,
                "tokens/s": rows / decode,
                "weights' share of it, %": 100 * generator.weight_bytes / card.bandwidth / decode,
                "verifier": verifier.name,
                "scored tokens/s": 50 * rows / score,
            }
        )
    return found


def search_rows(
    generator: ModelShape, verifier: ModelShape, card: Card, paths: int, prompt: int, steps: int, step_tokens: int
) -> list[dict[str, Any]]:
    """The floor of a search in which `paths` children are sampled and scored in each round: 1, 8 and 32 at a time.

    Args:
        generator: its sizes.
        verifier: its sizes.
        card: the GPU.
        paths: N times M.
        prompt: tokens of a problem.
        steps: rounds of a search.
        step_tokens: tokens of a step.
    """
    found = []
    for searches in (1, 8, 32):
        generating = scoring = 0.0
        for step in range(steps):
            shared = prompt + step * step_tokens
            rows = searches * paths
            # Children of a path see what their search has so far, once, and half of their own step on average.
            unique_per_row = step_tokens / 2 + shared / paths
            one = decode_seconds(generator, card, rows, round(unique_per_row), 0)
            generating += step_tokens * one
            scoring += scoring_seconds(verifier, card, rows * step_tokens, searches * shared)
        seconds = generating + scoring
        found.append(
            {
                "generator": generator.name,
                "searches": searches,
                "N x M": paths,
                "rounds/s": searches * steps / seconds,
                "searches/min": 60 * searches / seconds,
                "generator %": 100 * generating / seconds,
                "verifier %": 100 * scoring / seconds,
            }
        )
    return found


def command(
    model: Annotated[
        str | None, typer.Option(help="Only compute the floor on paper, for a100, h100 or h200; needs no GPU.")
    ] = None,
    rehearse: Annotated[
        bool, typer.Option(help="Run everything with tiny models on the CPU; the figures mean nothing.")
    ] = False,
    part: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure only profile, libraries, attention-variants, plain, ceilings, attention, kernels, products, "
            "steps, invariant or searches; may be repeated."
        ),
    ] = None,
    beam_width: Annotated[int, typer.Option("-N", min=1, help="Beam width N.")] = 16,
    expansion: Annotated[int, typer.Option("-M", min=1, help="Expansion M.")] = 4,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a problem.")] = 200,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a solution.")] = 10,
    step_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 50,
    json_path: JsonPath = None,
) -> None:
    """Decode steps and searches on a GPU at real sizes, against the time that bytes and products alone take."""
    if model is None:
        _measure_gpu(rehearse, part, json_path)
        return
    if model not in CARDS:
        raise typer.BadParameter(f"must be one of {', '.join(CARDS)}", param_hint="--model")
    card, context = CARDS[model], prompt + steps * step_tokens // 2
    pairs = [(MODELS[generator], MODELS[verifier]) for generator, verifier in PAIRS]
    of_steps = [row for pair in pairs for row in step_rows(*pair, card, context, prompt)]
    Report(f"floor on {model}: steps at {context} tokens, {prompt} of them shared").finish(of_steps, {})
    paths = beam_width * expansion
    of_searches = [row for pair in pairs for row in search_rows(*pair, card, paths, prompt, steps, step_tokens)]
    sizes = f"{prompt} tokens of prompt, {steps} steps of {step_tokens}"
    Report(f"floor on {model}: beam search, N·M = {paths}, {sizes}", json_path).finish(of_searches, {})


def _measure_gpu(rehearse: bool, parts: list[str] | None, json_path: Path | None) -> None:
    import torch

    if not rehearse and not torch.cuda.is_available():
        raise typer.BadParameter("no GPU is available; --model computes the floor on paper", param_hint="gpu")
    from espalier.experiments.lab.bench.gpu.causes import CAUSES
    from espalier.experiments.lab.bench.gpu.measured import PARTS, Bench

    measurements = CAUSES | PARTS  # causes first: they decide what is to change
    if unknown := [part for part in parts or [] if part not in measurements]:
        raise typer.BadParameter(f"{', '.join(unknown)}: must be of {', '.join(measurements)}", param_hint="--part")
    bench = Bench(rehearse)
    name = "CPU, rehearsed" if rehearse else torch.cuda.get_device_name(0)
    for part, measure in measurements.items():
        if parts and part not in parts:
            continue
        to = json_path.with_name(f"{json_path.stem}-{part}{json_path.suffix}") if json_path else None
        report = Report(f"{part} on {name}", to)
        report.finish(measure(bench, report.show), {})
