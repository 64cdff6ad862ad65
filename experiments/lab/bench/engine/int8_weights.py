"""Decode steps in float32 and in int8, by the size of a model: the figures behind `--generator-quantization auto`."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from espalier.engine.models.options import Quantization
from espalier.experiments.cli.options import parse_int_list
from espalier.experiments.lab.bench.engine.decode import engine_rate, load_endless
from espalier.experiments.lab.bench.options import JsonPath
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown

_PROMPT_TOKENS = 32
_KINDS = {"float32": Quantization.NONE, "int8": Quantization.INT8}


def run(
    checkpoints: Sequence[str], batches: Sequence[int], new_tokens: int, repeats: int, show: Show = nothing_shown
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Measure each checkpoint at each batch size, the two kinds of weights in turn.

    Args:
        checkpoints: names of generators.
        batches: batch sizes.
        new_tokens: tokens to decode for each sequence.
        repeats: counted turns.
        show: gets the figures that there are so far, whenever there are more.

    Returns:
        Rows with the median milliseconds of a step, and ratios `NAME@B`, float32's over int8's, medians of pairs.
    """
    torch.set_num_threads(1)  # the engine has its own threads, like `load_orchestrator`
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for name in checkpoints:
        models = {kind: load_endless(name, quantization) for kind, quantization in _KINDS.items()}
        config = next(iter(models.values())).config
        label = Path(name).stem
        for batch in batches:
            random = torch.Generator().manual_seed(batch)
            prompts = torch.randint(3, config.vocab_size, (batch, _PROMPT_TOKENS), generator=random)
            turns = [
                {kind: 1000 * batch / engine_rate(model, prompts, new_tokens) for kind, model in models.items()}
                for _ in range(repeats + 1)
            ][1:]  # the first is the warm-up
            medians = {f"{kind}, ms a step": statistics.median(turn[kind] for turn in turns) for kind in _KINDS}
            ratios[f"{label}@{batch}"] = statistics.median(turn["float32"] / turn["int8"] for turn in turns)
            weights = round(config.layer_weights / 1e6, 1)
            rows.append({"model": label, "million weights in layers": weights, "batch": batch, **medians})
            show(rows, ratios)
    return rows, ratios


def command(
    checkpoints: Annotated[list[str], typer.Argument(help="Generators of any sizes, as --generator.")],
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "1,16",
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode for each sequence.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Counted turns.")] = 5,
    json_path: JsonPath = None,
) -> None:
    """Milliseconds of a decode step in float32 and in int8, in turn, by the size of a model."""
    report = Report("a decode step in float32 and in int8", json_path)
    report.finish(*run(checkpoints, parse_int_list(batches, "--batches"), new_tokens, repeats, report.show))
