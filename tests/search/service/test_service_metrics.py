"""What a server counts and shows, with real clients and a scripted orchestrator."""

import asyncio
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from callers_files import callers_file
from exposition import OPENMETRICS, Exposition, read, scrape, some_stats
from raw_client import bearer, raw_stub
from raw_http import RawConnection
from scripted_orchestrator import USAGE, ScriptedOrchestrator
from server_thread import PATIENCE, ServerThread, wait_until

from espalier.search.client import NO_RETRIES, SearchClient, ServiceError
from espalier.search.request import SearchRequest
from espalier.search.result import Started
from espalier.search.service.access.callers import Caller
from espalier.search.service.access.calls import Call
from espalier.search.service.errors import REASONS, BindError
from espalier.search.service.observability.metrics import MAX_NAMES, OTHER, Metrics
from espalier.search.service.server import serve
from espalier.search.service.settings import ServerSettings, SettingsError
from espalier.v1 import search_pb2 as pb

SOLVE, HOLD = SearchRequest("solve"), SearchRequest("hold")


@pytest.fixture
def pool():
    with ThreadPoolExecutor(32) as executor:
        yield executor


def solve(server: ServerThread, *problems: str) -> None:
    """Run searches one after the other, whatever becomes of them."""
    with SearchClient(server.address, retry=NO_RETRIES) as client:
        for problem in problems:
            try:
                client.solve(SearchRequest(problem), PATIENCE)
            except (ServiceError, ValueError):
                continue


# ---- what is counted


def test_calls_searches_and_tokens_are_counted_exactly(start):
    server = start()
    solve(server, "solve", "solve", "nothing", "fail", "budget")
    seen = scrape(server)

    assert seen.value("espalier_calls_total", method="SolveProblem", code="OK") == 4
    assert seen.value("espalier_calls_total", method="SolveProblem", code="INTERNAL") == 1
    assert seen.value("espalier_call_seconds_count", method="SolveProblem") == 5
    assert seen.value("espalier_call_failures_total", reason="search_failed") == 1
    assert seen.series("espalier_searches_total", "outcome") == {"finished": 3, "failed": 1, "budget": 1}
    assert seen.value("espalier_computed_tokens_total", role="generator") == 5 * USAGE.generator_tokens
    assert seen.value("espalier_computed_tokens_total", role="verifier") == 5 * USAGE.verifier_tokens
    assert seen.value("espalier_tree_tokens_total", role="generator") == 5 * USAGE.generator_tree_tokens
    assert seen.value("espalier_tree_tokens_total", role="verifier") == 5 * USAGE.verifier_tree_tokens
    assert seen.value("espalier_saved_tokens_total", role="generator") == 5 * USAGE.generator_saved_tokens
    assert seen.value("espalier_saved_tokens_total", role="verifier") == 5 * USAGE.verifier_saved_tokens
    assert seen.value("espalier_sampled_tokens_total") == 5 * USAGE.generated_tokens
    assert seen.value("espalier_stopped_tokens_total") == 5 * USAGE.stopped_tokens
    assert seen.value("espalier_search_run_seconds_sum", algorithm="beam") == 5 * USAGE.seconds
    assert seen.value("espalier_search_first_step_seconds_bucket", le="0.1") == 0
    assert seen.value("espalier_search_first_step_seconds_bucket", le="0.25") == 5
    assert seen.value("espalier_search_queue_seconds_count") == 5


def test_every_outcome_of_a_search_appears(start, fake, pool):
    server = start(search_seconds=2.0)
    solve(server, "solve", "budget", "fail")
    with SearchClient(server.address) as client:
        client.solve(SearchRequest("hold", time_limit=0.05), PATIENCE)
        stream = client.solve_stream(HOLD, PATIENCE)
        assert isinstance(next(stream), Started)
        stream.close()
        fake.cancelled.get(timeout=PATIENCE)
    solve(server, "die")
    outcomes = {"finished", "budget", "failed", "deadline", "cancelled", "aborted"}
    wait_until(lambda: scrape(server).series("espalier_searches_total", "outcome").keys() == outcomes)
    assert set(scrape(server).series("espalier_searches_total", "outcome").values()) == {1}


def test_the_tokens_of_a_search_whose_client_left_count_too(start, fake):
    server = start()
    with SearchClient(server.address) as client:
        stream = client.solve_stream(HOLD, PATIENCE)
        assert isinstance(next(stream), Started)
        stream.close()
    wait_until(lambda: scrape(server).value("espalier_sampled_tokens_total") == USAGE.generated_tokens)
    wait_until(lambda: "CANCELLED" in scrape(server).series("espalier_calls_total", "code"))


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_of_a_failure_is_counted_and_shown_before_it_happens(reason: str):
    metrics = Metrics()
    assert shown(metrics).value("espalier_call_failures_total", reason=reason) == 0
    call = Call("SolveProblem", "r")
    call.fail("INTERNAL", reason)
    metrics.call_ended(call)
    assert shown(metrics).value("espalier_call_failures_total", reason=reason) == 1


def test_calls_turned_away_are_counted_by_reason(start, fake, pool, tmp_path):
    server = start(max_searches=1, max_queue=0, callers=callers_file(tmp_path, ann="", bob="max_searches = 1"))
    with raw_stub(server.address) as stub:
        bob = bearer("bob")
        hold = pb.SolveProblemRequest(problem="hold")
        held = [pool.submit(stub.SolveProblem, hold, PATIENCE, login) for login in (bob, bearer("ann"))]
        for _ in held:
            fake.submitted.get(timeout=PATIENCE)
        solve_ = pb.SolveProblemRequest(problem="solve")
        for login in (bob, bearer("ann"), bearer("eve"), ()):
            with pytest.raises(grpc.RpcError):
                stub.SolveProblem(solve_, PATIENCE, login)
        fake.release.set()
        for each in held:
            each.result(PATIENCE)
    wait_until(lambda: scrape(server).series("espalier_searches_total", "outcome") == {"finished": 2})
    failures = scrape(server).series("espalier_call_failures_total", "reason")
    assert {reason: count for reason, count in failures.items() if count} == {
        "quota": 1,
        "busy": 1,
        "unauthenticated": 2,
    }


def test_only_logins_are_named_and_only_so_many(start, fake, tmp_path):
    anonymous = start(ScriptedOrchestrator)
    anonymous.wait_loaded()
    solve(anonymous, "solve")
    assert scrape(anonymous).series("espalier_caller_calls_total", "caller") == {}

    server = start(callers=callers_file(tmp_path, ann=""))
    with raw_stub(server.address) as stub:
        stub.SolveProblem(pb.SolveProblemRequest(problem="solve"), PATIENCE, bearer("ann"))
    seen = scrape(server)
    assert seen.value("espalier_caller_calls_total", caller="ann", code="OK") == 1
    used_up = USAGE.generated_tokens + USAGE.verifier_tokens
    assert seen.series("espalier_caller_tokens_total", "caller") == {"ann": used_up}

    metrics = Metrics()
    for number in range(MAX_NAMES + 7):
        metrics.call_ended(Call(f"GET /{number}", "r", caller=Caller(f"c{number}", login=True)))
    for name, label in (("espalier_caller_calls_total", "caller"), ("espalier_calls_total", "method")):
        counted = shown(metrics).series(name, label)
        assert len(counted) == MAX_NAMES + 1
        assert counted[OTHER] == 7


def shown(metrics: Metrics) -> Exposition:
    return read(*metrics.render())


# ---- what is held now


def test_what_is_held_is_shown_and_an_idle_server_holds_no_live_block(start, fake, pool):
    server = start(max_searches=2, max_queue=7)
    with SearchClient(server.address) as client:
        held = [pool.submit(client.solve, HOLD, PATIENCE) for _ in range(3)]
        wait_until(lambda: scrape(server).value("espalier_waiting_calls") == 1)
        wait_until(lambda: scrape(server).value("espalier_running_searches") == 2)
        seen = scrape(server)
        assert seen.value("espalier_admitted_calls") == 2
        assert seen.value("espalier_search_slots") == 2
        assert seen.value("espalier_queue_places") == 7
        assert seen.value("espalier_kv_blocks", role="generator", state="live") == 2
        assert seen.value("espalier_kv_pool_bytes") == 2**20
        fake.release.set()
        for search in held:
            search.result(PATIENCE)
    seen = scrape(server)
    assert seen.value("espalier_kv_blocks", role="generator", state="live") == 0
    assert seen.value("espalier_kv_blocks", role="generator", state="cached") == 3
    names = ("running_searches", "waiting_searches", "admitted_calls", "waiting_calls")
    assert [seen.value(f"espalier_{name}") for name in names] == [0, 0, 0, 0]


def test_the_engines_counters_are_shown_by_role(start, fake):
    fake.stats = {"generator": some_stats(), "verifier": some_stats()}
    seen = scrape(start())
    for role in fake.stats:
        assert seen.value("espalier_engine_preemptions_total", role=role) == 12
        assert seen.value("espalier_prefix_cache_hit_blocks_total", role=role) == 8
        assert seen.value("espalier_prefix_cache_lookup_blocks_total", role=role) == 13
        assert seen.value("espalier_kv_bytes", role=role, state="cached") == 3 * 16384
        assert seen.value("espalier_recurrent_states", role=role, state="cached") == 2
        assert seen.value("espalier_engine_batch_rows_bucket", role=role, le="1.0") == 1
        assert seen.value("espalier_engine_batch_rows_bucket", role=role, le="4.0") == 2
        assert seen.value("espalier_engine_batch_rows_bucket", role=role, le="1024.0") == 2
        assert seen.value("espalier_engine_batch_rows_count", role=role) == 3
        assert seen.value("espalier_engine_batch_tokens_sum", role=role) == 20034
        assert seen.value("espalier_engine_step_seconds_bucket", role=role, le="0.001") == 1
        assert seen.value("espalier_engine_step_seconds_sum", role=role) == pytest.approx(60.003)


def test_what_is_served_is_shown_by_short_digests_and_names(start):
    seen = scrape(start())
    (sample,) = seen.families["espalier_build_info"].samples
    assert sample.labels.keys() == {"version", "generator", "verifier", "generator_name", "verifier_name"}
    assert (sample.labels["generator_name"], sample.labels["verifier_name"]) == ("org/talker", "judge")
    assert (sample.labels["generator"], sample.labels["verifier"]) == ("ab" * 6, "cd" * 6)


def test_two_servers_in_one_process_count_apart(start):
    one, other = start(), start(ScriptedOrchestrator)
    other.wait_loaded()
    solve(one, "solve")
    assert scrape(one).value("espalier_calls_total", method="SolveProblem", code="OK") == 1
    assert scrape(other).value("espalier_calls_total", method="SolveProblem", code="OK") is None


# ---- engines that do not answer


def states(seen: Exposition) -> dict[str, float]:
    return seen.series("espalier_engine_state", "espalier_engine_state")


def test_a_busy_engine_holds_no_scrape_up_and_its_last_report_is_shown_with_its_age(start, fake, pool, monkeypatch):
    monkeypatch.setattr("espalier.search.service.observability.metrics.ASK_SECONDS", 0.1)
    server = start()
    with SearchClient(server.address) as client:
        assert scrape(server).value("espalier_running_searches") == 0
        held = pool.submit(client.solve, SearchRequest("stuck"), PATIENCE)
        fake.submitted.get(timeout=PATIENCE)
        begun = time.monotonic()
        ages = [scrape(server).number("espalier_engine_report_age_seconds") for _ in range(5)]
        assert time.monotonic() - begun < PATIENCE / 2
        seen = scrape(server)
        assert ages == sorted(ages)
        assert ages[-1] > 0.3
        assert states(seen)["ready"] == 1
        assert seen.value("espalier_admitted_calls") == 1, "what the event loop knows is not old"
        fake.release.set()
        held.result(PATIENCE)
    assert scrape(server).number("espalier_engine_report_age_seconds") < ages[-1]


def test_a_loading_engine_is_shown_as_such(start):
    go = threading.Event()

    def load() -> ScriptedOrchestrator:
        assert go.wait(PATIENCE)
        return ScriptedOrchestrator()

    server = start(load)
    seen = scrape(server)
    assert states(seen) == {"loading": 1, "ready": 0, "stopping": 0, "dead": 0}
    assert seen.value("espalier_running_searches") is None
    go.set()
    server.wait_loaded()
    assert states(scrape(server))["ready"] == 1


def test_a_dead_engine_is_shown_as_such_and_a_scrape_answers(start):
    server = start()
    scrape(server)
    solve(server, "die")
    wait_until(lambda: states(scrape(server))["dead"] == 1)
    assert scrape(server).number("espalier_engine_report_age_seconds") > 0
    wait_until(lambda: scrape(server).value("espalier_call_failures_total", reason="not_ready") == 1)


def test_askers_that_leave_do_not_fill_the_engines_queue(start, fake, pool):
    server = start(max_searches=2, max_queue=1)
    with SearchClient(server.address) as client:
        held = pool.submit(client.solve, SearchRequest("stuck"), PATIENCE)
        fake.submitted.get(timeout=PATIENCE)

        async def ask_and_leave() -> None:
            for _ in range(100):
                asking = asyncio.ensure_future(server.server.session.info())
                await asyncio.sleep(0)
                asking.cancel()
                await asyncio.wait([asking])

        server.call(ask_and_leave())
        other = pool.submit(client.solve, SOLVE, PATIENCE)
        wait_until(lambda: server.server.session.queue.held == 2)
        fake.release.set()
        held.result(PATIENCE)
        assert other.result(PATIENCE).answer == "42"
    assert server.info().occupancy.running == 0


# ---- how it is shown


def test_both_formats_are_chosen_by_the_accept_header_and_agree(start, fake):
    fake.stats = {"generator": some_stats()}
    server = start()
    solve(server, "solve")
    plain, open_ = scrape(server), scrape(server, OPENMETRICS)
    passing = ("process_", "espalier_engine_report_age_seconds")
    for name, labels in open_.samples().items():
        if not name.startswith(passing):
            assert plain.samples()[name] == labels
    assert open_.value("espalier_sampled_tokens_total") == plain.value("espalier_sampled_tokens_total") == 60


@pytest.mark.parametrize(
    "accept", ["*/*", "", "application/openmetrics-text; version=abc", ";;;=", "text/plain;version=x"]
)
def test_any_accept_header_is_answered(accept: str):
    text, content_type = Metrics().render(accept)
    assert b"espalier_call_failures_total" in text
    assert content_type.split(";")[0] in ("text/plain", "application/openmetrics-text")


def test_the_metrics_port_answers_prometheus(start):
    server = start(metrics_port=0)
    solve(server, "solve")
    request = urllib.request.Request(f"http://{server.server.metrics_address}/metrics", headers={"Accept": OPENMETRICS})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=PATIENCE) as response:
        text = response.read().decode()
        assert response.headers["Content-Type"].startswith("application/openmetrics-text")
    assert 'espalier_calls_total{code="OK",method="SolveProblem"} 1.0' in text
    assert text.endswith("# EOF\n")
    server.call(server.server.stop())
    with pytest.raises(OSError):
        opener.open(request, timeout=PATIENCE)


def test_the_metrics_port_answers_to_the_names_of_this_machine_alone_and_has_metrics_alone(start):
    server = start(metrics_port=0)
    url = f"http://{server.server.metrics_address}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for host, path, wanted in (
        ("evil.example", "/metrics", 403),
        ("127.0.0.1", "/v1/server", 404),
        ("127.0.0.1", "/", 404),
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            opener.open(urllib.request.Request(url + path, headers={"Host": host}), timeout=PATIENCE)
        assert caught.value.code == wanted


def test_the_metrics_port_waits_for_no_request_and_holds_few_connections(start, monkeypatch):
    monkeypatch.setattr("espalier.search.service.http_api.listener._HEADER_SECONDS", 0.5)
    server = start(metrics_port=0)
    url = f"http://{server.server.metrics_address}"
    with ExitStack() as stack:
        silent = [stack.enter_context(RawConnection(url)) for _ in range(16)]
        more = stack.enter_context(RawConnection(url))
        assert silent[0].rest() == b"", "the one that is idle for longest makes room"
        more.send(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"espalier_build_info" in more.until(b"espalier_build_info")
        for each in silent[1:]:
            assert each.rest() == b""
    text, _ = server.server.metrics.render()
    assert b"espalier_calls_total{" not in text, "scrapes are not counted"


def test_a_metrics_port_in_use_is_reported_before_loading(start):
    taken = int(start(metrics_port=0).server.metrics_address.rpartition(":")[2])

    def load() -> Any:
        raise AssertionError("nothing is loaded")

    with pytest.raises(BindError, match=f"127.0.0.1:{taken}: .*--metrics-port"):
        serve(load, ServerSettings(port=0, metrics_port=taken))


def test_metrics_are_for_this_machine_unless_the_operator_says_otherwise():
    with pytest.raises(SettingsError, match=r"--metrics-host 0\.0\.0\.0 .*--insecure-bind"):
        ServerSettings(metrics_port=9464, metrics_host="0.0.0.0")
    assert ServerSettings(metrics_host="0.0.0.0").metrics_port is None, "no port, no matter"
    assert ServerSettings(metrics_port=9464, metrics_host="0.0.0.0", insecure_bind=True)
