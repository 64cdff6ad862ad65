"""What both clients send and give back, against a server without an engine."""

import subprocess
import sys
import threading
from concurrent import futures
from typing import Any

import grpc
import pytest
from scripted_orchestrator import CANDIDATE, DIGESTS, GRADER, NAMES, NODES
from server_thread import PATIENCE, wait_until

from espalier.engine.errors import EspalierError, InvalidRequestError, MisuseError
from espalier.search.client import NO_RETRIES, ConnectionSettingsError, SearchClient, ServerInfo, ServiceError
from espalier.search.request import AlgorithmName, SearchRequest, Vote
from espalier.search.result import Finished, SearchResult, Started
from espalier.search.server_info import KvBlocks, Occupancy

SOLVE, HOLD = SearchRequest("solve"), SearchRequest("hold")


def test_solve_returns_the_result_as_the_orchestrator_made_it(start, connect):
    client = connect(start().address)
    result = client.solve(SearchRequest("solve", AlgorithmName.BEST_OF_N, seed=7), PATIENCE, include_nodes=True)

    assert result.answer == "42"
    assert (result.best, result.candidates, result.nodes) == (CANDIDATE, (CANDIDATE,), NODES)
    assert result.digests == DIGESTS
    assert result.grader == GRADER
    assert result.configuration == SearchRequest("solve", AlgorithmName.BEST_OF_N, vote=Vote.WEIGHTED, seed=7)
    assert result.usage.seconds == 1.5


def test_a_text_with_fields_is_a_request_and_fields_change_a_whole_one(start, connect):
    client = connect(start().address)
    wanted = SearchRequest("solve", AlgorithmName.DVTS, beam_width=2, vote=Vote.WEIGHTED)
    for given in ("solve", SearchRequest("solve", beam_width=3)):
        assert client.solve(given, PATIENCE, algorithm="dvts", beam_width=2).configuration == wanted
    with pytest.raises(InvalidRequestError, match="beam_with: is unknown"):
        client.solve("solve", beam_with=2)


def test_what_is_no_problem_is_refused_at_once(start, connect):
    client = connect(start().address)
    for wrong in (12, None, b"2+2", ["2+2"]):
        with pytest.raises(TypeError, match="a problem is a text or a SearchRequest, not "):
            client.solve(wrong)
        with pytest.raises(TypeError, match="a problem is a text or a SearchRequest, not "):
            next(iter(client.solve_stream(wrong)))
        with pytest.raises(TypeError, match="a problem is a text or a SearchRequest, not "):
            client.solve_many(["2+2", wrong])
    for single in ("abc", b"abc", SOLVE, 12, None, {"problem": "2+2"}):
        with pytest.raises(TypeError, match="takes a list of problems, not"):
            client.solve_many(single)


def test_a_stream_begins_with_the_start_and_ends_with_the_result(start, connect):
    events = list(connect(start().address).solve_stream(SOLVE, PATIENCE))
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert events[-1].result.answer == "42"


def test_the_tree_is_left_out_unless_asked_for(start, connect):
    assert connect(start().address).solve(SOLVE, PATIENCE).nodes == ()


def test_priority_reaches_the_orchestrator_by_every_way(start, fake, connect):
    client = connect(start(max_priority=9).address)
    client.solve(SOLVE, PATIENCE, priority=7)
    list(client.solve_stream(SOLVE, PATIENCE, priority=8))
    client.solve_many(["solve"], priority=9)
    assert [options.priority for options in fake.options.values()] == [7, 8, 9]


def test_server_info_is_what_the_server_knows_of_itself(start, connect):
    server = start(max_searches=3, max_queue=5)
    info = connect(server.address).server_info()
    blocks = {"generator": KvBlocks(0, 3, 7)}
    assert info == ServerInfo(info.version, DIGESTS, 2**20, Occupancy(0, 0, blocks), 0, 0, 3, 5, NAMES)
    assert info == server.info()


def test_health_follows_the_server(start, fake, connect):
    loaded = threading.Event()

    def load() -> Any:
        loaded.wait(PATIENCE)
        return fake

    server = start(load)
    client = connect(server.address)
    assert client.health() is False
    loaded.set()
    wait_until(client.health)
    server.call(server.server.drain())
    assert client.health() is False


# ---- errors


def test_a_server_that_is_not_there_is_named_with_what_to_do(start, connect):
    server = start()
    server.call(server.server.stop())

    client = connect(server.address, retry=NO_RETRIES)
    calls = (lambda: client.solve(SOLVE, PATIENCE), lambda: next(client.solve_stream(SOLVE, PATIENCE)), client.health)
    for call in calls:
        with pytest.raises(ServiceError, match=f"no server at {server.address}; start one with: espalier serve") as no:
            call()
        assert no.value.code == "UNAVAILABLE"


def test_a_name_without_an_address_is_told_apart_from_a_connection_that_broke(connect):
    client = connect("no-such-host.invalid:50051", retry=NO_RETRIES)
    with pytest.raises(ServiceError, match=r"cannot reach the server at no-such-host\.invalid:50051") as caught:
        client.solve(SOLVE, PATIENCE)
    assert caught.value.code == "UNAVAILABLE"


def test_violations_come_back_as_the_error_the_orchestrator_raises(start, connect):
    with pytest.raises(InvalidRequestError) as caught:
        list(connect(start().address).solve_stream(SearchRequest("x", beam_width=1000, max_steps=0), PATIENCE))

    assert caught.value.violations[0].field == "beam_width"
    assert "must be between 1 and 256, is 1000" in str(caught.value)
    assert {v.field for v in caught.value.violations} >= {"beam_width", "max_steps"}


def test_a_number_too_large_for_the_wire_is_an_invalid_request(start, connect):
    with pytest.raises(InvalidRequestError, match="beam_width"):
        connect(start().address).solve(SearchRequest("x", beam_width=2**40), PATIENCE)


def test_a_timeout_is_told_apart_from_the_servers_limit(start, connect):
    with pytest.raises(ServiceError, match="within the timeout") as caught:
        connect(start().address).solve(HOLD, timeout=0.1)

    assert caught.value.code == "DEADLINE_EXCEEDED"


def test_a_server_of_another_kind_is_told_apart(connect):
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        client = connect(f"127.0.0.1:{port}")
        for call in (lambda: client.solve(SOLVE, PATIENCE), client.server_info, client.health):
            with pytest.raises(ServiceError, match="is it an Espalier server"):
                call()
    finally:
        server.stop(None).wait(PATIENCE)


@pytest.mark.parametrize("request_id", ["", "a b", "é", "x" * 129])
def test_a_request_id_that_no_log_would_carry_is_refused(request_id: str, start, connect):
    client = connect(start().address)
    for call in (client.solve, lambda *_, **named: next(client.solve_stream(SOLVE, **named))):
        with pytest.raises(ConnectionSettingsError, match="request id"):
            call(SOLVE, request_id=request_id)


def test_an_error_carries_the_request_id_of_its_call(start, connect):
    client = connect(start().address)
    with pytest.raises(ServiceError) as caught:
        client.solve("bug", PATIENCE, request_id="mine")
    assert caught.value.request_id == "mine"
    with pytest.raises(ServiceError) as caught:
        list(client.solve_stream("bug", PATIENCE))
    assert len(caught.value.request_id) == 32


def test_a_service_error_is_an_error_the_command_line_knows():
    assert issubclass(ServiceError, EspalierError)


def test_asking_for_a_search_in_process_imports_no_grpc():
    code = "import sys, espalier.search.request, espalier.search.result; print('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)

    assert done.stdout == "False\n"


def test_a_client_imports_nothing_that_runs_searches():
    code = "import sys, espalier.search.client; print(*[name for name in sys.modules if name.startswith('espalier.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    modules = done.stdout.split()
    rooms = ("engine.", "kernels", "prm", "search.run", "search.voting", "search.grading", "search.service.session")
    found = {name for name in modules if name.removeprefix("espalier.").startswith(rooms)}
    assert found <= {f"espalier.engine.{name}" for name in ("errors", "own_code", "roles", "stats")}
    # Algorithms declare fields of the request, and one may be code of the user's own.
    searches = [name for name in modules if "search.algorithms" in name or name.endswith(".own_code")]
    assert len(modules) - len(searches) <= 43


# ---- many searches


def test_results_of_many_searches_are_in_order_whichever_ends_first(start, fake, connect):
    client = connect(start().address)
    finished: list[SearchResult | EspalierError] = []

    def progress(done: int, total: int, result: SearchResult | EspalierError) -> None:
        assert (done, total) == (len(finished) + 1, 3)
        finished.append(result)
        if done == 2:
            fake.release.set()

    results = client.solve_many(["hold", "solve", SearchRequest("nothing", seed=3)], on_progress=progress)
    assert [result.configuration.problem for result in results] == ["hold", "solve", "nothing"]
    assert results[2].configuration.seed == 3
    assert finished[2] is results[0]


def test_no_more_searches_are_in_progress_than_wanted(start, fake, connect):
    server = start()
    client = connect(server.address)
    with futures.ThreadPoolExecutor(1) as pool:
        results = pool.submit(client.solve_many, ["hold"] * 7, concurrency=3)
        wait_until(lambda: server.info().occupancy.running == 3)
        assert server.info().admitted_calls == 3
        fake.release.set()
        assert len(results.result(PATIENCE)) == 7


def test_the_first_failure_of_many_ends_the_others(start, fake, connect):
    server = start()
    with pytest.raises(ServiceError, match="logits are not numbers"):
        connect(server.address).solve_many(["hold", "fail", *["hold"] * 10], concurrency=2)
    wait_until(lambda: server.info().admitted_calls == 0)
    assert fake.submitted.qsize() <= 3, "those that had not begun never do"


def test_failures_may_stand_in_the_place_of_results(start, connect):
    client = connect(start().address)
    good, failed, bad = client.solve_many(["solve", "fail", "pool"], return_errors=True)
    assert good.answer == "42"
    assert isinstance(failed, ServiceError)
    assert isinstance(bad, InvalidRequestError)


def test_a_request_that_cannot_be_sent_stops_many_before_any_has_begun(start, fake, connect):
    with pytest.raises(InvalidRequestError, match="beam_width"):
        connect(start().address).solve_many(["solve", SearchRequest("x", beam_width=2**40)], return_errors=True)
    assert fake.submitted.empty()


def test_fewer_than_one_search_at_a_time_is_refused(start, connect):
    with pytest.raises(MisuseError, match="concurrency must be at least 1, is 0"):
        connect(start().address).solve_many(["solve"], concurrency=0)


def test_no_searches_at_all_have_no_results(start, connect):
    assert connect(start().address).solve_many([]) == []


# ---- use


def test_one_client_serves_many_threads(start):
    with SearchClient(start().address) as client, futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda seed: client.solve("solve", PATIENCE, seed=seed), range(40)))
    assert [result.configuration.seed for result in results] == list(range(40))


def test_a_closed_client_says_so(start, connect):
    client = connect(start().address)
    client.close()
    calls = (lambda: client.solve(SOLVE), lambda: next(client.solve_stream(SOLVE)), client.health, client.server_info)
    for call in calls:
        with pytest.raises(MisuseError, match="closed"):
            call()
