"""Decode tokens a second: the engine beside a bare dense torch loop, in turn, in one run."""

import dataclasses
import statistics
import time
from typing import Any

import torch

from espalier.engine.checkpoint import Checkpoint, locate
from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.model import Model, load_generator
from espalier.engine.sampling import Sampling, stream_key
from espalier.engine.turns import GENERATOR
from espalier.engine.work import Generate
from espalier.experiments.peers.dense_loop import DenseLoop
from espalier.kernels.linear import Linear

BATCHES = (1, 4, 16, 64, 256)


def run(
    generator: str, prompt_tokens: int, new_tokens: int, repeats: int
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Measure every batch size.

    Both contestants decode `new_tokens` tokens for B sequences with prompts of their own; prefill is not timed. Ratios
    are taken pair by pair, in turn, and their median is reported.

    Returns:
        Rows with median tokens a second of each, and ratios `decode@B/dense`.
    """
    checkpoint = Checkpoint(locate(generator))
    model = dataclasses.replace(load_generator(checkpoint, torch.float32, "cpu"), eos_token_ids=())
    rows, ratios, threads = [], {}, torch.get_num_threads()
    for batch in BATCHES:
        random = torch.Generator().manual_seed(batch)
        prompts = torch.randint(3, model.config.vocab_size, (batch, prompt_tokens), generator=random)
        pairs = []
        for repeat in range(repeats + 1):
            torch.set_num_threads(1)  # as `load_orchestrator` does: the engine's threads are numba's
            ours = _engine_rate(model, prompts, new_tokens)
            torch.set_num_threads(threads)
            pair = ours, _dense_rate(model, prompts, new_tokens)
            if repeat:  # the first is the warm-up
                pairs.append(pair)
        ours, dense = (statistics.median(rates) for rates in zip(*pairs, strict=True))
        ratios[f"decode@{batch}/dense"] = statistics.median(a / b for a, b in pairs)
        rows.append({"batch": batch, "espalier tokens/s": ours, "dense loop tokens/s": dense})
    return rows, ratios


def _engine_rate(model: Model, prompts: torch.Tensor, new_tokens: int) -> float:
    batch, length = prompts.shape
    blocks = batch * (-(-(length + new_tokens) // 16) + 1)
    c = model.config
    block_bytes = 16 * c.num_layers * 2 * c.num_kv_heads * c.head_dim * 4
    engine = Engine(
        {GENERATOR: model}, EngineSettings(kv_memory_bytes=blocks * block_bytes * 2, max_batch_tokens=batch * length)
    )
    for i, prompt in enumerate(prompts.tolist()):
        sampling = Sampling(key=stream_key(0, "bench", (i,)))
        sequence = engine.open(GENERATOR, prompt)
        engine.submit(Generate(i, sequence, (sampling,), new_tokens, delimiter="", in_place=True))
    engine.step()  # prefill, and the first token of each
    start = time.perf_counter()
    while engine.busy:
        engine.step()
    return batch * (new_tokens - 1) / (time.perf_counter() - start)


def _dense_rate(model: Model, prompts: torch.Tensor, new_tokens: int) -> float:
    assert isinstance(model.head, Linear)
    loop = DenseLoop(model.decoder, model.head)
    tokens = loop.prefill(prompts, new_tokens)
    start = time.perf_counter()
    for _ in range(new_tokens - 1):
        tokens = loop.decode(tokens)
    return len(prompts) * (new_tokens - 1) / (time.perf_counter() - start)
