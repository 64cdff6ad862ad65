"""What no honest client sends: broken HTTP, endless heads and bodies, silence, too many connections; random bodies."""

import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as some
from random_examples import random_examples
from raw_http import RawConnection, post, status
from scripted_orchestrator import ScriptedOrchestrator
from server_thread import PATIENCE, ServerThread, wait_until
from starlette.responses import Response

from espalier.search.client import SearchClient
from espalier.search.request import SearchRequest
from espalier.search.service import errors
from espalier.search.service.http_api.answers import HttpError
from espalier.search.service.http_api.body import parse_json
from espalier.search.service.settings import ServerSettings

ASK = json.dumps({"model": "espalier", "messages": [{"role": "user", "content": "solve"}]}).encode()
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    """A server that all broken things are sent to; it must go on serving."""
    running = ServerThread(ScriptedOrchestrator, ServerSettings(port=0, http_port=0))
    running.wait_loaded()
    yield running
    running.close()


def is_well(server: ServerThread) -> bool:
    with RawConnection(server.url) as connection:
        connection.send(post(ASK))
        return b'"answer":"42"' in connection.until(b'"answer"')


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello
        b"\r\n\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",  # no host
        b"GET /healthz HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET /health\x00z HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: a\r\nx y: z\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: a\r\nx: \x00\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/searches HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST /v1/searches HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 40_000,  # and it goes on
        b"GET /" + b"y" * 40_000,
    ],
    ids=lambda raw: str(raw)[:40],
)
def test_what_is_not_http_is_refused_without_a_stack_in_the_log(raw: bytes, server: ServerThread, caplog):
    with caplog.at_level(logging.DEBUG), RawConnection(server.url) as connection:
        connection.send(raw)
        received = connection.rest()
    assert status(received) == (403 if raw.startswith(b"PRI") else 400), received
    assert b'{"error":{"message":"' in received
    assert [record for record in caplog.records if record.levelno >= logging.WARNING or record.exc_info] == []
    assert is_well(server)


@pytest.mark.parametrize("host", ["[", "[::1", "a b", "", "x" * 300, "localhost:port", "127.0.0.1@evil.example"])
@pytest.mark.parametrize("header", ["host", "origin"])
def test_a_host_or_origin_that_is_none_is_refused(header: str, host: str, server: ServerThread):
    headers = {"host": "localhost", header: host}
    if header == "origin" and host == "":
        headers["origin"] = "null"
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with RawConnection(server.url) as connection:
        connection.send(f"GET /v1/models HTTP/1.1\r\n{lines}connection: close\r\n\r\n".encode())
        received = connection.rest()
    assert status(received) in ((200, 403) if host == "localhost:port" and header == "host" else (400, 403)), received


def test_requests_that_are_sent_together_are_answered_in_order(server: ServerThread):
    with RawConnection(server.url) as connection:
        connection.send(post(ASK) + HEALTH + post(b"{}") + HEALTH)
        wait_until(lambda: len(connection.until(b"HTTP/1.1").split(b"HTTP/1.1 ")) > 4 or not connection._receive())
    assert [int(part[:3]) for part in connection.received.split(b"HTTP/1.1 ")[1:]] == [200, 200, 400, 200]


# ---- time


def test_a_head_that_does_not_arrive_in_time_is_not_waited_for(serve, monkeypatch):
    monkeypatch.setattr("espalier.search.service.http_api.listener._HEADER_SECONDS", 0.2)
    server = serve()
    for before in (b"", HEALTH):  # a new connection, and one that was used
        for first in (b"", b"G") if not before else (b"G",):
            with RawConnection(server.url) as connection:
                connection.send(before)
                if before:
                    connection.until(b'{"alive":true}')
                connection.send(first)
                connection.rest()
    with RawConnection(server.url) as drips:
        began = time.monotonic()
        try:
            while time.monotonic() < began + PATIENCE:
                drips.send(b"G")
                time.sleep(0.02)
        except OSError:
            pass
    assert time.monotonic() < began + PATIENCE


def test_a_connection_without_a_request_is_kept_for_a_while_and_then_closed(serve, monkeypatch):
    monkeypatch.setattr("espalier.search.service.http_api.listener._HEADER_SECONDS", 0.1)
    monkeypatch.setattr("espalier.search.service.http_api.listener._KEEPALIVE_SECONDS", 0.5)
    with RawConnection(serve().url) as connection:
        began = time.monotonic()
        connection.send(HEALTH)
        connection.rest()
    assert time.monotonic() - began > 0.3, "not as soon as a connection on which a head has begun"


def test_a_body_that_does_not_arrive_in_time_is_not_waited_for(serve, monkeypatch, fake):
    monkeypatch.setattr("espalier.search.service.http_api.body._SECONDS", 0.2)
    with RawConnection(serve().url) as connection:
        connection.send(post(ASK[:10], length=len(ASK)))
        received = connection.rest()
    assert status(received) == 408
    assert b"connection: close" in received.lower()
    assert fake.options == {}


def test_a_silent_client_whose_search_waits_for_the_body_never_gets_a_slot(serve, fake, http):
    server = serve(max_searches=1)
    with RawConnection(server.url) as connection:
        connection.send(post(ASK[:10], length=len(ASK)))
        body = {"model": "espalier", "messages": [{"role": "user", "content": "solve"}]}
        assert http(server).post("/v1/chat/completions", json=body).status_code == 200
        connection.send(ASK[10:])
        connection.until(b'"answer":"42"')


def test_answers_are_sent_at_once_and_silent_connections_are_probed(serve):
    server = serve()
    with RawConnection(server.url) as connection:
        connection.send(HEALTH)
        connection.until(b'{"alive":true}')
        (accepted,) = server.server._http._server.server_state.connections
        of_client = accepted.transport.get_extra_info("socket")
        assert of_client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert of_client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_client_that_does_not_read_does_not_hold_up_the_end_of_the_server(serve, fake):
    server = serve()
    with RawConnection(server.url) as connection:
        connection.send(post(b'{"problem": "flood"}', "/v1/searches"))
        connection.until(b"event: step")
        (accepted,) = server.server._http._server.server_state.connections
        wait_until(lambda: accepted.flow.write_paused)
        assert server.call(server.server.stop()), "in time, and in order"
    assert fake.running == 0


# ---- size and number


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/nowhere"])
def test_a_body_over_the_limit_is_refused_and_one_far_over_it_is_not_read(path: str, serve):
    server = serve(max_receive_bytes=1024)
    for size in (2000, 100_000_000):
        with RawConnection(server.url) as connection:
            connection.send(post(b"x" * 2000, path, length=size))
            assert status(connection.until(b"\r\n\r\n")) == 413
            if size > 2000:
                connection.rest()
    with RawConnection(server.url) as endless:
        endless.send(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        with pytest.raises(OSError, match=r".*"):  # noqa: PT012 (the server hangs up at some point)
            for _ in range(100_000):
                endless.send(b"400\r\n" + b"x" * 1024 + b"\r\n")


def test_a_body_that_waits_to_be_asked_for_is_refused_without_asking(serve):
    with RawConnection(serve(max_receive_bytes=1024).url) as connection:
        connection.send(post(b"", "/v1/searches", "expect: 100-continue", length=3000))
        assert status(connection.rest()) == 413


def test_a_body_that_is_asked_for_is_read(server: ServerThread):
    with RawConnection(server.url) as connection:
        connection.send(post(b"", "/v1/chat/completions", "expect: 100-continue", length=len(ASK)))
        connection.until(b"100 Continue")
        connection.send(ASK)
        connection.until(b'"answer":"42"')


def test_a_refused_call_does_not_leave_its_body_to_be_read_as_the_next_request(serve, tmp_path):
    (tmp_path / "callers.toml").write_text("")
    inner = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with RawConnection(serve(callers=tmp_path / "callers.toml").url) as connection:
        connection.send(post(inner) + HEALTH)
        connection.until(b'{"alive":true}')
    assert [int(part[:3]) for part in connection.received.split(b"HTTP/1.1 ")[1:]] == [401, 200]


def test_connections_that_wait_for_requests_make_room_for_new_ones(serve):
    server = serve(max_connections=8)
    with ExitStack() as held:
        for begun in (post(ASK[:10], length=len(ASK)), HEALTH[:10], HEALTH, b"") * 5:
            for _ in range(4):
                held.enter_context(RawConnection(server.url)).send(begun)
            assert is_well(server)
            assert len(server.server._http._server.server_state.connections) <= 4


def test_connections_over_the_limit_are_closed_and_leave_grpc_its_own(serve, fake):
    server = serve(max_connections=4)
    held = [RawConnection(server.url) for _ in range(2)]
    for connection in held:
        connection.send(post(b'{"problem": "hold"}', "/v1/searches"))
        connection.until(b"event: started")
    with RawConnection(server.url) as one_more:
        one_more.send(HEALTH)
        assert one_more.rest() == b""
    with SearchClient(server.address) as client:
        assert client.solve(SearchRequest("solve"), PATIENCE).answer == "42"
    held.pop().socket.close()

    def served() -> bool:
        with RawConnection(server.url) as connection:
            connection.send(HEALTH.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            return b'{"alive":true}' in connection.rest()

    wait_until(served)
    held.pop().socket.close()


# ---- random bodies

_LEAVES = (
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=20)
    | some.sampled_from(["solve", "espalier", "user", "assistant", "system", "text", "x" * 5000, "\ud800"])
)  # fmt: skip
JSON = some.recursive(
    _LEAVES,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
_NAMES = [
    "model", "messages", "temperature", "top_p", "seed", "max_tokens", "max_completion_tokens", "stream", "n", "stop",
    "stream_options", "logprobs", "tools", "tool_choice", "response_format", "user", "metadata", "espalier",
]  # fmt: skip
_FIELDS = [
    "algorithm", "beam_width", "expansion", "vote", "aggregation", "temperature", "top_k", "max_steps", "time_limit",
    "seed", "generator_budget", "merge_duplicates", "priority", "problem", "history", "stream",
]  # fmt: skip
_PART = some.fixed_dictionaries({"type": some.just("text") | JSON, "text": JSON})
_MESSAGE = some.fixed_dictionaries(
    {"role": some.sampled_from(["system", "developer", "user", "assistant", "tool"]) | JSON},
    optional={"content": JSON | some.lists(_PART, max_size=3), "name": JSON, "tool_calls": JSON},
)
_BODY = some.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(_NAMES, JSON),
        "model": some.sampled_from(["espalier", "espalier@beam-n2-m2", "espalier@majority-999999"]) | JSON,
        "messages": some.lists(_MESSAGE, max_size=4) | JSON,
        "espalier": some.dictionaries(some.sampled_from(_FIELDS) | some.text(max_size=5), JSON, max_size=4) | JSON,
        "stream_options": some.fixed_dictionaries({}, optional={"include_usage": JSON}) | JSON,
    },
)
MEANT = (200, 400, 404)


@given(asked=_BODY | JSON, changed=some.booleans())
@random_examples(400)
def test_a_random_body_is_answered_or_refused(asked: Any, changed: bool, shared: httpx2.Client):
    if changed and isinstance(asked, dict):  # one thing that is wrong with what is right
        name = next(iter(asked), "model")
        asked = {"model": "espalier", "messages": [{"role": "user", "content": "solve"}], name: asked.get(name)}
    raw = json.dumps(asked)
    response = shared.post("/v1/chat/completions", content=raw, headers={"content-type": "application/json"})
    assert response.status_code in MEANT, (response.status_code, response.text, raw)
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@given(asked=some.dictionaries(some.sampled_from(_FIELDS) | some.text(max_size=5), JSON, max_size=5))
@random_examples(150)
def test_a_random_search_is_answered_or_refused(asked: dict[str, Any], shared: httpx2.Client):
    raw = json.dumps({"stream": False, **asked})
    response = shared.post("/v1/searches", content=raw, headers={"content-type": "application/json"})
    assert response.status_code in MEANT, (response.status_code, response.text, raw)


@given(raw=some.binary(max_size=60) | some.text(alphabet='[]{}",:\\0123eE.-+ truefalsn', max_size=60).map(str.encode))
@random_examples(500)
def test_bytes_are_read_as_json_only_if_they_are(raw: bytes):
    try:
        value = parse_json(raw)
    except HttpError:
        return  # any other error is a failure
    assert json.loads(raw.decode()) == value


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/searches", {"problem": "solve", "history": [{}] * 100_000}),
        ("/v1/searches", {"problem": "solve", **{f"x{number}": 1 for number in range(30_000)}}),
        ("/v1/chat/completions", {"model": "espalier", "messages": [{}] * 100_000}),
        ("/v1/chat/completions", {"model": "espalier", "messages": [{"role": "user", "content": [{}] * 100_000}]}),
    ],
    ids=["history", "fields", "messages", "parts"],
)
def test_a_body_with_very_many_faults_is_refused_without_looking_at_all(path: str, body: Any, shared, monkeypatch):
    looked: list[str] = []
    in_fields = errors.in_fields
    monkeypatch.setattr(errors, "in_fields", lambda text: looked.append(text) or in_fields(text))
    response = shared.post(path, json=body)
    assert response.status_code == 400
    assert len(response.content) < 4096
    assert 0 < len(looked) < 300
    assert max(map(len, looked)) < 10_000


def test_reading_json_takes_no_longer_than_its_length_allows():
    """Each of these would take minutes if any of it were tried again and again."""
    size = 500_000
    for raw in (b'"' * size, b'"' + b"\\" * size, b'"' + b'\\"' * (size // 2), b"[" * size, b"{" * size, b"1" * size):
        with pytest.raises(HttpError):
            parse_json(raw)


# ---- clients that read slowly, or not at all


def drain_slowly(connection: RawConnection, seconds: float) -> bytes:
    """Read a little at a time, for so long."""
    end = time.monotonic() + seconds
    received = b""
    while time.monotonic() < end:
        if not (more := connection.socket.recv(4096)):
            break
        received += more
        time.sleep(0.01)
    return received


def test_a_client_that_reads_nothing_is_disconnected(serve, monkeypatch):
    monkeypatch.setattr("espalier.search.service.http_api.listener._WRITE_SECONDS", 0.3)
    server = serve()
    with RawConnection(server.url, receive_buffer=2048) as connection:
        page = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
        connection.socket.settimeout(1)
        connection.send(page)
        wait_until(lambda: bool(server.server._http._server.server_state.connections))
        (served,) = server.server._http._server.server_state.connections
        assert served.transport.get_write_buffer_limits() == (0, 1), "also one that leaves only a little unread"
        with suppress(OSError):  # the server is full, or has hung up
            for _ in range(5000):
                connection.send(page)
        wait_until(lambda: not server.server._http._server.server_state.connections)


def test_a_client_that_reads_slowly_gets_all_of_it(serve, monkeypatch):
    monkeypatch.setattr("espalier.search.service.http_api.listener._WRITE_SECONDS", 1.0)
    whole = b"x" * 12_000_000
    monkeypatch.setattr("espalier.search.service.http_api.app.json_response", lambda *_: Response(whole))
    with RawConnection(serve().url, receive_buffer=2048) as connection:
        connection.send(HEALTH)
        received = drain_slowly(connection, 2.5)
        assert 0 < len(received) < len(whole), "slower than the limit"
        while len(received) < len(whole):
            more = connection.socket.recv(2**20)
            assert more, "the server has hung up"
            received += more
    assert received.endswith(whole[:1000])


def test_a_result_waits_for_a_client_that_reads_later_than_the_search_may_last(serve, monkeypatch):
    monkeypatch.setattr("espalier.search.service.session._GRACE", 0.2)
    with RawConnection(serve(search_seconds=0.3, event_buffer=8).url, receive_buffer=2048) as connection:
        connection.send(post(b'{"problem":"flood"}', "/v1/searches"))
        time.sleep(1.2)
        assert b"event: error" not in connection.until(b"event: result")
