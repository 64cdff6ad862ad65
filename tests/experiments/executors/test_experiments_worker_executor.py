"""What an executor does about its workers' reports, with workers that do what the test says."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from exposition import some_stats  # pyright: ignore[reportMissingImports] - on pytest's path
from fake_workers import DEFAULTS, IDLE, LOADED, SILENT, FakeWorkers, result_of

from espalier.engine.errors import (
    CheckpointError,
    FatalError,
    InvalidRequestError,
    PoolTooSmallError,
    RequestTooLargeError,
    Violation,
)
from espalier.experiments.executors import workers as executor_workers
from espalier.experiments.executors.worker import Loaded, Lost, Reload, Run, Tell
from espalier.experiments.executors.worker_executor import WorkerExecutor
from espalier.search.request import AnswerEquivalence, SearchRequest, SubmitOptions
from espalier.search.result import Event, Finished, SearchResult, Started, StepDone, StopReason
from espalier.search.run.executor import Rejected, request_of
from espalier.search.run.settings import RuntimeSettings
from espalier.search.scores import NodeScore, ScoreSessionRequest, SessionStep, SessionTurn, StepsScored
from espalier.search.server_info import KvBlocks
from espalier.search.service.errors import NotReadyError

RUNTIME = RuntimeSettings(max_running=4, answer_equivalence=AnswerEquivalence.EXACT_MATCH)
MOST = 5  # max_running and an eighth more, at least one


def executor_on(workers: FakeWorkers, **options: Any) -> WorkerExecutor:
    return WorkerExecutor(workers, RUNTIME, **options)


def submit(executor: WorkerExecutor, count: int, **options: Any) -> list[str]:
    return [executor.submit(SearchRequest(f"problem {number}"), **options) for number in range(count)]


def results_of(executor: WorkerExecutor, workers: FakeWorkers, **_: Any) -> dict[str, SearchResult]:
    """Let all workers finish what they have until nothing is left."""
    found: dict[str, SearchResult] = {}
    for _step in range(1000):
        workers.finish_all()
        for result in executor.step():
            assert result.search_id not in found, "a result counted twice"
            found[result.search_id] = result
        if not executor.busy:
            return found
    raise AssertionError("the searches do not end")


def test_every_search_is_run_once_and_its_result_comes_back():
    workers = FakeWorkers(3)
    executor = executor_on(workers)
    names = submit(executor, 40)
    found = results_of(executor, workers)
    assert {name: result.answer for name, result in found.items()} == {
        name: f"problem {number}/0" for number, name in enumerate(names)
    }
    assert len([order for _, order in workers.orders if isinstance(order, Run)]) == 40


def test_a_worker_has_a_few_more_searches_than_run_at_once_and_the_others_wait():
    workers = FakeWorkers(2)
    executor = executor_on(workers)
    submit(executor, 20)
    executor.step()
    assert [len(running) for running in workers.running] == [MOST, MOST]
    seen = executor.occupancy()
    assert (seen.running, seen.waiting) == (2 * MOST, 20 - 2 * MOST)
    workers.finish(1, next(iter(workers.running[1])))
    executor.step()
    executor.step()
    assert len(workers.running[1]) == MOST


def test_searches_start_by_priority_and_then_in_the_order_of_arrival_or_of_length():
    for longest_first, order in ((False, ["first", "aa", "bbb", "c"]), (True, ["first", "bbb", "aa", "c"])):
        workers = FakeWorkers(1)
        executor = executor_on(workers, longest_first=longest_first)
        for text in ("aa", "bbb", "c"):
            executor.submit(SearchRequest(text))
        executor.submit(SearchRequest("first"), options=SubmitOptions(priority=1))
        executor.step()
        assert [request_of(order.request).problem for _, order in workers.orders if isinstance(order, Run)] == order


def test_the_searches_of_a_lost_worker_begin_again_on_another_with_the_same_request(caplog):
    workers = FakeWorkers(2)
    executor = executor_on(workers)
    names = submit(executor, 6)
    executor.step()
    before = {order.search_id: order.request for _, order in workers.orders if isinstance(order, Run)}
    lost = set(workers.running[0])
    workers.finish(1, next(iter(workers.running[1])))
    workers.lose(0, "worker 0 was killed by SIGKILL")
    (done,) = executor.step()
    executor.step()
    assert set(workers.running[1]) == set(names) - {done.search_id}
    assert {name: workers.running[1][name].request for name in lost} == {name: before[name] for name in lost}
    assert f"with {len(lost)} searches: worker 0 was killed by SIGKILL" in caplog.text
    assert results_of(executor, workers).keys() == set(names) - {done.search_id}


def test_a_result_of_a_worker_that_was_taken_for_lost_counts_no_more():
    workers = FakeWorkers(2)
    executor = executor_on(workers)
    (name,) = submit(executor, 1)
    executor.step()
    first = workers.where(name)
    assert first is not None
    request = request_of(workers.running[first][name].request)
    workers.lose(first)
    executor.step()
    executor.step()
    second = workers.where(name)
    assert second is not None
    assert second == 1 - first
    workers.report(first, Finished(name, result_of(name, request, StopReason.CANCELLED)))
    assert executor.step() == []
    workers.finish(second, name)
    assert [result.stop_reason for result in executor.step()] == [StopReason.FINISHED]
    workers.report(second, Finished(name, result_of(name, request, StopReason.FINISHED)))
    assert executor.step() == []


def test_what_a_lost_search_has_waited_counts_in_its_queue_time_and_its_limit():
    workers = FakeWorkers(1)
    executor = executor_on(workers)
    (name,) = submit(executor, 1, options=SubmitOptions(waited=5.0, max_seconds=100.0))
    executor.step()
    workers.lose(0)
    executor.step()
    workers.load(0)
    executor.step()
    executor.step()
    first, second = [order.options for _, order in workers.orders if isinstance(order, Run)]
    assert 5.0 <= first.waited < second.waited
    assert second.waited + second.max_seconds == pytest.approx(105.0)
    assert name in workers.running[0]


def test_a_worker_that_comes_back_is_used_again_unless_it_has_other_models(caplog):
    workers = FakeWorkers(2)
    executor = executor_on(workers)
    for worker in (0, 1):
        workers.lose(worker)
    executor.step()
    workers.load(0, replace(LOADED, models={"generator": "other", "verifier": "cd"}))
    workers.load(1)
    executor.step()
    submit(executor, 3)
    executor.step()
    assert [len(running) for running in workers.running] == [0, 3]
    assert "worker 0 did not come back: workers 0 and 0 differ" in caplog.text
    assert "generator ab and other" in caplog.text


def test_a_worker_that_cannot_load_again_leaves_the_work_to_the_others(caplog):
    workers = FakeWorkers(2)
    executor = executor_on(workers)
    names = submit(executor, 4)
    workers.lose(0)
    executor.step()
    for _ in range(3):
        workers.lose(0, "no memory")
        executor.step()
    assert results_of(executor, workers).keys() == set(names)
    assert caplog.text.count("worker 0 did not come back: no memory") == 3


def test_a_search_that_kills_its_workers_ends_alone_and_all_others_finish():
    workers = FakeWorkers(2)
    executor = executor_on(workers)
    names = submit(executor, 12)
    poison = executor.submit(SearchRequest("poison"), options=SubmitOptions(priority=1))
    found: dict[str, SearchResult] = {}
    deaths = 0
    while executor.busy:
        found |= {result.search_id: result for result in executor.step()}
        if (worker := workers.where(poison)) is not None:
            deaths += 1
            if deaths > 3:
                assert list(workers.running[worker]) == [poison], "a suspect has company"
            workers.lose(worker, "out of memory")
            workers.load(worker)
        else:
            workers.finish_all()
    assert deaths == 4
    assert found[poison].stop_reason is StopReason.FAILED
    assert found[poison].error == (
        "4 workers died while they ran this search, the last one with no other: out of memory"
    )
    assert {found[name].stop_reason for name in names} == {StopReason.FINISHED}


def test_a_suspect_does_not_hold_up_others_whatever_its_priority():
    workers = FakeWorkers(1)
    executor = executor_on(workers)
    suspect = executor.submit(SearchRequest("poison"), options=SubmitOptions(priority=1))
    names: list[str] = []
    for death in range(3):
        executor.step()
        workers.lose(0)
        if death == 2:
            names = submit(executor, 3)
        workers.load(0)
        executor.step()
    assert set(workers.running[0]) == set(names)
    workers.finish_all()
    executor.step()
    executor.step()
    assert set(workers.running[0]) == {suspect}


def test_a_search_that_was_only_in_bad_company_finishes_alone():
    workers = FakeWorkers(1)
    executor = executor_on(workers)
    (name,) = submit(executor, 1)
    for _ in range(3):
        executor.step()
        workers.lose(0)
        workers.load(0)
        executor.step()
    assert results_of(executor, workers)[name].stop_reason is StopReason.FINISHED


def test_a_worker_that_died_while_nothing_was_to_do_is_not_given_a_search():
    workers = FakeWorkers(2)
    executor = executor_on(workers)
    workers.lose(0)
    (name,) = submit(executor, 1)
    executor.step()
    assert workers.where(name) == 1
    assert [to for to, _ in workers.orders] == [1]


def test_a_rejected_search_does_not_hide_what_came_with_it():
    workers = FakeWorkers(2)
    executor = executor_on(workers)
    names = submit(executor, 2)
    executor.step()
    workers.report(0, Rejected(names[0], OF_ALL))
    workers.lose(1)
    (result,) = executor.step()
    assert (result.stop_reason, result.error) == (StopReason.FAILED, str(OF_ALL))
    assert [worker.up for worker in executor._workers.states] == [True, False]


def test_a_cancelled_search_ends_wherever_it_is():
    workers = FakeWorkers(1)
    executor = executor_on(workers)
    names = submit(executor, MOST + 2)
    executor.step()
    running, waiting = names[0], names[-1]
    for name in (running, running, waiting, "unknown"):
        executor.cancel(name)
    assert workers.cancelled(0) == [running]
    (ended,) = executor.step()
    assert (ended.search_id, ended.stop_reason) == (waiting, StopReason.CANCELLED)
    workers.finish(0, running, StopReason.CANCELLED)
    (ended,) = executor.step()
    assert (ended.search_id, ended.stop_reason) == (running, StopReason.CANCELLED)
    assert results_of(executor, workers).keys() == set(names) - {running, waiting}


def test_a_cancelled_search_of_a_lost_worker_is_not_run_again():
    workers = FakeWorkers(2)
    executor = executor_on(workers)
    (name,) = submit(executor, 1)
    executor.step()
    executor.cancel(name)
    worker = workers.where(name)
    assert worker is not None
    workers.lose(worker)
    (ended,) = executor.step()
    assert ended.stop_reason is StopReason.CANCELLED
    assert not executor.busy


def test_dropped_searches_are_stopped_and_forgotten_and_make_room():
    workers = FakeWorkers(1)
    executor = executor_on(workers)
    names = submit(executor, MOST + 3)
    executor.step()
    executor.drop([*names[:2], names[-1], "unknown"])
    assert set(workers.cancelled(0)) == {*names[:2]}
    executor.step()
    assert set(workers.running[0]) == set(names[:-1])  # the two that were dropped have not ended there yet
    assert results_of(executor, workers).keys() == set(names[2:-1])


def test_a_finished_search_that_is_dropped_before_its_step_returns_is_not_returned():
    workers = FakeWorkers(1)
    executor = executor_on(workers)
    (name,) = submit(executor, 1)
    executor.step()
    workers.finish(0, name)
    executor.occupancy()  # hears of the end
    assert executor.busy
    executor.drop([name])
    assert not executor.busy
    assert executor.step() == []


def events_of(executor: WorkerExecutor, **options: Any) -> tuple[str, list[Event | Rejected]]:
    seen: list[Event | Rejected] = []
    return executor.submit(SearchRequest("watched"), seen.append, **options), seen


def test_events_are_passed_on_in_order_and_a_search_starts_once_even_if_it_begins_again():
    workers = FakeWorkers(2)
    executor = executor_on(workers)
    name, seen = events_of(executor)
    executor.step()
    first = workers.where(name)
    assert first is not None
    started, step = Started(name, SearchRequest("watched")), StepDone(name, 1, 4, ())
    workers.report(first, started, step)
    executor.step()
    assert seen == [started, step]
    workers.lose(first)
    executor.step()
    executor.step()
    second = workers.where(name)
    assert second is not None
    workers.report(second, started, step)
    workers.finish(second, name)
    (result,) = executor.step()
    assert seen == [started, step, step, Finished(name, result)]


@pytest.mark.parametrize("kind", [Started, Finished, Rejected])
def test_a_listener_that_raises_fails_its_search_alone(kind: type):
    workers = FakeWorkers(1)
    executor = executor_on(workers)
    seen: list[Any] = []

    def listen(event: Any) -> None:
        seen.append(event)
        if isinstance(event, kind):
            raise RuntimeError("secret")

    name, (other,) = executor.submit(SearchRequest("watched"), listen), submit(executor, 1)
    executor.step()
    if kind is Rejected:
        workers.report(0, Rejected(name, TOO_LARGE))
    else:
        workers.report(0, Started(name, SearchRequest("watched")))
        workers.finish(0, name)
    workers.finish(0, other)
    results = {result.search_id: result for result in executor.step()}
    assert results[other].stop_reason is StopReason.FINISHED
    assert (results[name].stop_reason, results[name].error) == (StopReason.FAILED, f"internal error, id={name}")
    assert isinstance(seen[-1], Finished)
    assert not executor.busy
    assert workers.cancelled(0) == ([name] if kind is Started else [])


def test_a_search_that_nobody_watches_asks_for_no_progress():
    workers = FakeWorkers(1)
    executor = executor_on(workers)
    submit(executor, 1)
    events_of(executor)
    executor.step()
    assert [order.progress for _, order in workers.orders if isinstance(order, Run)] == [False, True]


TOO_LARGE = PoolTooSmallError(2**30, 2**20)
OF_PROBLEM = InvalidRequestError([Violation("problem", "holds odd tokens")])
OF_ALL = InvalidRequestError([Violation("algorithm", "needs a verifier")])


@pytest.mark.parametrize("error", [TOO_LARGE, OF_PROBLEM, OF_ALL, RuntimeError("bug")], ids=repr)
def test_a_rejected_search_tells_its_watcher_and_ends_as_failed(error: Exception):
    workers = FakeWorkers(1)
    executor = executor_on(workers)
    name, seen = events_of(executor)
    executor.step()
    workers.report(0, Rejected(name, error))
    (result,) = executor.step()
    assert seen == [Rejected(name, error)]
    assert (result.stop_reason, result.error) == (StopReason.FAILED, str(error))
    assert not executor.busy


@pytest.mark.parametrize("error", [TOO_LARGE, OF_PROBLEM, OF_ALL], ids=repr)
def test_what_a_worker_finds_wrong_with_a_request_is_raised_where_it_is_submitted(error: Exception):
    workers = FakeWorkers(1)
    executor = executor_on(workers)
    workers.answers = {0: error}
    with pytest.raises(type(error)) as raised:
        submit(executor, 1)
    assert str(raised.value) == str(error)
    assert not executor.busy


@pytest.mark.parametrize("error", [TOO_LARGE, OF_PROBLEM, OF_ALL], ids=repr)
def test_a_search_that_was_checked_without_a_worker_and_is_rejected_then_ends_as_failed(error: Exception):
    workers = FakeWorkers(1)
    executor = executor_on(workers)
    workers.answers = {0: SILENT}
    (name,) = submit(executor, 1)
    executor.step()
    workers.report(0, Rejected(name, error))
    (result,) = executor.step()
    assert (result.stop_reason, result.error) == (StopReason.FAILED, str(error))


def test_a_request_is_checked_by_a_worker_with_little_to_do_and_by_another_if_that_is_silent():
    workers = FakeWorkers(3)
    executor = executor_on(workers)
    submit(executor, 2)
    executor.step()
    workers.asked.clear()
    executor.check(SearchRequest("fine"))
    assert workers.asked == [2]
    workers.answers = {2: SILENT, 0: TOO_LARGE, 1: TOO_LARGE}
    with pytest.raises(RequestTooLargeError, match="KV memory"):
        executor.check(SearchRequest("large"))
    assert len(workers.asked) == 3


def test_with_silent_or_lost_workers_only_invalid_fields_are_found(caplog):
    workers = FakeWorkers(4)
    executor = executor_on(workers)
    workers.answers = dict.fromkeys(range(4), SILENT)
    executor.check(SearchRequest("fine"))
    assert len(workers.asked) == 2, "a caller waits for two of them, not for all"
    assert "without a worker: no answer" in caplog.text
    for worker in range(4):
        workers.lose(worker)
    executor.step()
    executor.check(SearchRequest("fine"))
    assert len(workers.asked) == 2
    with pytest.raises(InvalidRequestError, match="beam_width"):
        executor.check(SearchRequest("fine", beam_width=0))


def test_defaults_are_those_of_the_workers_and_known_also_while_all_are_lost():
    workers = FakeWorkers(1)
    executor = executor_on(workers)
    found = executor.defaults.fill(SearchRequest("a", top_p=0.5))
    assert (found.temperature, found.top_k, found.top_p, found.max_tokens) == (0.7, 0, 0.5, DEFAULTS.max_positions)
    workers.lose(0)
    executor.step()
    assert executor.defaults.fill(SearchRequest("a", top_p=0.5)) == found
    assert workers.asked == []


def test_blocks_of_all_workers_are_summed_up_and_those_of_a_lost_one_are_gone():
    workers = FakeWorkers(2)
    executor = executor_on(workers)
    assert executor.occupancy().kv_blocks == {"generator": KvBlocks(0, 6, 14), "verifier": KvBlocks(0, 2, 18)}
    workers.report(0, kv_blocks={"generator": KvBlocks(5, 0, 5), "verifier": KvBlocks(1, 0, 9)})
    assert executor.occupancy().kv_blocks == {"generator": KvBlocks(5, 3, 12), "verifier": KvBlocks(1, 1, 18)}
    workers.lose(0)
    assert executor.occupancy().kv_blocks == IDLE
    workers.lose(1)
    assert executor.occupancy().kv_blocks == {}


def test_so_many_searches_run_at_once_as_all_workers_run():
    assert executor_on(FakeWorkers(3)).max_running == 3 * RUNTIME.max_running


def test_counters_of_all_workers_are_summed_up_and_a_lost_one_s_are_kept():
    workers = FakeWorkers(2)
    executor = executor_on(workers)
    one = some_stats()
    workers.report(0, stats={"generator": one})
    workers.report(1, stats={"generator": replace(one, preemptions=5, live_blocks=2)})
    seen = executor.occupancy().stats["generator"]
    assert (seen.preemptions, seen.live_blocks, seen.free_blocks) == (one.preemptions + 5, 2, 2 * one.free_blocks)
    assert (seen.block_bytes, seen.bytes_per_token) == (one.block_bytes, one.bytes_per_token)
    assert seen.step_seconds.count == 2 * one.step_seconds.count
    assert seen.step_seconds.sum == pytest.approx(2 * one.step_seconds.sum)
    workers.lose(1)
    after = executor.occupancy().stats["generator"]
    assert (after.preemptions, after.live_blocks, after.free_blocks) == (seen.preemptions, 0, one.free_blocks)
    workers.load(1)
    workers.report(1, stats={"generator": replace(one, preemptions=1)})
    again = executor.occupancy().stats["generator"]
    assert (again.preemptions, again.computed_tokens) == (seen.preemptions + 1, 3 * one.computed_tokens)


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        (lambda workers: workers.lose(1, "worker 1 was killed by SIGKILL"), FatalError, "killed by SIGKILL"),
        (lambda workers: workers.load(1, replace(LOADED, version="0.0.1")), FatalError, r"differ.*0\.0\.1"),
    ],
    ids=["lost", "other version"],
)
def test_an_executor_whose_workers_do_not_all_load_alike_does_not_start(
    act: Callable[[FakeWorkers], None], error: type[Exception], words: str
):
    workers = FakeWorkers(2, loads=False)
    workers.load(0)
    act(workers)
    with pytest.raises(error, match=words):
        executor_on(workers)
    assert workers.closed


def test_the_error_of_a_worker_that_cannot_load_is_raised_as_it_was_there():
    workers = FakeWorkers(1, loads=False)
    workers._reports.append((0, Lost(CheckpointError("no-such-folder: not found"))))
    with pytest.raises(CheckpointError, match="no-such-folder"):
        executor_on(workers)


def test_closing_ends_everything():
    workers = FakeWorkers(2)
    executor = executor_on(workers)
    submit(executor, 9)
    executor.step()
    executor.close()
    assert workers.closed
    assert not executor.busy
    assert executor.occupancy().running == 0


def test_a_session_of_a_lost_worker_is_told_again_what_it_was_told_and_repeats_no_score():
    workers = FakeWorkers(2)
    executor = executor_on(workers)
    events: list[Any] = []
    name = executor.submit(ScoreSessionRequest("problem"), events.append)
    turns = [SessionTurn((SessionStep(1, 0, "a"), SessionStep(2, 0, "b"))), SessionTurn((SessionStep(3, 2, "c"),))]
    executor.tell(name, turns[0])
    executor.step()
    first = workers.where(name)
    assert first is not None
    workers.report(first, StepsScored(name, (NodeScore(2, 0.5),)))
    executor.step()
    workers.lose(first)
    executor.step()
    executor.step()
    second = workers.where(name)
    assert second == 1 - first
    executor.tell(name, turns[1])
    told = [order for number, order in workers.orders if number == second and isinstance(order, Tell)]
    assert [order.turn for order in told] == turns
    workers.report(second, StepsScored(name, (NodeScore(1, 0.25), NodeScore(2, 0.5))))
    workers.report(second, StepsScored(name, (NodeScore(3, 0.75),)))
    executor.step()
    assert [each for event in events for each in event.scores] == [
        NodeScore(2, 0.5),
        NodeScore(1, 0.25),
        NodeScore(3, 0.75),
    ]
    executor.tell("unknown", turns[0])


# ---- other weights for the generator


def reloaded(folder: str = "new", generator: str = "ef") -> Loaded:
    return replace(LOADED, models={**LOADED.models, "generator": generator}, folder=folder)


def prepared(workers: FakeWorkers, *digests: Any) -> WorkerExecutor:
    """An executor whose workers answer so when they are to load weights beside those that go on."""
    executor = executor_on(workers)
    workers.digests = list(digests)
    return executor


def test_all_workers_load_other_weights_first_and_then_take_them():
    workers = FakeWorkers(2)
    executor = prepared(workers, "ef", "ef")
    assert executor.prepare_reload("new") == "ef"
    assert sorted((worker, asked.folder) for worker, asked in workers.prepared) == [(0, "new"), (1, "new")]
    assert executor.describe_models()["generator"] == "ab"
    workers.on_reload = lambda worker, order: workers.load(worker, reloaded(order.folder))
    executor.reload("new")
    assert [order for _, order in workers.orders] == [Reload("new"), Reload("new")]
    assert executor.describe_models()["generator"] == "ef"
    submit(executor, 4)
    assert len(results_of(executor, workers)) == 4


@pytest.mark.parametrize("answer", [CheckpointError("new has other shapes"), SILENT, "another digest"], ids=str)
def test_if_one_worker_cannot_have_them_all_let_go_of_them(answer: Any):
    workers = FakeWorkers(2)
    executor = prepared(workers, "ef", answer)
    with pytest.raises(NotReadyError if answer is SILENT else CheckpointError):
        executor.prepare_reload("new")
    assert [worker for worker, asked in workers.prepared if asked.folder is None] == [0, 1]
    assert not workers.orders
    assert executor.describe_models()["generator"] == "ab"


def test_searches_go_on_while_weights_are_taken_and_no_result_is_lost():
    workers = FakeWorkers(2)
    executor = prepared(workers, "ef", "ef")
    names = submit(executor, 6)
    executor.step()

    def take(worker: int, order: Reload) -> None:
        for name in list(workers.running[worker]):
            workers.finish(worker, name)
        workers.load(worker, reloaded(order.folder))

    workers.on_reload = take
    executor.reload("new")
    assert results_of(executor, workers).keys() == set(names)


def test_a_worker_that_is_lost_meanwhile_is_not_waited_for_and_gets_them_when_it_comes_back():
    workers = FakeWorkers(2)
    executor = prepared(workers, "ef", "ef")
    names = submit(executor, 6)
    executor.step()
    executor.prepare_reload("new")
    workers.on_reload = lambda worker, order: (
        workers.lose(worker) if worker else workers.load(worker, reloaded(order.folder))
    )
    executor.reload("new")
    workers.orders.clear()
    workers.load(1)  # by the weights of its start
    executor.step()
    assert (1, Reload("new")) in workers.orders
    assert not workers.running[1], "no search before it has the new ones"
    assert not executor._workers.states[1].up
    workers.load(1, reloaded())
    executor.step()
    assert executor._workers.states[1].up
    assert results_of(executor, workers).keys() == set(names)


def test_a_worker_that_comes_back_with_yet_other_weights_gets_no_search(caplog):
    workers = FakeWorkers(2)
    executor = prepared(workers, "ef", "ef")
    workers.on_reload = lambda worker, order: workers.load(worker, reloaded(order.folder))
    executor.reload("new")
    workers.lose(1)
    workers.load(1)
    executor.step()
    workers.load(1, reloaded(generator="99"))  # the folder was changed
    executor.step()
    assert not executor._workers.states[1].up
    assert "worker 1 did not come back: workers 0 and 1 differ" in caplog.text
    submit(executor, 6)
    executor.step()
    assert (len(workers.running[0]), len(workers.running[1])) == (MOST, 0)


def test_a_worker_that_does_not_take_them_in_time_is_ended(monkeypatch: pytest.MonkeyPatch):
    workers = FakeWorkers(2)
    executor = prepared(workers, "ef", "ef")
    monkeypatch.setattr(executor_workers, "_SILENT_SECONDS", 0.0)
    workers.on_reload = lambda worker, order: None if worker else workers.load(worker, reloaded(order.folder))
    monkeypatch.setattr(workers, "restart", workers.lose)
    executor.reload("new")
    assert [worker.up for worker in executor._workers.states] == [True, False]
