import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import pairwise
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from scripted_orchestrator import SECRET, WHY
from server_thread import PATIENCE, ServerThread, wait_for_health

from espalier.engine.errors import CheckpointError, InvalidRequestError
from espalier.search.client import NO_RETRIES, SearchClient, ServiceError
from espalier.search.request import SearchRequest
from espalier.search.result import CandidateDone, Finished, Started, StepDone
from espalier.search.service.server import BindError, serve
from espalier.search.service.settings import ServerSettings
from espalier.v1 import search_pb2 as pb
from espalier.v1.search_pb2_grpc import SearchServiceStub

SOLVE, HOLD = SearchRequest("solve"), SearchRequest("hold")


@pytest.fixture
def pool():
    with ThreadPoolExecutor(32) as executor:
        yield executor


def hold(server, pool):
    """A client, and the search it has running until released."""
    client = SearchClient(server.address, retry=NO_RETRIES)
    return client, pool.submit(client.solve, HOLD, PATIENCE)


def test_a_stream_starts_with_started_and_ends_with_the_result(start):
    with SearchClient(start().address) as client:
        events = list(client.solve_stream(SOLVE, timeout=PATIENCE, include_nodes=True))

    assert [type(event) for event in events] == [Started, StepDone, StepDone, CandidateDone, Finished]
    assert isinstance(events[-1], Finished)
    assert events[-1].result.answer == "42"
    assert len(events[-1].result.nodes) == 4


@pytest.mark.parametrize(("include_nodes", "reported"), [(True, True), (False, False)])
def test_a_stream_asks_for_changes_of_the_tree_where_its_caller_asks_for_nodes(start, fake, include_nodes, reported):
    with SearchClient(start().address) as client:
        list(client.solve_stream(SOLVE, timeout=PATIENCE, include_nodes=include_nodes))
        client.solve(SOLVE, PATIENCE, include_nodes=include_nodes)  # it has no use for them

    assert [options.report_nodes for options in fake.options.values()] == [reported, False]


def test_an_idle_engine_sleeps(start, fake):
    server = start()
    with SearchClient(server.address) as client:
        client.solve(SOLVE, PATIENCE)
    wait_for_health(server.address, "SERVING")
    looks = fake.looks
    for _ in range(5):
        wait_for_health(server.address, "SERVING")

    assert fake.looks <= looks + 2, "once more after its last search is fine; polling looks thousands of times"


def test_an_explicit_zero_is_not_taken_for_a_field_left_out(start):
    assert refused_fields(start(), pb.SolveProblemRequest(problem="x", beam_width=0, seed=0)) == {"beam_width"}


def test_a_bad_message_lists_unknown_enum_values_and_broken_limits_together(start):
    message = pb.SolveProblemRequest(
        problem="  ",
        beam_width=-1,
        expansion=10_000,
        temperature=float("nan"),
        top_k=-1,
        top_p=2,
        min_p=-0.5,
        max_steps=0,
        seed=-1,
        priority=101,
    )
    message.algorithm = 99  # pyright: ignore[reportAttributeAccessIssue]
    message.vote = 98  # pyright: ignore[reportAttributeAccessIssue]
    fields = "problem beam_width expansion temperature top_k top_p min_p max_steps seed priority algorithm vote"
    assert refused_fields(start(), message) >= set(fields.split())


def refused_fields(server: ServerThread, message: pb.SolveProblemRequest) -> set[str]:
    """The fields that the server finds wrong with a message."""
    with grpc.insecure_channel(server.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub: Any = SearchServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.SolveProblem(message, timeout=PATIENCE)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    found = set()
    for packed in rpc_status.from_call(error).details:
        details = error_details_pb2.BadRequest()
        packed.Unpack(details)
        found |= {violation.field for violation in details.field_violations}
    return found


def test_bad_fields_are_all_listed_before_the_search_waits_for_a_slot(start, fake, pool):
    server = start(max_searches=1, max_queue=0)
    client, _ = hold(server, pool)
    fake.submitted.get(timeout=PATIENCE)

    with client, pytest.raises(InvalidRequestError) as caught:
        client.solve(SearchRequest("", beam_width=0, top_p=float("nan"), seed=-1), PATIENCE)

    assert {v.field for v in caught.value.violations} == {"problem", "beam_width", "top_p", "seed"}


def test_a_search_that_can_never_fit_is_the_callers_error(start):
    with SearchClient(start().address) as client, pytest.raises(InvalidRequestError, match=r"1024\.0 MiB"):
        client.solve(SearchRequest("pool"), PATIENCE)


def test_nothing_is_served_until_the_orchestrator_is_loaded(start, fake):
    go = threading.Event()

    def load():
        assert go.wait(PATIENCE)
        return fake

    server = start(load)
    with SearchClient(server.address, retry=NO_RETRIES) as client:
        wait_for_health(server.address, "NOT_SERVING")
        with pytest.raises(ServiceError, match="still loading") as caught:
            client.solve(SOLVE, PATIENCE)
        assert (caught.value.code, caught.value.retry_seconds) == ("UNAVAILABLE", 5.0)

        go.set()
        wait_for_health(server.address, "SERVING")
        assert client.solve(SOLVE, PATIENCE).answer == "42"


def test_a_full_queue_refuses_and_says_when_to_retry(start, fake, pool):
    server = start(max_searches=1, max_queue=1)
    client, held = hold(server, pool)
    with client:
        fake.submitted.get(timeout=PATIENCE)
        # One of these two waits, the other is one too many.
        others = [pool.submit(client.solve, HOLD, PATIENCE) for _ in range(2)]
        refused = next(as_completed(others, PATIENCE))
        with pytest.raises(ServiceError, match="queue of 1 is full") as caught:
            refused.result(PATIENCE)
        assert (caught.value.code, caught.value.retry_seconds) == ("RESOURCE_EXHAUSTED", 5.0)

        full = time.perf_counter()  # so the other waits already
        time.sleep(0.05)
        at_least = time.perf_counter() - full
        fake.release.set()
        (waited,) = [f for f in others if f is not refused]
        assert held.result(PATIENCE).answer == "42"
        assert waited.result(PATIENCE).usage.queue_seconds >= at_least


def test_a_call_does_not_wait_for_a_slot_for_ever(start, fake, pool):
    server = start(max_searches=1, queue_seconds=0.02)
    client, _ = hold(server, pool)
    fake.submitted.get(timeout=PATIENCE)

    with client, pytest.raises(ServiceError, match=r"stayed busy for 0\.02 s") as caught:
        client.solve(SOLVE, PATIENCE)

    assert caught.value.code == "RESOURCE_EXHAUSTED"


def test_a_search_that_does_not_end_at_the_servers_time_limit_is_cancelled(start, fake, monkeypatch):
    monkeypatch.setattr("espalier.search.service.session._GRACE", 0.0)
    fake.late = True
    with SearchClient(start(search_seconds=0.05).address) as client, pytest.raises(ServiceError) as caught:
        client.solve(HOLD, PATIENCE)

    assert (caught.value.code, "limit of 0.05 s" in str(caught.value)) == ("DEADLINE_EXCEEDED", True)
    fake.cancelled.get(timeout=PATIENCE)


def test_a_client_that_stops_reading_cancels_its_search_and_frees_its_slot(start, fake):
    with SearchClient(start(max_searches=1).address) as client:
        events = client.solve_stream(HOLD, PATIENCE)
        assert isinstance(next(events), Started)
        events.close()

        assert fake.cancelled.get(timeout=PATIENCE) == fake.submitted.get(timeout=PATIENCE)
        assert client.solve(SOLVE, PATIENCE).answer == "42"
    assert fake.running == 0


def test_a_call_that_gives_up_while_it_waits_takes_no_slot_with_it(start, fake, pool):
    server = start(max_searches=1)
    client, held = hold(server, pool)
    with client:
        fake.submitted.get(timeout=PATIENCE)
        with pytest.raises(ServiceError):
            client.solve(SOLVE, timeout=0.1)
        fake.release.set()
        held.result(PATIENCE)

        assert client.solve(SOLVE, PATIENCE).answer == "42"


def test_a_clients_deadline_cancels_its_search(start, fake):
    with SearchClient(start().address) as client, pytest.raises(ServiceError) as caught:
        client.solve(HOLD, timeout=0.2)

    assert caught.value.code == "DEADLINE_EXCEEDED"
    fake.cancelled.get(timeout=PATIENCE)


def test_a_dead_engine_fails_its_searches_and_turns_health_and_calls_away(start, fake, pool):
    server = start()
    client, held = hold(server, pool)
    with client:
        fake.submitted.get(timeout=PATIENCE)
        for call in (lambda: client.solve(SearchRequest("die"), PATIENCE), held.result, lambda: client.solve(SOLVE)):
            with pytest.raises(ServiceError, match="the engine has stopped") as caught:
                call()
            assert caught.value.code == "UNAVAILABLE"
            assert SECRET not in str(caught.value)
    wait_for_health(server.address, "NOT_SERVING")
    assert fake.closed


@pytest.mark.parametrize("streaming", [False, True])
def test_a_search_that_a_model_cannot_compute_tells_the_client_why(start, streaming):
    with SearchClient(start().address) as client:
        solve = (lambda *args: list(client.solve_stream(*args))) if streaming else client.solve
        with pytest.raises(ServiceError) as caught:
            solve(SearchRequest("fail"), PATIENCE)
        assert (caught.value.code, str(caught.value)) == ("INTERNAL", WHY)
        assert client.solve(SOLVE, PATIENCE).answer == "42", "one search's failure is not the server's"


@pytest.mark.parametrize("streaming", [False, True])
def test_an_internal_error_tells_the_client_an_id_and_nothing_else(start, streaming):
    with SearchClient(start().address) as client:
        solve = (lambda *args: list(client.solve_stream(*args))) if streaming else client.solve
        with pytest.raises(ServiceError) as caught:
            solve(SearchRequest("bug"), PATIENCE)

        assert caught.value.code == "INTERNAL"
        assert str(caught.value).startswith("internal error, id=")
        assert len(str(caught.value)) < 40
        assert client.solve(SOLVE, PATIENCE).answer == "42", "one search's failure is not the server's"


def test_no_answer_is_an_outcome_and_not_an_error(start):
    with SearchClient(start().address) as client:
        result = client.solve(SearchRequest("nothing"), PATIENCE)

    assert (result.answer, result.best, result.stop_reason) == ("", None, "finished")


def test_many_clients_are_served_at_once(start, fake, pool):
    server = start(max_searches=16)

    def solve(seed: int):
        with SearchClient(server.address) as client:
            return client.solve(SearchRequest("hold", seed=seed), PATIENCE)

    calls = [pool.submit(solve, seed) for seed in range(16)]
    for _ in calls:
        fake.submitted.get(timeout=PATIENCE)
    assert fake.running == 16
    fake.release.set()

    assert [call.result(PATIENCE).configuration.seed for call in calls] == list(range(16))


def test_a_slow_reader_misses_progress_but_not_the_start_and_the_result(start, fake):
    with SearchClient(start(event_buffer=8).address) as client:
        events = client.solve_stream(SearchRequest("flood"), PATIENCE)
        assert isinstance(next(events), Started)
        fake.flood_until(5_000)
        fake.release.set()
        fake.ended.get(timeout=PATIENCE)
        rest = list(events)

    depths = [event.depth for event in rest if isinstance(event, StepDone)]
    assert isinstance(rest[-1], Finished)
    assert len(depths) < fake.flooded / 2, "10 kB each: far more than a connection's buffers hold"
    assert all(a < b for a, b in pairwise(depths))
    assert depths[-1] == fake.flooded, "the latest progress is what is kept"


def test_a_result_larger_than_a_message_may_be_is_cut_and_says_so(start):
    address = start(max_send_bytes=1024).address
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        response = SearchServiceStub(channel).SolveProblem(
            pb.SolveProblemRequest(problem="solve", max_steps=9, include_nodes=True), timeout=PATIENCE
        )

    assert response.ByteSize() <= 1024
    assert response.result.answer == "42"
    assert response.result.omitted_nodes in (0, 4)


def test_progress_larger_than_a_message_may_be_is_cut_and_does_not_end_the_call(start, fake):
    with SearchClient(start(max_send_bytes=1024).address) as client:
        events = client.solve_stream(SearchRequest("flood"), PATIENCE)
        cut = next(event for event in events if isinstance(event, StepDone))
        fake.release.set()
        rest = list(events)

    assert cut.kept == (), "of 10 kB each"
    assert isinstance(rest[-1], Finished)


def test_a_request_larger_than_the_server_takes_is_refused_with_its_size(start):
    with SearchClient(start(max_receive_bytes=1024).address) as client:
        with pytest.raises(InvalidRequestError, match=r"request: the message has 20.. bytes, of at most 1024"):
            client.solve(SearchRequest("x" * 2000), PATIENCE)
        with pytest.raises(ServiceError) as caught:  # far over it, gRPC itself refuses
            client.solve(SearchRequest("x" * 20_000), PATIENCE)

    assert caught.value.code == "RESOURCE_EXHAUSTED"


def load_nothing():
    raise CheckpointError("no config.json")


def test_a_second_server_on_the_same_port_fails_with_a_clear_error_before_loading(start):
    port = int(start().address.rsplit(":", 1)[1])

    with pytest.raises(BindError, match=f"cannot listen on 127.0.0.1:{port}.*--port"):
        serve(load_nothing, ServerSettings(port=port))


def test_what_loading_raised_is_raised_by_serve():
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        serve(load_nothing, ServerSettings(port=0))


def test_stopping_cancels_searches_and_closes_the_orchestrator(start, fake, pool):
    server = start()
    client, held = hold(server, pool)
    with client:
        fake.submitted.get(timeout=PATIENCE)
        assert server.call(server.server.stop())
        with pytest.raises(ServiceError, match="shutting down"):
            held.result(PATIENCE)
    assert fake.closed
    assert fake.running == 0
