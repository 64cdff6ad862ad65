"""How many searches run at once where the operator does not say."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server_thread import PATIENCE, ServerThread, wait_until

from espalier.search.client import NO_RETRIES, SearchClient, ServiceError
from espalier.search.request import SearchRequest
from espalier.search.result import StopReason
from espalier.search.service.settings import MAX_SEARCHES, ServerSettings, SettingsError, default_searches


@pytest.mark.parametrize(
    ("on_gpu", "cores", "workers", "searches"),
    [
        *[(False, 1, 1, 32), (False, 2, 1, 32), (False, 8, 1, 128), (False, 16, 1, 256), (False, 96, 1, 256)],
        *[(False, 8, 4, 128), (True, 1, 1, 128), (True, 64, 1, 128), (True, 64, 8, 1024), (True, 8, 99, MAX_SEARCHES)],
    ],
)
def test_searches_follow_from_the_device_and_the_cores(on_gpu: bool, cores: int, workers: int, searches: int):
    assert default_searches(on_gpu, cores, workers) == searches


def test_a_server_takes_as_many_searches_as_its_orchestrator_runs_unless_told(start, fake):
    usual: ServerThread = start()
    assert usual.info().max_searches == fake.max_running
    assert start(max_searches=3).info().max_searches == 3


def test_calls_whose_time_ends_in_the_queue_are_bounded_too(start, fake):
    """They hold no slot, and a step of the engine may last: else they would pile up, and nobody could be cancelled."""
    server: ServerThread = start(max_searches=1, max_queue=4)
    with ThreadPoolExecutor(1) as pool, SearchClient(server.address, retry=NO_RETRIES) as client:
        held = pool.submit(client.solve, SearchRequest("stuck"), PATIENCE)
        fake.started.wait(PATIENCE)
        codes: Counter[str] = Counter()
        for _ in range(60):
            try:
                client.solve(SearchRequest("solve", time_limit=0.001), 0.75)
            except ServiceError as error:
                codes[error.code] += 1
        fake.release.set()
        held.result(PATIENCE)
        assert set(codes) == {"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
        assert codes["DEADLINE_EXCEEDED"] == 4, "the client's own deadlines: they wait for the step"
        wait_until(lambda: server.info().admitted_calls == 0)
        assert client.solve(SearchRequest("solve", time_limit=5.0), PATIENCE).answer == "42"


@pytest.mark.parametrize("wrong", [0, MAX_SEARCHES + 1])
def test_a_number_of_searches_out_of_range_is_refused(wrong: int):
    with pytest.raises(SettingsError, match="--max-searches must be between 1 and 4096"):
        ServerSettings(max_searches=wrong)


def test_a_server_that_is_stopped_as_soon_as_it_has_loaded_ends_in_order(start, fake, caplog):
    loading, may_end = threading.Event(), threading.Event()

    def load() -> Any:
        loading.set()
        may_end.wait(PATIENCE)
        return fake

    server: ServerThread = start(load)
    assert loading.wait(PATIENCE)
    threading.Timer(0.1, may_end.set).start()
    assert server.call(server.server.stop())
    assert not [record for record in caplog.records if record.exc_info]


def test_the_time_that_a_call_waits_to_be_checked_counts_as_waiting(start, fake, monkeypatch: pytest.MonkeyPatch):
    check = fake.check

    def slow(request: SearchRequest) -> SearchRequest:
        time.sleep(0.1)
        return check(request)

    monkeypatch.setattr(fake, "check", slow)
    server: ServerThread = start()
    with SearchClient(server.address) as client:
        late = client.solve(SearchRequest("hold", time_limit=0.05), PATIENCE)
    (options,) = fake.options.values()
    assert options.waited >= 0.1
    assert late.stop_reason is StopReason.DEADLINE
