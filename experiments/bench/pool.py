"""Problems a minute in a pool under pressure: one pool for both models beside pools split in advance."""

import statistics
import time
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

from espalier.engine.admission import Admission, Reservation
from espalier.engine.errors import PoolTooSmallError
from espalier.engine.turns import GENERATOR, VERIFIER
from espalier.experiments.benchmarks import load_benchmark
from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.runtime import RuntimeSettings, load_orchestrator

SPLITS = {"25/75": 0.25, "50/50": 0.5, "75/25": 0.75}
"""The generator's share of the bytes."""
_ANY = SearchRequest("-", max_tokens=160, max_step_tokens=32, max_steps=12)
WORKLOADS = {
    "beam N=4 M=4": replace(_ANY, beam_width=4, expansion=4),
    "beam N=2 M=8": replace(_ANY, beam_width=2, expansion=8),
    "best-of-16": replace(_ANY, algorithm=AlgorithmName.BEST_OF_N, beam_width=16),
}


class StaticSplit(Admission):
    """Admission to a pool of which each model may use its own part only."""

    def __init__(self, whole: Admission, generator_share: float) -> None:
        super().__init__(whole.arena, whole.pools)
        sectors = round(generator_share * self.arena.num_sectors)
        self._limits = {GENERATOR: sectors, VERIFIER: self.arena.num_sectors - sectors}

    def try_reserve(self, blocks: Mapping[str, int], owner: Hashable = None, priority: int = 0) -> Reservation | None:
        """As the shared pool's, and only while every model stays within its part."""
        for role, limit in self._limits.items():
            pool = self.pools[role]
            if pool.sectors_for(blocks.get(role, 0)) > limit:
                raise PoolTooSmallError(
                    pool.sectors_for(blocks[role]) * self.arena.sector_bytes, limit * self.arena.sector_bytes
                )
            if pool.sectors_for(self.reserved_blocks[role] + blocks.get(role, 0)) > limit:
                return None
        return super().try_reserve(blocks, owner, priority)


def run(memory: int, problems: int, repeats: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Search the same problems in a shared pool of `memory` bytes and in each split of it, in turn.

    Returns:
        Rows with median problems a minute and searches in flight at most, and ratios `pool@WORKLOAD/SPLIT` and
        `pool@WORKLOAD/best-static`, medians of pairs.
    """
    texts = [problem.problem for problem in load_benchmark("demo", problems)]
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for workload, search in WORKLOADS.items():
        rates: dict[str, list[float]] = {"shared": [], **{name: [] for name in SPLITS}}
        most: dict[str, int] = {}
        for repeat in range(repeats + 1):
            for name in rates:
                rate, most[name] = _rate(memory, texts, replace(search, seed=repeat), SPLITS.get(name))
                if repeat:  # the first is the warm-up
                    rates[name].append(rate)
        for name, measured in rates.items():
            rows.append(
                {
                    "workload": workload,
                    "pool": name,
                    "problems/min": statistics.median(measured),
                    "in flight at most": most[name],
                }
            )
            if name != "shared":
                ratios[f"pool@{workload}/{name}"] = _ratio(rates["shared"], measured)
        ratios[f"pool@{workload}/best-static"] = min(ratios[f"pool@{workload}/{name}"] for name in SPLITS)
    return rows, ratios


def _rate(memory: int, texts: list[str], search: SearchRequest, generator_share: float | None) -> tuple[float, int]:
    """Problems a minute, and the most searches in flight."""
    orchestrator = load_orchestrator(RuntimeSettings(kv_memory_bytes=memory, max_running=len(texts)))
    engine = orchestrator.engine
    if generator_share is not None:
        engine.admission = StaticSplit(engine.admission, generator_share)
    for text in texts:
        orchestrator.submit(replace(search, problem=text))
    most = 0
    start = time.perf_counter()
    while orchestrator.busy:
        orchestrator.step()
        most = max(most, orchestrator.running)
    seconds = time.perf_counter() - start
    engine.check_drained()
    return 60 * len(texts) / seconds, most


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
