"""Decode steps in float32 and in int8, by the size of a model: the figures behind `--generator-quantization auto`."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from espalier.engine.models.options import Quantization
from espalier.experiments.bench.engine.decode import engine_rate, load_endless
from espalier.experiments.bench.report import Show, nothing_shown

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
