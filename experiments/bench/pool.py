"""Problems a minute in a pool under pressure: one pool for both models beside pools split in advance."""

import itertools
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

from espalier.engine.errors import PoolTooSmallError
from espalier.engine.turns import GENERATOR, VERIFIER
from espalier.experiments.benchmarks import load_benchmark
from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.runtime import RuntimeSettings, load_orchestrator
from espalier.search.voting import GroupingName

SPLITS = {"25/75": 0.25, "50/50": 0.5, "75/25": 0.75}
"""The generator's share of the bytes."""
_ANY = SearchRequest("-", max_tokens=112, max_step_tokens=32, max_steps=12)
_BEAM = replace(_ANY, beam_width=4, expansion=4)
_MAJORITY = replace(_ANY, algorithm=AlgorithmName.MAJORITY, beam_width=16)
WORKLOADS = {
    "beam N=4 M=4": [_BEAM],
    "beam N=2 M=8": [replace(_ANY, beam_width=2, expansion=8)],
    "best-of-16": [replace(_ANY, algorithm=AlgorithmName.BEST_OF_N, beam_width=16)],
    "majority of 16": [_MAJORITY],
    "beam N=4 M=4, majority of 16": [_BEAM, _MAJORITY],
}
"""Searches that the problems take in turn."""


def run(memory: int, problems: int, repeats: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Search the same problems in a shared pool of `memory` bytes and in each split of it, in turn.

    Returns:
        Rows with median problems a minute, searches in flight at most and how often one gave up its memory, and ratios
        `pool@WORKLOAD/SPLIT`, medians of pairs, and `pool@WORKLOAD/best-static`; `pool/50-50` and `pool/best-static`
        are the lowest over all workloads. A split that cannot hold one search has no rate and no ratio.
    """
    texts = [problem.problem for problem in load_benchmark("demo", problems)]
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for workload, searches in WORKLOADS.items():
        rates: dict[str, list[float]] = {"shared": [], **{name: [] for name in SPLITS}}
        last: dict[str, _Run] = {}
        for repeat in range(repeats + 1):
            for name in rates:
                last[name] = _run(memory, texts, [replace(s, seed=repeat) for s in searches], SPLITS.get(name))
                if repeat:  # the first is the warm-up
                    rates[name].append(last[name].rate)
        for name, measured in rates.items():
            rows.append(
                {
                    "workload": workload,
                    "pool": name,
                    "problems/min": statistics.median(measured),
                    "in flight at most": last[name].most_running,
                    "preemptions": last[name].preemptions,
                }
            )
        against = {name: _ratio(rates["shared"], rates[name]) for name in SPLITS if all(rates[name])}
        ratios |= {f"pool@{workload}/{name}": ratio for name, ratio in against.items()}
        if against:
            ratios[f"pool@{workload}/best-static"] = min(against.values())
    for key, name in (("pool/best-static", "best-static"), ("pool/50-50", "50/50")):
        if measured := [ratios[k] for workload in WORKLOADS if (k := f"pool@{workload}/{name}") in ratios]:
            ratios[key] = min(measured)
    return rows, ratios


@dataclass(frozen=True, slots=True)
class _Run:
    """Problems a minute, most searches in flight, how often one gave up its memory; zeros where none fits the pool."""

    rate: float
    most_running: int
    preemptions: int


def _run(memory: int, texts: list[str], searches: list[SearchRequest], generator_share: float | None) -> _Run:
    orchestrator = load_orchestrator(
        RuntimeSettings(kv_memory_bytes=memory, max_running=len(texts), grouping=GroupingName.SPELLING)
    )
    engine = orchestrator.engine
    if generator_share is not None:
        sectors = round(generator_share * engine.arena.num_sectors)
        engine.arena.set_quota(GENERATOR, sectors)
        engine.arena.set_quota(VERIFIER, engine.arena.num_sectors - sectors)
    try:
        for text, search in zip(texts, itertools.cycle(searches), strict=False):
            orchestrator.submit(replace(search, problem=text))
    except PoolTooSmallError:
        if generator_share is None:
            raise
        orchestrator.close()
        return _Run(0.0, 0, 0)
    most = 0
    start = time.perf_counter()
    while orchestrator.busy:
        orchestrator.step()
        most = max(most, orchestrator.running)
    seconds = time.perf_counter() - start
    engine.check_drained()
    preemptions = max(role.preemptions for role in engine.stats().values())
    return _Run(60 * len(texts) / seconds, most, preemptions)


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
