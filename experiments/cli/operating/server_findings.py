"""Findings of `espalier doctor` about a server's settings: whether it would start, and what will trouble it later."""

import socket
import ssl
import stat
import time
from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path

from espalier.engine.errors import EspalierError
from espalier.experiments.cli.operating.finding import Finding
from espalier.search.service.access.callers import read_callers
from espalier.search.service.access.watched_files import TlsFiles
from espalier.search.service.settings import ServerSettings, connections_by_file_limit, file_limit

_DAYS = 21
"""Days before its end from which a certificate gets advice."""


def server_findings(settings: ServerSettings) -> Iterator[Finding]:
    """Return the findings about a server that would be started with `settings`."""
    yield from _ports(settings)
    yield _files(settings)
    if settings.tls:
        yield _certificate(settings.tls)
    if settings.callers:
        yield _callers(settings.callers)


def _ports(settings: ServerSettings) -> Iterator[Finding]:
    for field in fields(settings):
        if field.name == "port" or field.name.endswith("_port"):
            port, flag = getattr(settings, field.name), "--" + field.name.replace("_", "-")
            if port:  # not 0, which takes a free one
                host = getattr(settings, field.name.removesuffix("port") + "host", settings.host)
                yield _port(host, port, flag)


def _port(host: str, port: int, flag: str) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server's: connections that end do not count
        try:
            tried.bind((host, port))
        except OSError as error:
            advice = f"{error.strerror}: a server needs another {flag} or --host"
            return Finding(f"port {port}", f"of {host}", advice)
    return Finding(f"port {port}", f"of {host}, free")


def _files(settings: ServerSettings) -> Finding:
    files = file_limit()
    most = settings.max_connections or connections_by_file_limit()
    advice = ""
    if most > files:
        advice = f"fewer than --max-connections {most}"
    elif files < 4096:
        advice = "few for a server: raise the hard limit with ulimit -Hn or systemd's LimitNOFILE"
    return Finding("open files", f"{'any' if files >= 2**62 else files}, {most} connections", advice)


def _certificate(files: TlsFiles) -> Finding:
    try:
        files.context()
        shown = _shown_certificate(files)
    except (EspalierError, ssl.SSLError) as error:
        return Finding("certificate", "", str(error), fatal=True)
    names = ", ".join(value for _, value in shown.get("subjectAltName", ())) or "no name, so no client will take it"
    end = ssl.cert_time_to_seconds(shown["notAfter"])
    days = int((end - time.time()) // 86400)
    advice = f"ends in {days} days" if days < _DAYS else ""
    if files.key.stat().st_mode & stat.S_IROTH and not advice:
        advice = f"everybody on this machine may read its key: chmod o= {files.key}"
    return Finding("certificate", f"for {names}, until {datetime.fromtimestamp(end, UTC):%Y-%m-%d}", advice)


def _shown_certificate(files: TlsFiles) -> dict:
    """The server's certificate as a client sees it, from a handshake in memory: `ssl` reads certificates only there.

    Raises:
        ssl.SSLError: it is not valid now.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trusted for itself, whoever has signed it
    client.load_verify_locations(files.certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = TlsFiles(files.certificate, files.key).context().wrap_bio(to_server, to_client, server_side=True)
    seen = client.wrap_bio(to_client, to_server)
    for side in (seen, server, seen):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return dict(seen.getpeercert() or {})


def _callers(file: Path) -> Finding:
    try:
        count = len(read_callers(file))
    except EspalierError as error:
        return Finding("callers", "", str(error), fatal=True)
    advice = "" if count else "nobody can log in: espalier token NAME adds a caller"
    if file.stat().st_mode & stat.S_IROTH and not advice:
        advice = f"everybody on this machine may read it: chmod o= {file}"
    return Finding("callers", f"{count} in {file}", advice)
