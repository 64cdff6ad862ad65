"""How long a caller with one small search waits beside callers with many, over what a fair share would give it."""

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, cycle
from typing import Any

from espalier.experiments.bench.service.server_process import logins, serving
from espalier.experiments.evaluation.benchmarks import load_benchmark
from espalier.search.client import NO_RETRIES, SearchClient, ServiceError
from espalier.search.request import SearchRequest
from espalier.search.result import Started


class _Count:
    """A number that threads add to."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    def add(self) -> None:
        with self._lock:
            self.value += 1


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


def run(searches: int) -> list[dict[str, Any]]:
    """Measure the waits of one caller's small searches, one after the other, beside each crowd.

    A fair share is a turn for each caller: the next slot of every `callers + 1` is the small caller's, so it waits at
    most as long as that many searches need to end.

    Returns:
        A row for each crowd: median and longest wait in seconds, the fair one, and the ratio of the medians.
    """
    return [{"crowd": name, **_measure(crowd, searches)} for name, crowd in CROWDS.items()]


def _measure(crowd: Crowd, searches: int) -> dict[str, Any]:
    texts = [problem.problem for problem in load_benchmark("demo", 64)]
    with logins(crowd.callers + 1) as (callers, tokens):
        options = ("--callers", str(callers), "--max-searches", str(crowd.slots))
        with serving(*options) as server, _crowd(server.address, crowd, tokens[1:], texts) as ended:
            time.sleep(3.0)  # all slots are taken and the queue has formed
            waits, begun, before = [], time.perf_counter(), ended.value
            with SearchClient(server.address, token=tokens[0], retry=NO_RETRIES) as client:
                for number in range(searches):
                    asked = time.perf_counter()
                    for event in client.solve_stream(SearchRequest(texts[number % len(texts)], seed=number)):
                        if isinstance(event, Started):
                            waits.append(time.perf_counter() - asked)
            between = (time.perf_counter() - begun) / (ended.value - before + searches)
    fair = (crowd.callers + 1) * between
    median = statistics.median(waits)
    return {
        "median wait s": median,
        "longest wait s": max(waits),
        "fair wait s": fair,
        "median over fair": median / fair,
    }


@contextmanager
def _crowd(address: str, crowd: Crowd, tokens: list[str], texts: list[str]) -> Iterator["_Count"]:
    """Run the crowd until the end; yields how many of its searches have ended."""
    ended, over = _Count(), threading.Event()
    seeds = count()

    def loop(client: SearchClient) -> None:
        for text in cycle(texts):
            if over.is_set():
                return
            try:
                client.solve(SearchRequest(text, beam_width=4, expansion=4, merge_duplicates=False, seed=next(seeds)))
                ended.add()
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
