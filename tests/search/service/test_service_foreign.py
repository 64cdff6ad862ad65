"""Clients of other languages, made from the contract or by reflection: Node's grpc-js, and buf. Needs node and npm."""

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import trustme
from server_thread import ServerThread

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent / "foreign"
PROTO = Path(__file__).parents[3] / "proto"
SECONDS = 120
PINGS_SECONDS = 16
"""Long enough for three pings, of which a server with gRPC's own limits would end the connection."""


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the client and its packages."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("foreign")
    for name in ("package.json", "client.js"):
        shutil.copyfile(HERE / name, folder / name)
    command = [npm, "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
    installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    if installed.returncode:
        pytest.skip(f"npm could not install the clients: {installed.stderr[-300:]}")
    return folder


@pytest.fixture
def load() -> Callable[[], Any] | None:
    """What the server loads; None for the scripted orchestrator."""
    return None


@pytest.fixture
def server(start, tmp_path: Path, load: Callable[[], Any] | None) -> ServerThread:
    """A server with a certificate for localhost and one caller, ann, whose token is `token`."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    files = {"tls_certificate": tmp_path / "server.pem", "tls_key": tmp_path / "server.key"}
    files["tls_certificate"].write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    files["tls_key"].write_bytes(issued.private_key_pem.bytes())
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    callers = tmp_path / "callers.toml"
    callers.write_text(f'[ann]\ntoken_sha256 = "{sha256(b"token").hexdigest()}"\n')
    running = start(load, **files, callers=callers)
    running.wait_loaded()
    return running


@pytest.fixture
def node(packages: Path, server: ServerThread, tmp_path: Path) -> Callable[..., Any]:
    """Calls the server by grpc-js, and returns what it printed."""

    def call(how: str, problem: str = "solve", token: str = "token") -> Any:
        settings = {"address": f"localhost:{server.address.rpartition(':')[2]}", "ca": str(tmp_path / "ca.pem")}
        settings |= {"proto": str(PROTO / "espalier/v1/search.proto"), "how": how, "problem": problem, "token": token}
        command = ["node", "client.js", json.dumps(settings)]
        ran = subprocess.run(command, cwd=packages, capture_output=True, text=True, timeout=SECONDS)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    return call


def test_grpc_js_gets_an_answer_over_tls_with_a_token(node):
    assert node("unary") == {"answer": "42", "reason": "STOP_REASON_FINISHED"}


def test_grpc_js_is_told_what_is_wrong_with_details(node):
    refused = node("unary", token="other")
    assert (refused["code"], refused["text"]) == ("UNAUTHENTICATED", "the token is unknown to this server")
    assert node("unary", problem="pool") | {"text": ""} == {"code": "INVALID_ARGUMENT", "text": "", "details": 1}


def test_grpc_js_follows_a_stream(node):
    assert node("stream") == {"events": ["started", "step", "step", "candidate", "result"]}


def test_a_call_that_grpc_js_cancels_or_that_runs_out_of_time_ends_on_the_server(node, fake):
    cancelled = node("cancel", problem="hold")
    assert (cancelled["code"], cancelled["events"]) == ("CANCELLED", ["started"])
    assert fake.cancelled.get(timeout=SECONDS)
    assert node("deadline", problem="hold")["code"] == "DEADLINE_EXCEEDED"
    assert fake.cancelled.get(timeout=SECONDS)


def test_grpc_js_keeps_a_silent_search_by_pings(node, fake):
    threading.Timer(PINGS_SECONDS, fake.release.set).start()
    assert node("patience", problem="hold")["answer"] == "42"


class TestSessionsOfScores:
    """Over a real engine."""

    @pytest.fixture
    def load(self, make_orchestrator: Callable[..., Any]) -> Callable[[], Any]:
        made = make_orchestrator()
        return lambda: made

    def test_grpc_js_has_steps_scored_as_they_come(self, node):
        told = node("session", problem="Tom starts with 38 coins.")
        assert [each["node"] for each in told["scores"]] == [1, 2, 3]
        assert all(0 <= each["score"] <= 1 for each in told["scores"])
        assert told["reason"] == "STOP_REASON_FINISHED"
        assert told["nodes"] == 3


@pytest.fixture
def buf(packages: Path, server: ServerThread, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Calls a method of the server by `buf curl`, which learns of it by reflection."""

    def call(*arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
        login = "authorization: Bearer token"
        options = ["--protocol", "grpc", "--cacert", str(tmp_path / "ca.pem"), "-H", login, "--reflect-header", login]
        url = f"https://localhost:{server.address.rpartition(':')[2]}{path}"
        command = [packages / "node_modules/.bin/buf", "curl", *options, *arguments, url]
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ})

    return call


def test_buf_learns_of_the_methods_by_reflection_and_calls_them(buf):
    listed = buf("--list-methods").stdout.split()
    methods = [f"espalier.v1.SearchService/{name}" for name in ("GetServerInfo", "SolveProblem", "SolveProblemStream")]
    assert set(methods) < set(listed)
    assert json.loads(buf(path=f"/{methods[0]}").stdout)["maxQueue"] == 64
    answer = buf("-d", '{"problem": "solve"}', path=f"/{methods[1]}")
    assert json.loads(answer.stdout)["result"]["answer"] == "42", answer.stderr
    stream = buf("-d", '{"request": {"problem": "solve"}}', path=f"/{methods[2]}").stdout
    assert stream.index('"started"') < stream.index('"step"') < stream.index('"candidate"') < stream.index('"result"')
    refused = buf("-d", '{"problem": "x", "beamWidth": 1000}', path=f"/{methods[1]}")
    assert json.loads(refused.stderr)["code"] == "invalid_argument"


def test_buf_finds_nothing_wrong_with_the_contract(packages: Path):
    ran = subprocess.run([packages / "node_modules/.bin/buf", "lint"], cwd=PROTO, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "")


def test_the_example_of_the_contracts_readme_runs_as_it_stands(packages: Path, start: Callable[..., ServerThread]):
    code = re.findall(r"```js\n(.*?)```", (PROTO / "README.md").read_text(), re.DOTALL)[0]
    (packages / "example.js").write_text(code.replace("127.0.0.1:50051", start().address))
    environment = os.environ | {"NODE_PATH": str(packages / "node_modules")}
    command = ["node", packages / "example.js"]
    ran = subprocess.run(command, cwd=PROTO.parent, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert (ran.returncode, ran.stdout) == (0, "42\n"), ran.stderr
