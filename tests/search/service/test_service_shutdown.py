"""Signals need a process of their own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from server_thread import PATIENCE, wait_for_health

from espalier.search.client import NO_RETRIES, SearchClient, ServiceError
from espalier.search.request import SearchRequest
from espalier.search.result import Finished, Started

HERE = Path(__file__).parent
HOLD = SearchRequest("hold")


class Process:
    def __init__(self, argument: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, HERE / "serve_scripted.py", argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self.child.stdout is not None
        self.first_line = self.child.stdout.readline().strip()

    def end(self, line: str | None = None) -> tuple[int, str]:
        """Exit code and what else was printed, after an input line where given."""
        output, errors = self.child.communicate(line, timeout=PATIENCE)
        print(errors, file=sys.stderr)
        return self.child.returncode, output


@pytest.fixture
def spawn():
    processes = []

    def start(argument: str) -> Process:
        processes.append(Process(argument))
        return processes[-1]

    yield start
    for process in processes:
        process.child.kill()
        process.child.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_searches_end_and_refuses_new_ones(spawn, number):
    process = spawn("30")
    with SearchClient(process.first_line, retry=NO_RETRIES) as client:
        events = client.solve_stream(HOLD, PATIENCE)
        assert isinstance(next(events), Started)
        process.child.send_signal(number)
        wait_for_health(process.first_line, "NOT_SERVING")
        with pytest.raises(ServiceError, match="shutting down") as caught:
            client.solve(HOLD, PATIENCE)
        assert caught.value.code == "UNAVAILABLE"

        process.child.stdin.write("release\n")
        process.child.stdin.flush()
        assert isinstance(list(events)[-1], Finished)

    assert process.end() == (0, "closed=True live=0 ended=1\n")


def test_searches_that_outlast_the_drain_time_are_cancelled(spawn):
    process = spawn("0.05")
    with SearchClient(process.first_line) as client:
        events = client.solve_stream(HOLD, PATIENCE)
        next(events)
        process.child.send_signal(signal.SIGTERM)
        with pytest.raises(ServiceError, match="shutting down") as caught:
            list(events)
        assert caught.value.code == "UNAVAILABLE"

    assert process.end() == (0, "closed=True live=0 ended=1\n")


def test_a_second_signal_exits_at_once(spawn):
    process = spawn("30")
    with SearchClient(process.first_line) as client:
        events = client.solve_stream(HOLD, PATIENCE)
        next(events)
        process.child.send_signal(signal.SIGTERM)
        wait_for_health(process.first_line, "NOT_SERVING")
        process.child.send_signal(signal.SIGTERM)

        assert process.end() == (128 + signal.SIGTERM, "")
        with pytest.raises(ServiceError, match="lost the connection"):
            list(events)


def test_a_signal_while_loading_ends_the_process(spawn):
    process = spawn("loading")
    assert process.first_line == "loading"
    process.child.send_signal(signal.SIGTERM)

    assert process.end() == (0, "closed=False live=0 ended=0\n")


def test_a_client_that_is_killed_cancels_its_search(start, fake):
    script = (
        "import sys\n"
        "from espalier.search.client import SearchClient\n"
        "from espalier.search.request import SearchRequest\n"
        "for event in SearchClient(sys.argv[1]).solve_stream(SearchRequest('hold')):\n"
        "    print('running', flush=True)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, start().address],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "running\n"
    child.kill()
    child.communicate(timeout=PATIENCE)

    assert fake.cancelled.get(timeout=PATIENCE) == fake.submitted.get(timeout=PATIENCE)


@pytest.mark.parametrize("problem", ["lost", "die"])
def test_a_server_whose_engine_dies_tells_its_clients_and_exits_with_one(spawn, problem):
    """It could serve nobody; whoever watches over it starts it again. A fault of the device takes one line to say."""
    process = spawn("30")
    clients = [SearchClient(process.first_line, retry=NO_RETRIES) for _ in range(2)]
    with clients[0] as client, clients[1] as other:
        held = other.solve_stream(HOLD, PATIENCE)
        assert isinstance(next(held), Started)
        for call in (lambda: client.solve(SearchRequest(problem), PATIENCE), lambda: list(held)):
            with pytest.raises(ServiceError, match="the engine has stopped") as caught:
                call()
            assert caught.value.code == "UNAVAILABLE"
        output, errors = process.child.communicate(timeout=PATIENCE)
    assert process.child.returncode == 1
    assert output == "closed=True live=0 ended=2\n"
    if problem == "lost":
        assert errors == "the engine died: the generator could not be run on cuda:0: CUDA error: device lost\n"
    else:
        assert errors.count("Traceback") == 1
