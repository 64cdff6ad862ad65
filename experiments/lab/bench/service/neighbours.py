"""Seconds and answers of one caller's small searches, alone and beside another caller's load."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Annotated, Any

import typer

from espalier.engine.errors import EspalierError
from espalier.experiments.lab.bench.options import JsonPath
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown
from espalier.experiments.lab.bench.service import fairness
from espalier.experiments.lab.bench.service.answering_server import ROOTS, TOWERS
from espalier.experiments.lab.bench.service.server_process import ServerProcess, logins, serving
from espalier.experiments.runs.benchmarks import load_benchmark
from espalier.search.client import NO_RETRIES, SearchClient, ServiceError
from espalier.search.request import AlgorithmName, EarlyStop, SearchRequest

_PATIENCE = 120.0
"""Seconds after which a small search is given up."""
_SETTLING = 5.0
"""Seconds from the start of a load until it is measured beside."""
_PROMPT_BYTES = 32 * 1024

Load = tuple[int, Callable[[int], SearchRequest]]
"""Number of calls in progress at once, and the request of the call with a number."""


def _small(number: int) -> SearchRequest:
    """One whose vote compares formulas."""
    return replace(_majority(number, 6), seed=ROOTS + number)


def _majority(number: int, paths: int) -> SearchRequest:
    problem = load_benchmark("demo", 64)[number % 64].problem
    return SearchRequest(
        problem,
        AlgorithmName.MAJORITY,
        paths,
        temperature=1.5,
        early_stop=EarlyStop.OFF,
        merge_duplicates=False,
        seed=number,
    )


def _prompt(number: int) -> SearchRequest:
    text = f"{number}: How many? "
    return SearchRequest(text * (_PROMPT_BYTES // len(text)), seed=number)


LOADS: dict[str, Load] = {
    "60 long searches": (60, lambda number: _majority(number, 64)),
    "votes on towers of powers": (4, lambda number: replace(_majority(number, 6), seed=TOWERS + number)),
    "256 calls with 32 KB prompts": (256, _prompt),
}


def run(searches: int, show: Show = nothing_shown, rows: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """Measure one caller's small searches, one after the other, alone and beside each load of another caller.

    A fair share is half of the machine, so that a search takes twice as long as alone; that is measured before and
    after each load, as others may use the machine.

    Args:
        searches: small searches beside each load.
        show: gets the rows so far.
        rows: those that there are before, to which these are added.

    Returns:
        A row for each load: median and longest seconds of a small search, those at a fair share, their ratio, and how
        many answered as they do alone.
    """
    rows = [] if rows is None else rows
    with logins(2) as (callers, tokens):
        options = ("--callers", str(callers))
        with serving(*options, module="espalier.experiments.lab.bench.service.answering_server") as server:
            _measure(server, tokens[0], searches)  # processes that compare have started
            alone, answers = _measure(server, tokens[0], searches)
            rows.append(_row("nobody", alone, statistics.median(alone), searches, searches))
            show(rows, {})
            for name, load in LOADS.items():
                with _loaded(server, tokens[1], load):
                    time.sleep(_SETTLING)
                    took, found = _measure(server, tokens[0], searches)
                _settle(server, tokens[0])
                before, (alone, _) = alone, _measure(server, tokens[0], searches)
                same = sum(one == other for one, other in zip(answers, found, strict=True))
                rows.append(_row(name, took, 2 * statistics.median(before + alone), same, searches))
                show(rows, {})
    return rows


def _settle(server: ServerProcess, token: str) -> None:
    """Wait until the searches of a load that has left have ended."""
    with SearchClient(server.address, token=token) as client:
        while (info := client.server_info()).occupancy.running or info.admitted_calls:
            time.sleep(0.1)


def _row(beside: str, took: list[float], fair: float, same: int, searches: int) -> dict[str, Any]:
    median = statistics.median(took)
    return {
        "beside": beside,
        "measured": "search",
        "median s": median,
        "longest s": max(took),
        "fair s": fair,
        "median over fair": median / fair,
        "same answers": f"{same} of {searches}",
    }


def _measure(server: ServerProcess, token: str, searches: int) -> tuple[list[float], list[str]]:
    """Seconds and answers of small searches; the name of the error for one that is refused."""
    took, answers = list[float](), list[str]()
    with SearchClient(server.address, token=token, retry=NO_RETRIES) as client:
        for number in range(searches):
            start = time.perf_counter()
            try:
                answers.append(client.solve(_small(number), _PATIENCE).answer)
            except ServiceError as error:
                answers.append(error.code)
            took.append(time.perf_counter() - start)
    return took, answers


@contextmanager
def _loaded(server: ServerProcess, token: str, load: Load) -> Iterator[None]:
    """Keep a load's calls in progress."""
    at_once, request = load
    over, numbers = threading.Event(), count()

    def loop(client: SearchClient) -> None:
        while not over.is_set():
            try:
                client.solve(request(next(numbers)), _PATIENCE)
            except EspalierError:
                over.wait(0.01)  # refused

    with SearchClient(server.address, token=token, retry=NO_RETRIES) as client:
        threads = [threading.Thread(target=loop, args=(client,), daemon=True) for _ in range(at_once)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            client.close()
            for thread in threads:
                thread.join()


def command(
    searches: Annotated[int, typer.Option(min=1, help="Small searches beside each crowd.")] = 20,
    json_path: JsonPath = None,
) -> None:
    """Wait and time of a caller's small search beside what others ask, compared with its fair share."""
    report = Report("one caller's small searches beside others", json_path)
    rows = run(searches, report.show, fairness.run(searches, report.show))
    report.finish(rows, {})
