"""A long run under mixed load, with clients that vanish: what is left of blocks, memory and patience."""

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Annotated, Any

import typer

from espalier.engine.errors import EspalierError
from espalier.experiments.lab.bench.options import JsonPath
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown
from espalier.experiments.lab.bench.service.server_process import ServerProcess, logins, serving
from espalier.experiments.runs.benchmarks import load_benchmark
from espalier.search.client import NO_RETRIES, SearchClient, ServiceError
from espalier.search.request import AlgorithmName, SearchRequest

_SMALL = SearchRequest("-", beam_width=2, expansion=2)
_LARGE = SearchRequest("-", beam_width=8, expansion=4, merge_duplicates=False)
_WARM_UP = 0.2
"""Share of the run after which memory must not grow."""
_SAMPLE_SECONDS = 5.0
_POOL = "512M"
"""Filled within the warm-up: cached prompts take what is free of the pool, and its memory counts once it is used."""
_IDLE_SECONDS = 60.0

_Loop = Callable[[threading.Event], None]
"""Work of a thread until the event is set."""


@dataclass(slots=True)
class _Figures:
    """Figures that the threads of a run have seen."""

    waits: list[float] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, outcome: str) -> None:
        with self.lock:
            self.ended[outcome] = self.ended.get(outcome, 0) + 1


def run(
    minutes: float, large: int = 3, small: int = 2, vanishing: int = 2, show: Show = nothing_shown
) -> tuple[list[dict[str, Any]], dict[str, float], dict[str, int]]:
    """Load a server for some minutes, from the first one on with clients that vanish; each caller has a login.

    Args:
        minutes: length of the run, after a tenth of it in which small searches run alone.
        large: callers that always have a large search running.
        small: callers of small searches, one after the other; their times count.
        vanishing: callers that disappear in the middle of a search, without a word.
        show: gets the figures that there are so far, whenever there are more.

    Returns:
        A row for each twentieth of the run: memory, live blocks, searches. Ratios: memory at the end over that after
        the warm-up; p99 of small searches under load over that of the quiet time. And how many calls ended how.

    Raises:
        EspalierError: the server still held blocks a minute after the load ended, or a call ended with an error that it
            should not have.
    """
    texts = [problem.problem for problem in load_benchmark("demo", 200)]
    rows: list[dict[str, Any]] = []
    with (
        logins(1 + large + small + vanishing) as (file, (own, *tokens)),
        serving("--kv-memory", _POOL, "--callers", str(file)) as server,
        SearchClient(server.address, token=own) as watcher,
    ):
        of_large, of_small, of_vanishing = tokens[:large], tokens[large:-vanishing], tokens[-vanishing:]
        quiet = _Figures()
        with _threads([partial(_ask, server.address, token, _SMALL, texts, quiet) for token in of_small]):
            time.sleep(6 * minutes)
        loaded, others = _Figures(), _Figures()
        with _resetting_proxy(server.address) as proxy:
            work: list[_Loop] = [partial(_ask_wrongly, server.address, own, others)]
            work += [partial(_ask, server.address, token, _LARGE, texts, others) for token in of_large]
            work += [partial(_ask, server.address, token, _SMALL, texts, loaded) for token in of_small]
            work += [partial(_vanish, proxy, token, texts, others) for token in of_vanishing]
            with _threads(work):
                rows = _watch(server, watcher, minutes, loaded, show)
        left = _wait_until_idle(watcher)
    ended = {name: loaded.ended.get(name, 0) + others.ended.get(name, 0) for name in {**loaded.ended, **others.ended}}
    bad = {name: count for name, count in ended.items() if name not in ("OK", "INVALID_ARGUMENT", "vanished")}
    if left or bad:
        raise EspalierError(f"after the load the server holds {left} live blocks; calls ended with {bad}")
    steady = [row["resident MiB"] for row in rows[int(_WARM_UP * len(rows)) :]]
    third = max(1, len(steady) // 3)
    ratios = {
        "resident memory, last third over first after warm-up": sum(steady[-third:]) / sum(steady[:third]),
        "p99 of small searches, loaded over quiet": _p99(loaded.waits) / _p99(quiet.waits),
    }
    return rows, ratios, ended


def _watch(
    server: ServerProcess, client: SearchClient, minutes: float, figures: _Figures, show: Show
) -> list[dict[str, Any]]:
    rows = list[dict[str, Any]]()
    begun = time.monotonic()
    parts = 20
    for part in range(1, parts + 1):
        seen: list[Any] = []
        while time.monotonic() - begun < 60 * minutes * part / parts:
            seen.append(client.server_info())
            time.sleep(min(_SAMPLE_SECONDS, 60 * minutes / parts / 4))
        rows.append(
            {
                "minute": (time.monotonic() - begun) / 60,
                "resident MiB": server.resident_bytes() / 2**20,
                "live blocks, most": max(sum(b.live for b in info.occupancy.kv_blocks.values()) for info in seen),
                "running, most": max(info.occupancy.running for info in seen),
                "small searches": len(figures.waits),
                "p99 s so far": _p99(figures.waits),
            }
        )
        show(rows, {})
    return rows


def _wait_until_idle(client: SearchClient) -> int:
    """Live blocks when the server runs nothing, or after a minute."""
    end = time.monotonic() + _IDLE_SECONDS
    while True:
        info = client.server_info()
        live = sum(blocks.live for blocks in info.occupancy.kv_blocks.values())
        idle = not (info.occupancy.running or info.admitted_calls or info.waiting_calls or live)
        if idle or time.monotonic() > end:
            return live
        time.sleep(0.2)


# ---- callers


def _ask(
    address: str, token: str, request: SearchRequest, texts: list[str], figures: _Figures, over: threading.Event
) -> None:
    random_ = random.Random()
    with SearchClient(address, token=token, retry=NO_RETRIES) as client:
        while not over.is_set():
            values = request.to_dict() | {"problem": random_.choice(texts), "seed": random_.randrange(2**31)}
            begun = time.perf_counter()
            try:
                client.solve(SearchRequest(**values))
                figures.count("OK")
                figures.waits.append(time.perf_counter() - begun)
            except ServiceError as error:
                figures.count(error.code)


def _ask_wrongly(address: str, token: str, figures: _Figures, over: threading.Event) -> None:
    wrong = [{"beam_width": 0}, {"algorithm": AlgorithmName.BEAM, "expansion": 10**6}, {"problem": "x" * 40_000}]
    with SearchClient(address, token=token, retry=NO_RETRIES) as client:
        for number in count():
            if over.wait(0.5):
                return
            try:
                client.solve(SearchRequest(**{"problem": "2 + 2?", **wrong[number % len(wrong)]}))
            except EspalierError as error:
                figures.count(getattr(error, "code", "INVALID_ARGUMENT"))


def _vanish(proxy: "_Proxy", token: str, texts: list[str], figures: _Figures, over: threading.Event) -> None:
    random_ = random.Random()
    while not over.is_set():
        with SearchClient(proxy.address, token=token, retry=NO_RETRIES) as client:
            values = _LARGE.to_dict() | {"problem": random_.choice(texts), "seed": random_.randrange(2**31)}
            reset = threading.Timer(random_.uniform(0.05, 2.0), proxy.reset_one)
            reset.start()
            try:
                for _ in client.solve_stream(SearchRequest(**values)):
                    pass
                figures.count("OK")
            except ServiceError as error:
                figures.count("vanished" if error.code == "UNAVAILABLE" else error.code)
            finally:
                reset.cancel()


@contextmanager
def _threads(work: list[_Loop]) -> Iterator[None]:
    over = threading.Event()
    threads = [threading.Thread(target=each, args=(over,), daemon=True) for each in work]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


class _Proxy:
    """Passes connections on, and resets them when told to, as a machine that lost its power would seem to."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def reset_one(self) -> None:
        """Reset the oldest connection."""
        with self._lock:
            pair = self._open.pop(0) if self._open else ()
        for end in pair:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RD)  # wakes the thread that reads from it
                end.close()

    def close(self) -> None:
        self._listener.close()
        while self._open:
            self.reset_one()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                with self._lock:
                    self._open.append((client, server))
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=_forward, args=(source, sink), daemon=True).start()


def _forward(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(2**16):
            sink.sendall(data)


@contextmanager
def _resetting_proxy(target: str) -> Iterator[_Proxy]:
    proxy = _Proxy(target)
    try:
        yield proxy
    finally:
        proxy.close()


def _p99(seconds: list[float]) -> float:
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else float("nan")


def command(
    minutes: Annotated[float, typer.Option(min=0.5, help="Length of the run.")] = 15.0,
    json_path: JsonPath = None,
) -> None:
    """A server under mixed load with clients that vanish: blocks, memory, and how long small searches take."""
    report = Report(f"{minutes:g} minutes of mixed load", json_path)
    rows, ratios, ended = run(minutes, show=report.show)
    how = ", ".join(f"{number} {name}" for name, number in sorted(ended.items()))
    report.title += f"; nothing is left; calls ended: {how}"
    report.finish(rows, ratios)
