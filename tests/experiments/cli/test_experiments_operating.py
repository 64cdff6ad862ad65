"""`espalier health`, `espalier token`, and `espalier doctor` about a server."""

import json
import os
import socket
import stat
import tomllib
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import trustme
from scripted_orchestrator import NAMES, ScriptedOrchestrator
from server_thread import ServerThread

from espalier.experiments.cli.operating.doctor import server_findings
from espalier.search.request import SearchRequest
from espalier.search.service import errors
from espalier.search.service.access.callers import CallerEntry, Callers, CallersFileError, add_caller
from espalier.search.service.errors import BusyError
from espalier.search.service.settings import ServerSettings


@pytest.fixture
def server():
    """A server without an engine."""
    running = ServerThread(ScriptedOrchestrator, ServerSettings(port=0))
    running.wait_loaded()
    yield running
    running.close()


# ---- health


def test_a_server_that_serves_is_healthy(server: ServerThread, espalier):
    assert espalier("health", "--endpoint", server.address) == (0, f"{server.address}: serving\n", "")


def test_a_server_that_is_not_there_or_drains_is_not(server: ServerThread, espalier):
    server.call(server.server.drain())
    for endpoint, why in ((server.address, "loading or draining"), ("127.0.0.1:9", "no server at 127.0.0.1:9")):
        ran = espalier("health", "--endpoint", endpoint)
        assert (ran.code, ran.err) == (1, "")
        assert ran.out.startswith(f"{endpoint}: not serving: ")
        assert why in ran.out


def test_health_is_asked_of_this_machine_where_nothing_else_is_said(server: ServerThread, espalier, monkeypatch):
    monkeypatch.setenv("ESPALIER_PORT", server.address.rpartition(":")[2])
    assert espalier("health").code == 0
    monkeypatch.setenv("ESPALIER_PORT", "9")
    assert "127.0.0.1:9" in espalier("health").out


def test_info_is_a_table_or_json(server: ServerThread, espalier):
    shown = espalier("health", "--info", "--endpoint", server.address).out
    assert "blocks of the generator   0 live, 3 cached, 7 free" in shown
    assert "calls admitted            0 of 32" in shown
    assert "generator                 org/talker (abababababab…)" in shown
    values = json.loads(espalier("health", "--info", "--json", "--endpoint", server.address).out)
    assert (values["serving"], values["endpoint"]) == (True, server.address)
    assert values["info"]["model_names"] == NAMES
    assert values["info"]["occupancy"]["kv_blocks"]["generator"] == {"live": 0, "cached": 3, "free": 7}
    server.call(server.server.drain())
    values = json.loads(espalier("health", "--info", "--json", "--endpoint", server.address).out)
    assert values["serving"] is False
    assert "info" not in values


def test_a_server_is_healthy_also_for_who_may_not_see_more(espalier, tmp_path):
    (tmp_path / "callers.toml").write_text("")
    running = ServerThread(ScriptedOrchestrator, ServerSettings(port=0, callers=tmp_path / "callers.toml"))
    running.wait_loaded()
    ran = espalier("health", "--info", "--endpoint", running.address)
    assert (ran.code, ran.err) == (0, "")
    assert "serving\nit does not say more: this server needs a login" in ran.out
    values = json.loads(espalier("health", "--info", "--json", "--endpoint", running.address).out)
    assert values["serving"]
    assert "needs a login" in values["info_problem"]
    running.close()


# ---- logins of `solve` and `health`


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--token-file", "{0}/missing"), "--token-file: cannot read"),
        (("--token-file", "{0}/empty"), "is empty"),
        (("--tls-ca", "{0}/missing"), "no certificates of authorities in"),
        (("--client-certificate", "{0}/empty"), "given together"),
    ],
)
def test_a_login_that_cannot_be_used_is_refused(arguments: tuple, why: str, espalier, tmp_path):
    (tmp_path / "empty").touch()
    ran = espalier("health", *(argument.format(tmp_path) for argument in arguments))
    assert (ran.code, ran.out) == (2, "")
    assert why in ran.err


def test_a_token_is_not_sent_to_others_in_the_clear(espalier, monkeypatch):
    monkeypatch.setenv("ESPALIER_TOKEN", "my-secret")
    for command in (("health",), ("solve", "1+1?")):
        ran = espalier(*command, "--endpoint", "example.org:50051")
        assert ran.code == 2
        assert "--insecure-token" in ran.err
        assert "my-secret" not in ran.err


def test_a_wait_for_a_server_is_shown(espalier, server, monkeypatch):
    busy = BusyError("the server is busy; try again later")
    monkeypatch.setattr(errors, "_CODES", ((BusyError, "RESOURCE_EXHAUSTED", 1.0),))
    failures = [busy]

    real = ScriptedOrchestrator.check

    def check(executor: ScriptedOrchestrator, request: SearchRequest) -> SearchRequest:
        if failures:
            raise failures.pop()
        return real(executor, request)

    monkeypatch.setattr(ScriptedOrchestrator, "check", check)
    ran = espalier("solve", "solve", "--endpoint", server.address)
    assert ran.code == 0
    assert ran.err.startswith("the server is busy; try again later; attempt 2 of 4 in 1.")


@pytest.mark.parametrize("option", [("--token-file", "t"), ("--tls",), ("--timeout", 3), ("--priority", 1)])
def test_what_only_a_server_would_hear_of_is_refused_without_one(option: tuple, espalier):
    ran = espalier("solve", "1+1?", *option)
    assert (ran.code, ran.err) == (2, f"error: {option[0]}: only for a server's searches; give --endpoint\n")


# ---- token


def test_a_token_is_printed_once_and_its_hash_is_kept(espalier, tmp_path):
    file = tmp_path / "callers.toml"
    limits = ("--max-searches", 4, "--tokens-per-minute", 1000, "--max-priority", 7)
    ran = espalier("token", "ann", "--callers", file, *limits)
    assert ran.code == 0
    token = ran.out.strip()
    assert len(token) > 40
    assert "not shown again" in ran.err
    assert token not in ran.err + file.read_text()
    entry = {"token_sha256": sha256(token.encode()).hexdigest()}
    assert tomllib.loads(file.read_text()) == {
        "ann": {**entry, "max_searches": 4, "tokens_per_minute": 1000, "max_priority": 7}
    }
    caller = Callers(file).identify(f"Bearer {token}", "host")
    assert (caller.name, caller.max_searches) == ("ann", 4)


def test_the_file_of_callers_may_come_from_the_environment_as_for_serve(espalier, tmp_path, monkeypatch):
    monkeypatch.setenv("ESPALIER_CALLERS", str(tmp_path / "callers.toml"))
    assert espalier("token", "ann").code == 0
    assert (tmp_path / "callers.toml").exists()


def test_a_name_that_is_taken_is_refused_unless_it_is_to_be_replaced(espalier, tmp_path):
    file = tmp_path / "callers.toml"
    first = espalier("token", "ann", "--callers", file, "--max-searches", 4).out.strip()
    before = file.read_text()
    refused = espalier("token", "ann", "--callers", file)
    assert (refused.code, refused.out) == (2, "")
    assert "ann exists" in refused.err
    assert file.read_text() == before
    second = espalier("token", "ann", "--callers", file, "--replace").out.strip()
    assert Callers(file).identify(f"Bearer {second}", "host").max_searches is None
    assert sha256(first.encode()).hexdigest() not in file.read_text()


def test_other_callers_and_comments_stay_as_they_are(tmp_path):
    file = tmp_path / "callers.toml"
    old = f'# who may call\n[bob] # of sales\ntoken_sha256 = "{"ab" * 32}"\nmax_searches = 3 # few\n'
    file.write_text(old)
    add_caller(file, "ann.b@x-1", CallerEntry())
    assert file.read_text().startswith(old)
    assert set(tomllib.loads(file.read_text())) == {"bob", "ann.b@x-1"}


@pytest.mark.parametrize(
    ("mode", "kept"), [(None, 0o600), (0o600, 0o600), (0o640, 0o640), (0o644, 0o640), (0o666, 0o640), (0o400, 0o600)]
)
def test_nobody_else_can_read_the_file_but_a_group_that_could_before(mode: int | None, kept: int, tmp_path):
    file = tmp_path / "callers.toml"
    if mode is not None:
        file.touch()
        file.chmod(mode)
    add_caller(file, "ann", CallerEntry())
    assert stat.S_IMODE(file.stat().st_mode) == kept


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_server_that_runs_as_another_user_can_still_read_its_file(tmp_path):
    file = tmp_path / "callers.toml"
    file.touch()
    os.chown(file, 1234, 1235)
    add_caller(file, "ann", CallerEntry())
    assert (file.stat().st_uid, file.stat().st_gid) == (1234, 1235)


def test_a_link_to_the_file_stays_a_link(tmp_path):
    link = tmp_path / "callers.toml"
    (tmp_path / "real").mkdir()
    link.symlink_to(tmp_path / "real" / "callers.toml")
    add_caller(link, "ann", CallerEntry())
    assert link.is_symlink()
    assert "ann" in (tmp_path / "real" / "callers.toml").read_text()


@pytest.mark.parametrize("name", ["", "a b", "[x]", "-x", 'a"', "x" * 65, "å"])
def test_a_name_that_logs_could_not_show_is_refused(name: str, tmp_path):
    with pytest.raises(CallersFileError, match="no name of a caller"):
        add_caller(tmp_path / "callers.toml", name, CallerEntry())
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_wrong_is_told_and_left_alone(espalier, tmp_path):
    file = tmp_path / "callers.toml"
    for text, why in (("[ann", "cannot be read"), ("[ann]\ntokens = 3\n", "tokens is unknown")):
        file.write_text(text)
        ran = espalier("token", "bob", "--callers", file)
        assert ran.code == 2
        assert why in ran.err
        assert file.read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["callers.toml"]


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "callers.toml"
    add_caller(file, "ann", CallerEntry())
    before = file.read_text()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CallersFileError, match="No space left"):
        add_caller(file, "bob", CallerEntry())
    assert file.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["callers.toml"]


def test_callers_that_are_added_at_the_same_time_are_all_there(tmp_path):
    file = tmp_path / "callers.toml"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: add_caller(file, f"caller-{number}", CallerEntry()), range(24)))
    assert len(tomllib.loads(file.read_text())) == 24


@pytest.mark.parametrize("limit", ["--max-searches", "--tokens-per-minute"])
def test_a_limit_out_of_range_is_refused_by_its_flag(limit: str, espalier, tmp_path):
    ran = espalier("token", "ann", "--callers", tmp_path / "callers.toml", limit, 0)
    assert (ran.code, ran.err) == (2, f"error: {limit}: must be at least 1, is 0\n")


# ---- doctor


def found(name: str, **settings: Any) -> Any:
    (finding,) = (each for each in server_findings(ServerSettings(**settings)) if each.name.startswith(name))
    return finding


def test_doctor_tells_whether_a_port_is_free():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        busy = found("port", port=port)
        assert (busy.fatal, "another --port" in busy.advice) == (False, True)
    assert found("port", port=port).advice == ""
    far = found("port", port=0, metrics_port=port, metrics_host="203.0.113.1", insecure_bind=True)
    assert "another --metrics-port" in far.advice, "it is tried on its own address, which is not this machine's"
    assert [each.name for each in server_findings(ServerSettings(port=0))] == ["open files"]


def test_doctor_tells_how_many_connections_the_file_limit_allows(monkeypatch):
    limits = [1024, 1024]
    monkeypatch.setattr("resource.getrlimit", lambda _: tuple(limits))
    assert found("open files").value == "1024, 768 connections"
    assert "LimitNOFILE" in found("open files").advice
    assert "--max-connections 5000" in found("open files", max_connections=5000).advice
    for limits[:], told in (
        ((1024, 524_288), "16384, 12288 connections"),
        ((1024, -1), "16384, 12288 connections"),
        ((65_536, 65_536), "65536, 49152 connections"),
        ((-1, -1), "any, 65536 connections"),
    ):
        assert (found("open files").value, found("open files").advice) == (told, "")


@pytest.fixture
def certificate(tmp_path: Path):
    """Makes a server's certificate."""

    def make(**given: Any) -> dict[str, Path]:
        issued = trustme.CA().issue_cert("espalier.example.org", **given)
        files = {"tls_certificate": tmp_path / "server.pem", "tls_key": tmp_path / "server.key"}
        files["tls_certificate"].write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        files["tls_key"].write_bytes(issued.private_key_pem.bytes())
        files["tls_key"].chmod(0o600)
        return files

    return make


def test_doctor_reads_the_certificate(certificate):
    from datetime import UTC, datetime, timedelta

    good = found("certificate", **certificate())
    assert (good.advice, good.fatal) == ("", False)
    assert good.value.startswith("for espalier.example.org, until ")
    soon = found("certificate", **certificate(not_after=datetime.now(UTC) + timedelta(days=5, hours=1)))
    assert (soon.advice, soon.fatal) == ("ends in 5 days", False)
    over = found("certificate", **certificate(not_after=datetime.now(UTC) - timedelta(days=1)))
    assert (over.fatal, "expired" in over.advice) == (True, True)


def test_doctor_tells_of_a_key_that_is_not_the_certificates_or_that_others_can_read(certificate, tmp_path):
    files = certificate()
    files["tls_key"].chmod(0o644)
    assert "may read its key" in found("certificate", **files).advice
    other = tmp_path / "other.key"
    files["tls_key"].rename(other)
    other_key = certificate()["tls_key"]
    assert other_key.exists()
    wrong = found("certificate", tls_certificate=files["tls_certificate"], tls_key=other)
    assert (wrong.fatal, "cannot be used together" in wrong.advice) == (True, True)


def test_doctor_reads_the_callers_file(tmp_path):
    file = tmp_path / "callers.toml"
    assert found("callers", callers=file).fatal
    file.touch()
    assert "nobody can log in" in found("callers", callers=file).advice
    add_caller(file, "ann", CallerEntry())
    file.chmod(0o604)
    assert "chmod o=" in found("callers", callers=file).advice
    file.chmod(0o600)
    assert found("callers", callers=file).value.startswith("1 in ")


def test_doctor_takes_the_options_of_serve_and_fails_where_serve_would(espalier, tmp_path):
    config = tmp_path / "server.toml"
    config.write_text(f'[server]\nport = 0\ncallers = "{tmp_path}/missing.toml"\n[models]\ngenerator = "no/such"\n')
    ran = espalier("doctor", "--config", config)
    assert ran.code == 1
    assert "✗ callers" in ran.out
    assert "– no/such" in ran.out
    assert ran.err.startswith("error: callers: ")
