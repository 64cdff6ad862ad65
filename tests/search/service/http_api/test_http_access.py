"""Who may call over HTTP: tokens, certificates, pages of this and other origins; the page; the log."""

import logging
import ssl
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import trustme
from callers_files import callers_file
from scripted_orchestrator import ScriptedOrchestrator
from server_thread import PATIENCE, wait_until

from espalier.search.client import SearchClient
from espalier.search.request import SearchRequest
from espalier.search.service.errors import BindError
from espalier.search.service.model_names import short_name
from espalier.search.service.page.files import page_files
from espalier.search.service.server import serve as run_server
from espalier.search.service.settings import ServerSettings, SettingsError

CHAT = "/v1/chat/completions"
ASK = {"model": "espalier", "messages": [{"role": "user", "content": "solve"}]}


# ---- callers


def test_a_caller_is_the_same_at_both_endpoints(serve, http, fake):
    server = serve(share_prompts=True)
    http(server).post(CHAT, json=ASK)
    with SearchClient(server.address) as client:
        client.solve(SearchRequest("solve"), PATIENCE)
    assert len({options.salt for options in fake.options.values()}) == 1


def test_user_identifies_nobody(serve, http, fake):
    client = http(serve(share_prompts=True))
    for user in ("ann", "bob"):
        client.post(CHAT, json={**ASK, "user": user})
    assert len({options.salt for options in fake.options.values()}) == 1


def test_a_forwarded_address_is_not_believed(serve, http, fake, caplog):
    with caplog.at_level(logging.INFO, "espalier.access"):
        http(serve()).post(CHAT, json=ASK, headers={"x-forwarded-for": "10.9.8.7", "forwarded": "for=10.9.8.7"})
        wait_until(lambda: len(caplog.records) == 1)
    assert "caller=127.0.0.1 " in caplog.text


def test_a_token_brings_its_callers_limits(serve, chat, tmp_path):
    server = serve(callers=callers_file(tmp_path, ann="max_priority = 5"))
    client = chat(server, api_key="ann")
    asked = {**ASK, "extra_body": {"espalier": {"priority": 5}}}
    assert client.chat.completions.create(**asked).espalier["answer"] == "42"
    with pytest.raises(openai.BadRequestError, match="between -100 and 5 for you, is 6"):
        client.chat.completions.create(**{**asked, "extra_body": {"espalier": {"priority": 6}}})


def test_each_call_has_one_line_without_its_texts(serve, http, tmp_path, caplog):
    client = http(serve(callers=callers_file(tmp_path, ann="")), headers={"authorization": "Bearer ann"})
    with caplog.at_level(logging.INFO, "espalier.access"):
        response = client.post(CHAT, json=ASK, headers={"x-request-id": "r1"})
        assert response.headers["x-request-id"] == "r1"
        client.get("/healthz")
        client.get("/readyz")
        client.get("/v1/models/espalier@auto")
        client.get("/v1/nonsense%0aforged=line")
        client.request("FORGED", "/v1/server")
        wait_until(lambda: len(caplog.records) == 4)
    lines = [record.getMessage() for record in caplog.records]
    assert "request_id=r1 caller=ann method=POST /v1/chat/completions code=OK" in lines[0]
    assert "stop_reason=finished" in lines[0]
    assert "method=GET /v1/models/{model} code=OK" in lines[1]
    assert "method=GET unknown path code=NOT_FOUND" in lines[2]
    assert "method=other /v1/server code=UNIMPLEMENTED" in lines[3]
    assert not any(text in caplog.text for text in ("solve", "boxed", "forged", "FORGED"))


# ---- TLS


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def write(folder: Path, authority: trustme.CA, name: str) -> dict[str, Path]:
    """Files of a certificate for this machine, as settings of a server."""
    issued = authority.issue_cert("127.0.0.1", common_name=name)
    files = {"tls_certificate": folder / f"{name}.pem", "tls_key": folder / f"{name}.key"}
    files["tls_certificate"].write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    files["tls_key"].write_bytes(issued.private_key_pem.bytes())
    return files


def trusting(authority: trustme.CA, client: dict[str, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if client:
        context.load_cert_chain(client["tls_certificate"], client["tls_key"])
    return context


def test_with_a_certificate_http_is_https_with_it(serve, http, tmp_path, authority):
    server = serve(**write(tmp_path, authority, "server"))
    assert server.url.startswith("https://127.0.0.1:")
    assert http(server, verify=trusting(authority)).post(CHAT, json=ASK).status_code == 200
    with pytest.raises(httpx2.ConnectError):
        http(server, verify=trusting(trustme.CA())).get("/healthz")
    plain = http(server)
    plain.base_url = server.url.replace("https", "http")
    with pytest.raises(httpx2.TransportError):
        plain.get("/healthz")
    write(tmp_path, other := trustme.CA(), "server")
    assert http(server, verify=trusting(other)).get("/healthz").status_code == 200, "the files are read again"


def test_a_clients_certificate_is_its_login(serve, http, tmp_path, authority, fake):
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    callers = callers_file(tmp_path, ann="max_priority = 9", bob="")
    server = serve(**write(tmp_path, authority, "server"), tls_client_ca=tmp_path / "ca.pem", callers=callers)
    ann, bob = (http(server, verify=trusting(authority, write(tmp_path, authority, name))) for name in ("ann", "bob"))
    high = {**ASK, "espalier": {"priority": 9}}
    assert [ann.post(CHAT, json=high).status_code for _ in range(2)] == [200, 200]
    assert [bob.post(CHAT, json=asked).status_code for asked in (high, ASK)] == [400, 200]
    first, second, third = (options.salt for options in fake.options.values())
    assert first == second != third
    for stranger in (trusting(authority), trusting(authority, write(tmp_path, trustme.CA(), "eve"))):
        with pytest.raises(httpx2.TransportError):
            http(server, verify=stranger).post(CHAT, json=ASK)


# ---- pages of other origins


def refused(client: httpx2.Client, **headers: str) -> bool:
    statuses = {client.get("/v1/models", headers=headers).status_code}
    statuses.add(client.post(CHAT, json=ASK, headers=headers).status_code)
    assert statuses in ({200}, {403})
    return statuses == {403}


def test_a_name_that_only_resolves_to_this_machine_is_refused(serve, http, tmp_path):
    server = serve()
    client, port = http(server), server.url.rpartition(":")[2]
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "10.0.0.1",
    ):
        assert refused(client, host=host)
        assert refused(client, host=host, origin=f"http://{host}"), "a page that was loaded under the name"
        assert client.get("/healthz", headers={"host": host}).status_code == 200
    for host in (f"127.0.0.1:{port}", "localhost", f"LOCALHOST:{port}", "[::1]:80"):
        assert not refused(client, host=host)
    server = serve(ScriptedOrchestrator, callers=callers_file(tmp_path, ann=""))
    server.wait_loaded()
    guarded = http(server, headers={"authorization": "Bearer ann"})
    assert not refused(guarded, host="espalier.example"), "a page does not have the token"


def test_a_page_of_another_origin_may_not_call(serve, http):
    server = serve()
    client, own = http(server), server.url
    for origin in ("https://evil.example", "null", own + "1", own.replace("127.0.0.1", "localhost"), "file://", "x"):
        assert refused(client, origin=origin)
    assert not refused(client, origin=own)
    response = client.post(CHAT, json=ASK, headers={"origin": own})
    assert not [name for name in response.headers if name.startswith("access-control")]
    simple = client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})
    assert simple.status_code == 415, "what a form of any page could send"


def test_the_operator_may_let_the_pages_of_one_origin_call(serve, http):
    friend = {"origin": "https://chat.example.org"}
    client = http(serve(cors_origin=friend["origin"]))
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
    allowed = client.options(CHAT, headers={**friend, **asking})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == friend["origin"]
    assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]
    for response in (client.post(CHAT, json=ASK, headers=friend), client.post(CHAT, json={}, headers=friend)):
        assert response.headers["access-control-allow-origin"] == friend["origin"]
        assert "x-request-id" in response.headers["access-control-expose-headers"]
    assert refused(client, origin="https://evil.example")
    assert client.options(CHAT, headers={"origin": "https://evil.example", **asking}).status_code == 400


# ---- the page


def test_the_page_needs_no_login_and_may_only_use_this_server(serve, http, tmp_path, caplog):
    client = http(serve(callers=callers_file(tmp_path, ann="")))
    with caplog.at_level(logging.INFO, "espalier.access"):
        index = client.get("/")
        script = client.get("/tree.js")
    assert index.content == page_files(asks_token=True)["/"].content
    assert script.headers["content-type"].partition(";")[0] == "text/javascript"
    for response in (index, script):
        policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == "'self'"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
    assert caplog.records == []
    assert client.get("/tree.js", headers={"if-none-match": script.headers["etag"]}).status_code == 304
    assert client.post("/v1/searches", json={"problem": "solve"}).status_code == 401


@pytest.mark.parametrize(
    "path", ["/files.py", "/README.md", "/..%2fsettings.py", "/%2e%2e/settings.py", "//etc/passwd", "/x.js", "/tree"]
)
def test_nothing_but_the_pages_files_is_served(path: str, serve, http):
    response = http(serve()).get(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


def test_the_page_cannot_be_posted_to(serve, http):
    assert http(serve()).post("/tree.js").status_code == 405


# ---- settings and addresses


def test_a_server_without_an_http_port_has_grpc_alone(start):
    assert start().url is None


def test_a_port_in_use_is_told_by_its_flag_before_anything_loads(serve, fake):
    taken = int(serve().url.rpartition(":")[2])

    def load() -> Any:
        raise AssertionError("it loads")

    with pytest.raises(BindError, match=f"cannot listen on 127.0.0.1:{taken}: .*--http-port"):
        run_server(load, ServerSettings(port=0, http_port=taken))


def test_both_endpoints_listen_on_an_address_of_the_other_kind(serve, http):
    server = serve(host="::1")
    assert server.url.startswith("http://[::1]:")
    assert http(server).post(CHAT, json=ASK).status_code == 200


def test_two_servers_in_one_process_are_apart(serve, http):
    one, two = serve(model_name="one"), serve(model_name="two")
    for server, name in ((one, "one"), (two, "two")):
        assert http(server).get("/v1/models").json()["data"][0]["id"] == name


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"http_port": -1}, "--http-port must be between 0 and 65535"),
        ({"model_name": "a@b"}, "--model-name must be"),
        ({"model_name": ""}, "--model-name must be"),
        ({"cors_origin": "*"}, "--cors-origin must be like"),
        ({"cors_origin": "https://a.example/"}, "--cors-origin must be like"),
        ({"cors_origin": "null"}, "--cors-origin must be like"),
        ({"http_port": 0, "host": "0.0.0.0"}, "without encryption or login"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], why: str):
    with pytest.raises(SettingsError, match=why):
        ServerSettings(**given)


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ("demo-generator", "demo-generator"),
        ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen2.5-1.5B-Instruct"),
        ("Qwen/Qwen2.5-1.5B-Instruct@main", "Qwen2.5-1.5B-Instruct"),
        ("org/some-GGUF:Q4_K_M", "some-GGUF"),
        ("models/some.gguf", "some"),
        ("my models/größe 7/", "gr-e-7"),
        (".", "espalier"),
        ("/", "espalier"),
    ],
)
def test_a_generator_has_a_short_name(checkpoint: str, name: str):
    assert short_name(checkpoint) == name
    ServerSettings(model_name=name)
