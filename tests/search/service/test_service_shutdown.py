"""Signals need a process of their own."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from openai import APIError, InternalServerError, OpenAI
from server_thread import PATIENCE, wait_for_health

from espalier.search.client import NO_RETRIES, SearchClient, ServiceError
from espalier.search.request import SearchRequest
from espalier.search.result import Finished, Started

HERE = Path(__file__).parent
HOLD = SearchRequest("hold")
CHAT = {"model": "espalier", "messages": [{"role": "user", "content": "hold"}]}


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
        self.address, _, self.url = self.first_line.partition(" ")

    def end(self, line: str | None = None) -> tuple[int, str]:
        """Exit code and what else was printed, after an input line where given."""
        output, errors = self.child.communicate(line, timeout=PATIENCE)
        print(errors, file=sys.stderr)
        assert "Traceback" not in errors
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
    with SearchClient(process.address, retry=NO_RETRIES) as client:
        events = client.solve_stream(HOLD, PATIENCE)
        assert isinstance(next(events), Started)
        process.child.send_signal(number)
        wait_for_health(process.address, "NOT_SERVING")
        with pytest.raises(ServiceError, match="shutting down") as caught:
            client.solve(HOLD, PATIENCE)
        assert caught.value.code == "UNAVAILABLE"

        process.child.stdin.write("release\n")
        process.child.stdin.flush()
        assert isinstance(list(events)[-1], Finished)

    assert process.end() == (0, "closed=True live=0 ended=1\n")


def test_a_signal_lets_a_stream_over_http_end_and_refuses_new_calls(spawn):
    process = spawn("30")
    with OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        stream = client.chat.completions.create(**CHAT, stream=True)
        next(iter(stream))
        process.child.send_signal(signal.SIGTERM)
        wait_for_health(process.address, "NOT_SERVING")
        with pytest.raises(InternalServerError, match="shutting down") as caught:
            client.chat.completions.create(**CHAT)
        assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "5")
        process.child.stdin.write("release\n")
        process.child.stdin.flush()
        assert list(stream)[-1].choices[0].finish_reason == "stop"

        assert process.end() == (0, "closed=True live=0 ended=1\n")


def test_a_stream_over_http_that_outlasts_the_drain_time_ends_with_an_error(spawn):
    process = spawn("0.05")
    with OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        stream = client.chat.completions.create(**CHAT, stream=True)
        next(iter(stream))
        process.child.send_signal(signal.SIGTERM)
        with pytest.raises(APIError, match="shutting down"):
            list(stream)

    code, output = process.end()
    assert (code, output) == (0, "closed=True live=0 ended=1\n")


def test_clients_that_hold_connections_do_not_hold_up_the_end(spawn):
    """One says nothing, one has sent half a head, one does not read what it asked for."""
    process = spawn("0.05")
    host, _, port = process.url.removeprefix("http://").partition(":")
    flood = json.dumps({"problem": "flood"})
    head = "POST /v1/searches HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
    sent = ("", "GET /", f"{head}{len(flood)}\r\n\r\n{flood}")
    held = [socket.create_connection((host, int(port))) for _ in sent]
    for connection, text in zip(held, sent, strict=True):
        connection.sendall(text.encode())
    assert b"event: step" in held[-1].recv(65536, socket.MSG_WAITALL)
    process.child.send_signal(signal.SIGTERM)
    code, output = process.end()
    assert (code, output) == (0, "closed=True live=0 ended=1\n")
    for connection in held:
        connection.close()


def test_searches_that_outlast_the_drain_time_are_cancelled(spawn):
    process = spawn("0.05")
    with SearchClient(process.address) as client:
        events = client.solve_stream(HOLD, PATIENCE)
        next(events)
        process.child.send_signal(signal.SIGTERM)
        with pytest.raises(ServiceError, match="shutting down") as caught:
            list(events)
        assert caught.value.code == "UNAVAILABLE"

    assert process.end() == (0, "closed=True live=0 ended=1\n")


def test_a_second_signal_exits_at_once(spawn):
    process = spawn("30")
    with SearchClient(process.address) as client:
        events = client.solve_stream(HOLD, PATIENCE)
        next(events)
        process.child.send_signal(signal.SIGTERM)
        wait_for_health(process.address, "NOT_SERVING")
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
    clients = [SearchClient(process.address, retry=NO_RETRIES) for _ in range(2)]
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
