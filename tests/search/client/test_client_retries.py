"""When a failed call is tried again: on plain data, and by both clients against a server that fails as told."""

import itertools
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from failing_server import RESULT, failing_server, waits
from hypothesis import given
from hypothesis import strategies as st
from scripted_orchestrator import ScriptedOrchestrator
from server_thread import PATIENCE, wait_until

from espalier.engine.errors import EspalierError, InvalidRequestError, MisuseError, Violation
from espalier.search.client import NO_RETRIES, RetryPolicy, SearchClient, ServiceError
from espalier.search.client.errors import DEFAULT_RETRIES, Attempts
from espalier.search.result import Finished, Started, StopReason
from espalier.search.service.errors import Failure

FAST = RetryPolicy(first_delay=0.01)
BUSY = Failure("RESOURCE_EXHAUSTED", "busy", "the server is busy", retry_seconds=0.2)
FULL = Failure("RESOURCE_EXHAUSTED", "busy", "the answer is too large")
LOADING = Failure("UNAVAILABLE", "not_ready", "the server is loading", retry_seconds=0.2)
BROKEN = Failure("INTERNAL", "internal", "internal error, id=1")
WRONG = Failure("INVALID_ARGUMENT", "invalid", "wrong", (Violation("seed", "is odd"),), 0.01)


def error(code: str, told: float | None = None) -> ServiceError:
    return ServiceError(code, "text", told)


# ---- plain data


def test_delays_double_up_to_the_largest():
    policy = RetryPolicy(attempts=6, first_delay=1, largest_delay=5)
    assert [policy.delay(n, error("UNAVAILABLE")) for n in range(1, 7)] == [1, 2, 4, 5, 5, None]


def test_no_attempt_comes_before_the_time_that_the_server_says():
    policy = RetryPolicy(first_delay=1, largest_delay=5)
    assert [policy.delay(n, error("UNAVAILABLE", 3)) for n in (1, 2, 3)] == [3, 3, 4]
    assert policy.delay(1, error("RESOURCE_EXHAUSTED", 60)) == 60


@pytest.mark.parametrize("code", ["INTERNAL", "DEADLINE_EXCEEDED", "CANCELLED", "UNAUTHENTICATED", "NOT_FOUND"])
def test_what_stays_wrong_is_not_tried_again(code: str):
    assert DEFAULT_RETRIES.delay(1, error(code, 1)) is None


def test_a_server_that_is_busy_is_tried_again_only_if_it_says_when():
    assert DEFAULT_RETRIES.delay(1, error("RESOURCE_EXHAUSTED")) is None
    assert DEFAULT_RETRIES.delay(1, error("RESOURCE_EXHAUSTED", 1)) == 1
    assert RetryPolicy(codes=frozenset({"RESOURCE_EXHAUSTED"})).delay(1, error("RESOURCE_EXHAUSTED")) is not None


def test_a_wrong_request_is_never_tried_again_and_no_policy_may_say_so():
    assert DEFAULT_RETRIES.delay(1, InvalidRequestError([Violation("seed", "is odd")])) is None
    for name in ("codes", "codes_with_delay"):
        with pytest.raises(MisuseError, match="INVALID_ARGUMENT"):
            RetryPolicy(**{name: frozenset({"INVALID_ARGUMENT"})})


@pytest.mark.parametrize(
    "wrong", [{"attempts": 0}, {"first_delay": -1.0}, {"largest_delay": float("nan")}, {"jitter": float("inf")}]
)
def test_a_policy_that_is_out_of_range_is_refused_by_name(wrong: dict):
    with pytest.raises(MisuseError, match=next(iter(wrong))):
        RetryPolicy(**wrong)


@given(
    st.floats(0, 100),
    st.lists(st.tuples(st.floats(0, 20), st.one_of(st.none(), st.floats(0, 90))), max_size=8),
    st.floats(0, 1, exclude_max=True),
)
def test_attempts_and_waits_never_go_past_the_deadline(timeout: float, steps: list, drawn: float):
    now = [50.0]
    attempts = Attempts(RetryPolicy(attempts=9, jitter=0.5), timeout, lambda: now[0], lambda: drawn)
    for seconds, told in steps:
        left = attempts.left()
        assert left is not None
        assert left >= 0
        now[0] += min(seconds, left)
        try:
            delay = attempts.delay_after(error("UNAVAILABLE", told))
        except ServiceError:
            return
        assert delay >= (told or 0)
        now[0] += delay
        assert now[0] <= 50 + timeout


def test_jitter_makes_a_delay_longer_by_its_share_at_most():
    policy = RetryPolicy(first_delay=1, jitter=0.5)
    assert Attempts(policy, None, draw=lambda: 0.0).delay_after(error("UNAVAILABLE")) == 1
    assert Attempts(policy, None, draw=lambda: 1.0).delay_after(error("UNAVAILABLE")) == 1.5
    assert Attempts(policy, None).left() is None


# ---- against a server


def test_a_call_is_tried_again_until_it_is_answered_under_one_request_id(connect, caplog):
    with failing_server([LOADING, BUSY]) as server, caplog.at_level(logging.DEBUG, "espalier.client"):
        assert connect(server.address, retry=FAST).solve("solve", PATIENCE).answer == RESULT.answer
        assert all(seconds >= 0.2 for seconds in waits(server)), "the server said when"
        assert len({metadata["x-request-id"] for metadata in server.metadata}) == 1
    assert "the server is loading; attempt 2 of 4 in 0." in caplog.text


def test_a_call_is_given_up_after_the_last_attempt_with_the_last_error(connect):
    policy = RetryPolicy(attempts=3, first_delay=0.01)
    with failing_server([Failure("UNAVAILABLE", "not_ready", f"no {n}") for n in range(9)]) as server:
        with pytest.raises(ServiceError, match="no 2"):
            connect(server.address, retry=policy).solve("solve", PATIENCE)
        assert len(server.arrivals) == 3


@pytest.mark.parametrize("failure", [FULL, BROKEN, WRONG], ids=lambda failure: failure.code)
def test_other_failures_are_told_at_once(connect, failure: Failure):
    with failing_server([failure]) as server:
        with pytest.raises(EspalierError, match=r"too large|internal error|odd"):
            connect(server.address, retry=FAST).solve("solve", PATIENCE)
        assert len(server.arrivals) == 1


def test_without_retries_the_first_failure_is_told(connect):
    with failing_server([LOADING]) as server, pytest.raises(ServiceError, match="loading"):
        connect(server.address, retry=NO_RETRIES).solve("solve", PATIENCE)


def test_all_attempts_share_the_callers_deadline(connect):
    with failing_server([LOADING] * 9) as server:
        with pytest.raises(ServiceError, match="loading"):
            connect(server.address, retry=FAST).solve("solve", timeout=1.5)
        left = [seconds for seconds in server.left if seconds is not None]
        assert left[0] <= 1.51  # gRPC rounds up
        assert all(later <= earlier - 0.19 for earlier, later in itertools.pairwise(left))


def test_a_wait_that_would_end_after_the_deadline_is_not_begun(connect):
    with failing_server([Failure("UNAVAILABLE", "not_ready", "in an hour", retry_seconds=3600)]) as server:
        with pytest.raises(ServiceError, match="in an hour") as caught:
            connect(server.address).solve("solve", PATIENCE)
        assert caught.value.retry_seconds == 3600


def test_a_stream_that_has_yielded_nothing_is_tried_again(connect):
    with failing_server([BUSY, LOADING]) as server:
        events = list(connect(server.address, retry=FAST).solve_stream("solve", PATIENCE))
        assert [type(event) for event in events] == [Started, Finished]
        assert len(server.arrivals) == 3


def test_a_stream_that_has_begun_is_not_tried_again(connect):
    with failing_server([LOADING], events=1) as server:
        events = connect(server.address, retry=FAST).solve_stream("solve", PATIENCE)
        assert isinstance(next(events), Started)
        with pytest.raises(ServiceError, match="loading"):
            next(events)
        assert len(server.arrivals) == 1


def test_many_searches_are_tried_again_each_by_itself(connect):
    with failing_server([BUSY] * 3) as server:
        results = connect(server.address, retry=FAST).solve_many(["solve"] * 5, concurrency=2)
        assert len(results) == 5
        assert len(server.arrivals) == 8


def test_server_info_is_tried_again_and_health_asks_once(start, connect, caplog):
    server = start()
    server.call(server.server.stop())
    client = connect(server.address, retry=RetryPolicy(attempts=3, first_delay=0.01))
    for call, retries in ((client.server_info, 2), (client.health, 0)):
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "espalier.client"), pytest.raises(ServiceError, match="no server"):
            call()
        assert len(caplog.records) == retries


def test_a_server_that_starts_later_is_found(start, connect, caplog):
    first = start()
    port = int(first.address.rpartition(":")[2])
    client = connect(first.address, retry=RetryPolicy(attempts=50, first_delay=0.05, largest_delay=0.2))
    assert client.solve("solve", PATIENCE).answer == "42"
    first.call(first.server.stop())
    with caplog.at_level(logging.DEBUG, "espalier.client"), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.solve, "solve", PATIENCE)
        wait_until(lambda: len(caplog.records) >= 2)
        start(ScriptedOrchestrator, port=port)
        assert answer.result(PATIENCE).answer == "42"


def test_a_session_is_opened_again_until_the_server_has_a_place():
    with failing_server([LOADING, BUSY]) as server, SearchClient(server.address, retry=FAST) as client:
        with client.score_session("solve", PATIENCE) as session:
            assert session.score("a step").score == 0.5
        assert session.close().stop_reason is StopReason.FINISHED
        assert min(waits(server)) >= 0.2
        assert len({each["x-request-id"] for each in server.metadata}) == 1


def test_a_session_whose_first_write_fails_is_opened_again():
    soon = Failure("RESOURCE_EXHAUSTED", "busy", "the server is busy", retry_seconds=0.001)
    policy = RetryPolicy(attempts=17, first_delay=0.001, largest_delay=0.01)
    with failing_server([soon] * 16, unread=True) as server, SearchClient(server.address, retry=policy) as client:
        with client.score_session("solve", PATIENCE) as session:
            assert session.score("a step").score == 0.5
        assert len(server.arrivals) == 17


def test_a_session_that_stays_refused_is_given_up():
    with failing_server([BROKEN]) as server, SearchClient(server.address, retry=FAST) as client:
        with pytest.raises(ServiceError, match="internal error, id=1"):
            client.score_session("solve", PATIENCE)
        assert len(server.arrivals) == 1
