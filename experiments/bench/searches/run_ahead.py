"""Latency of a search alone with run-ahead and without, in pairs, and the rows of the steps that it fills up."""

import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from espalier.engine.roles import GENERATOR
from espalier.engine.scheduling.run_ahead import RunAhead
from espalier.engine.step_record import StepRecord
from espalier.experiments.bench.report import Show, nothing_shown
from espalier.experiments.runs.benchmarks import load_benchmark
from espalier.search.request import SearchRequest
from espalier.search.result import SearchResult
from espalier.search.run.load import load_orchestrator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.settings import RuntimeSettings


@dataclass(slots=True)
class _Turn:
    """A search alone: its result, its seconds, and for each step of the generator its rows and seconds."""

    result: SearchResult
    seconds: float
    cpu_seconds: float
    steps: list[tuple[int, float]]

    @property
    def said(self) -> tuple[Any, ...]:
        """All that must not depend on run-ahead."""
        nodes = sorted((n.path, n.text, n.score, n.termination, n.multiplicity) for n in self.result.nodes[1:])
        return self.result.answer, self.result.score, nodes


def run(
    runtime: RuntimeSettings, request: SearchRequest, ahead: Sequence[int], problems: int, show: Show = nothing_shown
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Search each problem of the demo benchmark alone, without run-ahead and up to each number of rows.

    Args:
        runtime: the models.
        request: a search, whose problem does not count.
        ahead: rows up to which steps are filled up.
        problems: counted ones; another comes first.
        show: gets the figures that there are so far.

    Returns:
        A row for each number of rows, 0 for none: medians over problems, rows of the generator's steps on average, the
        share of its time in steps of up to 2 and up to 4 rows, and tokens computed ahead of a search on average. And
        the ratios `seconds@R` and `CPU@R` over those without, medians of pairs; below 1 it is faster.
    """
    turns: dict[int, list[_Turn]] = {rows: [] for rows in (0, *ahead)}
    table: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    with closing(load_orchestrator(runtime)) as orchestrator:
        for number, problem in enumerate(load_benchmark("demo", problems + 1)):
            asked = replace(request, problem=problem.problem, seed=number)
            _turn(orchestrator, asked, 0)  # caches the prompts
            order = list(turns)
            for rows in order[number % len(order) :] + order[: number % len(order)]:
                turns[rows].append(_turn(orchestrator, asked, rows))
            if number == 0:  # a warm-up
                for its in turns.values():
                    its.clear()
            else:
                table = [_row(rows, its, turns[0]) for rows, its in turns.items()]
                for rows in ahead:
                    pairs = list(zip(turns[rows], turns[0], strict=True))
                    ratios[f"seconds@{rows}"] = statistics.median(a.seconds / b.seconds for a, b in pairs)
                    ratios[f"CPU@{rows}"] = statistics.median(a.cpu_seconds / b.cpu_seconds for a, b in pairs)
                show(table, ratios)
    return table, ratios


def _turn(orchestrator: Orchestrator, request: SearchRequest, rows: int) -> _Turn:
    engine, steps = orchestrator.engine, list[StepRecord]()
    scheduler = engine.schedulers[GENERATOR]
    scheduler.ahead = RunAhead(scheduler.table, rows) if rows else None
    engine.on_step = steps.append
    start, cpu_start = time.perf_counter(), time.process_time()
    orchestrator.submit(request)
    results: list[Any] = []
    while orchestrator.busy:
        results += orchestrator.step()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    engine.on_step = None
    own = [(step.rows, step.scheduling_seconds + step.computing_seconds) for step in steps if step.role == GENERATOR]
    return _Turn(results[0], seconds, cpu_seconds, own)


def _row(rows: int, turns: list[_Turn], without: list[_Turn]) -> dict[str, Any]:
    steps = [step for turn in turns for step in turn.steps]
    seconds = sum(seconds for _, seconds in steps)
    narrow = {most: sum(s for rows, s in steps if rows <= most) / seconds for most in (2, 4)}
    ahead, kept = (
        statistics.fmean(getattr(turn.result.usage, name) for turn in turns)
        for name in ("ahead_tokens", "ahead_kept_tokens")
    )
    return {
        "run ahead": rows,
        "ms": 1e3 * statistics.median(turn.seconds for turn in turns),
        "CPU ms": 1e3 * statistics.median(turn.cpu_seconds for turn in turns),
        "generator's share %": 100 * seconds / sum(turn.seconds for turn in turns),
        "steps": statistics.fmean(len(turn.steps) for turn in turns),
        "rows": statistics.fmean(rows for rows, _ in steps),
        "time with <= 2 rows %": 100 * narrow[2],
        "<= 4 rows %": 100 * narrow[4],
        "tokens ahead": ahead,
        "kept": kept,
        "same": all(turn.said == other.said for turn, other in zip(turns, without, strict=True)),
        "searches": len(turns),
    }
