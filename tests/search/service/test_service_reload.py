"""Reloads as callers ask for them: who may, from where, one at a time, and what they are told."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from callers_files import callers_file
from exposition import scrape
from raw_client import bearer, raw_stub
from scripted_orchestrator import DIGESTS, SECRET, ScriptedOrchestrator
from server_thread import PATIENCE, ServerThread, wait_until

from espalier.engine.errors import InvalidRequestError
from espalier.search.client import NO_RETRIES, SearchClient, ServiceError
from espalier.search.service.reload import checkpoint_below
from espalier.v1 import search_pb2 as pb

Start = Callable[..., ServerThread]
NEW = "ef" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of checkpoints by the names that the scripted orchestrator knows."""
    folder = tmp_path / "weights"
    for name in ("new", "bad", "bug", "slow", "die"):
        (folder / name).mkdir(parents=True)
    return folder


def post(server: ServerThread, body: Any, **headers: str) -> httpx2.Response:
    with httpx2.Client(base_url=server.url or "", timeout=PATIENCE, trust_env=False, headers=headers) as client:
        return client.post("/v1/reload", json=body)


def code_of(client: SearchClient, path: str) -> tuple[str, str]:
    with pytest.raises((ServiceError, InvalidRequestError)) as caught:
        client.reload(path, PATIENCE)
    error: Any = caught.value
    return getattr(error, "code", "INVALID_ARGUMENT"), str(error)


def test_both_endpoints_reload_and_everything_that_tells_of_the_weights_follows(
    start: Start, folder: Path, fake: ScriptedOrchestrator
):
    server = start(http_port=0, reload_folder=folder)
    with SearchClient(server.address) as client, httpx2.Client(base_url=server.url or "", trust_env=False) as web:
        assert web.get("/v1/models").json()["data"][0]["digest"] == DIGESTS["generator"]
        done = client.reload("new", PATIENCE)
        assert (done.digest, done.digest_before) == (NEW, DIGESTS["generator"])
        assert 0 < done.seconds < PATIENCE
        assert client.server_info().models["generator"] == NEW
        assert {model["digest"] for model in web.get("/v1/models").json()["data"]} == {NEW}
        assert web.get("/v1/models/espalier").json()["digest"] == NEW
        assert scrape(server).series("espalier_build_info", "generator") == {NEW[:12]: 1.0}
        answer = post(server, {"path": "./new/"}).json()
        assert (answer["digest"], answer["digest_before"]) == (NEW, NEW)
    assert fake.reloaded == [str(folder / "new")] * 2


def test_searches_go_on_while_weights_are_loaded(start: Start, folder: Path, fake: ScriptedOrchestrator):
    server = start(reload_folder=folder)
    with SearchClient(server.address) as client, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(client.reload, "slow", PATIENCE)
        assert fake.preparing.wait(PATIENCE)
        assert client.solve("solve").answer == "42"
        assert client.health()
        assert not fake.reloaded
        fake.release.set()
        assert slow.result(PATIENCE).digest == NEW


def test_a_second_reload_is_refused_while_one_goes_on_and_one_whose_caller_left_goes_on(
    start: Start, folder: Path, fake: ScriptedOrchestrator
):
    server = start(reload_folder=folder)
    with SearchClient(server.address, retry=NO_RETRIES) as client:
        with raw_stub(server.address) as stub:
            call = stub.Reload.future(pb.ReloadRequest(path="slow"), timeout=PATIENCE)
            assert fake.preparing.wait(PATIENCE)
            code, text = code_of(client, "new")
            assert (code, "already" in text) == ("RESOURCE_EXHAUSTED", True)
            call.cancel()
        assert code_of(client, "new")[0] == "RESOURCE_EXHAUSTED"
        fake.release.set()
        wait_until(lambda: fake.reloaded == [str(folder / "slow")])
        wait_until(lambda: server.info().models["generator"] == NEW)
        assert client.reload("new", PATIENCE).digest_before == NEW


def test_without_a_folder_nobody_reloads(start: Start, fake: ScriptedOrchestrator):
    server = start(http_port=0)
    with SearchClient(server.address) as client:
        code, text = code_of(client, "/")
        assert (code, "--reload-folder" in text) == ("UNIMPLEMENTED", True)
    response = post(server, {"path": "new"})
    assert (response.status_code, response.json()["error"]["code"]) == (405, "not_offered")
    assert not fake.preparing.is_set()


@pytest.mark.parametrize("path", ["", "nothing", "..", "new/../../other", "/", "link", "loop", "new\0", "n" * 5000])
def test_a_path_must_lead_to_a_checkpoint_below_the_folder(path: str, folder: Path, start: Start, fake: Any):
    (folder.parent / "other").mkdir()
    (folder / "link").symlink_to(folder.parent / "other")
    (folder / "loop").symlink_to(folder / "loop")
    with pytest.raises(InvalidRequestError) as caught:
        checkpoint_below(folder, path)
    assert str(folder.parent) not in str(caught.value)
    server = start(reload_folder=folder)
    with SearchClient(server.address) as client:
        code, text = code_of(client, path)
    assert code == "INVALID_ARGUMENT"
    assert str(folder.parent) not in text
    assert not fake.preparing.is_set()


def test_what_a_checkpoint_holds_are_files_below_the_folder(folder: Path, tmp_path: Path):
    (outside := tmp_path / "secret.json").write_text("{}")
    new = folder / "new"
    (new / "model.safetensors").touch()
    (new / "config.json").symlink_to(new / "model.safetensors")
    assert checkpoint_below(folder, "new") == new, "links that stay below are followed, as of a cache of the hub"
    for name, make, why in (
        ("a", lambda path: path.symlink_to(outside), "'a' is a link out of --reload-folder"),
        ("b", lambda path: path.symlink_to("/dev/zero"), "'b' is a link out of --reload-folder"),
        ("c", lambda path: path.symlink_to(tmp_path), "'c' is a link out of --reload-folder"),
        ("d", os.mkfifo, "'d' is no file"),
        ("e", lambda path: path.symlink_to(new / "nowhere"), "'e' is no file"),
        ("f", lambda path: path.symlink_to(path), "is no path"),
    ):
        make(new / name)
        with pytest.raises(InvalidRequestError, match=why) as caught:
            checkpoint_below(folder, "new")
        assert str(tmp_path) not in str(caught.value)
        (new / name).unlink()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_the_server_may_not_read_is_refused(folder: Path):
    (folder / "new").chmod(0)
    with pytest.raises(InvalidRequestError, match="may not read"):
        checkpoint_below(folder, "new")


def test_a_link_below_the_folder_and_an_absolute_path_lead_to_checkpoints(folder: Path):
    (folder / "latest").symlink_to(folder / "new")
    (folder / "one.gguf").touch()
    for path in ("new", "latest", str(folder / "new"), "bad/../new"):
        assert checkpoint_below(folder, path) == folder / "new"
    assert checkpoint_below(folder, "one.gguf") == folder / "one.gguf"


def test_what_is_refused_says_why_without_the_servers_paths(start: Start, folder: Path, fake: Any):
    server = start(http_port=0, reload_folder=folder)
    with SearchClient(server.address) as client:
        code, text = code_of(client, "bad")
        assert code == "INVALID_ARGUMENT"
        assert "path: bad differs from the generator in more than its weights: its tokenizer" in text
        code, text = code_of(client, "bug")
        assert (code, SECRET in text) == ("INTERNAL", False)
        assert client.reload("new", PATIENCE).digest_before == DIGESTS["generator"], "the old weights had stayed"
    error = post(server, {"path": "bad"}).json()["error"]
    assert (error["param"], str(folder) in error["message"]) == ("path", False)
    for body in ({}, {"path": 3}, {"path": "new", "force": True}, []):
        assert post(server, body).status_code == 400


class Panic(BaseException):
    """As libraries in Rust raise it."""


def test_a_panic_while_weights_are_read_ends_that_reload_alone(
    start: Start, folder: Path, fake: Any, monkeypatch: pytest.MonkeyPatch
):
    def panic(_: str) -> str:
        raise Panic(SECRET)

    server = start(reload_folder=folder)
    with SearchClient(server.address, retry=NO_RETRIES) as client:
        with monkeypatch.context() as patched:
            patched.setattr(fake, "prepare_reload", panic)
            code, text = code_of(client, "new")
            assert (code, SECRET in text) == ("INTERNAL", False)
        assert client.reload("new", PATIENCE).digest == NEW


def test_a_panic_while_a_request_is_checked_ends_that_call_alone(
    start: Start, fake: Any, monkeypatch: pytest.MonkeyPatch
):
    def panic(_: Any) -> None:
        raise Panic(SECRET)

    server = start()
    with SearchClient(server.address, retry=NO_RETRIES) as client:
        with monkeypatch.context() as patched:
            patched.setattr(fake, "check", panic)
            with pytest.raises(ServiceError, match="internal error") as caught:
                client.solve("solve", PATIENCE)
            assert SECRET not in str(caught.value)
        assert client.solve("solve", PATIENCE).answer == "42"


def test_an_engine_that_dies_of_it_ends_the_call(start: Start, folder: Path):
    server = start(reload_folder=folder)
    with SearchClient(server.address, retry=NO_RETRIES) as client:
        code_of(client, "die")
        wait_until(lambda: not client.health())
        assert code_of(client, "new")[0] == "UNAVAILABLE"


def test_a_server_that_stops_does_not_wait_for_a_reload(start: Start, folder: Path, fake: ScriptedOrchestrator):
    server = start(reload_folder=folder)
    with SearchClient(server.address, retry=NO_RETRIES) as client, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(code_of, client, "slow")
        assert fake.preparing.wait(PATIENCE)
        assert server.call(server.server.stop())
        assert slow.result(PATIENCE)[0] == "UNAVAILABLE"
    fake.release.set()


def test_a_login_needs_the_right_to_reload_and_keeps_its_quota(start: Start, folder: Path, tmp_path: Path, fake: Any):
    callers = callers_file(tmp_path, ann="may_reload = true\nmax_searches = 1", bob="may_reload = false", carl="")
    server = start(http_port=0, callers=callers, reload_folder=folder)
    with raw_stub(server.address) as stub, ThreadPoolExecutor(1) as pool:

        def code(who: str) -> str:
            call = stub.Reload.future(pb.ReloadRequest(path="new"), metadata=bearer(who), timeout=PATIENCE)
            return "OK" if call.exception(PATIENCE) is None else call.code().name

        assert [code(who) for who in ("ann", "bob", "carl", "eve")] == [
            "OK",
            "PERMISSION_DENIED",
            "PERMISSION_DENIED",
            "UNAUTHENTICATED",
        ]
        hold = pb.SolveProblemRequest(problem="hold")
        held = pool.submit(stub.SolveProblem, hold, metadata=bearer("ann"), timeout=PATIENCE)
        fake.submitted.get(timeout=PATIENCE)
        assert code("ann") == "RESOURCE_EXHAUSTED"
        fake.release.set()
        held.result(PATIENCE)
        assert code("ann") == "OK"
    response = post(server, {"path": "new"}, authorization="Bearer bob")
    assert (response.status_code, response.json()["error"]["code"]) == (403, "permission_denied")
    assert "may_reload = true" in response.json()["error"]["message"]
    assert post(server, {"path": "new"}, authorization="Bearer ann").status_code == 200
    assert post(server, {"path": "new"}).status_code == 401
    assert len(fake.reloaded) == 3
