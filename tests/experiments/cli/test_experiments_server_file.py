"""A server started with the example file, and what an operator and a caller do with it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from readme_files import ROOT

EXAMPLE = ROOT / "experiments" / "deploy" / "server.toml"
PROBLEM = "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Certificates, as an operator has them."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    (tmp_path / "server.pem").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    (tmp_path / "server.key").write_bytes(issued.private_key_pem.bytes())
    return tmp_path


@pytest.fixture
def address(folder: Path, espalier) -> Iterator[str]:
    """Of a server with the example's settings, but for a free port and other places of its files."""
    token = espalier("token", "ann", "--callers", folder / "callers.toml", "--max-priority", 5).out
    (folder / "ann.token").write_text(token)
    paths = {"TLS_CERTIFICATE": "server.pem", "TLS_KEY": "server.key", "CALLERS": "callers.toml"}
    variables = {f"ESPALIER_{name}": str(folder / file) for name, file in paths.items()}
    command = [Path(sys.executable).with_name("espalier"), "serve", "--config", EXAMPLE, "--port", "0"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables, "ESPALIER_HOST": "127.0.0.1", "ESPALIER_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        greeting = process.stdout.readline()
        found = re.search(r"127\.0\.0\.1:\d+", greeting)
        assert found, process.communicate()[1]
        yield found.group()
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    logged = [json.loads(line) for line in errors.splitlines()]
    assert {(line["caller"], line["code"]) for line in logged if "code" in line} == {
        ("ann", "OK"),
        (None, "UNAUTHENTICATED"),
    }


def test_the_example_file_starts_a_server_that_is_called_with_tls_and_a_token(address: str, folder: Path, espalier):
    server = "--endpoint", address, "--tls-ca", folder / "ca.pem"
    login = "--token-file", folder / "ann.token"
    assert espalier("health", *server) == (0, f"{address}: serving\n", "")
    info = json.loads(espalier("health", "--info", "--json", *server, *login).out)["info"]
    assert (info["kv_memory_bytes"], info["max_queue"]) == (2 * 2**30, 64)

    solved = espalier("solve", PROBLEM, "-N", 2, "-M", 2, "--priority", 5, "--json", *server, *login)
    assert solved.code == 0, solved.err
    assert json.loads(solved.out)["answer"]

    refused = espalier("solve", PROBLEM, *server)
    assert refused.code == 2
    assert "this server needs a login" in refused.err
    assert espalier("health", "--endpoint", address).code == 1, "it speaks TLS only"


def test_doctor_reads_the_example_file(folder: Path, espalier, monkeypatch):
    for name in ("TLS_CERTIFICATE", "TLS_KEY", "CALLERS"):
        monkeypatch.setenv(f"ESPALIER_{name}", str(folder / "missing"))
    ran = espalier("doctor", "--config", EXAMPLE)
    assert ran.code == 1
    assert {line.split(":")[1].strip() for line in ran.err.splitlines()} == {"certificate", "callers"}
