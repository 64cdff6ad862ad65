"""`espalier serve` as a process of its own, and its clients."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from espalier.search.client import SearchClient
from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.result import CandidateDone, Finished, Started, StepDone
from espalier.search.service.settings import default_searches

PATIENCE = 60.0
PROBLEM = "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"


class Service:
    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [Path(sys.executable).with_name("espalier"), "serve", "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "ESPALIER_THREADS": "1"},
        )

    def wait_ready(self) -> "Service":
        assert self.process.stdout is not None
        self.greeting = self.process.stdout.readline()
        found = re.search(r"127\.0\.0\.1:\d+", self.greeting)
        assert found, self.greeting + self.process.communicate()[1]
        self.address = found.group()
        return self

    def end(self) -> tuple[int, str]:
        """Wait for the end; exit code and standard error."""
        _, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, errors


@pytest.fixture
def start() -> Iterator[Callable[..., Service]]:
    """Starts servers of a test's own."""
    services: list[Service] = []

    def start(*options: str) -> Service:
        services.append(Service(*options))
        return services[-1]

    yield start
    for service in services:
        service.process.kill()
        service.process.communicate()


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = Service()
    yield service.wait_ready()
    service.process.kill()
    service.process.communicate()


def test_server_says_what_it_serves_and_where(service):
    assert "demo-generator" in service.greeting
    assert "demo-verifier" in service.greeting


def test_a_server_runs_as_many_searches_as_its_device_can_take(service):
    with SearchClient(service.address) as client:
        info = client.server_info()
    assert info.model_names == {"generator": "demo-generator", "verifier": "demo-verifier"}
    assert info.max_searches == default_searches(info.models["device"] == "cuda", cores=1)  # of ESPALIER_THREADS


def test_solve_by_the_server_gives_what_solving_here_gives(service, espalier):
    arguments = ("solve", PROBLEM, "-N", 2, "-M", 2, "--seed", 3, "--json")
    there = json.loads(espalier(*arguments, "--endpoint", service.address).out)
    here = json.loads(espalier(*arguments).out)
    for result in (there, here):
        for name in ("search_id", "usage"):
            del result[name]
        result["nodes"].sort(key=lambda node: (len(node["path"]), node["text"], node["score"] or 0))
    assert there["answer"] == here["answer"]
    assert there["configuration"] == here["configuration"]
    assert there["digests"] == here["digests"]
    assert [(n["path"], n["text"]) for n in there["nodes"]] == [(n["path"], n["text"]) for n in here["nodes"]]
    assert there["score"] == pytest.approx(here["score"], abs=1e-5)


def test_solve_by_the_server_shows_the_tree(service, espalier):
    ran = espalier("solve", PROBLEM, "--endpoint", service.address)
    assert ran.code == 0
    assert "problem\n" in ran.out
    assert "──" in ran.out
    assert "KV blocks held" in ran.out


def test_bad_fields_come_back_from_the_server_as_one_line(service, espalier):
    ran = espalier("solve", PROBLEM, "-N", 0, "--max-steps", 0, "--endpoint", service.address)
    assert ran.code == 2
    (line,) = ran.err.splitlines()
    assert "-N/--beam-width: must" in line
    assert "--max-steps: must" in line


def test_two_clients_are_served_at_once(service):
    with SearchClient(service.address) as one, SearchClient(service.address) as two:
        long = one.solve_stream(SearchRequest(PROBLEM, beam_width=16, expansion=16), PATIENCE)
        assert isinstance(next(long), Started)
        short = two.solve(SearchRequest(PROBLEM, AlgorithmName.GREEDY), PATIENCE)
        assert short.configuration.algorithm is AlgorithmName.GREEDY
        events = list(long)
    assert isinstance(events[-1], Finished)
    assert any(isinstance(event, StepDone) for event in events)
    assert any(isinstance(event, CandidateDone) for event in events)


def test_company_does_not_change_an_answer(service):
    request = SearchRequest(PROBLEM, beam_width=2, expansion=2, seed=3)
    with SearchClient(service.address) as client:
        alone = client.solve(request, PATIENCE)
        others = [SearchRequest(f"What is {i}+{i}?", beam_width=4, expansion=2, seed=i) for i in range(5)]
        with ThreadPoolExecutor(6) as pool:
            futures = [pool.submit(client.solve, r, PATIENCE) for r in (request, *others)]
            together = futures[0].result()
            assert len({future.result().search_id for future in futures}) == 6
    assert together.answer == alone.answer
    assert [c.text for c in together.candidates] == [c.text for c in alone.candidates]


@pytest.mark.parametrize(("after", "log_format"), [("the first event", "text"), ("the last event", "json")])
def test_server_that_is_told_to_end_lets_a_search_end_and_exits_with_zero(start, after, log_format):
    service = start("--log-format", log_format).wait_ready()
    with SearchClient(service.address) as client:
        events = client.solve_stream(SearchRequest(PROBLEM, beam_width=16, expansion=8), PATIENCE)
        assert isinstance(next(events), Started)
        if after == "the first event":
            service.process.send_signal(signal.SIGTERM)
        assert isinstance(list(events)[-1], Finished)
    if after == "the last event":
        service.process.send_signal(signal.SIGTERM)
    code, errors = service.end()
    assert code == 0, errors
    assert "Traceback" not in errors
    if log_format == "json":
        lines = [json.loads(line) for line in errors.splitlines()]
        assert "SolveProblemStream" in [line.get("method") for line in lines]
        assert any("SIGTERM" in line.get("message", "") for line in lines)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc for how far the server is")
@pytest.mark.parametrize("library", ["libtorch_python", "safetensors"])
def test_server_that_is_told_to_end_while_it_loads_exits_with_zero(start, library):
    service = start()
    maps = Path(f"/proc/{service.process.pid}/maps")
    deadline = time.monotonic() + PATIENCE
    while library not in maps.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    service.process.send_signal(signal.SIGTERM)
    code, errors = service.end()
    assert code == 0, errors
    assert [line for line in errors.splitlines() if " espalier." not in line] == []
