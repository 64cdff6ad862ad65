"""Searches with all their events: what the page reads."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import httpx2
import pytest
from scripted_orchestrator import CANDIDATE, DIGESTS, NODES, result_of
from server_thread import PATIENCE, wait_until

from espalier.search.request import AlgorithmName, SearchRequest, Vote
from espalier.search.result import StepDone, StopReason
from espalier.search.server_info import ServerInfo
from espalier.search.service.http_api.app import event_json
from espalier.search.service.queues import fitted

Sent = tuple[str, dict[str, Any]]


def events(raw: str) -> list[Sent]:
    """Names and data of server-sent events; comments are left out."""
    found = []
    for block in raw.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            name, data = lines
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def plain(value: Any) -> Any:
    """As JSON has it."""
    return json.loads(json.dumps(value))


def test_the_events_of_a_search_come_as_the_dataclasses_have_them(shared: httpx2.Client):
    response = shared.post("/v1/searches", json={"problem": "solve", "algorithm": "dvts", "beam_width": 2, "seed": 3})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-store"
    sent = events(response.text)
    assert [name for name, _ in sent] == ["started", "step", "step", "candidate", "result"]
    asked = SearchRequest("solve", AlgorithmName.DVTS, beam_width=2, seed=3, vote=Vote.WEIGHTED)
    search_id = sent[0][1]["search_id"]
    assert sent[0][1] == {"search_id": search_id, "configuration": plain(asked.to_dict()), "prompt_tokens": 0}
    assert sent[1][1]["kept"] == [plain(asdict(NODES[1]))]
    assert sent[3][1] == {"search_id": search_id, "candidate": plain(asdict(CANDIDATE))}
    assert set(sent[4][1]) == {"search_id", "result"}
    result = sent[4][1]["result"]
    assert result["nodes"] == plain([asdict(node) for node in NODES])
    assert result["stop_reason"] == "finished"
    wanted = result_of(asked, search_id, StopReason.FINISHED).to_dict()
    assert set(result) == set(wanted) - {"rounds"}


def test_a_search_can_be_had_as_one_result(shared: httpx2.Client):
    response = shared.post("/v1/searches", json={"problem": "solve", "stream": False})
    assert response.headers["content-type"] == "application/json"
    assert (response.json()["answer"], len(response.json()["nodes"])) == ("42", 4)


def test_a_search_may_have_a_history_and_a_priority(serve, http, fake):
    history = [{"role": "user", "content": "6*7?"}, {"role": "assistant", "content": "42."}]
    asked = {"problem": "solve", "history": history, "priority": 3, "stream": False}
    response = http(serve(max_priority=3)).post("/v1/searches", json=asked)
    whole = [{**message, "reasoning_content": "", "more": ""} for message in history]
    assert response.json()["configuration"]["history"] == whole
    assert [options.priority for options in fake.options.values()] == [3]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({}, "problem"),
        ({"problem": 3}, "problem"),
        ({"problem": "x", "nonsense": 3}, "nonsense"),
        ({"problem": "x", "beam_width": 0}, "beam_width"),
        ({"problem": "x", "algorithm": "antigravity:Search"}, "algorithm"),
        ({"problem": "x", "priority": 1}, "priority"),
        ({"problem": "x", "priority": 1.5}, "priority"),
        ({"problem": "x", "stream": "no"}, "stream"),
        ({"problem": "x", "history": [{"role": "user"}]}, "history[0].content"),
        ({"problem": "x", "history": [{"role": "king", "content": "y"}]}, "history[0].role"),
        ({"problem": "x", "history": "y"}, "history"),
        ({"problem": "pool"}, "request"),
    ],
    ids=str,
)
def test_a_bad_search_is_refused_before_its_stream_begins(asked: dict[str, Any], param: str, shared: httpx2.Client):
    response = shared.post("/v1/searches", json=asked)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_search_that_fails_ends_its_stream_with_the_error(serve, http, fake):
    with http(serve()).stream("POST", "/v1/searches", json={"problem": "fail"}) as response:
        sent = events(response.read().decode())
    assert response.status_code == 200
    assert [name for name, _ in sent] == ["started", "error"]
    assert sent[-1][1]["error"]["code"] == "internal_error"


def test_leaving_the_page_cancels_its_search(serve, http, fake):
    server = serve()
    with http(server).stream("POST", "/v1/searches", json={"problem": "hold"}) as response:
        assert next(response.iter_lines()) == "event: started"
    assert fake.cancelled.get(timeout=PATIENCE) == fake.submitted.get(timeout=PATIENCE)
    wait_until(lambda: server.info().admitted_calls == 0)


def test_a_slow_page_misses_steps_but_not_the_result(serve, http, fake):
    server = serve(event_buffer=8)
    with http(server).stream("POST", "/v1/searches", json={"problem": "flood"}) as response:
        fake.flood_until(5_000)
        fake.release.set()
        fake.ended.get(timeout=PATIENCE)
        sent = events(response.read().decode())
    depths = [data["depth"] for name, data in sent if name == "step"]
    assert sent[-1][0] == "result"
    assert len(depths) < fake.flooded / 2, "10 kB each: far more than a connection's buffers hold"
    assert depths == sorted(depths)
    assert depths[-1] == fake.flooded, "the latest progress is what is kept"


def test_a_client_that_does_not_read_holds_up_no_other_and_is_disconnected(serve, http, fake, monkeypatch):
    monkeypatch.setattr("espalier.search.service.http_api.listener._WRITE_SECONDS", 0.3)
    server = serve()
    with http(server).stream("POST", "/v1/searches", json={"problem": "flood"}):
        held = fake.submitted.get(timeout=PATIENCE)
        assert http(server).post("/v1/searches", json={"problem": "solve"}).status_code == 200
        assert fake.cancelled.get(timeout=PATIENCE) == held
    wait_until(lambda: server.info().admitted_calls == 0)


def test_what_is_larger_than_may_be_sent_is_cut_and_says_so(serve, http, fake):
    client = http(serve(max_send_bytes=2048))
    result = client.post("/v1/searches", json={"problem": "solve", "stream": False})
    assert len(result.content) <= 2048
    assert (result.json()["nodes"], result.json()["omitted_nodes"]) == ([], 4)
    with client.stream("POST", "/v1/searches", json={"problem": "flood"}) as response:
        fake.flood_until(100)
        fake.release.set()
        sent = events(response.read().decode())
    assert [data["kept"] for name, data in sent if name == "step" and data["kept"]] == [], "of 10 kB each"
    assert "omitted_nodes" in sent[-1][1]["result"]


def test_a_stream_tells_how_the_tree_changes_and_other_calls_have_no_use_for_it(serve, http, fake):
    client = http(serve())
    chat = {"model": "espalier", "messages": [{"role": "user", "content": "solve"}], "stream": True}
    client.post("/v1/searches", json={"problem": "solve"})
    client.post("/v1/searches", json={"problem": "solve", "stream": False})
    client.post("/v1/chat/completions", json=chat)
    assert [options.report_nodes for options in fake.options.values()] == [True, False, False]


@pytest.mark.parametrize("limit", [2000, 1000, 600, 300])
def test_a_report_of_changes_is_cut_to_what_may_be_sent(limit):
    nodes = tuple(replace(NODES[1], node_id=number, text="x" * 100) for number in range(1, 9))
    step = StepDone("s", 1, 8, nodes[:4], CANDIDATE, nodes=nodes, seconds=1.5, blocks={"generator": 9})
    data = fitted(step, event_json, len, limit)
    assert data is not None
    assert len(data) <= limit
    told = json.loads(data)
    assert (told["seconds"], told["blocks"]) == (1.5, {"generator": 9})
    assert len(told["nodes"]) + told.get("omitted_nodes", 0) == 8


def test_many_candidates_are_cut_from_the_last(serve, http, fake, monkeypatch):
    many = tuple(CANDIDATE for _ in range(100))
    made = result_of
    monkeypatch.setattr("scripted_orchestrator.result_of", lambda *given: replace(made(*given), candidates=many))
    response = http(serve(max_send_bytes=8192)).post("/v1/searches", json={"problem": "solve", "stream": False})
    result = response.json()
    assert len(response.content) <= 8192
    assert 0 < len(result["candidates"]) == 100 - result["omitted_candidates"]
    assert result["answer"] == "42"


def test_the_server_tells_what_it_serves_and_holds(serve, http, fake):
    server = serve(max_searches=3)
    client = http(server)
    idle = client.get("/v1/server").json()
    offered = {"searches", "default_search", "notice", "examples"}
    assert set(idle) == {*ServerInfo.__dataclass_fields__, *offered}
    assert (idle["models"], idle["max_searches"], idle["occupancy"]["running"]) == (DIGESTS, 3, 0)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(client.post, "/v1/searches", json={"problem": "hold"})
        fake.submitted.get(timeout=PATIENCE)
        assert http(server).get("/v1/server").json()["admitted_calls"] == 1
        fake.release.set()
        held.result(PATIENCE)
