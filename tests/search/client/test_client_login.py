"""Tokens, certificates and encryption of clients, and what is refused."""

from hashlib import sha256
from pathlib import Path

import pytest
import trustme
from failing_server import failing_server
from server_thread import PATIENCE, ServerThread

from espalier.search.client import NO_RETRIES, ConnectionSettingsError, SearchClient, ServiceError, Tls
from espalier.search.client.connection import Connection, host_of, system_roots


class Files:
    """Certificates of two authorities, only one of which is meant to be trusted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authorities = {"ca": trustme.CA(), "other": trustme.CA()}
        for name, authority in self.authorities.items():
            (folder / f"{name}.pem").write_bytes(authority.cert_pem.bytes())

    def __getitem__(self, name: str) -> Path:
        return self.folder / name

    def issue(self, name: str, *hosts: str, by: str = "ca") -> dict[str, Path]:
        issued = self.authorities[by].issue_cert(*hosts, common_name=name)
        pair = {"certificate": self[f"{name}.pem"], "key": self[f"{name}.key"]}
        pair["certificate"].write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        pair["key"].write_bytes(issued.private_key_pem.bytes())
        return pair


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def serve(start, files: Files):
    """Starts a server with a certificate for `host`."""

    def serve(host: str = "127.0.0.1", **settings) -> ServerThread:
        own = files.issue("server", host)
        return start(tls_certificate=own["certificate"], tls_key=own["key"], **settings)

    return serve


# ---- tokens


def test_a_token_is_a_login_on_every_method(start, tmp_path, connect):
    callers = tmp_path / "callers.toml"
    callers.write_text(f'[ann]\ntoken_sha256 = "{sha256(b"her-token").hexdigest()}"\n')
    server = start(callers=callers)
    ann, eve = connect(server.address, token="her-token"), connect(server.address, token="other")
    assert ann.solve("solve", PATIENCE).answer == "42"
    assert len(list(ann.solve_stream("solve", PATIENCE))) > 2
    assert ann.solve_many(["solve"])[0].answer == "42"
    assert ann.server_info().max_queue
    for call in (lambda: eve.solve("solve"), lambda: list(eve.solve_stream("solve")), eve.server_info):
        with pytest.raises(ServiceError, match="unknown") as caught:
            call()
        assert caught.value.code == "UNAUTHENTICATED"
    assert eve.health(), "asking for health needs no login"


def test_a_connection_shows_its_token_to_nobody():
    assert "my-secret" not in repr(Connection("127.0.0.1:50051", "my-secret"))


def test_without_a_token_no_login_is_sent(connect):
    with failing_server([]) as server:
        connect(server.address).solve("solve", PATIENCE)
        assert "authorization" not in server.metadata[0]


@pytest.mark.parametrize("endpoint", ["10.0.0.7:50051", "example.org:443", "[2001:db8::1]:50051"])
def test_a_token_does_not_go_to_another_machine_in_the_clear_unless_that_is_wanted(endpoint: str):
    with pytest.raises(ConnectionSettingsError, match="without encryption"):
        Connection(endpoint, "token")
    assert Connection(endpoint, "token", insecure_token=True).login
    assert Connection(endpoint, "token", Tls()).login
    assert not Connection(endpoint).login


@pytest.mark.parametrize("endpoint", ["127.0.0.1:50051", "localhost:50051", "[::1]:50051"])
def test_a_token_may_go_to_this_machine_in_the_clear(endpoint: str):
    assert Connection(endpoint, "token").login == (("authorization", "Bearer token"),)


@pytest.mark.parametrize("token", ["", "two words", "line\n", "snö"])
def test_a_token_that_cannot_be_sent_is_refused_without_showing_it(token: str):
    with pytest.raises(ConnectionSettingsError, match="printable ASCII") as caught:
        SearchClient("127.0.0.1:50051", token=token)
    assert token == "" or token not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["", "host", "host:", ":1", "host:0", "host:65536", "::1:1", "dns:///host:1"])
def test_an_endpoint_is_a_host_and_a_port(endpoint: str, connect):
    assert host_of(endpoint) is None
    with pytest.raises(ConnectionSettingsError, match="HOST:PORT"):
        connect(endpoint)


# ---- TLS


def test_a_server_is_trusted_by_its_authority(serve, files, connect):
    client = connect(serve().address, tls=Tls(files["ca.pem"]))
    assert client.solve("solve", PATIENCE).answer == "42"
    assert client.health()


def test_a_certificate_for_another_name_is_trusted_only_under_that_name(serve, files, connect):
    server = serve("example.org")
    named = connect(server.address, tls=Tls(files["ca.pem"], server_name="example.org"))
    assert named.solve("solve", PATIENCE).answer == "42"
    with pytest.raises(ServiceError, match="for another name; give that name"):
        connect(server.address, tls=Tls(files["ca.pem"]), retry=NO_RETRIES).solve("solve", PATIENCE)


@pytest.mark.parametrize(
    ("client", "why"),
    [
        (lambda files: Tls(files["other.pem"]), "by no authority that is trusted"),
        (lambda files: True, "by no authority that is trusted"),
        (lambda files: False, "ends each connection: either one of the two sides uses TLS"),
    ],
    ids=["other authority", "system", "no TLS"],
)
def test_a_connection_that_fails_says_what_does_not_fit(client, why: str, serve, files, connect):
    with pytest.raises(ServiceError, match=why) as caught:
        connect(serve().address, tls=client(files), retry=NO_RETRIES).solve("solve", PATIENCE)
    assert caught.value.code == "UNAVAILABLE"


def test_tls_to_a_server_without_it_says_what_does_not_fit(start, files, connect):
    with pytest.raises(ServiceError, match="ends each connection: either one of the two sides uses TLS"):
        connect(start().address, tls=Tls(files["ca.pem"]), retry=NO_RETRIES).solve("solve", PATIENCE)


def test_a_clients_certificate_is_shown_where_it_is_asked_for(serve, files, connect):
    server = serve(tls_client_ca=files["ca.pem"])
    ann = connect(server.address, tls=Tls(files["ca.pem"], **files.issue("ann")))
    assert ann.solve("solve", PATIENCE).answer == "42"
    for tls in (Tls(files["ca.pem"]), Tls(files["ca.pem"], **files.issue("eve", by="other"))):
        with pytest.raises(ServiceError, match="the server asks for a client's certificate"):
            connect(server.address, tls=tls, retry=NO_RETRIES).solve("solve", PATIENCE)


@pytest.mark.parametrize("place", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
def test_what_the_system_trusts_is_trusted(place: str, serve, files, connect, monkeypatch, tmp_path):
    trusted = tmp_path / "trusted"
    trusted.mkdir()
    (trusted / "0a1b2c3d.0").write_bytes(files["ca.pem"].read_bytes())
    monkeypatch.setenv("SSL_CERT_FILE", str(files["ca.pem"] if place == "SSL_CERT_FILE" else tmp_path / "missing"))
    monkeypatch.setenv("SSL_CERT_DIR", str(trusted if place == "SSL_CERT_DIR" else tmp_path / "missing"))
    assert system_roots() == files["ca.pem"].read_bytes()
    assert connect(serve().address, tls=True).solve("solve", PATIENCE).answer == "42"


def test_a_system_without_certificates_leaves_the_choice_to_grpc(monkeypatch, tmp_path):
    for place in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.setenv(place, str(tmp_path / "missing"))
    assert system_roots() is None


def test_files_that_cannot_be_used_are_refused_by_name_before_any_call(files):
    own, other = files.issue("ann"), files.issue("bob")
    files["empty.pem"].touch()
    for tls, why in (
        (Tls(files["missing.pem"]), "missing.pem"),
        (Tls(files["empty.pem"]), "empty.pem"),
        (Tls(certificate=own["certificate"]), "given together"),
        (Tls(certificate=own["certificate"], key=other["key"]), "cannot be used together"),
        (Tls(certificate=own["certificate"], key=files["missing.key"]), "missing.key"),
    ):
        with pytest.raises(ConnectionSettingsError, match=why):
            SearchClient("127.0.0.1:50051", tls=tls)
