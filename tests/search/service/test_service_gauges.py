"""The gauges that gateways scrape, and readiness by what the executor says of its workers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from callers_files import callers_file
from exposition import Exposition, parse_text
from scripted_orchestrator import ScriptedOrchestrator
from server_thread import PATIENCE, ServerThread, wait_for_health, wait_until

from espalier.search.client import SearchClient
from espalier.search.request import SearchRequest
from espalier.search.server_info import Occupancy


@pytest.fixture
def read() -> Iterator[Callable[..., dict[str, float]]]:
    """Reads the gauges of a server, as Prometheus would."""
    with httpx2.Client(timeout=PATIENCE, trust_env=False) as http:

        def gauges(url: str | None) -> dict[str, float]:
            response = http.get(f"{url}/gauges")
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            seen = Exposition(parse_text(response.text))
            assert {family.type for family in seen.families.values()} == {"gauge"}
            assert seen.samples() == {name: {"model_name"} for name in seen.samples()}
            return {name.removeprefix("vllm:"): seen.number(name, model_name="pair") for name in seen.samples()}

        yield gauges


def test_calls_and_memory_are_told_without_a_login(
    start: Any, fake: ScriptedOrchestrator, read: Any, tmp_path: Path
) -> None:
    held: Any = {"generator": SimpleNamespace(live_bytes=2**18), "verifier": SimpleNamespace(live_bytes=2**17)}
    settings = {"http_port": 0, "metrics_port": 0, "max_searches": 2, "model_name": "pair"}
    server: ServerThread = start(callers=callers_file(tmp_path, ann=""), **settings)
    metrics = f"http://{server.server.metrics_address}"
    assert read(server.url) == {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0}
    fake.stats = held
    with SearchClient(server.address, token="ann") as client:
        calls = [client._usable._start(lambda: client._thread.client.solve(SearchRequest("hold"))) for _ in range(5)]
        wait_until(lambda: read(metrics)["num_requests_waiting"] == 3)
        wait_until(lambda: read(server.url)["kv_cache_usage_perc"] > 0)
        wanted = {"num_requests_running": 2, "num_requests_waiting": 3, "kv_cache_usage_perc": 0.375}
        assert read(server.url) == read(metrics) == wanted
        fake.release.set()
        for call in calls:
            call.result(PATIENCE)
    assert read(server.url)["num_requests_running"] == 0


def test_a_scrape_does_not_wait_for_a_step(start: Any, fake: ScriptedOrchestrator, read: Any) -> None:
    server: ServerThread = start(http_port=0, model_name="pair")
    with SearchClient(server.address) as client:
        call = client._usable._start(lambda: client._thread.client.solve(SearchRequest("stuck")))
        wait_until(fake.started.is_set)
        for _ in range(3):
            assert read(server.url)["num_requests_running"] == 1
        fake.release.set()
        call.result(PATIENCE)


def test_a_server_without_a_worker_is_not_ready(
    start: Any, fake: ScriptedOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: ServerThread = start(http_port=0)
    with httpx2.Client(base_url=server.url or "", timeout=PATIENCE, trust_env=False) as http:
        ready = [lambda path=path: http.get(path).status_code for path in ("/readyz", "/v2/health/ready")]
        assert [ask() for ask in ready] == [200, 200]
        monkeypatch.setattr(fake, "occupancy", lambda: Occupancy(0, 0, {}, {}, pools=0))
        wait_until(lambda: [ask() for ask in ready] == [503, 503])
        wait_for_health(server.address, "NOT_SERVING")
        monkeypatch.undo()
        wait_until(lambda: [ask() for ask in ready] == [200, 200])
        wait_for_health(server.address, "SERVING")
