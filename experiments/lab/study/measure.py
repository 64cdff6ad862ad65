"""One cell of a study: searches one at a time, for their memory, and all at once, for throughput."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from time import perf_counter
from typing import Any

import numpy as np

from espalier.engine.engine import Engine
from espalier.engine.errors import EspalierError
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.engine.stats import StepRecord
from espalier.experiments.lab.study.figures import PHASES
from espalier.experiments.planning.closed_form import HeldBlocks, PathLengths, TreeShape, blocks_by_round
from espalier.search.algorithms import algorithm_of
from espalier.search.request import SearchRequest, SubmitOptions
from espalier.search.result import SearchResult
from espalier.search.run.executor import ResolvedRequest
from espalier.search.run.orchestrator import Orchestrator

MOMENTS = 20
"""Parts of a search's life, by engine steps."""
_STEPLESS = ("duplicate",)


@dataclass(slots=True)
class _Run:
    """Searches that run together.

    Attributes:
        phases: seconds by what the process did, see `PHASES`: the generator's batches, prompts included; the
            verifier's; choosing batches and taking in their results; and the rest: the tree, tokenization of steps, the
            vote; on a machine with other work also waiting.
        held: the logical and physical blocks after each engine step, if counted.
    """

    engine: Engine
    counts_blocks: bool
    results: list[SearchResult] = field(default_factory=list)
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    held: list[tuple[int, int]] = field(default_factory=list)
    most_bytes: int = 0
    most_running: int = 0
    computed_tokens: int = 0
    preemptions: int = 0

    def add(self, record: StepRecord) -> None:
        """Add an engine step."""
        self.phases["decode" if record.role == GENERATOR else "scoring"] += record.computing_seconds
        self.phases["scheduling"] += record.scheduling_seconds
        schedulers = self.engine.schedulers.values()
        pools = [(its.table, group, pool) for its in schedulers for group, pool in enumerate(its.pools)]
        self.most_bytes = max(self.most_bytes, sum(pool.live_bytes for *_, pool in pools))
        if self.counts_blocks:
            logical = sum(len(blocks) for table, group, _ in pools for blocks in table.live_block_tables(group))
            self.held.append((logical, sum(pool.live_blocks for *_, pool in pools)))


def measure_cell(orchestrator: Orchestrator, problems: Iterable[str], request: SearchRequest) -> dict[str, Any]:
    """Measure one search setting on some problems: alone, then all at once.

    Returns:
        Values for JSON; see the columns of `page`.

    Raises:
        EspalierError: a search failed.
    """
    texts = list(problems)
    _run(orchestrator, [replace(request, problem=texts[0])], counts_blocks=False)  # warm-up
    alone = [_run(orchestrator, [replace(request, problem=text)], counts_blocks=True) for text in texts]
    together = _run(orchestrator, [replace(request, problem=text) for text in texts], counts_blocks=False)
    return {
        "algorithm": str(request.algorithm),
        "beam_width": request.beam_width,
        "expansion": request.expansion,
        "problems": len(texts),
        "isolated": _isolated(alone),
        "estimate": _estimate(orchestrator, texts, [one.results[0] for one in alone]),
        "together": _together(together),
    }


def _run(orchestrator: Orchestrator, requests: list[SearchRequest], counts_blocks: bool) -> _Run:
    """Run searches that share nothing with each other or with earlier ones."""
    engine = orchestrator.engine
    before = engine.stats()
    run = _Run(engine, counts_blocks)
    ended: dict[str, SearchResult] = {}
    start = perf_counter()
    engine.on_step = run.add
    try:
        order = [
            orchestrator.submit(request, options=SubmitOptions(salt=secrets.token_bytes(16))) for request in requests
        ]
        while len(ended) < len(order):
            ended |= {result.search_id: result for result in orchestrator.step() if isinstance(result, SearchResult)}
            run.most_running = max(run.most_running, orchestrator.running)
    finally:
        engine.on_step = None
    run.seconds, after = perf_counter() - start, engine.stats()
    run.phases["search"] = max(0.0, run.seconds - sum(run.phases.values()))
    if failed := [result.error for result in ended.values() if result.error]:
        raise EspalierError(failed[0])
    run.results = [ended[name] for name in order]
    run.computed_tokens = sum(after[role].computed_tokens - before[role].computed_tokens for role in after)
    run.preemptions = max(after[role].preemptions - before[role].preemptions for role in after)
    return run


def _isolated(alone: list[_Run]) -> dict[str, Any]:
    """Means over the searches; the peaks are of rounds' ends, as in `Usage`, besides `peak_step_bytes`.

    A search's life is its blocks, logical and physical, at `MOMENTS` evenly spaced moments.
    """
    results = [one.results[0] for one in alone]
    names = (
        "peak_kv_bytes", "generator_peak_kv_bytes", "verifier_peak_kv_bytes", "logical_blocks", "physical_blocks",
        "generated_tokens", "generator_tokens", "verifier_tokens", "nodes", "duplicates",
    )  # fmt: skip
    places = [np.linspace(0, len(one.held) - 1, MOMENTS).round().astype(int) for one in alone]
    lives = [np.array(one.held, np.float64)[place] for one, place in zip(alone, places, strict=True)]
    life = np.mean(lives, axis=0).round(1)  # [MOMENTS, 2]
    return {
        **{name: fmean(getattr(result.usage, name) for result in results) for name in names},
        "peak_step_bytes": fmean(one.most_bytes for one in alone),
        "rounds": fmean(len(result.rounds) for result in results),
        "seconds": fmean(one.seconds for one in alone),
        "phases": {name: fmean(one.phases[name] for one in alone) for name in PHASES},
        "life_logical_blocks": life[:, 0].tolist(),
        "life_physical_blocks": life[:, 1].tolist(),
    }


def _together(run: _Run) -> dict[str, Any]:
    generated = sum(result.usage.generated_tokens for result in run.results)
    return {
        "seconds": run.seconds,
        "generated_tokens_per_second": generated / run.seconds,
        "computed_tokens_per_second": run.computed_tokens / run.seconds,
        "searches_per_minute": 60 * len(run.results) / run.seconds,
        "phases": run.phases,
        "preemptions": run.preemptions,
        "most_running": run.most_running,
        "peak_step_bytes": run.most_bytes,
    }


def _estimate(orchestrator: Orchestrator, texts: list[str], results: list[SearchResult]) -> dict[str, float] | None:
    """The closed form with each search's own lengths, averaged; None for an algorithm without one."""
    if algorithm_of(results[0].configuration).growth is None:
        return None
    found = [_estimate_of(orchestrator, text, result) for text, result in zip(texts, results, strict=True)]
    return {name: fmean(one[name] for one in found) for name in found[0]}


def _estimate_of(orchestrator: Orchestrator, problem: str, result: SearchResult) -> dict[str, float]:
    engine, usage = orchestrator.engine, result.usage
    steps = [node for node in result.nodes if node.parent_id is not None and node.termination not in _STEPLESS]
    request = result.configuration
    resolved = orchestrator.check(replace(request, problem=problem))
    assert isinstance(resolved, ResolvedRequest)
    depth = max(node.depth for node in steps)
    tree = TreeShape(request, depth, min(0.99, usage.duplicates / usage.nodes))
    lengths = {
        GENERATOR: PathLengths(
            len(resolved.generator_prompt), fmean(node.tokens for node in steps), pending_tokens=1, varying=True
        )
    }
    if usage.verifier_tree_tokens:
        prompt = len(resolved.verifier_prompt)
        scored = usage.verifier_tree_tokens - prompt
        lengths[VERIFIER] = PathLengths(prompt, scored / len(steps), varying=True)
    size = engine.settings.block_size
    stats, models = engine.stats(), engine.models
    block_bytes = [stats[role].block_bytes for role in lengths]
    rows = (blocks_by_round(tree, its, size, models[role].config.window_shares) for role, its in lengths.items())
    rounds = zip(*rows, strict=True)
    fullest = max(rounds, key=lambda both: _held_bytes(both, block_bytes))
    return {
        "peak_kv_bytes": _held_bytes(fullest, block_bytes),
        "physical_blocks": sum(blocks.physical for blocks in fullest),
        "logical_blocks": sum(blocks.logical for blocks in fullest),
    }


def _held_bytes(blocks: Sequence[HeldBlocks], block_bytes: Sequence[int]) -> float:
    return sum(each.physical * size for each, size in zip(blocks, block_bytes, strict=True))
