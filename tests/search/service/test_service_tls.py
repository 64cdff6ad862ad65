"""TLS of the server's ports, with real clients."""

from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from raw_client import raw_stub
from server_thread import PATIENCE, ServerThread

from espalier.search.service.access.watched_files import TlsError
from espalier.search.service.settings import ServerSettings, SettingsError
from espalier.v1 import search_pb2 as pb

ASK = pb.SolveProblemRequest(problem="solve")


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def write(folder: Path, authority: trustme.CA, name: str = "server") -> dict[str, Path]:
    """Files of a certificate for this machine, as settings of a server."""
    issued = authority.issue_cert("127.0.0.1", "localhost", common_name=name)
    files = {"tls_certificate": folder / f"{name}.pem", "tls_key": folder / f"{name}.key"}
    chain = issued.cert_chain_pems
    files["tls_certificate"].write_bytes(b"".join(pem.bytes() for pem in chain))
    files["tls_key"].write_bytes(issued.private_key_pem.bytes())
    return files


def trusting(authority: trustme.CA, client: dict[str, Path] | None = None) -> grpc.ChannelCredentials:
    roots = authority.cert_pem.bytes()
    if client is None:
        return grpc.ssl_channel_credentials(roots)
    return grpc.ssl_channel_credentials(roots, client["tls_key"].read_bytes(), client["tls_certificate"].read_bytes())


def answer(server: ServerThread, credentials: grpc.ChannelCredentials | None, **metadata: str) -> str:
    with raw_stub(server.address, credentials) as stub:
        return stub.SolveProblem(ASK, timeout=PATIENCE, metadata=tuple(metadata.items())).result.answer


def test_a_server_with_a_certificate_speaks_tls_only(start, tmp_path, authority):
    server = start(**write(tmp_path, authority))
    assert answer(server, trusting(authority)) == "42"
    for credentials in (None, trusting(trustme.CA())):
        with pytest.raises(grpc.RpcError) as caught:
            answer(server, credentials)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNAVAILABLE


def test_a_certificate_that_changes_is_served_to_the_next_connection(start, tmp_path, authority, caplog):
    server = start(**write(tmp_path, authority))
    other = trustme.CA()
    (tmp_path / "server.key").write_text("nonsense")
    assert answer(server, trusting(authority)) == "42"
    assert "the certificate read before stays" in caplog.text
    write(tmp_path, other)
    assert answer(server, trusting(other)) == "42"
    with pytest.raises(grpc.RpcError):
        answer(server, trusting(authority))


def test_a_clients_certificate_is_its_login(start, tmp_path, authority, fake):
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    callers = tmp_path / "callers.toml"
    callers.write_text("[ann]\nmax_priority = 9\n[bob]\n")
    server = start(**write(tmp_path, authority), tls_client_ca=tmp_path / "ca.pem", callers=callers)
    ann, bob = (trusting(authority, write(tmp_path, authority, name)) for name in ("ann", "bob"))
    with raw_stub(server.address, ann) as stub:
        first, second = (stub.SolveProblem(ASK, timeout=PATIENCE).result.search_id for _ in range(2))
        high = pb.SolveProblemRequest(problem="solve", priority=9)
        assert stub.SolveProblem(high, timeout=PATIENCE).result.answer == "42"
    with raw_stub(server.address, bob) as stub:
        third = stub.SolveProblem(ASK, timeout=PATIENCE).result.search_id
        callers.write_text("[ann]\n")
        with pytest.raises(grpc.RpcError) as caught:
            stub.SolveProblem(ASK, timeout=PATIENCE)
        locked_out: Any = caught.value
        assert locked_out.code() is grpc.StatusCode.UNAUTHENTICATED
    salts = [fake.options[search].salt for search in (first, second, third)]
    assert salts[0] == salts[1] != salts[2]
    stranger = trusting(authority, write(tmp_path, trustme.CA(), "eve"))
    for credentials in (trusting(authority), stranger):
        with pytest.raises(grpc.RpcError) as caught:
            answer(server, credentials)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNAVAILABLE, "the handshake fails"


def test_files_that_do_not_belong_together_are_refused_at_start(start, tmp_path, authority):
    files = write(tmp_path, authority)
    write(tmp_path, authority, "other")
    with pytest.raises(TlsError, match=r"--tls-certificate.*cannot be used together"):
        start(**{**files, "tls_key": tmp_path / "other.key"})
    with pytest.raises(TlsError, match=r"--tls-client-ca.*cannot be used"):
        start(**files, tls_client_ca=tmp_path / "missing.pem")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tls_certificate": Path("a")}, "given together"),
        ({"tls_client_ca": Path("a")}, "needs --tls-certificate"),
        ({"host": "0.0.0.0", "callers": Path("a")}, "without encryption;"),
        ({"host": "0.0.0.0", "tls_certificate": Path("a"), "tls_key": Path("b")}, "without login;"),
        ({"host": "0.0.0.0"}, "without encryption or login;"),
    ],
)
def test_settings_that_leave_a_server_open_or_incomplete_are_refused(given: dict[str, Any], why: str):
    with pytest.raises(SettingsError, match=why):
        ServerSettings(**given)


def test_other_machines_may_reach_a_server_with_tls_and_login():
    files = {"tls_certificate": Path("a"), "tls_key": Path("b")}
    assert not ServerSettings(host="0.0.0.0", callers=Path("c"), **files).exposed
    assert not ServerSettings(host="0.0.0.0", tls_client_ca=Path("c"), **files).exposed


def test_an_exposed_server_warns_at_its_start(start, caplog):
    start(host="0.0.0.0", insecure_bind=True)
    assert "reachable from other machines without encryption or login" in caplog.text
