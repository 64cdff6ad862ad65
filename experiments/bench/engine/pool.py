"""Search throughput in problems/min in a pool under pressure: one pool for both models against static splits."""

import itertools
import statistics
import time
from dataclasses import replace
from typing import Any

from espalier.engine.errors import PoolTooSmallError
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.experiments.bench.report import Show, nothing_shown
from espalier.experiments.evaluation.benchmarks import load_benchmark
from espalier.search.request import AlgorithmName, AnswerEquivalence, SearchRequest
from espalier.search.run.load import RuntimeSettings, load_orchestrator

SPLITS = {"25/75": 0.25, "50/50": 0.5, "75/25": 0.75}
"""The generator's shares of the pool in the static splits."""
_SHARES = {"shared": None, **SPLITS}
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
"""Searches assigned to the problems in turn."""


_SLICE = 0.1
"""Minimum seconds of a turn."""


def run(
    memory: int, problems: int, repeats: int, reserved_share: float, show: Show = nothing_shown
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Search the same problems in a shared pool of `memory` bytes and in each static split of it.

    The pools alternate in turns of a tenth of a second, so that other load on the machine affects all alike; each has
    its own clock.

    `show` gets the figures after each workload.

    Returns:
        Rows with median problems/min, batches of both models, maximum searches in flight and preemptions; and ratios
        `pool@WORKLOAD/SPLIT`, medians of pairs, and `pool@WORKLOAD/best-static`. `pool/50-50` and `pool/best-static`
        are the minimum over all workloads. A split that cannot hold one search has no rate and no ratio.
    """
    texts = [problem.problem for problem in load_benchmark("demo", problems)]
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for workload, searches in WORKLOADS.items():
        rates: dict[str, list[float]] = {"shared": [], **{name: [] for name in SPLITS}}
        last: dict[str, _Contestant] = {}
        for repeat in range(repeats + 1):
            last = _race(memory, reserved_share, texts, [replace(search, seed=repeat) for search in searches])
            if repeat:  # the first is the warm-up
                for name, contestant in last.items():
                    rates[name].append(contestant.rate)
        for name, measured in rates.items():
            rows.append(
                {
                    "workload": workload,
                    "pool": name,
                    "problems/min": statistics.median(measured),
                    "batches": last[name].batches,
                    "in flight at most": last[name].most_running,
                    "preemptions": last[name].preemptions,
                }
            )
        against = {name: _ratio(rates["shared"], rates[name]) for name in SPLITS if all(rates[name])}
        ratios |= {f"pool@{workload}/{name}": ratio for name, ratio in against.items()}
        if against:
            ratios[f"pool@{workload}/best-static"] = min(against.values())
        show(rows, ratios)
    for key, name in (("pool/best-static", "best-static"), ("pool/50-50", "50/50")):
        if measured := [ratios[k] for workload in WORKLOADS if (k := f"pool@{workload}/{name}") in ratios]:
            ratios[key] = min(measured)
    return rows, ratios


def _race(
    memory: int, reserved_share: float, texts: list[str], searches: list[SearchRequest]
) -> dict[str, "_Contestant"]:
    contestants = {name: _Contestant(memory, reserved_share, texts, searches, share) for name, share in _SHARES.items()}
    while running := [contestant for contestant in contestants.values() if contestant.busy]:
        for contestant in running:
            contestant.take_turn()
    for contestant in contestants.values():
        contestant.close()
    return contestants


class _Contestant:
    """One pool and its measurements; all zero if no search fits."""

    def __init__(
        self,
        memory: int,
        reserved_share: float,
        texts: list[str],
        searches: list[SearchRequest],
        generator_share: float | None,
    ) -> None:
        self.most_running = 0
        self._fits = True
        self._seconds = 0.0
        self._problems = len(texts)
        self._orchestrator = load_orchestrator(
            RuntimeSettings(
                kv_memory=memory,
                reserved_share=reserved_share,
                max_running=len(texts),
                answer_equivalence=AnswerEquivalence.EXACT_MATCH,
            )
        )
        kv_pool = self._orchestrator.engine.kv_pool
        if generator_share is not None:
            slabs = round(generator_share * kv_pool.num_slabs)
            kv_pool.set_quota(GENERATOR, slabs)
            kv_pool.set_quota(VERIFIER, kv_pool.num_slabs - slabs)
        try:
            for text, search in zip(texts, itertools.cycle(searches), strict=False):
                self._orchestrator.submit(replace(search, problem=text))
        except PoolTooSmallError:
            if generator_share is None:
                raise
            self._fits = False

    @property
    def busy(self) -> bool:
        return self._fits and self._orchestrator.busy

    @property
    def rate(self) -> float:
        """Problems per minute."""
        return 60 * self._problems / self._seconds if self._seconds else 0.0

    @property
    def batches(self) -> int:
        return sum(role.steps for role in self._orchestrator.engine.stats().values())

    @property
    def preemptions(self) -> int:
        return max(role.preemptions for role in self._orchestrator.engine.stats().values())

    def take_turn(self) -> None:
        start = time.perf_counter()
        while self.busy and time.perf_counter() < start + _SLICE:
            self._orchestrator.step()
            self.most_running = max(self.most_running, self._orchestrator.running)
        self._seconds += time.perf_counter() - start

    def close(self) -> None:
        self._orchestrator.engine.check_drained()
        self._orchestrator.close()


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
