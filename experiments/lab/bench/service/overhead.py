"""Searches in problems/min by many callers of a server, compared with the same searches in one process."""

import json
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from http.client import HTTPConnection
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from espalier.engine.errors import EspalierError
from espalier.experiments.lab.bench.options import JsonPath
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown
from espalier.experiments.lab.bench.service.server_process import serving
from espalier.experiments.runs.benchmarks import load_benchmark
from espalier.search.client import SearchClient
from espalier.search.request import SearchRequest, SubmitOptions
from espalier.search.result import Finished, SearchResult
from espalier.search.run.load import load_orchestrator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.settings import RuntimeSettings

_BEAM = SearchRequest("-", beam_width=4, expansion=4)
WORKLOADS = {"beam N=4 M=4": _BEAM, "beam N=4 M=4, unmerged": replace(_BEAM, merge_duplicates=False)}
_LOCAL = "one process"
_STREAMED = ", streamed"

Answers = dict[str, str]
"""The answer to each problem."""


def run(
    problems: int, callers: int, repeats: int, show: Show = nothing_shown
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Search by every way in turn; nowhere are prompts cached, as the server shares none of callers without a login.

    Args:
        problems: searches of a turn.
        callers: searches in flight: threads with a client each, or searches that run at once in the process.
        repeats: counted turns.
        show: gets the figures that there are so far, whenever there are more.

    Returns:
        Rows with median problems/min, and processor time in milliseconds a search, of this process (the callers', or
        that of the searches in one process) and of the server; and ratios of the server's ways over one process in
        problems/min, and of the streamed ones over the others of the same endpoint; medians of pairs.

    Raises:
        EspalierError: the answers of two ways differ.
    """
    texts = [problem.problem for problem in load_benchmark("demo", problems)]
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    with (
        serving("--http-port", "0") as server,
        closing(load_orchestrator(RuntimeSettings(max_running=callers))) as orchestrator,
    ):
        ways: dict[str, Callable[[Sequence[SearchRequest]], Answers]] = {
            _LOCAL: lambda requests: _locally(orchestrator, requests),
            "gRPC": lambda requests: _by_server(server.address, callers, requests, stream=False),
            f"gRPC{_STREAMED}": lambda requests: _by_server(server.address, callers, requests, stream=True),
            "chats": lambda requests: _by_chats(server.url or "", callers, requests, stream=False),
            f"chats{_STREAMED}": lambda requests: _by_chats(server.url or "", callers, requests, stream=True),
        }
        for workload, request in WORKLOADS.items():
            before = len(rows)
            rates: dict[str, list[float]] = {name: [] for name in ways}
            spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
            for turn in range(repeats + 1):
                requests = [replace(request, problem=text, seed=turn) for text in texts]
                answers = {}
                for name, way in ways.items():
                    begun, own, servers = time.perf_counter(), time.process_time(), server.cpu_seconds()
                    answers[name] = way(requests)
                    if turn:  # the first is the warm-up
                        rates[name].append(60 * problems / (time.perf_counter() - begun))
                        spent[name].append((time.process_time() - own, server.cpu_seconds() - servers))
                if differing := [name for name, its in answers.items() if its != answers[_LOCAL]]:
                    raise EspalierError(f"{', '.join(differing)}: other answers than those of one process")
                if not turn:
                    continue
                rows[before:] = [_row(workload, name, rates[name], spent[name], problems) for name in ways]
                beside = [(way, _LOCAL) for way in ways if way != _LOCAL]
                beside += [(way, way.removesuffix(_STREAMED)) for way in ways if way.endswith(_STREAMED)]
                for name, other in beside:
                    pairs = zip(rates[name], rates[other], strict=True)
                    ratios[f"{name}@{workload}/{other}"] = statistics.median(one / two for one, two in pairs)
                show(rows, ratios)
    return rows, ratios


def _row(
    workload: str, way: str, rates: list[float], spent: list[tuple[float, float]], problems: int
) -> dict[str, Any]:
    here, there = (1000 * statistics.median(times) / problems for times in zip(*spent, strict=True))
    return {
        "workload": workload,
        "way": way,
        "problems/min": statistics.median(rates),
        "this process, CPU ms a search": here,
        "server, CPU ms a search": there,
    }


def _locally(orchestrator: Orchestrator, requests: Sequence[SearchRequest]) -> Answers:
    asked = {}
    for request in requests:
        options = SubmitOptions(salt=secrets.token_bytes(16), timed_from_start=True)
        asked[orchestrator.submit(request, options=options)] = request
    answers: Answers = {}
    while orchestrator.busy:
        for result in orchestrator.step():
            assert isinstance(result, SearchResult)
            answers[asked[result.search_id].problem] = result.answer
    return answers


def _by_server(address: str, callers: int, requests: Sequence[SearchRequest], stream: bool) -> Answers:
    def ask(request: SearchRequest) -> tuple[str, str]:
        if not stream:
            return request.problem, client.solve(request).answer
        *_, last = client.solve_stream(request)
        assert isinstance(last, Finished)
        return request.problem, last.result.answer

    with SearchClient(address) as client, ThreadPoolExecutor(callers) as pool:
        return dict(pool.map(ask, requests))


def _by_chats(url: str, callers: int, requests: Sequence[SearchRequest], stream: bool) -> Answers:
    """Ask by chat completions, each on a connection of its own."""

    def ask(request: SearchRequest) -> tuple[str, str]:
        fields = {name: getattr(request, name) for name in ("beam_width", "expansion", "merge_duplicates")}
        messages = [{"role": "user", "content": request.problem}]
        body = {"model": "demo-generator", "messages": messages, "seed": request.seed, "stream": stream}
        with closing(HTTPConnection(urlsplit(url).netloc)) as connection:
            text = json.dumps({**body, "espalier": fields})
            connection.request("POST", "/v1/chat/completions", text, {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise EspalierError(f"the server answers {answer.status}: {answer.read(1000).decode()}")
            if not stream:
                return request.problem, json.loads(answer.read())["espalier"]["answer"]
            data = [line[6:] for line in answer if line.startswith(b"data: {")]
            return request.problem, json.loads(data[-1])["espalier"]["answer"]

    with ThreadPoolExecutor(callers) as pool:
        return dict(pool.map(ask, requests))


def command(
    problems: Annotated[int, typer.Option(min=1, max=500, help="Problems in each run.")] = 128,
    callers: Annotated[int, typer.Option(min=1, help="Callers at once.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Counted repetitions.")] = 5,
    json_path: JsonPath = None,
) -> None:
    """Searches in problems/min through a server with default settings, compared with one process."""
    report = Report(f"searches through a server, {callers} callers", json_path)
    report.finish(*run(problems, callers, repeats, report.show))
