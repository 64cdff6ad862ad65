"""What becomes of worker processes, with small ones that load nothing and do what their orders say."""

# What the small ones report is not what real ones do:
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_tree import stop, wait_until

from espalier.engine.errors import CheckpointError, InvalidRequestError
from espalier.experiments.executors import process_transport
from espalier.experiments.executors.process_transport import Place, ProcessTransport
from espalier.experiments.executors.worker import Loaded, Lost, NoAnswerError, Report, Run, Stepped
from espalier.search.request import DEFAULT_OPTIONS, SearchRequest
from espalier.search.run.settings import RuntimeSettings

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")

PATIENCE = 120.0
STUB = """
import os, sys, time
from multiprocessing.connection import Connection
from espalier.engine.errors import CheckpointError, InvalidRequestError, Violation
from espalier.experiments.executors.process_transport import CheckReply, CheckRequest
from espalier.experiments.executors.worker import Loaded, Lost, Run, Stepped

connection = Connection(int(sys.argv[1]))
runtime = connection.recv()
if runtime.generator == "missing":
    connection.send(Lost(CheckpointError("missing: not found")))
    os._exit(1)
print("not for a reader of results", flush=True)
connection.send(Loaded(sys.argv[2], {}, 0, {"pid": os.getpid()}, None, {}))
while True:
    try:
        message = connection.recv()
    except EOFError:
        os._exit(0)
    match message:
        case CheckRequest(number, request):
            match request.problem:
                case "wrong":
                    connection.send(CheckReply(number, error=InvalidRequestError([Violation("problem", "is wrong")])))
                case "die":
                    os._exit(7)
                case "slow":
                    time.sleep(1)
                    connection.send(CheckReply(number, "too late"))
                case other:
                    connection.send(CheckReply(number, other))
        case Run() if message.request.problem == "die":
            os._exit(7)
        case Run() if message.request.problem == "give up":
            connection.send(Lost(CheckpointError("the device is lost")))
            os._exit(1)
        case Run():
            connection.send(Stepped({}, (message.search_id,)))
"""


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ProcessTransport]]:
    """Starts small workers; after the test none is left."""
    monkeypatch.setattr(process_transport, "_COMMAND", STUB)
    monkeypatch.setattr(process_transport, "places_of", lambda runtime, workers: [Place(runtime)] * workers)
    monkeypatch.setattr(process_transport, "_FIRST_PAUSE", 0.01)
    made: list[ProcessTransport] = []

    def make(workers: int = 1, runtime: RuntimeSettings = RuntimeSettings()) -> ProcessTransport:  # noqa: B008 (frozen)
        made.append(ProcessTransport(runtime, workers))
        return made[-1]

    yield make
    for transport in made:
        pids = transport.process_ids
        transport.close()
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def hear(transport: ProcessTransport, count: int) -> list[tuple[int, Report]]:
    """Wait for so many reports."""
    heard: list[tuple[int, Report]] = []
    wait_until(lambda: heard.extend(transport.poll(0.05)) or len(heard) >= count, PATIENCE)
    assert len(heard) == count
    return heard


def order(problem: str, search_id: str = "a") -> Run:
    return Run(search_id, SearchRequest(problem), DEFAULT_OPTIONS, progress=False)


def test_orders_reach_their_worker_and_its_reports_come_back_in_order(make, capfd):
    transport = make(3)
    loaded = {number: report.version for number, report in hear(transport, 3)}
    assert loaded == {0: "0", 1: "1", 2: "2"}
    for name in ("a", "b", "c"):
        transport.send(1, order("go", name))
    assert hear(transport, 3) == [(1, Stepped({}, (name,))) for name in ("a", "b", "c")]
    assert capfd.readouterr().out == "", "workers print where results are printed"


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (lambda transport: os.kill(transport.process_ids[0], signal.SIGKILL), "worker 0 was killed by SIGKILL"),
        (lambda transport: transport.send(0, order("die")), "worker 0 ended with exit code 7"),
        (lambda transport: transport.send(0, order("give up")), "the device is lost"),
    ],
    ids=["killed", "exit", "its own words"],
)
def test_a_worker_that_ends_is_reported_and_started_again_whether_or_not_anybody_listens(make, end, why):
    transport = make()
    hear(transport, 1)
    (first,) = transport.process_ids
    end(transport)
    wait_until(lambda: transport.process_ids not in ([], [first]), PATIENCE)
    (_, lost), (_, loaded) = hear(transport, 2)
    assert isinstance(lost, Lost)
    assert str(lost.error) == why
    assert isinstance(loaded, Loaded)
    assert loaded.hardware["pid"] == transport.process_ids[0]


def test_no_order_reaches_a_worker_before_its_predecessors_end_was_told(make):
    transport = make()
    hear(transport, 1)
    os.kill(transport.process_ids[0], signal.SIGKILL)
    wait_until(lambda: transport._reports.qsize() == 2, PATIENCE)  # lost, and loaded again
    transport.send(0, order("go", "of the old one"))
    assert [type(report) for _, report in hear(transport, 2)] == [Lost, Loaded]
    transport.send(0, order("go", "of the new one"))
    assert hear(transport, 1) == [(0, Stepped({}, ("of the new one",)))]


def test_a_worker_that_cannot_load_is_tried_again_after_longer_and_longer_pauses(make, monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr(process_transport, "_FIRST_PAUSE", 1.0)
    monkeypatch.setattr(process_transport, "_LONGEST_PAUSE", 5.0)

    class Impatient(threading.Event):
        def wait(self, timeout=None):
            waited.append(timeout)
            if len(waited) == 5:
                self.set()

    monkeypatch.setattr(process_transport, "Event", Impatient)
    transport = make(runtime=RuntimeSettings(generator="missing"))
    reports = hear(transport, 5)
    assert {type(report.error) for _, report in reports} == {CheckpointError}
    assert waited == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_requests_are_checked_on_any_thread_and_errors_raised_as_they_were(make):
    transport = make()
    hear(transport, 1)
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = transport.check(0, SearchRequest(f"question {number}"), PATIENCE)

    threads = [threading.Thread(target=ask, args=[number]) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert answers == {number: f"question {number}" for number in range(20)}
    with pytest.raises(InvalidRequestError, match="problem: is wrong"):
        transport.check(0, SearchRequest("wrong"), PATIENCE)


def test_a_late_answer_and_a_worker_that_dies_over_a_request_are_no_answers(make):
    transport = make()
    hear(transport, 1)
    with pytest.raises(NoAnswerError, match=r"did not answer within 0\.01 s"):
        transport.check(0, SearchRequest("slow"), 0.01)
    assert transport.check(0, SearchRequest("next"), PATIENCE) == "next"
    start = time.monotonic()
    with pytest.raises(NoAnswerError, match="has ended"):
        transport.check(0, SearchRequest("die"), PATIENCE)
    assert time.monotonic() - start < PATIENCE


def test_a_worker_that_takes_no_message_any_more_is_killed_and_replaced(make, monkeypatch, caplog):
    monkeypatch.setattr(process_transport, "_TAKE_SECONDS", 1.0)
    transport = make()
    hear(transport, 1)
    (first,) = transport.process_ids
    stop(first)
    for _ in range(100):
        transport.send(0, order("x" * 30_000))
    (_, lost), (_, loaded) = hear(transport, 2)
    assert str(lost.error) == "worker 0 was killed by SIGKILL"
    assert loaded.hardware["pid"] != first
    assert "took no message for 1 s" in caplog.text


def test_a_worker_that_hangs_is_ended_and_replaced(make):
    transport = make()
    hear(transport, 1)
    stop(transport.process_ids[0])
    transport.restart(0)
    (_, lost), (_, loaded) = hear(transport, 2)
    assert str(lost.error) == "worker 0 was killed by SIGKILL"
    assert isinstance(loaded, Loaded)


def test_a_worker_that_does_not_end_by_itself_is_killed(make, monkeypatch):
    monkeypatch.setattr(process_transport, "_END_SECONDS", 0.1)
    transport = make()
    hear(transport, 1)
    (pid,) = transport.process_ids
    stop(pid)
    transport.close()
    assert not Path(f"/proc/{pid}").exists()
