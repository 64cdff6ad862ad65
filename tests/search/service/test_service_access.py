"""Who calls, what they may take, and what is written down about it; with real clients where a client sees it."""

import json
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

import grpc
import pytest
from callers_files import callers_file
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from raw_client import NO_PROXY, bearer, raw_stub
from server_thread import PATIENCE, ServerThread, wait_until

from espalier.search.service.access.callers import Caller, Callers, CallersFileError, Quotas, Salts
from espalier.search.service.access.calls import AccessLog, Call, request_id_of
from espalier.search.service.errors import QuotaError, UnauthenticatedError
from espalier.search.service.settings import LogFormat
from espalier.v1 import search_pb2 as pb


def ask(problem: str = "solve", **fields: Any) -> pb.SolveProblemRequest:
    return pb.SolveProblemRequest(problem=problem, **fields)


# ---- identity


@pytest.mark.parametrize(
    ("address", "host"),
    [("::ffff:10.0.0.1", "10.0.0.1"), ("10.0.0.1", "10.0.0.1"), ("2001:db8::1", "2001:db8::1"), ("unix:", "unix:")],
)
def test_a_host_is_one_caller_whichever_way_its_address_is_written(address: str, host: str):
    assert Callers(None).identify(None, address).name == host


def test_without_logins_a_caller_is_its_host():
    callers = Callers(None)
    assert callers.identify(None, "ipv4:10.0.0.1") == Caller("ipv4:10.0.0.1")
    assert callers.identify("Bearer anything", "ipv4:10.0.0.1") == Caller("ipv4:10.0.0.1")


def test_a_token_is_its_callers_login_with_limits(tmp_path):
    callers = Callers(callers_file(tmp_path, ann="max_searches = 2\nmax_priority = 7", bob="tokens_per_minute = 50"))
    assert callers.identify("Bearer ann", "host") == Caller("ann", True, max_searches=2, max_priority=7)
    assert callers.identify("bearer bob", "host") == Caller("bob", True, tokens_per_minute=50)


@pytest.mark.parametrize("login", [None, "", "Bearer", "Bearer ", "Bearer eve", "Basic ann", "ann", "Bearer \udcff"])
def test_without_a_known_token_nobody_gets_in(login: str | None, tmp_path):
    callers = Callers(callers_file(tmp_path, ann="", cert="") if login != "Bearer " else callers_file(tmp_path, ann=""))
    with pytest.raises(UnauthenticatedError):
        callers.identify(login, "host")


def test_a_caller_without_a_token_has_a_certificate_only(tmp_path):
    file = tmp_path / "callers.toml"
    file.write_text("[ann]\nmax_searches = 3\n")
    callers = Callers(file, certificates=True)
    assert callers.identify(None, "host", "ann") == Caller("ann", True, max_searches=3)
    for login in ("Bearer ", "Bearer", "Bearer ann"):
        with pytest.raises(UnauthenticatedError):
            callers.identify(login, "host", "ann")


def test_a_certificate_whose_name_is_not_in_the_callers_file_or_no_more_is_refused(tmp_path):
    file = tmp_path / "callers.toml"
    file.write_text("[ann]\n[bob]\nmax_searches = 3\n")
    callers = Callers(file, certificates=True)
    assert callers.identify(None, "host", "bob").max_searches == 3
    file.write_text("[ann]\n")
    for name in ("bob", "carl"):
        with pytest.raises(UnauthenticatedError):
            callers.identify(None, "host", name)
    assert callers.identify(None, "host", "ann") == Caller("ann", True)


@pytest.mark.parametrize("name", ["ann\ncode=OK", "ann\x1b[2J", "\u202enna", "ann\x00", "a\u2028b", "a\x85b"])
def test_a_name_with_control_characters_is_nobodys(name: str, tmp_path):
    with pytest.raises(UnauthenticatedError) as caught:
        Callers(None, certificates=True).identify(None, "host", name)
    assert name not in str(caught.value)
    (tmp_path / "callers.toml").write_text(f"[{json.dumps(name)}]\nmax_searches = 1\n")
    with pytest.raises(CallersFileError, match="control characters"):
        Callers(tmp_path / "callers.toml")


def test_the_callers_file_is_read_again_when_it_changes_and_a_broken_one_is_not_taken(tmp_path, caplog):
    callers = Callers(callers_file(tmp_path, ann=""))
    callers_file(tmp_path, bob="max_searches = 1")
    assert callers.identify("Bearer bob", "host").max_searches == 1
    with pytest.raises(UnauthenticatedError):
        callers.identify("Bearer ann", "host")
    (tmp_path / "callers.toml").write_text("[bob\n")
    assert callers.identify("Bearer bob", "host").name == "bob"
    assert "the callers read before stay" in caplog.text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[ann", "cannot be read"),
        ("ann = 3", "ann is no table"),
        ("[ann]\nmax_searches = 0", "max_searches must be at least 1"),
        ("[ann]\nmax_priority = 101", "max_priority must be between -100 and 100"),
        ("[ann]\ntokens = 3", "tokens is unknown"),
        ('[ann]\ntoken_sha256 = "abc"', "64 digits"),
        (f'[bob]\n[ann]\ntoken_sha256 = "{sha256(b"").hexdigest()}"', r"\[ann\]: .*empty token"),
    ],
)
def test_a_callers_file_that_is_wrong_says_where(text: str, why: str, tmp_path):
    (tmp_path / "callers.toml").write_text(text)
    with pytest.raises(CallersFileError, match=why) as caught:
        Callers(tmp_path / "callers.toml")
    assert "--callers" in str(caught.value)


def test_salts_are_shared_by_a_login_and_by_a_host_only_if_that_is_wanted():
    ann, host = Caller("ann", login=True), Caller("host")
    salts, sharing = Salts(), Salts(share_by_host=True)
    assert len(salts.of(ann)) == 32
    assert salts.of(ann) == salts.of(ann)
    assert salts.of(host) != salts.of(host)
    assert sharing.of(host) == sharing.of(host)
    assert sharing.of(host) != sharing.of(Caller("host", login=True)), "nobody gets a host's salt by a name"
    assert salts.of(ann) != Salts().of(ann), "the key is the process's own"


# ---- a server with logins


@pytest.fixture
def guarded(start, tmp_path) -> ServerThread:
    file = callers_file(tmp_path, ann="max_searches = 1\nmax_priority = 5", bob="tokens_per_minute = 1")
    return start(callers=file, max_searches=4)


def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    def whole() -> None:
        result = call()
        if hasattr(result, "__iter__"):
            list(result)

    with pytest.raises(grpc.RpcError) as caught:
        whole()
    error: Any = caught.value
    return error.code(), error.details()


@pytest.mark.parametrize("metadata", [(), bearer("eve"), (("authorization", "ann"),)], ids=str)
def test_everything_but_health_needs_a_login(metadata: tuple, guarded: ServerThread, fake):
    reflected = reflection_pb2.ServerReflectionRequest(list_services="")
    with grpc.insecure_channel(guarded.address, options=NO_PROXY) as channel, raw_stub(guarded.address) as stub:
        reflect: Any = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        health: Any = health_pb2_grpc.HealthStub(channel)
        for call in (
            lambda: stub.SolveProblem(ask(), metadata=metadata, timeout=PATIENCE),
            lambda: stub.SolveProblemStream(pb.SolveProblemStreamRequest(), metadata=metadata, timeout=PATIENCE),
            lambda: stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=metadata, timeout=PATIENCE),
            lambda: stub.Reload(pb.ReloadRequest(path="new"), metadata=metadata, timeout=PATIENCE),
            lambda: reflect(iter([reflected]), metadata=metadata, timeout=PATIENCE),
        ):
            code, text = refusal(call)
            assert code is grpc.StatusCode.UNAUTHENTICATED
            assert "eve" not in text
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE).status
        assert stub.SolveProblem(ask(), metadata=bearer("ann"), timeout=PATIENCE).result.answer == "42"
    assert len(fake.options) == 1


def test_a_caller_may_ask_for_her_own_highest_priority(guarded: ServerThread):
    with raw_stub(guarded.address) as stub:
        assert stub.SolveProblem(ask(priority=5), metadata=bearer("ann"), timeout=PATIENCE).result.answer
        code, _ = refusal(lambda: stub.SolveProblem(ask(priority=6), metadata=bearer("ann"), timeout=PATIENCE))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        code, _ = refusal(lambda: stub.SolveProblem(ask(priority=1), metadata=bearer("bob"), timeout=PATIENCE))
        assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_a_caller_has_no_more_searches_in_progress_than_she_may(guarded: ServerThread, fake):
    with raw_stub(guarded.address) as stub, ThreadPoolExecutor(1) as pool:
        held = pool.submit(stub.SolveProblem, ask("hold"), metadata=bearer("ann"), timeout=PATIENCE)
        fake.submitted.get(timeout=PATIENCE)
        code, text = refusal(lambda: stub.SolveProblem(ask(), metadata=bearer("ann"), timeout=PATIENCE))
        assert (code, "1 searches in progress" in text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        assert stub.SolveProblem(ask(), metadata=bearer("bob"), timeout=PATIENCE).result.answer
        fake.release.set()
        held.result(PATIENCE)
        assert stub.SolveProblem(ask(), metadata=bearer("ann"), timeout=PATIENCE).result.answer


def test_a_caller_who_has_taken_a_minutes_tokens_is_told_when_there_are_more(guarded: ServerThread):
    with raw_stub(guarded.address) as stub:
        first = stub.SolveProblem(ask(), metadata=bearer("bob"), timeout=PATIENCE).result.usage
        taken = first.generated_tokens + first.verifier_tokens
        with pytest.raises(grpc.RpcError) as caught:
            stub.SolveProblem(ask(), metadata=bearer("bob"), timeout=PATIENCE)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = error_details_pb2.RetryInfo()
    assert rpc_status.from_call(error).details[0].Unpack(retry)
    assert 60 * (taken - 1) <= retry.retry_delay.ToSeconds() + 1 <= 60 * (taken + 1), "one token a minute comes back"


def test_a_crowd_of_one_caller_waits_its_turn_and_makes_room_for_another(start, tmp_path, fake):
    server = start(callers=callers_file(tmp_path, crowd="", other=""), max_searches=1, max_queue=64)
    with raw_stub(server.address) as stub:

        def call(problem: str, who: str) -> Any:
            return stub.SolveProblem.future(ask(problem), timeout=PATIENCE, metadata=bearer(who))

        calls = [call("hold", "crowd")]
        wait_until(lambda: server.info().admitted_calls == 1)
        calls.append(call("hold", "other"))
        wait_until(lambda: server.info().admitted_calls == 2)  # each has a share of the slot
        calls += [call("solve", "crowd") for _ in range(64)]
        wait_until(lambda: server.info().waiting_calls == 64)
        calls.append(call("solve", "other"))
        wait_until(lambda: sum(each.done() for each in calls) == 1)  # the newest of the crowd made room
        (refused,) = [each for each in calls if each.done()]
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        fake.release.set()
        assert calls[-1].result(PATIENCE).result.answer == "42"
        for each in calls:
            each.exception(PATIENCE)
    salts = [fake.options[fake.submitted.get_nowait()].salt for _ in range(66)]
    assert len(set(salts)) == 2
    assert salts[1] in salts[2:4], "the other caller's search is one of the next two"


# ---- quotas on plain data


def test_tokens_come_back_evenly_and_no_more_than_a_minutes():
    now = [0.0]
    quotas, bob = Quotas(clock=lambda: now[0]), Caller("bob", True, tokens_per_minute=600)

    def refused() -> float | None:
        try:
            with quotas.call(bob):
                return None
        except QuotaError as error:
            return error.retry_seconds

    assert refused() is None
    quotas.take(bob, 700)
    assert refused() == pytest.approx(10.1)
    now[0] = 10.0
    assert refused() == pytest.approx(0.1)
    now[0] = 10.2
    assert refused() is None
    now[0] = 1000.0
    quotas.take(bob, 601)
    assert refused() == pytest.approx(0.2), "an hour without calls saves up one minute's tokens"


def test_a_call_that_fails_is_in_progress_no_more():
    quotas, ann = Quotas(), Caller("ann", True, max_searches=1)
    for _ in range(3):
        with pytest.raises(QuotaError), quotas.call(ann), quotas.call(ann):
            pass


# ---- request ids and the access log


@pytest.mark.parametrize(
    ("given", "kept"), [("abc-1", True), ("", False), (None, False), ("a" * 129, False), ("a b", False)]
)
def test_a_request_id_is_kept_if_it_is_short_and_printable(given: str | None, kept: bool):
    assert (request_id_of(given) == given) == kept
    assert request_id_of(given)


@pytest.mark.parametrize("problem", ["solve", "pool"])
def test_a_callers_request_id_comes_back_and_a_missing_one_is_made(problem: str, start):
    with raw_stub(start().address) as stub:
        for given in ((("x-request-id", "mine"),), ()):
            call = stub.SolveProblem.future(ask(problem), metadata=given, timeout=PATIENCE)
            call.exception(PATIENCE)
            (echoed,) = [value for name, value in call.trailing_metadata() if name == "x-request-id"]
            assert echoed == "mine" if given else re.fullmatch("[0-9a-f]{32}", echoed)


@pytest.mark.parametrize("form", list(LogFormat))
def test_each_call_has_one_line_without_its_problem_or_answer(form: LogFormat, start, tmp_path, caplog):
    server = start(callers=callers_file(tmp_path, ann=""), log_format=form)
    with caplog.at_level(logging.INFO, "espalier.access"), raw_stub(server.address) as stub:
        meta = (*bearer("ann"), ("x-request-id", "r1"))
        stub.SolveProblem(ask(), metadata=meta, timeout=PATIENCE)
        refusal(lambda: stub.SolveProblem(ask(), timeout=PATIENCE))
        wait_until(lambda: len(caplog.records) == 2)
    good, bad = (record.getMessage() for record in caplog.records)
    if form is LogFormat.JSON:
        fields = json.loads(good)
        wanted = {
            "request_id": "r1",
            "caller": "ann",
            "method": "SolveProblem",
            "code": "OK",
            "stop_reason": "finished",
        }
        assert wanted.items() <= fields.items()
        assert fields["generated_tokens"] > 0
        assert json.loads(bad)["code"] == "UNAUTHENTICATED"
    else:
        assert "request_id=r1 caller=ann method=SolveProblem code=OK" in good
        assert "code=UNAUTHENTICATED" in bad
    assert "solve" not in good.replace("SolveProblem", "")
    assert "42" not in re.sub(r'seconds\S+ \S+|"time": \S+', "", good).replace("search_id", "")


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("ann", "caller=ann "),
        ("Größe", "caller=Größe "),
        ("Ann code=OK", r'caller="Ann code=OK" '),
        ("a\nb", r'caller="a\nb" '),
        ('"', r'caller="\"" '),
    ],
)
def test_a_callers_name_stays_one_field_of_one_line(name: str, written: str, caplog):
    with caplog.at_level(logging.INFO, "espalier.access"):
        AccessLog(LogFormat.TEXT).call_ended(Call("SolveProblem", "r", caller=Caller(name, login=True)))
    (record,) = caplog.records
    assert f" {written}method=" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_flood_of_refusals_writes_few_lines_and_the_next_second_tells_how_many_were_left_out(caplog):
    now = [0.0]
    log = AccessLog(LogFormat.TEXT, clock=lambda: now[0])
    with caplog.at_level(logging.INFO, "espalier.access"):
        for _ in range(1000):
            log.call_ended(Call("SolveProblem", "r", code="INVALID_ARGUMENT"))
        few = len(caplog.records)
        now[0] = 1.0
        log.call_ended(Call("SolveProblem", "r", code="INVALID_ARGUMENT"))
    assert few == 10
    assert "left_out=990" in caplog.records[-1].getMessage()
