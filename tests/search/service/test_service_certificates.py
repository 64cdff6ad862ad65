"""Who gets in by a client's certificate, at both endpoints, when what decides it changes under a running server."""

import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme
from server_thread import PATIENCE, ServerThread, wait_until

ASK = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def guarded(start: Callable[..., ServerThread], tmp_path: Path, authority: trustme.CA) -> Callable[..., ServerThread]:
    """Starts a server with both endpoints that asks for certificates of `authority`."""

    def start_server(**settings: object) -> ServerThread:
        issued = authority.issue_cert("127.0.0.1")
        (tmp_path / "server.pem").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        (tmp_path / "server.key").write_bytes(issued.private_key_pem.bytes())
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        files = {"tls_certificate": "server.pem", "tls_key": "server.key", "tls_client_ca": "ca.pem"}
        given = {name: tmp_path / file for name, file in files.items()}
        return start(http_port=0, **given, **settings)

    return start_server


class Client:
    """A TLS client with a certificate, which resumes its last session with a port wherever the port lets it."""

    def __init__(self, server: ServerThread, authority: trustme.CA, name: str) -> None:
        self._ports = {"http": urlsplit(server.url or "").port, "grpc": int(server.address.rpartition(":")[2])}
        self.context = ssl.create_default_context()
        authority.configure_trust(self.context)
        authority.issue_cert("client.test", common_name=name).configure_cert(self.context)
        self.session: ssl.SSLSession | None = None
        self.resumed: bool | None = False

    def says(self, endpoint: str) -> bytes:
        """What the port says to a request; nothing if it refuses the connection."""
        self.context.set_alpn_protocols(["h2"] if endpoint == "grpc" else ["http/1.1"])
        try:
            with (
                socket.create_connection(("127.0.0.1", self._ports[endpoint]), PATIENCE) as plain,
                self.context.wrap_socket(plain, server_hostname="127.0.0.1", session=self.session) as connection,
            ):
                connection.sendall(H2_PREFACE if endpoint == "grpc" else ASK)
                said = connection.recv(65536)
                self.session, self.resumed = connection.session, connection.session_reused
                return said
        except (ssl.SSLError, ConnectionError):
            return b""


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["tls1.2", "tls1.3"])
@pytest.mark.parametrize("endpoint", ["http", "grpc"])
def test_no_session_outlives_the_authority_that_its_client_was_verified_by(
    endpoint: str, version: ssl.TLSVersion, guarded, tmp_path: Path, authority: trustme.CA
):
    client = Client(guarded(), authority, "ann")
    client.context.maximum_version = version
    assert client.says(endpoint)
    assert client.says(endpoint)
    if endpoint == "http":
        assert client.resumed, "else this test shows nothing"
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    assert client.session
    assert not client.says(endpoint)


def test_a_caller_who_is_deleted_from_the_file_is_locked_out(guarded, tmp_path: Path, authority: trustme.CA):
    callers = tmp_path / "callers.toml"
    callers.write_text("[ann]\n[bob]\nmax_searches = 1\n")
    bob = Client(guarded(callers=callers), authority, "bob")
    assert bob.says("http").startswith(b"HTTP/1.1 200")
    callers.write_text("[ann]\n")
    assert bob.says("http").startswith(b"HTTP/1.1 401")


def test_a_certificate_cannot_forge_lines_of_the_log(guarded, authority: trustme.CA, caplog):
    eve = Client(guarded(), authority, "eve\nrequest_id=r1 caller=ann method=SolveProblem code=OK")
    with caplog.at_level(logging.INFO, "espalier.access"):
        assert eve.says("http").startswith(b"HTTP/1.1 401")
        wait_until(lambda: len(caplog.records) == 1)
    assert "caller=None" in caplog.records[0].getMessage()
    assert "ann" not in caplog.text
