"""Searches in problems/min of a server whose gauges are scraped many times a second, and how long a scrape takes."""

import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
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
from espalier.search.request import SearchRequest

_BEAM = SearchRequest("-", beam_width=4, expansion=4)


def run(
    problems: int, callers: int, interval: float, repeats: int, show: Show = nothing_shown
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Search with a scrape each `interval` seconds and without in turn, `callers` searches in flight.

    Returns:
        Rows with median problems/min and the server's processor time in milliseconds a search, and for the scraped one
        the median and the 99th percentile of a scrape in milliseconds; and the median ratio of pairs, in problems/min.
    """
    texts = [problem.problem for problem in load_benchmark("demo", problems)]
    rates: dict[bool, list[float]] = {False: [], True: []}
    spent: dict[bool, list[float]] = {False: [], True: []}
    took, rows, ratios = list[float](), list[dict[str, Any]](), dict[str, float]()
    with (
        serving("--http-port", "0", "--max-searches", str(callers)) as server,
        SearchClient(server.address) as client,
        ThreadPoolExecutor(callers) as pool,
    ):
        for turn in range(repeats + 1):
            for scraped in (True, False) if turn % 2 else (False, True):
                requests = [replace(_BEAM, problem=text, seed=turn) for text in texts]
                with _scrapes(server.url or "", interval if scraped else None) as times:
                    begun, used = time.perf_counter(), server.cpu_seconds()
                    list(pool.map(client.solve, requests))
                if turn:  # the first is the warm-up
                    rates[scraped].append(60 * problems / (time.perf_counter() - begun))
                    spent[scraped].append(1000 * (server.cpu_seconds() - used) / problems)
                    took += times
            if turn:
                rows = [_row("nobody", rates[False], spent[False], [])]
                rows.append(_row(f"each {1000 * interval:g} ms", rates[True], spent[True], took))
                pairs = zip(rates[True], rates[False], strict=True)
                ratios["problems/min, scraped/not"] = statistics.median(one / two for one, two in pairs)
                show(rows, ratios)
    return rows, ratios


def _row(scraped: str, rates: list[float], spent: list[float], took: list[float]) -> dict[str, Any]:
    return {
        "scraped by": scraped,
        "problems/min": statistics.median(rates),
        "server, CPU ms a search": statistics.median(spent),
        "scrapes": len(took) or None,
        "median ms": 1000 * statistics.median(took) if took else None,
        "99th percentile ms": 1000 * statistics.quantiles(took, n=100)[98] if took else None,
    }


@contextmanager
def _scrapes(url: str, interval: float | None) -> Iterator[list[float]]:
    """Scrape on a connection of its own until the end; yields the seconds of each scrape so far."""
    took, over = list[float](), threading.Event()

    def loop() -> None:
        with closing(HTTPConnection(urlsplit(url).netloc)) as connection:
            while not over.wait(interval):
                begun = time.perf_counter()
                connection.request("GET", "/gauges")
                answer = connection.getresponse()
                if b"vllm:num_requests_running" not in answer.read():
                    raise EspalierError(f"GET /gauges answers {answer.status}")
                took.append(time.perf_counter() - begun)

    thread = threading.Thread(target=loop, daemon=True)
    if interval is not None:
        thread.start()
    try:
        yield took
    finally:
        over.set()
        if interval is not None:
            thread.join()


def command(
    problems: Annotated[int, typer.Option(min=1, max=500, help="Problems in each run.")] = 256,
    callers: Annotated[int, typer.Option(min=1, help="Searches in flight.")] = 32,
    interval_ms: Annotated[float, typer.Option(min=1, help="Milliseconds between two scrapes.")] = 50.0,
    repeats: Annotated[int, typer.Option(min=1, help="Counted pairs of turns.")] = 7,
    json_path: JsonPath = None,
) -> None:
    """Searches in problems/min of a server whose gauges are scraped, compared with one that nobody scrapes."""
    report = Report(f"gauges of a server, {callers} searches in flight", json_path)
    report.finish(*run(problems, callers, interval_ms / 1000, repeats, report.show))
