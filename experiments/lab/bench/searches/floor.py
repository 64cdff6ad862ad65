"""Distance of a beam search in int8 to its floor: its products alone, at the rate of the best library."""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer

from espalier.engine.models.config import DecoderConfig
from espalier.engine.models.options import Quantization
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.experiments.lab.bench.options import JsonPath
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown
from espalier.experiments.runs.benchmarks import load_benchmark
from espalier.kernels.cpu.threads import num_threads
from espalier.search.request import AlgorithmName, AnswerEquivalence, SearchRequest
from espalier.search.result import SearchResult
from espalier.search.run.load import load_orchestrator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.settings import RuntimeSettings

_ROWS = 256
"""Rows of the library's products: about as many tokens as a step of 32 searches has."""
_PRODUCT_SECONDS = 0.2


def run(
    problems: int, repeats: int, beam_width: int, expansion: int, show: Show = nothing_shown
) -> list[dict[str, Any]]:
    """Measure searches and oneDNN's products of bytes, by turns.

    The operations of a search are two for each element of a layer's weights and each token that the model computes, and
    those of the head for each token that is sampled; attention, norms and draws are not counted.

    Args:
        problems: of the demo benchmark, 32 at a time.
        repeats: turns that count, after one that does not.
        beam_width: N.
        expansion: M.
        show: gets the rows so far.

    Returns:
        A row for merged and unmerged searches: their rate, the tera-operations of their products in a second, what
        oneDNN reaches with the same shapes on the same threads, and the share of the time that they would take.
    """
    settings = RuntimeSettings(
        max_running=32,
        generator_quantization=Quantization.INT8,
        verifier_quantization=Quantization.INT8,
        answer_equivalence=AnswerEquivalence.EXACT_MATCH,
    )
    request = SearchRequest("", AlgorithmName.BEAM, beam_width, expansion)
    texts = [problem.problem for problem in load_benchmark("demo", problems)]
    rows = list[dict[str, Any]]()
    orchestrator = load_orchestrator(settings)
    configs = {role: orchestrator.engine.model(role).config for role in (GENERATOR, VERIFIER)}
    try:
        for merge in (True, False):
            turns = [
                _turn(orchestrator, [replace(request, problem=text, merge_duplicates=merge) for text in texts], configs)
                for _ in range(repeats + 1)
            ][1:]
            rows.append({"searches": "merged" if merge else "unmerged", **_medians(turns)})
            show(rows, {})
    finally:
        orchestrator.close()
    return rows


def _turn(
    orchestrator: Orchestrator, requests: Sequence[SearchRequest], configs: dict[str, DecoderConfig]
) -> dict[str, float]:
    start = time.perf_counter()
    for request in requests:
        orchestrator.submit(request)
    results = list[SearchResult]()
    while orchestrator.busy:
        results += [each for each in orchestrator.step() if isinstance(each, SearchResult)]
    seconds = (time.perf_counter() - start) / len(results)
    floor = operations = 0.0
    rates = dict[tuple[int, int], float]()
    for inner, outer, tokens in _products(results, configs):
        if (inner, outer) not in rates:
            rates[inner, outer] = _library_rate(inner, outer)
        count = 2 * inner * outer * tokens / len(results)
        operations += count
        floor += count / rates[inner, outer]
    return {
        "problems/min": 60 / seconds,
        "tera-operations a problem": operations / 1e12,
        "tera-operations/s": operations / seconds / 1e12,
        "oneDNN tera-operations/s": operations / floor / 1e12,
        "share of the time": floor / seconds,
    }


def _products(results: Sequence[SearchResult], configs: dict[str, DecoderConfig]) -> Iterator[tuple[int, int, int]]:
    """Inner and outer dimension of each weight, and the tokens that it is multiplied with."""
    usage = [result.usage for result in results]
    tokens = {GENERATOR: sum(u.generator_tokens for u in usage), VERIFIER: sum(u.verifier_tokens for u in usage)}
    for role, config in configs.items():
        hidden, heads = config.hidden_size, config.num_heads * config.head_dim
        layer = (
            (hidden, heads + 2 * config.num_kv_heads * config.head_dim),
            (heads, hidden),
            (hidden, 2 * config.intermediate_size),
            (config.intermediate_size, hidden),
        )
        yield from ((*shape, tokens[role]) for shape in layer for _ in range(config.num_layers))
    head = configs[GENERATOR]
    yield head.hidden_size, head.vocab_size, sum(u.generated_tokens for u in usage)


def _library_rate(inner: int, outer: int) -> float:
    """Operations in a second of oneDNN's product of bytes, on all threads; the best of several."""
    left = torch.randint(-128, 128, (_ROWS, inner), dtype=torch.int8)
    right = torch.randint(-128, 128, (inner, outer), dtype=torch.int8)
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads())
    best, end = math.inf, time.perf_counter() + _PRODUCT_SECONDS
    while (start := time.perf_counter()) < end:
        torch._int_mm(left, right)  # pyright: ignore[reportPrivateImportUsage]
        best = min(best, time.perf_counter() - start)
    torch.set_num_threads(threads)
    return 2 * _ROWS * inner * outer / best


def _medians(turns: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def command(
    beam_width: Annotated[int, typer.Option("-N", help="Beam width N.")] = 4,
    expansion: Annotated[int, typer.Option("-M", help="Expansion M.")] = 4,
    problems: Annotated[int, typer.Option(min=1, max=500, help="Problems in each run.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Counted repetitions.")] = 3,
    json_path: JsonPath = None,
) -> None:
    """Beam searches in int8, 32 at once, compared with their products alone at oneDNN's rate."""
    report = Report(f"beam, N={beam_width} M={expansion}, {problems} problems, int8", json_path)
    report.finish(run(problems, repeats, beam_width, expansion, report.show), {})
