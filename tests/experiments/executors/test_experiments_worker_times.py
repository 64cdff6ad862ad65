"""What an executor on workers does as time passes."""

from typing import Any

import pytest
from fake_workers import FakeWorkers

from espalier.engine.errors import FatalError
from espalier.experiments.executors import worker_executor
from espalier.experiments.executors.worker_executor import WorkerExecutor
from espalier.search.request import AnswerEquivalence, SearchRequest, SubmitOptions
from espalier.search.result import StopReason
from espalier.search.run.settings import RuntimeSettings


def executor_on(workers: FakeWorkers) -> WorkerExecutor:
    return WorkerExecutor(workers, RuntimeSettings(max_running=4, answer_equivalence=AnswerEquivalence.EXACT_MATCH))


def submit(executor: WorkerExecutor, count: int) -> list[str]:
    return [executor.submit(SearchRequest(f"problem {number}")) for number in range(count)]


def test_without_any_worker_for_some_minutes_no_search_goes_on(monkeypatch: pytest.MonkeyPatch):
    now = 1000.0
    monkeypatch.setattr(worker_executor.time, "monotonic", lambda: now)
    workers = FakeWorkers(2)
    executor = executor_on(workers)
    submit(executor, 1)
    workers.lose(0)
    workers.lose(1)
    executor.step()
    now += 299
    workers.load(1)
    executor.step()
    workers.lose(1)
    executor.step()
    now += 299
    executor.step()
    now += 2
    with pytest.raises(FatalError, match="none has come back within 300 seconds"):
        executor.step()


def test_a_worker_that_has_searches_and_reports_nothing_is_ended(monkeypatch: pytest.MonkeyPatch):
    now = 1000.0
    monkeypatch.setattr(worker_executor.time, "monotonic", lambda: now)
    workers = FakeWorkers(2)
    executor = executor_on(workers)
    now += 500  # idle ones need not report
    submit(executor, 2)
    executor.step()
    now += 100
    workers.report(1)
    executor.step()
    now += 21
    executor.step()
    executor.step()
    assert workers.restarted == [0], "once"
    workers.lose(0)
    executor.step()
    assert [len(running) for running in workers.running] == [0, 2]


@pytest.mark.parametrize(
    ("limits", "ends"),
    [
        ({"request": {"time_limit": 5.0}}, True),
        ({"request": {"time_limit": 50.0}, "options": {"waited": 45.0}}, True),
        ({"options": {"max_seconds": 5.0}}, True),
        ({"request": {"time_limit": 5.0}, "options": {"timed_from_start": True}}, False),
        ({}, False),
    ],
    ids=str,
)
def test_time_passes_for_a_search_that_waits_for_a_worker(limits: dict[str, Any], ends: bool, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(worker_executor.time, "monotonic", lambda: now)
    workers = FakeWorkers(1)
    executor = executor_on(workers)
    workers.lose(0)
    executor.step()
    request = SearchRequest("late", **limits.get("request", {}))
    name = executor.submit(request, options=SubmitOptions(**limits.get("options", {})))
    now += 4
    assert executor.step() == []
    now += 2
    ended = executor.step()
    assert [(result.search_id, result.stop_reason) for result in ended] == [(name, StopReason.DEADLINE)] * ends
    workers.load(0)
    executor.step()
    executor.step()
    assert workers.where(name) == (None if ends else 0)
    assert executor.busy is not ends
