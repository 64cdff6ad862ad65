"""Large requests and results at both endpoints: the event loop does not stop for them, and refusals stay short."""

import sys
import threading
from collections.abc import Callable
from typing import Any

import grpc
import httpx2
import pytest
import scripted_orchestrator
from raw_client import raw_stub
from server_thread import PATIENCE, ServerThread

from espalier.search.result import NodeRecord
from espalier.v1 import search_pb2 as pb

MANY = {f"key{number:05d}": 1 for number in range(50_000)}
ASK = {"model": "espalier", "messages": [{"role": "user", "content": "solve"}]}
NODES = tuple(NodeRecord(n, n - 1 if n else None, (0,) * (n > 0), "a step", 0.5, "", 1, 2) for n in range(1000))

Spy = Callable[[str], "set[threading.Thread]"]


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Notes the threads that run a function of a module or a class, which still does its work."""

    def watch(name: str) -> "set[threading.Thread]":
        threads: set[threading.Thread] = set()
        where, _, attribute = f"espalier.search.service.{name}".rpartition(".")
        module, _, kind = where.partition(":")
        owner = getattr(sys.modules[module], kind) if kind else sys.modules[module]
        real = getattr(owner, attribute)

        def noted(*args: Any, **kwargs: Any) -> Any:
            threads.add(threading.current_thread())
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, noted)
        return threads

    return watch


def post(server: ServerThread, path: str, body: Any) -> httpx2.Response:
    with httpx2.Client(base_url=server.url or "", timeout=PATIENCE, trust_env=False) as client:
        return client.post(path, json=body)


def solve(server: ServerThread, request: pb.SolveProblemRequest) -> pb.SearchResult:
    with raw_stub(server.address) as stub:
        return stub.SolveProblem(request, timeout=PATIENCE).result


def stream(server: ServerThread, request: pb.SolveProblemRequest) -> pb.SearchResult:
    with raw_stub(server.address) as stub:
        asked = pb.SolveProblemStreamRequest(request=request)
        *_, last = stub.SolveProblemStream(asked, timeout=PATIENCE)
        return last.result


# ---- refusals


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/searches", {"problem": "solve", **MANY}, ""),
        ("/v1/searches", {"problem": "solve", "history": [{"role": "user", "content": "", **MANY}]}, "history[0]."),
        ("/v1/chat/completions", {**ASK, **MANY}, ""),
        ("/v1/chat/completions", {**ASK, "espalier": MANY}, "espalier."),
    ],
    ids=["search", "search-message", "chat", "chat-espalier"],
)
def test_of_very_many_unknown_names_a_few_are_told(path: str, body: dict[str, Any], place: str, start):
    answer = post(start(http_port=0), path, body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(f"{place}key00000: is unknown; ")
    assert message.endswith(f"{place}key00015: is unknown; and 49984 more like it")
    assert "key00016" not in message


def test_a_wrong_value_is_told_in_short(start):
    answer = post(start(http_port=0), "/v1/searches", {"problem": [[1] * 10] * 30_000})
    message = answer.json()["error"]["message"]
    assert message.startswith("problem: must be text, is [[1, 1")
    assert len(message) < 500


def test_a_message_with_very_many_items_is_refused_by_their_number(start):
    request = pb.SolveProblemRequest(problem="solve", history=[pb.ChatMessage(role=pb.CHAT_ROLE_USER)] * 200_000)
    with pytest.raises(grpc.RpcError) as caught:
        solve(start(), request)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "history: must be at most 1024 items, is 200000"


# ---- the event loop


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("endpoint", ["grpc", "grpc-stream", "searches", "openai"])
def test_a_large_request_is_read_beside_the_event_loop(endpoint: str, large: bool, start, spy: Spy):
    server: ServerThread = start(http_port=0)
    problem = "solve" if not large else "solve " * 3000
    request = pb.SolveProblemRequest(problem=problem)
    if endpoint.startswith("grpc"):
        reading = [spy("grpc_api.servicer._message"), spy("grpc_api.convert.request_from_wire")]
        assert (solve if endpoint == "grpc" else stream)(server, request).answer == "42"
    else:
        reading = [spy("http_api.body.parse_json")]
        chat = {**ASK, "messages": [{"role": "user", "content": problem}]}
        path, body = {
            "searches": ("/v1/searches", {"problem": problem}),
            "openai": ("/v1/chat/completions", chat),
        }[endpoint]
        assert post(server, path, body).status_code == 200
    for threads in reading:
        assert threads
        assert (server.thread in threads) != large


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("endpoint", ["grpc", "grpc-stream", "searches", "searches-stream"])
def test_a_large_result_is_written_beside_the_event_loop(endpoint: str, large: bool, start, spy: Spy, monkeypatch):
    server: ServerThread = start(http_port=0)
    if large:
        monkeypatch.setattr(scripted_orchestrator, "NODES", NODES)
    if endpoint.startswith("grpc"):
        threads = spy("grpc_api.convert.to_wire")
        request = pb.SolveProblemRequest(problem="solve", include_nodes=True)
        nodes = (solve if endpoint == "grpc" else stream)(server, request).nodes
        assert len(nodes) == len(scripted_orchestrator.NODES)
    else:
        threads = spy("http_api.app._result_json")
        body = {"problem": "solve", "stream": endpoint == "searches-stream"}
        assert post(server, "/v1/searches", body).text.count('"parent_id"') >= len(scripted_orchestrator.NODES)
    assert threads
    assert (threads == {server.thread}) != large  # small events before the result are written on the event loop
