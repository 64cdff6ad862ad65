"""Searches in problems/min on workers of one thread each, compared with one thread in this process."""

import logging
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Annotated, Any

import typer

from espalier.engine.errors import EspalierError
from espalier.experiments.cli.options import parse_int_list, parse_list
from espalier.experiments.executors.process_transport import ProcessTransport
from espalier.experiments.executors.ray_transport import RayTransport, import_ray
from espalier.experiments.executors.settings import ExecutorName, ExecutorSettings
from espalier.experiments.executors.worker import Transport
from espalier.experiments.executors.worker_executor import WorkerExecutor
from espalier.experiments.lab.bench.options import JsonPath
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown
from espalier.experiments.runs.benchmarks import load_benchmark
from espalier.search.request import AnswerEquivalence, SearchRequest, SubmitOptions
from espalier.search.result import SearchResult
from espalier.search.run.executor import Executor
from espalier.search.run.load import load_orchestrator
from espalier.search.run.settings import RuntimeSettings

_BEAM = SearchRequest("-", beam_width=4, expansion=4)
WORKLOADS = {"beam N=4 M=4": _BEAM, "beam N=4 M=4, unmerged": replace(_BEAM, merge_duplicates=False)}
_LOCAL = "one process"


def run(
    problems: int,
    kinds: Sequence[ExecutorName],
    workers: list[int],
    in_flight: int,
    repeats: int,
    show: Show = nothing_shown,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Search the same problems by every executor in turn, all with one thread for each engine.

    `show` gets the figures so far after each round.

    Returns:
        Rows with median problems/min; and ratios, medians of pairs, for each kind of workers: one worker over one
        process, and more workers over one.

    Raises:
        EspalierError: Ray is missing, there are too few cores, or an executor's answers are not those of one process.
    """
    texts = [problem.problem for problem in load_benchmark("demo", problems)]
    runtime = RuntimeSettings(
        threads=1, max_running=in_flight, kv_memory=2**30, answer_equivalence=AnswerEquivalence.EXACT_MATCH
    )
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    with ExitStack() as stack:
        contestants: dict[str, Executor] = {_LOCAL: stack.enter_context(closing(load_orchestrator(runtime)))}
        if ExecutorName.RAY in kinds:
            _start_ray(stack, sum(workers))
        for kind in kinds:
            for count in workers:
                executor = WorkerExecutor(_transport(kind, count, runtime), runtime, longest_first=True)
                contestants[_named(kind, count)] = stack.enter_context(closing(executor))
        for workload, request in WORKLOADS.items():
            before = len(rows)
            for rates in _race(contestants, texts, request, repeats):
                rows[before:] = [
                    {"workload": workload, "executor": name, "problems/min": statistics.median(its)}
                    for name, its in rates.items()
                ]
                for kind in kinds:
                    first, *others = [_named(kind, count) for count in workers]
                    ratios[f"{first}@{workload}/{_LOCAL}"] = _ratio(rates[first], rates[_LOCAL])
                    for other in others:
                        ratios[f"{other}@{workload}/{first}"] = _ratio(rates[other], rates[first])
                show(rows, ratios)
    return rows, ratios


def _start_ray(stack: ExitStack, cores: int) -> None:
    ray = import_ray()
    ray.init(
        address="local",
        num_cpus=cores,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    stack.callback(ray.shutdown)


def _transport(kind: ExecutorName, count: int, runtime: RuntimeSettings) -> Transport:
    if kind is ExecutorName.RAY:
        return RayTransport(runtime, ExecutorSettings(kind, workers=count))
    return ProcessTransport(runtime, count)


def _named(kind: ExecutorName, count: int) -> str:
    return f"{count} {'Ray worker' if kind is ExecutorName.RAY else 'worker'}{'s' if count > 1 else ''}"


def _race(
    contestants: dict[str, Executor], texts: list[str], request: SearchRequest, repeats: int
) -> Iterator[dict[str, list[float]]]:
    """After each counted round, the rates of all so far."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats + 1):
        answers = {}
        for name, executor in contestants.items():
            begun = time.perf_counter()
            answers[name] = _search(executor, texts, replace(request, seed=repeat))
            if repeat:  # the first is the warm-up
                rates[name].append(60 * len(texts) / (time.perf_counter() - begun))
        if differing := [name for name, its in answers.items() if its != answers[_LOCAL]]:
            raise EspalierError(f"{', '.join(differing)}: other answers than those of one process")
        if repeat:
            yield rates


def _search(executor: Executor, texts: list[str], request: SearchRequest) -> dict[str, str]:
    """The answer to each text."""
    options = SubmitOptions(salt=secrets.token_bytes(16), timed_from_start=True)
    asked = {executor.submit(replace(request, problem=text), options=options): text for text in texts}
    answers: dict[str, str] = {}
    while executor.busy:
        for result in executor.step():
            if result.error:
                raise EspalierError(result.error)
            assert isinstance(result, SearchResult)
            answers[asked[result.search_id]] = result.answer
    return answers


def _ratio(rates: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(rates, others, strict=True))


def command(
    problems: Annotated[int, typer.Option(min=1, max=500, help="Problems in each run.")] = 96,
    kinds: Annotated[str, typer.Option(help="Kinds of workers: processes, ray or both.")] = "processes,ray",
    workers: Annotated[str, typer.Option(help="Numbers of workers of each kind, like 1,2.")] = "1,2",
    in_flight: Annotated[int, typer.Option(min=1, help="Problems searched at once, by each worker.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Counted repetitions.")] = 5,
    json_path: JsonPath = None,
) -> None:
    """Searches in problems/min on workers of one thread each, compared with one thread in this process."""
    known = ExecutorName.PROCESSES, ExecutorName.RAY
    chosen = [kind for kind in known if kind in parse_list(kinds, "--kinds")]
    if len(chosen) != len(parse_list(kinds, "--kinds")):
        raise typer.BadParameter(f"{kinds!r} is not a list of {', '.join(known)}", param_hint="--kinds")
    report = Report(f"executors, {problems} problems, {in_flight} in flight, one thread each", json_path)
    report.finish(*run(problems, chosen, parse_int_list(workers, "--workers"), in_flight, repeats, report.show))
