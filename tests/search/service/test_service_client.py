import gc
import subprocess
import sys
from concurrent import futures

import grpc
import pytest
from scripted_orchestrator import CANDIDATE, DIGESTS, GRADER, NODES
from server_thread import PATIENCE

from espalier.engine.errors import EspalierError, InvalidRequestError
from espalier.search.client import SearchClient, ServiceError
from espalier.search.request import AlgorithmName, SearchRequest, Vote
from espalier.search.result import Started

SOLVE, HOLD = SearchRequest("solve"), SearchRequest("hold")


def test_solve_returns_the_result_as_the_orchestrator_made_it(start):
    with SearchClient(start().address) as client:
        result = client.solve(SearchRequest("solve", AlgorithmName.BEST_OF_N, seed=7), PATIENCE, include_nodes=True)

    assert result.answer == "42"
    assert (result.best, result.candidates, result.nodes) == (CANDIDATE, (CANDIDATE,), NODES)
    assert result.digests == DIGESTS
    assert result.grader == GRADER
    assert result.configuration == SearchRequest("solve", AlgorithmName.BEST_OF_N, vote=Vote.WEIGHTED, seed=7)
    assert result.usage.seconds == 1.5


def test_the_tree_is_left_out_unless_asked_for(start):
    with SearchClient(start().address) as client:
        assert client.solve(SOLVE, PATIENCE).nodes == ()


def test_a_server_that_is_not_there_is_named_with_what_to_do(start):
    server = start()
    address = server.address
    server.call(server.server.stop())

    with SearchClient(address) as client:
        for call in (lambda: client.solve(SOLVE, PATIENCE), lambda: next(client.solve_stream(SOLVE, PATIENCE))):
            with pytest.raises(ServiceError, match=f"no server at {address}; start one with: espalier serve") as caught:
                call()
            assert caught.value.code == "UNAVAILABLE"


def test_a_name_without_an_address_is_told_apart_from_a_connection_that_broke():
    with (
        SearchClient("no-such-host.invalid:50051") as client,
        pytest.raises(ServiceError, match=r"cannot reach the server at no-such-host\.invalid:50051") as caught,
    ):
        client.solve(SOLVE, PATIENCE)
    assert caught.value.code == "UNAVAILABLE"


def test_violations_come_back_as_the_error_the_orchestrator_raises(start):
    with SearchClient(start().address) as client, pytest.raises(InvalidRequestError) as caught:
        list(client.solve_stream(SearchRequest("x", beam_width=1000, max_steps=0), PATIENCE))

    assert caught.value.violations[0].field == "beam_width"
    assert "must be between 1 and 256, is 1000" in str(caught.value)
    assert {v.field for v in caught.value.violations} >= {"beam_width", "max_steps"}


def test_a_number_too_large_for_the_wire_is_an_invalid_request(start):
    with SearchClient(start().address) as client, pytest.raises(InvalidRequestError, match="beam_width"):
        client.solve(SearchRequest("x", beam_width=2**40), PATIENCE)


def test_a_timeout_is_told_apart_from_the_servers_limit(start):
    with SearchClient(start().address) as client, pytest.raises(ServiceError, match="within the timeout") as caught:
        client.solve(HOLD, timeout=0.1)

    assert caught.value.code == "DEADLINE_EXCEEDED"


def test_dropping_the_iterator_cancels_the_search(start, fake):
    with SearchClient(start().address) as client:
        events = client.solve_stream(HOLD)
        assert isinstance(next(events), Started)
        del events
        gc.collect()

        assert fake.cancelled.get(timeout=PATIENCE)


def test_closing_the_client_cancels_its_searches(start, fake):
    with SearchClient(start().address) as client:
        events = client.solve_stream(HOLD)
        next(events)

    with pytest.raises(ServiceError, match="cancelled"):
        list(events)
    assert fake.cancelled.get(timeout=PATIENCE)


def test_a_server_of_another_kind_is_told_apart():
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with SearchClient(f"127.0.0.1:{port}") as client, pytest.raises(ServiceError, match="is it an Espalier server"):
            client.solve(SOLVE, PATIENCE)
    finally:
        server.stop(None).wait(PATIENCE)


def test_a_service_error_is_an_error_the_command_line_knows():
    assert issubclass(ServiceError, EspalierError)


def test_asking_for_a_search_in_process_imports_no_grpc():
    code = "import sys, espalier.search.request, espalier.search.result; print('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)

    assert done.stdout == "False\n"
