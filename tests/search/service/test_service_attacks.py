"""What an attacker would send, over a real engine: nothing of it is a bug, ends the server or stays behind."""

import copy
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from google.protobuf.duration_pb2 import Duration
from raw_client import NO_PROXY
from server_thread import PATIENCE, ServerThread, wait_until

from espalier.prm.verifier import Verifier
from espalier.search.client import NO_RETRIES, SearchClient
from espalier.search.run.generator import Generator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.service.settings import ServerSettings
from espalier.v1 import search_pb2 as pb
from espalier.v1.search_pb2_grpc import SearchServiceStub

PROBLEM = "Tom has 38 coins."
MODEL = "talker"
CHAT = [{"role": "system", "content": "be"}, {"role": "user", "content": PROBLEM}]
OF_ASSISTANT = {"role": "assistant", "content": "a", "reasoning": "b"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/searches": {
        "problem": PROBLEM, "algorithm": "beam", "beam_width": 2, "expansion": 2, "stream": False, "max_tokens": 12,
        "history": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "step_rule": "text:x",
        "temperature": 0.8, "max_steps": 3, "max_step_tokens": 4, "vote": "majority", "thinking": "auto",
        "generator_budget": 99, "time_limit": 5, "probe_every": 1, "priority": 0, "stop_when": "", "answer_form": "",
    },
    "/v1/chat/completions": {
        "model": MODEL, "messages": [*CHAT, OF_ASSISTANT, CHAT[1]], "seed": 3, "max_tokens": 8, "stop": ["x"],
        "espalier": {"algorithm": "chain"}, "chat_template_kwargs": {"enable_thinking": False},
    },
    "/v1/completions": {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 4, "n": 2, "stop": ["q"], "logprobs": 1},
    "/v1/score": {"problem": PROBLEM, "steps": [["a", "b"]], "espalier": {"aggregation": "last", "time_limit": 4}},
    "/tokenize": {"model": MODEL, "messages": CHAT, "chat_template_kwargs": {"a": [1]}},
    f"/v2/models/{MODEL}/generate": {
        "id": "i", "text_input": PROBLEM, "parameters": {"algorithm": "chain", "max_tokens": 4, "timeout": 9_000_000},
    },
}  # fmt: skip
HOSTILE = ["\ud800", "text:\udfff", "json:\ud800", -1, 10**400, 1e308, {"\ud800": ["\ud800"]}, [[]], "\0", "x" * 70_000]
NAMES = ["self", "special_tokens", "\ud800", ""]
REFUSED = (400, 404, 413, 422)


@pytest.fixture(scope="module")
def server(load_model: Any, family_of: Any) -> Iterator[ServerThread]:
    """One for all tests, none of which leaves anything in it."""
    from espalier.engine.engine import Engine, EngineSettings

    family = family_of("classifier")
    models = {"generator": load_model("talker"), "verifier": family.model}
    engine = Engine(models, EngineSettings(kv_memory_bytes=2**22, block_size=4))
    made = Orchestrator(engine, Generator(engine, "", {"temperature": 1.0, "top_p": 1.0}), Verifier(family))
    settings = ServerSettings(port=0, http_port=0, max_searches=4, max_queue=8, model_name=MODEL)
    running = ServerThread(lambda: made, settings)
    running.wait_loaded()
    yield running
    running.close()


@pytest.fixture(autouse=True)
def _nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        wait_until(lambda: held(request.getfixturevalue("server")) == (0, 0, 0, 0))


@pytest.fixture(scope="module")
def http(server: ServerThread) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url or "", timeout=PATIENCE, trust_env=False) as client:
        yield client


@pytest.fixture
def stub(server: ServerThread) -> Iterator[Any]:
    with grpc.insecure_channel(server.address, options=NO_PROXY) as channel:
        yield SearchServiceStub(channel)


def held(server: ServerThread) -> tuple[int, int, int, int]:
    seen = server.info()
    live = sum(blocks.live for blocks in seen.occupancy.kv_blocks.values())
    return live, seen.occupancy.running, seen.admitted_calls, seen.waiting_calls


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(each, (*path, key))


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    its = inner = copy.deepcopy(body)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return its


@pytest.mark.parametrize("path", BODIES)
def test_no_value_at_any_place_of_a_body_is_an_internal_error(path: str, http: httpx2.Client) -> None:
    """A step rule of half a pair of surrogates ended the server; variables named `self` and long timeouts were bugs."""
    bodies = [changed(BODIES[path], place, value) for place in places(BODIES[path]) for value in HOSTILE]
    objects = [(), *(place for place in places(BODIES[path]) if isinstance(at(BODIES[path], place), dict))]
    bodies += [changed(BODIES[path], (*place, name), "v") for place in objects for name in NAMES]
    told = [http.post(path, content=json.dumps(each), headers={"content-type": "application/json"}) for each in bodies]
    wrong = [(answer.text[:200], each) for answer, each in zip(told, bodies, strict=True) if bug(answer.status_code)]
    assert wrong == []
    assert http.post(path, json=BODIES[path]).status_code == 200


def at(body: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        body = body[key]
    return body


def bug(status: int) -> bool:
    return status != 200 and status not in REFUSED


# ---- KServe's tensors


def element(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<I", len(text) if length is None else length) + text


GOOD = element(b"2+3?")
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1]}


@pytest.mark.parametrize(
    ("size", "tail", "change"),
    [
        *((size, GOOD, {}) for size in (-1, 7, 9, 4.0, "8", True, 2**63, [8])),
        *((len(tail), tail, {}) for tail in (element(b"2+3?", 2**32 - 1), element(b"2+3?", 5), element(b"2+3?", 3))),
        *((len(tail), tail, {}) for tail in (GOOD + GOOD, b"\1\0\0", b"", element(b""), element(b"\xff"), b"\0" * 400)),
        *((8, GOOD, {"shape": shape}) for shape in ([-1], [-1, -1], [0], [2**32, 2**32], [2**62, 4], [1] * 9)),
        *((8, GOOD, {"shape": shape}) for shape in (["1"], [[1]], [1.0], [True], 1, [10**400])),
        (8, GOOD, {"data": ["x"]}),
        (8, GOOD, {"datatype": "INT64"}),
        (8, GOOD + b"more", {}),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_a_length_that_lies_is_refused_and_named(size: Any, tail: bytes, change: Any, http: httpx2.Client) -> None:
    head = json.dumps({"inputs": [{**TENSOR, "parameters": {"binary_data_size": size}, **change}]}).encode()
    headers = {"inference-header-content-length": str(len(head))}
    answer = http.post(f"/v2/models/{MODEL}/infer", content=head + tail, headers=headers)
    assert answer.status_code == 400, answer.text
    assert "input" in answer.json()["error"]


@pytest.mark.parametrize("length", ["-1", "0", "1", "9" * 19, "9" * 30, "0x9", "1e2", "²", ""])
def test_a_length_of_the_head_that_lies_is_refused(length: str, http: httpx2.Client) -> None:
    head = json.dumps({"inputs": [{**TENSOR, "data": ["x"]}]}).encode()
    headers = [(b"inference-header-content-length", length.encode())]
    assert http.post(f"/v2/models/{MODEL}/infer", content=head, headers=headers).status_code == 400


# ---- clients that leave, or stay and say nothing


@pytest.mark.parametrize("running", [False, True])
def test_rollouts_whose_client_vanishes_hold_nothing(running: bool, server: ServerThread) -> None:
    request = pb.RolloutRequest(problem=PROBLEM, solutions=16, max_tokens=200, max_step_tokens=200)
    with grpc.insecure_channel(server.address, options=NO_PROXY) as channel:
        stub: Any = SearchServiceStub(channel)
        calls = [stub.Rollout(request) for _ in range(3)]
        if running:
            wait_until(lambda: held(server)[0] > 0 or all(call.done() for call in calls))
    wait_until(lambda: held(server) == (0, 0, 0, 0))


def test_sessions_that_say_nothing_hold_up_nobody_and_end_with_their_time(
    server: ServerThread, http: httpx2.Client, stub: Any
) -> None:
    asked = pb.ScoreSession(problem=PROBLEM, max_nodes=4, max_tokens=16, time_limit=Duration(seconds=2))
    said = threading.Event()

    def silent() -> Iterator[pb.ScoreStepsRequest]:
        yield pb.ScoreStepsRequest(open=asked)
        said.wait(PATIENCE)

    sessions = [stub.ScoreSteps(silent()) for _ in range(8)]
    wait_until(lambda: held(server)[2] == 4)
    assert http.post("/v1/searches", json=BODIES["/v1/searches"]).status_code == 200
    ended = [list(session)[-1] for session in sessions]
    said.set()
    assert all(each.HasField("result") for each in ended)


SERVE = Path(__file__).with_name("serve_scripted.py")
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.slow
@pytest.mark.parametrize("files", [1024, 8192])
def test_two_thousand_connections_that_say_nothing_shut_nobody_out_of_http(files: int) -> None:
    """Of gRPC, too, where the system allows the files; else its library lets go of them after twenty seconds."""
    mine, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 8192:
        pytest.skip("the system allows too few files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, hard))
    limit = "import resource as r, os, sys; r.setrlimit(r.RLIMIT_NOFILE, (1024, int(sys.argv[1]))); "
    limit += "os.execv(sys.executable, sys.argv[2:])"
    command = [sys.executable, "-c", limit, str(files), sys.executable, str(SERVE), "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    with (
        ExitStack() as opened,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as child,
    ):
        try:
            assert child.stdout
            address, url = child.stdout.readline().split()
            ports = int(url.rpartition(":")[2]), int(address.rpartition(":")[2])
            for number in range(4000 if files > 1024 else 2000):
                each = opened.enter_context(socket.create_connection(("127.0.0.1", ports[number // 2000]), PATIENCE))
                if number < 1000:
                    each.send(HEALTH)
            with httpx2.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
                assert client.get("/healthz").status_code == 200
            with SearchClient(address, retry=NO_RETRIES) as client:
                assert client.solve("solve", PATIENCE).answer == "42"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (mine, hard))
            child.terminate()
            _, said = child.communicate(timeout=PATIENCE)
    assert "Too many open files" not in said
