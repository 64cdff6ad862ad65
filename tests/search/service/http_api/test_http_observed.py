"""What is counted, traced and shown of HTTP calls."""

import pytest
from callers_files import callers_file
from exposition import OPENMETRICS, read
from server_thread import wait_until

from espalier.search.service.access.calls import Call

CHAT = "/v1/chat/completions"
ASK = {"model": "espalier", "messages": [{"role": "user", "content": "solve"}]}


class Heard:
    """An observer that keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def call_ended(self, call: Call) -> None:
        self.calls.append(call)

    def search_ended(self, call: Call, search: object) -> None:
        pass


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_metrics_are_shown_to_who_has_a_login(serve, http, tmp_path, accept):
    client = http(serve(callers=callers_file(tmp_path, ann="")))
    client.post(CHAT, json=ASK, headers={"authorization": "Bearer ann"})
    assert client.get("/metrics").status_code == 401
    shown = client.get("/metrics", headers={"authorization": "Bearer ann", "accept": accept})
    seen = read(shown.content, shown.headers["content-type"])
    assert seen.value("espalier_calls_total", method=f"POST {CHAT}", code="OK") == 1
    assert seen.value("espalier_caller_calls_total", caller="ann", code="OK") == 1
    assert seen.value("espalier_call_failures_total", reason="unauthenticated") == 1


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (CHAT, {**ASK, "temperature": "hot"}, "invalid_request"),
        (CHAT, {**ASK, "messages": [{"role": "user", "content": "fail"}]}, "search_failed"),
        (CHAT, {**ASK, "messages": [{"role": "user", "content": "fail"}], "stream": True}, "search_failed"),
        (CHAT, {**ASK, "messages": [{"role": "user", "content": "bug"}]}, "internal"),
        ("/v1/nothing", {}, "http"),
    ],
)
def test_failures_are_counted_with_their_reason(serve, http, path, body, reason):
    client = http(serve())
    client.post(path, json=body)
    shown = client.get("/metrics")
    failures = read(shown.content, shown.headers["content-type"]).series("espalier_call_failures_total", "reason")
    assert {name for name, count in failures.items() if count} == {reason}


def test_a_call_knows_its_place_in_the_callers_trace(start, http):
    heard = Heard()
    server = start(observers=[heard], http_port=0)
    parent = f"00-{5:032x}-{7:016x}-01"
    http(server).post(CHAT, json=ASK, headers={"traceparent": parent, "x-request-id": "call-7"})
    wait_until(lambda: bool(heard.calls))
    assert [(call.traceparent, call.request_id) for call in heard.calls] == [(parent, "call-7")]
