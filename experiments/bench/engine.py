"""Decode throughput in tokens/s: the engine, a bare dense torch loop and, if available, vLLM, in turn in one run."""

import dataclasses
import statistics
import time
from typing import Any

import torch

from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.config import parse_decoder_config
from espalier.engine.models.hub import locate
from espalier.engine.models.model import Model, load_generator
from espalier.engine.scheduling.role_policy import GENERATOR
from espalier.engine.work import Generate, Sampling, stream_key
from espalier.experiments.bench.baselines.dense_loop import DenseLoop
from espalier.experiments.bench.baselines.vllm_process import VllmProcess, VllmSettings
from espalier.kernels.linear import Linear

BATCHES = (1, 4, 16, 64, 256)
_COLUMNS = {"espalier": "espalier", "dense": "dense loop", "vllm": "vllm"}


def run(
    generator: str, prompt_tokens: int, new_tokens: int, repeats: int, vllm: VllmProcess | None = None
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Measure every batch size.

    All contestants decode `new_tokens` tokens for B sequences with separate prompts; prefill is not timed. For vLLM,
    the time of a run that ends at the first token is subtracted, with the prompts in its prefix cache in both runs.
    Ratios are computed per pair of turns, and their median is reported.

    Returns:
        Rows with the median tokens/s of each, and ratios `decode@B/dense` and, with `vllm`, `decode@B/vllm`.
    """
    checkpoint = Checkpoint(locate(generator))
    model = dataclasses.replace(load_generator(checkpoint, torch.float32, "cpu"), eos_token_ids=())
    rows, ratios = [], {}
    for batch in BATCHES:
        random = torch.Generator().manual_seed(batch)
        prompts = torch.randint(3, model.config.vocab_size, (batch, prompt_tokens), generator=random)
        turns = [_turn(model, prompts, new_tokens, vllm) for _ in range(repeats + 1)][1:]  # the first is the warm-up
        medians = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
        rows.append({"batch": batch, **{f"{_COLUMNS[name]} tokens/s": rate for name, rate in medians.items()}})
        for name in list(medians)[1:]:
            ratios[f"decode@{batch}/{name}"] = statistics.median(turn["espalier"] / turn[name] for turn in turns)
    return rows, ratios


def vllm_settings(generator: str, prompt_tokens: int, new_tokens: int) -> VllmSettings:
    """Settings with which vLLM prefills the largest batch in one step, like the engine, and caches every prompt."""
    folder = locate(generator)
    c = parse_decoder_config(Checkpoint(folder).config)
    length = prompt_tokens + new_tokens
    tokens = 2 * sum(BATCHES) * (length + 32)  # one more block of 32 each; doubled to avoid evictions
    return VllmSettings(
        folder,
        kv_memory_bytes=max(2**30, tokens * c.num_layers * 2 * c.num_kv_heads * c.head_dim * 4),
        max_sequences=max(BATCHES),
        max_batch_tokens=max(8192, max(BATCHES) * prompt_tokens),
        max_length=length,
    )


def _turn(model: Model, prompts: torch.Tensor, new_tokens: int, vllm: VllmProcess | None) -> dict[str, float]:
    """Tokens/s of each contestant in one turn, Espalier first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # like `load_orchestrator`: the engine has its own threads
    rates = {"espalier": _engine_rate(model, prompts, new_tokens)}
    torch.set_num_threads(threads)
    rates["dense"] = _dense_rate(model, prompts, new_tokens)
    if vllm:
        rates["vllm"] = vllm.decode_rate(prompts.tolist(), new_tokens)
    return rates


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
    engine.step()  # prefill and first tokens
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
