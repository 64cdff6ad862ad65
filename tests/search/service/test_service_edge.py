"""The edge of the service, with real clients: pings, broken messages, limits of time, what is seen from outside."""

import gc
import logging
import resource
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from raw_client import raw_stub
from server_thread import PATIENCE, ServerThread, wait_until

from espalier.engine.errors import InvalidRequestError
from espalier.search.client import NO_RETRIES, SearchClient, ServiceError
from espalier.search.request import SearchRequest
from espalier.search.result import StepDone, StopReason
from espalier.search.service.server import server_options
from espalier.search.service.settings import ServerSettings
from espalier.v1 import search_pb2 as pb
from espalier.v1.search_pb2_grpc import SearchServiceStub

SOLVE, HOLD = SearchRequest("solve"), SearchRequest("hold")
NO_PROXY = [("grpc.enable_http_proxy", 0)]
_FIVE_PINGS = 5.6
"""Seconds; a server that minds them ends all calls at the third."""


@pytest.fixture
def pool():
    with ThreadPoolExecutor(96) as executor:
        yield executor


def info(server: ServerThread) -> pb.GetServerInfoResponse:
    with grpc.insecure_channel(server.address, options=NO_PROXY) as channel:
        stub: Any = SearchServiceStub(channel)
        return stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=PATIENCE)


@pytest.mark.parametrize("between_calls", [0, 1])
def test_a_client_that_pings_every_few_seconds_keeps_its_search(between_calls: int, start, fake, pool):
    server = start()
    pings = [
        ("grpc.keepalive_time_ms", 1_100),
        ("grpc.keepalive_permit_without_calls", between_calls),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    with grpc.insecure_channel(server.address, options=NO_PROXY + pings) as channel:
        stub: Any = SearchServiceStub(channel)
        if between_calls:
            stub.SolveProblem(pb.SolveProblemRequest(problem="solve"), timeout=PATIENCE)
            time.sleep(_FIVE_PINGS)
        call = stub.SolveProblem.future(pb.SolveProblemRequest(problem="hold"), timeout=60)
        time.sleep(_FIVE_PINGS)
        fake.release.set()
        assert call.result(PATIENCE).result.answer == "42"


@pytest.mark.parametrize("method", ["SolveProblem", "SolveProblemStream"])
def test_bytes_that_are_no_message_are_the_callers_error_and_no_stack_in_the_log(method: str, start, caplog):
    with grpc.insecure_channel(start().address, options=NO_PROXY) as channel, caplog.at_level(logging.DEBUG):
        ask: Any = channel.unary_stream(f"/espalier.v1.SearchService/{method}")  # a client of streams reads both
        with pytest.raises(grpc.RpcError) as caught:
            list(ask(b"\xff\xff\xff", timeout=PATIENCE))
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be decoded" in error.details()
    assert not [record for record in caplog.records if record.exc_info]


def test_a_method_of_a_standard_service_that_is_not_offered_says_so(start, caplog):
    with grpc.insecure_channel(start().address, options=NO_PROXY) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.List(health_pb2.HealthListRequest(), timeout=PATIENCE)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not [record for record in caplog.records if record.exc_info]


def test_reflection_lists_the_services_and_describes_them(start):
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="espalier.v1.SearchService"),
    ]
    with grpc.insecure_channel(start().address, options=NO_PROXY) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        listed, described = stub.ServerReflectionInfo(iter(asked), timeout=PATIENCE)
    names = {service.name for service in listed.list_services_response.service}
    assert names >= {"espalier.v1.SearchService", "grpc.health.v1.Health"}
    assert any(b"SolveProblem" in file for file in described.file_descriptor_response.file_descriptor_proto)


def test_what_a_caller_is_told_names_fields_and_the_servers_flags_as_such(start):
    with SearchClient(start().address) as client, pytest.raises(InvalidRequestError) as caught:
        client.solve(SearchRequest("pool"), PATIENCE)
    (violation,) = caught.value.violations
    assert "raise the server's --kv-memory, or lower beam_width, expansion, max_tokens or" in violation.description


def test_a_search_that_can_never_fit_is_refused_without_a_slot(start, fake, pool):
    server = start(max_searches=1, max_queue=0)
    with SearchClient(server.address) as client:
        pool.submit(client.solve, HOLD, PATIENCE)
        fake.submitted.get(timeout=PATIENCE)
        with pytest.raises(InvalidRequestError, match="MiB"):
            client.solve(SearchRequest("pool"), PATIENCE)
        fake.release.set()


@pytest.mark.parametrize("given", [None, 0.2, 3600.0])
def test_the_smaller_of_both_time_limits_ends_a_search_with_its_result(given: float | None, start):
    with SearchClient(start(search_seconds=0.3).address) as client:
        result = client.solve(SearchRequest("hold", time_limit=given), PATIENCE)
    assert result.stop_reason is StopReason.DEADLINE
    assert result.configuration.time_limit == given


def test_a_time_limit_that_ends_in_the_queue_gives_an_empty_result(start, fake, pool):
    with SearchClient(start(max_searches=1).address) as client:
        pool.submit(client.solve, HOLD, PATIENCE)
        fake.submitted.get(timeout=PATIENCE)
        result = client.solve(SearchRequest("solve", time_limit=0.1), PATIENCE)
        assert (result.stop_reason, result.answer) == (StopReason.DEADLINE, "")
        fake.release.set()


@pytest.mark.parametrize("share", [False, True])
def test_calls_of_one_host_share_cached_prompts_only_where_the_operator_says_so(share: bool, start, fake):
    with SearchClient(start(share_prompts=share).address) as client:
        salts = {fake.options[client.solve(SOLVE, PATIENCE).search_id].salt for _ in range(3)}
    assert len(salts) == (1 if share else 3)


def test_a_priority_above_the_servers_is_refused_with_its_limit(start):
    with SearchClient(start().address) as client:
        with pytest.raises(InvalidRequestError, match="between -100 and 0 for you, is 1"):
            client.solve(SOLVE, PATIENCE, priority=1)
        assert client.solve(SOLVE, PATIENCE, priority=-5).answer == "42"


def test_running_and_waiting_calls_and_blocks_are_seen_from_outside(start, fake, pool):
    server = start(max_searches=2, max_queue=7)
    with SearchClient(server.address) as client:
        held = [pool.submit(client.solve, HOLD, PATIENCE) for _ in range(3)]
        wait_until(lambda: info(server).waiting_calls == 1)
        seen = info(server)
        assert (seen.running_searches, seen.admitted_calls, seen.max_searches, seen.max_queue) == (2, 2, 2, 7)
        assert seen.kv_blocks["generator"].live == 2
        assert seen.models["generator"]
        assert seen.version
        fake.release.set()
        for search in held:
            search.result(PATIENCE)
    seen = info(server)
    assert (seen.running_searches, seen.admitted_calls, seen.waiting_calls) == (0, 0, 0)
    assert seen.kv_blocks["generator"].live == 0


def test_what_a_dead_engine_is_asked_is_answered(start, fake):
    server = start()
    with SearchClient(server.address, retry=NO_RETRIES) as client, pytest.raises(ServiceError):
        client.solve(SearchRequest("die"), PATIENCE)
    with pytest.raises(grpc.RpcError) as caught:
        info(server)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    details = rpc_status.from_call(error).details
    assert any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in details)


def test_streams_that_nobody_reads_hold_nobody_up_and_cost_bounded_memory(start, fake, pool):
    server = start(max_searches=9, event_buffer=8)
    small_windows = {"grpc__http2__lookahead_bytes": 1, "grpc__http2__bdp_probe": 0}
    flood = pb.SolveProblemStreamRequest(request=pb.SolveProblemRequest(problem="flood"))
    with raw_stub(server.address, **small_windows) as stub:
        unread = [stub.SolveProblemStream(flood, timeout=PATIENCE) for _ in range(8)]
        fake.flood_until(8 * 400)
        with SearchClient(server.address) as client:
            assert client.solve(SOLVE, PATIENCE).answer == "42"
        held = sum(type(each) is StepDone for each in gc.get_objects())  # isinstance would ask dead proxies
        assert held < 8 * (2 * 8 + 60), "the buffer, what is written, and what one engine step posted to the event loop"
        fake.release.set()
        wait_until(lambda: server.info().occupancy.running == 0)
        wait_until(lambda: server.info().admitted_calls == 0)
        for call in unread:
            call.cancel()


@pytest.mark.slow
def test_a_client_that_was_stopped_is_noticed_and_its_search_ends(start, fake):
    """Keepalive pings go unanswered: after 60 s the server asks, after 20 more it gives up."""
    server = start(max_searches=1)
    code = (
        "import sys, grpc\n"
        "from espalier.v1 import search_pb2 as pb\n"
        "from espalier.v1.search_pb2_grpc import SearchServiceStub\n"
        "channel = grpc.insecure_channel(sys.argv[1], options=[('grpc.enable_http_proxy', 0)])\n"
        "ask = pb.SolveProblemStreamRequest(request=pb.SolveProblemRequest(problem='hold'))\n"
        "for event in SearchServiceStub(channel).SolveProblemStream(ask): print('event', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, server.address], stdout=subprocess.PIPE) as client:
        try:
            assert client.stdout
            client.stdout.readline()
            client.send_signal(signal.SIGSTOP)
            end = time.monotonic() + 100
            while server.info().occupancy.running:
                assert time.monotonic() < end
                time.sleep(0.5)
        finally:
            client.kill()


def test_connections_above_the_limit_are_closed_and_the_others_go_on(start):
    server = start(max_connections=4)
    host, port = server.address.rsplit(":", 1)
    with SearchClient(server.address) as client:
        assert client.solve(SOLVE, PATIENCE).answer == "42"
        with ExitStack() as opened:
            sockets = [opened.enter_context(socket.create_connection((host, int(port)), PATIENCE)) for _ in range(8)]
            greeted = [bool(each.recv(1)) for each in sockets]
            assert greeted == [True] * 3 + [False] * 5
            assert client.solve(SOLVE, PATIENCE).answer == "42"


def test_by_default_connections_leave_room_below_the_file_limit(monkeypatch):
    for limit, most in ((1024, 768), (256, 192), (100, 36), (resource.RLIM_INFINITY, 2**16)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert dict(server_options(ServerSettings()))["grpc.max_allowed_incoming_connections"] == most
