"""The inside of a worker, over tiny checkpoints: orders in, reports out."""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
from search_runs import BEAM, GREEDY, MAJORITY  # pyright: ignore[reportMissingImports] - on pytest's path

from espalier.engine.errors import (
    CheckpointError,
    DeviceError,
    EspalierError,
    InvalidRequestError,
    RequestTooLargeError,
)
from espalier.experiments.executors import worker as worker_module
from espalier.experiments.executors.ray_transport import RayWorker
from espalier.experiments.executors.worker import (
    Cancel,
    Loaded,
    Lost,
    NoAnswerError,
    Order,
    PrepareReload,
    Reload,
    Report,
    Run,
    Stepped,
    Tell,
    Worker,
)
from espalier.search.request import DEFAULT_OPTIONS, SearchRequest
from espalier.search.result import Finished, SearchResult, Started, StopReason
from espalier.search.run.executor import Rejected
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.settings import RuntimeSettings
from espalier.search.scores import ScoreSessionRequest, SessionStep, SessionTurn, StepsScored

PATIENCE = 60.0
LONG = replace(MAJORITY, beam_width=64, max_steps=20, max_tokens=200, temperature=2.0)


class Running:
    """A worker on a thread, and the reports that it sends."""

    def __init__(self) -> None:
        self.reports: queue.Queue[Report] = queue.Queue()
        self.worker = Worker(RuntimeSettings(), self.reports.put)
        self.stopped: list[bool] = []
        self.thread = threading.Thread(target=lambda: self.stopped.append(self.worker.run()))

    def start(self) -> "Running":
        self.thread.start()
        return self

    def next(self) -> Report:
        return self.reports.get(timeout=PATIENCE)

    def run(self, name: str, request: SearchRequest, progress: bool = False) -> None:
        self.worker.tell(Run(name, request, DEFAULT_OPTIONS, progress))

    def result(self, name: str) -> SearchResult:
        """Wait for the end of a search."""
        while True:
            report = self.next()
            assert isinstance(report, Stepped)
            for event in report.events:
                assert not isinstance(event, Rejected), event.error
                if isinstance(event, Finished) and event.search_id == name:
                    return event.result

    def join(self) -> bool:
        self.thread.join(PATIENCE)
        return self.stopped[0]


@pytest.fixture
def orchestrator(make_orchestrator: Callable[..., Orchestrator], monkeypatch: pytest.MonkeyPatch) -> Orchestrator:
    """What the worker loads."""
    made = make_orchestrator(kv_memory_bytes=2**25)
    monkeypatch.setattr("espalier.search.run.load.load_orchestrator", lambda _: made)
    return made


@pytest.fixture
def running(orchestrator: Orchestrator) -> Iterator[Running]:
    """A worker that has loaded."""
    running = Running().start()
    loaded = running.next()
    assert isinstance(loaded, Loaded)
    assert loaded.defaults.fill(SearchRequest("a")) == orchestrator.defaults.fill(SearchRequest("a"))
    yield running
    running.worker.stop()
    assert running.join()
    assert not orchestrator.busy


def test_a_worker_finds_what_its_orchestrator_finds_by_itself(running, make_orchestrator):
    alone = make_orchestrator()
    alone.submit(BEAM)
    expected: list[SearchResult] = []
    while not expected:
        expected = alone.step()
    running.run("a", BEAM)
    found = running.result("a")
    assert found.search_id == "a"
    assert found.candidates == expected[0].candidates
    assert found.nodes == expected[0].nodes
    assert found.rounds == ()


def test_all_events_of_a_watched_search_carry_the_executors_id(running):
    running.run("watched", BEAM, progress=True)
    seen = []
    while not (seen and isinstance(seen[-1], Finished)):
        seen += running.next().events
    assert isinstance(seen[0], Started)
    assert len(seen) > 2
    assert {event.search_id for event in seen} == {"watched"}
    assert seen[-1].result.search_id == "watched"


def test_the_report_of_the_last_result_says_that_no_block_is_live(running):
    for name in ("a", "b", "c"):
        running.run(name, BEAM)
    ended, live = 0, []
    while ended < 3:
        report = running.next()
        ended += len(report.events)
        live.append(sum(blocks.live for blocks in report.held.kv_blocks.values()))
    assert live[-1] == 0


def test_a_busy_worker_tells_what_it_holds_before_any_search_ends(running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_module, "_REPORT_SECONDS", 0.0)
    running.run("long", LONG)
    report = running.next()
    assert not report.events
    assert report.held.kv_blocks["generator"].live
    running.worker.tell(Cancel("long"))
    assert running.result("long").stop_reason is StopReason.CANCELLED


def test_an_order_that_is_given_twice_runs_once(running):
    running.run("a", BEAM)
    running.run("a", BEAM)
    running.run("b", GREEDY)
    ended = []
    while "b" not in ended or "a" not in ended:
        ended += [event.search_id for event in running.next().events]
    assert sorted(ended) == ["a", "b"]


def test_a_worker_that_is_told_to_forget_drops_all_and_serves_on(running, orchestrator):
    running.run("long", LONG, progress=True)
    assert running.next().held.kv_blocks["generator"].live
    running.worker.forget()
    while (report := running.next()).held.kv_blocks["generator"].live:
        pass
    assert not report.events
    running.run("next", GREEDY)
    assert running.result("next").stop_reason is StopReason.FINISHED
    assert not orchestrator.busy


def test_what_cannot_be_searched_is_rejected_and_the_others_go_on(running):
    running.run("bad", replace(GREEDY, problem="x " * 5000))
    running.run("good", GREEDY)
    events = []
    while len(events) < 2:
        events += running.next().events
    assert isinstance(events[0], Rejected)
    assert events[0].search_id == "bad"
    assert isinstance(events[0].error, RequestTooLargeError)
    assert isinstance(events[1], Finished)


def test_an_error_that_is_a_bug_is_logged_and_not_told(running, orchestrator, monkeypatch, caplog):
    def bug(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(orchestrator, "submit", bug)
    running.run("a", GREEDY)
    (event,) = running.next().events
    assert type(event.error) is EspalierError
    assert "secret" not in str(event.error)
    assert "secret" in caplog.text


def test_requests_are_checked_while_searches_run(running):
    running.run("long", LONG)
    assert running.worker.check(GREEDY).generator_prompt
    with pytest.raises(InvalidRequestError, match="beam_width"):
        running.worker.check(replace(GREEDY, beam_width=0))
    running.worker.forget()


def test_a_worker_whose_engine_fails_reports_why_and_ends(orchestrator, monkeypatch: pytest.MonkeyPatch):
    running = Running().start()
    running.next()
    error = DeviceError("generator", "cuda:0", RuntimeError("device lost"))
    monkeypatch.setattr(orchestrator.engine, "step", lambda: (_ for _ in ()).throw(error))
    running.run("a", GREEDY)
    reports = [running.next()]
    while not isinstance(reports[-1], Lost):
        reports.append(running.next())
    assert reports[-1].error is error
    assert not running.join()
    monkeypatch.undo()
    orchestrator.close()


def test_a_worker_that_cannot_load_reports_why_and_answers_nothing(monkeypatch: pytest.MonkeyPatch):
    def fail(_: RuntimeSettings) -> None:
        raise CheckpointError("no-such-folder: not found")

    monkeypatch.setattr("espalier.search.run.load.load_orchestrator", fail)
    running = Running().start()
    report = running.next()
    assert isinstance(report, Lost)
    assert str(report.error) == "no-such-folder: not found"
    assert not running.join()
    with pytest.raises(NoAnswerError, match="not loaded"):
        running.worker.check(GREEDY)


def test_the_turns_of_a_session_are_taken_one_after_another(running: Running):
    for order in session_orders("a"):
        running.worker.tell(order)
    scored: list[int] = []
    while True:
        report = running.next()
        assert isinstance(report, Stepped)
        for event in report.events:
            assert not isinstance(event, Rejected), event.error
            if isinstance(event, StepsScored):
                assert all(each.score is not None for each in event.scores)
                scored += [each.node for each in event.scores]
            elif isinstance(event, Finished):
                assert event.result.stop_reason is StopReason.FINISHED
                assert scored == [1, 2]
                return


def session_orders(name: str) -> list[Order]:
    """A session in which the second turn needs the first one."""
    options = replace(DEFAULT_OPTIONS, report_nodes=True)
    request = ScoreSessionRequest("Tom starts with 38 coins.", max_nodes=8, max_tokens=256)
    first = SessionTurn((SessionStep(1, 0, "38+47=85"),))
    second = SessionTurn((SessionStep(2, 1, "85-12=73"),), release=(1,))
    told = [Tell(name, turn) for turn in (first, second, SessionTurn(last=True))]
    return [Run(name, request, options, progress=True), *told]


def test_a_ray_worker_carries_orders_out_by_their_numbers_however_they_arrive(orchestrator: Orchestrator):
    """Ray does not promise an asynchronous actor the order of its calls."""
    worker = RayWorker(RuntimeSettings())
    orders = [*session_orders("a"), Run("long", LONG, DEFAULT_OPTIONS, progress=False), Cancel("long")]

    async def serve(first: int, arriving: Iterable[int]) -> dict[str, StopReason]:
        """Take the orders in the order of `arriving`; returns how their work has ended."""
        reports = worker.reports(first)
        assert isinstance(await anext(reports), Loaded)
        for place in arriving:
            await worker.tell(first + place, orders[place])
        ended: dict[str, StopReason] = {}
        while len(ended) < 2:
            report = await anext(reports)
            assert isinstance(report, Stepped)
            for event in report.events:
                assert not isinstance(event, Rejected), event.error
                if isinstance(event, Finished):
                    ended[event.search_id] = event.result.stop_reason
        return ended

    async def serve_two() -> None:
        await worker.load()
        for first, arriving in ((0, range(len(orders))), (9, reversed(range(len(orders)))), (17, (3, 0, 5, 2, 1, 4))):
            async with asyncio.timeout(PATIENCE):
                assert await serve(first, arriving) == {"a": StopReason.FINISHED, "long": StopReason.CANCELLED}
            await worker.tell(first + len(orders) + 1, Cancel("a"))  # the one before it is lost with its executor

    asyncio.run(serve_two())
    assert not orchestrator.busy
    worker._worker.stop()


def test_a_worker_loads_other_weights_beside_and_tells_once_it_goes_on_with_them(
    running, orchestrator, load_model: Callable, monkeypatch: pytest.MonkeyPatch
):
    other = replace(load_model("qwen2-untied"), digest="other", tokenizer=load_model("talker").tokenizer)
    monkeypatch.setattr(orchestrator, "_load_weights", {"new": other}.__getitem__)
    running.run("long", LONG)
    assert running.worker.check(PrepareReload("new")) == "other"
    running.worker.tell(Reload("new"))
    while not isinstance(report := running.next(), Loaded):
        pass
    assert (report.folder, report.models["generator"]) == ("new", "other")
    result = running.result("long")
    assert result.stop_reason is StopReason.FINISHED
    assert result.digests["generator"] == "other"
    assert running.worker.check(PrepareReload("new")) == "other"
    assert running.worker.check(PrepareReload(None)) == ""
    assert orchestrator._loaded_beside is None
    with pytest.raises(EspalierError):
        running.worker.check(PrepareReload("missing"))
