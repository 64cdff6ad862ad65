"""Time of a decode step for children that share a prefix: tree-aware attention against row-by-row attention."""

import dataclasses
import statistics
import time
from typing import Annotated, Any

import torch
import typer

from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.decoder import Decoder
from espalier.engine.models.hub import locate
from espalier.engine.models.model import Model, load_generator
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Generate, Sampling, stream_key
from espalier.experiments.lab.bench.options import JsonPath
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown
from espalier.kernels.cpu.attention.paged import TOKENS_PER_ITEM
from espalier.kernels.cpu.decoder import CpuLayers

SHARED = (0, 128, 512, 2048)
_OWN_TOKENS = 128
"""Prompt tokens of each sequence if nothing is shared."""


def run(
    generator: str, children: int, new_tokens: int, repeats: int, show: Show = nothing_shown
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Measure `children` sequences that share 0 (separate prompts), 128, 512 and 2048 tokens.

    Both contestants use the same engine and kernel on the same sequences; the plain one gives every token its own work
    item, so that no KV read is shared.

    Returns:
        Rows with the median milliseconds per decode step of each, and ratios `prefix@P/plain`.
    """
    model = _with_long_context(load_generator(Checkpoint(locate(generator)), torch.float32, "cpu"))
    torch.set_num_threads(1)  # like `load_orchestrator`
    rows, ratios = [], {}
    for shared in SHARED:
        pairs = []
        for repeat in range(repeats + 1):
            pair = (
                _step_seconds(model, shared, children, new_tokens, TOKENS_PER_ITEM),
                _step_seconds(model, shared, children, new_tokens, 1),
            )
            if repeat:  # the first is the warm-up
                pairs.append(pair)
        ours, plain = (1000 * statistics.median(times) for times in zip(*pairs, strict=True))
        ratios[f"prefix@{shared}/plain"] = statistics.median(b / a for a, b in pairs)
        rows.append({"shared tokens": shared, "tree-aware ms/step": ours, "plain ms/step": plain})
        show(rows, ratios)
    return rows, ratios


def _with_long_context(model: Model) -> Model:
    """Extend the model's context to the longest prefix; its speed does not depend on its training."""
    decoder = model.decoder
    config = dataclasses.replace(decoder.config, max_positions=_OWN_TOKENS + 2 * max(SHARED))
    longer = Decoder(config, decoder.backend, decoder.layers, decoder.weight_bytes)
    return dataclasses.replace(model, decoder=longer, eos_token_ids=())


def _step_seconds(model: Model, shared: int, children: int, new_tokens: int, tokens_per_item: int) -> float:
    layers = model.decoder.layers
    assert isinstance(layers, CpuLayers)
    layers.tokens_per_item = tokens_per_item
    engine = Engine({GENERATOR: model}, EngineSettings(2**30, max_batch_tokens=max(2048, children * _OWN_TOKENS)))
    random = torch.Generator().manual_seed(0)
    samplings = [Sampling(key=stream_key(0, "bench", (i,))) for i in range(children)]
    groups = [samplings] if shared else [[sampling] for sampling in samplings]
    for group in groups:
        prompt = torch.randint(3, model.config.vocab_size, (shared or _OWN_TOKENS,), generator=random)
        sequence = engine.open(GENERATOR, prompt.tolist())
        engine.submit(Generate(0, sequence, tuple(group), new_tokens + 1, delimiter=""))
    while engine.schedulers[GENERATOR].waiting_tokens():
        engine.step()
    start = time.perf_counter()
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    return (time.perf_counter() - start) / steps


def command(
    generator: Annotated[str, typer.Option(help="Checkpoint to decode with.")] = "demo-generator",
    children: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Decode steps in each repetition.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Counted repetitions.")] = 5,
    json_path: JsonPath = None,
) -> None:
    """Time of a decode step for children that share 0 to 2048 tokens, tree-aware compared with plain attention."""
    report = Report(f"decode of {children} children, float32", json_path)
    report.finish(*run(generator, children, new_tokens, repeats, report.show))
