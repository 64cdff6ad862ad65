"""Decode throughput in tokens/s: the engine, a dense torch loop and other engines, in turn in one run."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.families import parse_decoder_config
from espalier.engine.models.hub import locate
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.options import LoadFormat, Quantization
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Generate, Sampling, stream_key
from espalier.experiments.cli.options import parse_int_list
from espalier.experiments.lab.bench.baselines.dense_loop import DenseLoop
from espalier.experiments.lab.bench.baselines.llama_cpp_loop import LlamaCppLoop
from espalier.experiments.lab.bench.baselines.transformers_loop import TransformersLoop
from espalier.experiments.lab.bench.baselines.vllm_process import VllmProcess, VllmSettings, optional_vllm
from espalier.experiments.lab.bench.options import JsonPath, VllmPython, read_quantizations
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown
from espalier.kernels.cpu.threads import num_threads
from espalier.kernels.linear import Linear

BATCHES = (1, 4, 16, 64, 256)
_COLUMNS = {"dense": "dense loop", "llama_cpp": "llama.cpp"}

Rate = Callable[[torch.Tensor, int], float]
"""Tokens/s of a contestant: of prompts, int64 `[B, P]`, and the number of new tokens."""


def run(
    generator: str,
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
    vllm: VllmProcess | None = None,
    batches: Sequence[int] = (),
    quantizations: Sequence[Quantization] = (),
    transformers: bool = False,
    llama_cpp: Path | None = None,
    show: Show = nothing_shown,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Measure every batch size.

    All contestants decode `new_tokens` tokens for B sequences with separate prompts; prefill is not timed. For vLLM,
    the time of a run that ends at the first token is subtracted, with the prompts in its prefix cache in both runs.
    Ratios are computed per pair of turns, and their median is reported.

    Args:
        generator: checkpoint to decode with.
        prompt_tokens: tokens of each prompt.
        new_tokens: tokens to decode for each sequence.
        repeats: counted repetitions.
        vllm: vLLM, to take part.
        batches: batch sizes; empty for all of `BATCHES`.
        quantizations: Espalier takes part with its weights quantised so, too.
        transformers: whether transformers takes part.
        llama_cpp: a GGUF file with which llama.cpp takes part.
        show: gets the figures that there are so far, whenever there are more.

    Returns:
        Rows with the median tokens/s of each, and ratios `decode@B/NAME` of Espalier in float32 over each other.
    """
    model = load_endless(generator, Quantization.NONE)
    contestants: dict[str, Rate] = {"espalier": partial(engine_rate, model)}
    contestants |= {str(kind): partial(engine_rate, load_endless(generator, kind)) for kind in quantizations}
    contestants["dense"] = partial(_dense_rate, model)
    if transformers:
        contestants["transformers"] = TransformersLoop(locate(generator)).decode_rate
    if vllm:
        contestants["vllm"] = lambda prompts, new_tokens: vllm.decode_rate(prompts.tolist(), new_tokens)
    if llama_cpp:
        contestants["llama_cpp"] = LlamaCppLoop(llama_cpp, num_threads()).decode_rate
    rows, ratios = [], {}
    for batch in batches or BATCHES:
        random = torch.Generator().manual_seed(batch)
        prompts = torch.randint(3, model.config.vocab_size, (batch, prompt_tokens), generator=random)
        # The first turn is the warm-up.
        turns = [_turn(contestants, prompts, new_tokens) for _ in range(repeats + 1)][1:]
        medians = {name: statistics.median(turn[name] for turn in turns) for name in contestants}
        rates = {f"{_COLUMNS.get(name, name)} tokens/s": rate for name, rate in medians.items()}
        rows.append({"batch": batch, **rates})
        for name in list(medians)[1:]:
            ratios[f"decode@{batch}/{name}"] = statistics.median(turn["espalier"] / turn[name] for turn in turns)
        show(rows, ratios)
    return rows, ratios


def load_endless(generator: str, quantization: Quantization) -> Model:
    """A generator in float32 on the CPU, its weights in a format, whose samples end at their limit only."""
    checkpoint = Checkpoint(locate(generator), LoadFormat.AUTO, quantization)
    return dataclasses.replace(load_generator(checkpoint, torch.float32, "cpu"), eos_token_ids=())


def vllm_settings(generator: str, prompt_tokens: int, new_tokens: int, batches: Sequence[int] = ()) -> VllmSettings:
    """Settings with which vLLM prefills the largest batch in one step, like the engine, and caches every prompt."""
    folder, batches = locate(generator), batches or BATCHES
    c = parse_decoder_config(Checkpoint(folder).config)
    length = prompt_tokens + new_tokens
    tokens = 2 * sum(batches) * (length + 32)  # one more block of 32 each; doubled to avoid evictions
    return VllmSettings(
        folder,
        kv_memory_bytes=max(2**30, tokens * c.num_layers * 2 * c.num_kv_heads * c.head_dim * 4),
        max_sequences=max(batches),
        max_batch_tokens=max(8192, max(batches) * prompt_tokens),
        max_length=length,
    )


def _turn(contestants: dict[str, Rate], prompts: torch.Tensor, new_tokens: int) -> dict[str, float]:
    """Tokens/s of each contestant in one turn, Espalier first."""
    rates, threads = {}, torch.get_num_threads()
    for name, rate in contestants.items():
        own = getattr(rate, "func", None) is engine_rate  # the engine has its own threads, like `load_orchestrator`
        torch.set_num_threads(1 if own else threads)
        rates[name] = rate(prompts, new_tokens)
    torch.set_num_threads(threads)
    return rates


def engine_rate(model: Model, prompts: torch.Tensor, new_tokens: int) -> float:
    """Tokens/s of the engine; see `Rate`."""
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


def command(
    generator: Annotated[str, typer.Option(help="Checkpoint to decode with.")] = "demo-generator",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode for each sequence.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Counted repetitions.")] = 5,
    batches: Annotated[str | None, typer.Option(help="Batch sizes; default: 1,4,16,64,256.")] = None,
    quantization: Annotated[str, typer.Option(help="Take part with quantised weights, too: int8, int4 or both.")] = "",
    transformers: Annotated[bool, typer.Option("--transformers", help="transformers takes part, too.")] = False,
    llama_cpp: Annotated[
        Path | None, typer.Option(help="GGUF file with which llama.cpp takes part (pip install llama-cpp-python).")
    ] = None,
    vllm_python: VllmPython = None,
    json_path: JsonPath = None,
) -> None:
    """Decode throughput in tokens/s at batch 1 to 256, compared with a bare torch loop on dense KV, vLLM and others."""
    sizes = parse_int_list(batches, "--batches") if batches else ()
    kinds = read_quantizations(quantization)
    with optional_vllm(vllm_python, vllm_settings(generator, prompt_tokens, new_tokens, sizes)) as vllm:
        beside = f", {vllm.description}" if vllm else ""
        report = Report(f"decode, {prompt_tokens} + {new_tokens} tokens, float32{beside}", json_path)
        others = sizes, kinds, transformers, llama_cpp
        found = run(generator, prompt_tokens, new_tokens, repeats, vllm, *others, report.show)
    report.finish(*found)
