"""Waits of a caller with one small search beside callers with many, over what a fair share would give it."""

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, cycle
from typing import Any

from espalier.experiments.lab.bench.report import Show, nothing_shown
from espalier.experiments.lab.bench.service.server_process import logins, serving
from espalier.experiments.runs.benchmarks import load_benchmark
from espalier.search.client import NO_RETRIES, SearchClient, ServiceError
from espalier.search.request import SearchRequest
from espalier.search.result import Started


@dataclass(frozen=True, slots=True)
class Crowd:
    """Callers that always have searches in progress.

    Attributes:
        callers: how many.
        searches: in progress of each; the next is sent when one ends.
        slots: the server's.
    """

    callers: int
    searches: int
    slots: int


CROWDS = {
    "one caller with 68 searches, 4 slots": Crowd(1, 68, 4),
    "12 callers with 4 each, 4 slots": Crowd(12, 4, 4),
    "one caller with 96 searches, 32 slots": Crowd(1, 96, 32),
}


def run(searches: int, show: Show = nothing_shown) -> list[dict[str, Any]]:
    """Measure the waits of one caller's small searches, one after the other, beside each crowd.

    A fair share is a turn for each caller: of the next `callers + 1` slots that are free one is the small caller's, so
    it waits at most until that many searches have ended.

    Args:
        searches: small searches beside each crowd.
        show: gets the rows so far.

    Returns:
        A row for each crowd: median and longest wait in seconds, the median of the fair ones, and that of the ratios.
    """
    rows = list[dict[str, Any]]()
    for name, crowd in CROWDS.items():
        rows.append({"beside": name, **_measure(crowd, searches)})
        show(rows, {})
    return rows


def _measure(crowd: Crowd, searches: int) -> dict[str, Any]:
    texts = [problem.problem for problem in load_benchmark("demo", 64)]
    with logins(crowd.callers + 1) as (callers, tokens):
        options = ("--callers", str(callers), "--max-searches", str(crowd.slots))
        with serving(*options) as server, _crowd(server.address, crowd, tokens[1:], texts) as ended:
            time.sleep(3.0)  # all slots are taken and the queue has formed
            asked, waits = [], []
            with SearchClient(server.address, token=tokens[0], retry=NO_RETRIES) as client:
                for number in range(searches):
                    asked.append(time.perf_counter())
                    for event in client.solve_stream(SearchRequest(texts[number % len(texts)], seed=number)):
                        if isinstance(event, Started):
                            waits.append(time.perf_counter() - asked[-1])
            while sum(end > asked[-1] for end in ended) <= crowd.callers:
                time.sleep(0.1)
    fair = [sorted(end for end in ended if end > start)[crowd.callers] - start for start in asked]
    return {
        "measured": "wait",
        "median s": statistics.median(waits),
        "longest s": max(waits),
        "fair s": statistics.median(fair),
        "median over fair": statistics.median(wait / most for wait, most in zip(waits, fair, strict=True)),
        "same answers": "",
    }


@contextmanager
def _crowd(address: str, crowd: Crowd, tokens: list[str], texts: list[str]) -> Iterator[list[float]]:
    """Run the crowd until the end; yields the times at which its searches have ended so far."""
    ended, over = list[float](), threading.Event()
    seeds = count()

    def loop(client: SearchClient) -> None:
        for text in cycle(texts):
            if over.is_set():
                return
            try:
                client.solve(SearchRequest(text, beam_width=4, expansion=4, merge_duplicates=False, seed=next(seeds)))
                ended.append(time.perf_counter())
            except ServiceError:
                time.sleep(0.1)  # the queue is full, or a caller with fewer took the place

    clients = [SearchClient(address, token=token, retry=NO_RETRIES) for token in tokens]
    loops = [client for client in clients for _ in range(crowd.searches)]
    threads = [threading.Thread(target=loop, args=(client,), daemon=True) for client in loops]
    for thread in threads:
        thread.start()
    try:
        yield ended
    finally:
        over.set()
        for client in clients:
            client.close()
        for thread in threads:
            thread.join()
