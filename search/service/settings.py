"""The server's settings; the defaults are the documented ones."""

import ipaddress
import re
import resource
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from annotated_types import Interval

from espalier.engine.errors import EspalierError
from espalier.search.request import MAX_PRIORITY
from espalier.search.schema import option, optional, parse_size, violations
from espalier.search.service.access.watched_files import TlsFiles

MAX_SEARCHES = 4096
"""Limit on the searches that run at once."""

_PORT = Interval(ge=0, le=65535)
_FILES = 2**14
_METRICS_CONNECTIONS = 16
"""Limit on the connections of the metrics port."""
_MODEL_NAME = re.compile(r"[\w.:/+-]{1,128}", re.ASCII)  # without @, which separates a strategy
_ORIGIN = re.compile(r"https?://[\w.:\[\]-]+", re.ASCII)


class LogFormat(StrEnum):
    """Form of the access log."""

    TEXT = "text"
    JSON = "json"


class SettingsError(EspalierError):
    """A server setting is invalid."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Address, logins, limits and shutdown of the server.

    Raises:
        SettingsError: a value is invalid, or the address is reachable from other machines without TLS or login and
            without `insecure_bind`.
    """

    help_panel: ClassVar = "Server"
    env_prefix: ClassVar = "ESPALIER_"

    host: str = option("127.0.0.1", "Address to listen on; any but loopback needs --insecure-bind.")
    port: int = option(50051, "TCP port of gRPC; 0 takes a free one.", _PORT)
    http_port: int | None = optional(
        "TCP port of HTTP, on the same address; 0 takes a free one; default: no HTTP.", _PORT
    )
    model_name: str | None = optional("Name of the served models over HTTP; default: a short name of the generator.")
    cors_origin: str | None = optional(
        "Origin of other web pages that may call over HTTP, like https://chat.example.org."
    )
    insecure_bind: bool = option(False, "Allow an address that other machines can reach without TLS or without login.")
    callers: Path | None = optional(
        "File of callers and their tokens, see `espalier token`; calls without a token of it are refused."
    )
    tls_certificate: Path | None = optional("The server's certificate chain, PEM; read again when it changes.")
    tls_key: Path | None = optional("Private key of --tls-certificate, PEM.")
    tls_client_ca: Path | None = optional(
        "Certificates of who signs clients' certificates, PEM: clients must show one, and it is their login."
    )
    max_searches: int | None = optional(
        "Maximum searches running at once; fewer run where the KV pool holds fewer. As many more may be suspended "
        "for searches of a higher priority; they hold no KV. Default: 16 a core on a CPU, but 32 to 256; 128 on a "
        "GPU.",
        Interval(ge=1, le=MAX_SEARCHES),
    )
    max_queue: int = option(
        64,
        "Maximum calls waiting for a search slot; a caller with few takes the place of one with many.",
        Interval(ge=0),
    )
    max_priority: int = option(
        0,
        "Highest priority that a call may ask for; calls of a higher one go before all others.",
        Interval(ge=-MAX_PRIORITY, le=MAX_PRIORITY),
    )
    share_prompts: bool = option(
        False,
        "Let calls of one caller share cached prompts. Callers are told apart by their host, so whoever shares a "
        "host can tell by time and usage what was asked before.",
    )
    reload_folder: Path | None = optional(
        "Folder with checkpoints from which callers may have the generator's weights reloaded; default: nobody may.",
    )
    queue_seconds: float = option(60.0, "Maximum seconds a call may wait.", Interval(ge=0))
    search_seconds: float = option(
        300.0, "Maximum seconds a search may run; it then ends with the best answer so far.", Interval(gt=0)
    )
    drain_seconds: float = option(30.0, "Seconds a stopping server waits for running searches.", Interval(ge=0))
    max_connections: int | None = optional(
        "Maximum connections, shared evenly by gRPC and HTTP; default: what leaves a quarter of the process's file "
        "limit.",
        Interval(ge=1),
    )
    metrics_port: int | None = optional("TCP port of HTTP for metrics alone, without login; 0 takes a free one.", _PORT)
    metrics_host: str = option(
        "127.0.0.1", "Address of --metrics-port to listen on; any but loopback needs --insecure-bind."
    )
    log_format: LogFormat = option(
        LogFormat.TEXT, "Form of the log; json: one object a line, and nothing else on standard error."
    )
    event_buffer: int = option(64, "Events buffered for a slow client before progress is dropped.", Interval(ge=2))
    max_receive_bytes: int = option(
        2**20, "Maximum size of a received message, like 1M.", Interval(ge=1024), parse=parse_size
    )
    max_send_bytes: int = option(
        4 * 2**20,
        "Maximum size of a sent message, like 4M. A larger result omits its tree, then its last candidates; larger "
        "progress omits nodes and steps.",
        Interval(ge=1024),
        parse=parse_size,
    )

    def __post_init__(self) -> None:
        if wrong := violations(self):
            raise SettingsError("; ".join(f"--{w.field.replace('_', '-')} {w.description}" for w in wrong))
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise SettingsError("--tls-certificate and --tls-key are given together, or neither is")
        if self.tls_client_ca and not self.tls_certificate:
            raise SettingsError("--tls-client-ca needs --tls-certificate and --tls-key")
        if self.model_name is not None and not _MODEL_NAME.fullmatch(self.model_name):
            raise SettingsError(f"--model-name must be letters, digits and ._:/+-, is {self.model_name!r}")
        if self.cors_origin is not None and not _ORIGIN.fullmatch(self.cors_origin):
            raise SettingsError(f"--cors-origin must be like https://chat.example.org, is {self.cors_origin!r}")
        if self.exposed and not self.insecure_bind:
            raise SettingsError(
                f"--host {self.host} is reachable from other machines {self.exposed}; listen on 127.0.0.1, give "
                "--tls-certificate, --tls-key and --callers, or pass --insecure-bind to accept that"
            )
        if self.metrics_port is not None and not is_loopback(self.metrics_host) and not self.insecure_bind:
            raise SettingsError(
                f"--metrics-host {self.metrics_host} is reachable from other machines, and metrics need no login; "
                "listen on 127.0.0.1, or pass --insecure-bind to accept that"
            )

    @property
    def served_name(self) -> str:
        """The name of the served models."""
        return self.model_name or "espalier"

    @property
    def tls(self) -> TlsFiles | None:
        """The files of the server's certificate; None without TLS."""
        if self.tls_certificate is None or self.tls_key is None:
            return None
        return TlsFiles(self.tls_certificate, self.tls_key, self.tls_client_ca)

    @property
    def exposed(self) -> str:
        """The protection missing where other machines can reach the server; empty if none is missing or they cannot."""
        login = self.callers is not None or self.tls_client_ca is not None
        lacks = ["encryption"] * (self.tls is None) + ["login"] * (not login)
        return f"without {' or '.join(lacks)}" if lacks and not is_loopback(self.host) else ""

    @property
    def of_metrics_port(self) -> "ServerSettings | None":
        """Settings of the port of `--metrics-port`, an HTTP port without encryption or logins; None without it."""
        if self.metrics_port is None:
            return None
        return ServerSettings(
            host=self.metrics_host,
            http_port=self.metrics_port,
            insecure_bind=self.insecure_bind,
            max_connections=2 * _METRICS_CONNECTIONS,
        )

    @property
    def connections_per_port(self) -> int:
        """Limit on the connections of gRPC, and of HTTP if it is on."""
        most = self.max_connections or connections_by_file_limit()
        return most if self.http_port is None else max(1, most // 2)

    def address(self, port: int) -> str:
        """`HOST:PORT` of a port on `host` as gRPC writes it, with an IPv6 address in brackets."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"


def default_searches(on_gpu: bool, cores: int, workers: int = 1) -> int:
    """Return how many searches run at once where the operator does not say: enough to fill the device's batches.

    Whether their KV fits is not counted here: the orchestrator admits by memory, and lets the others wait.

    Args:
        on_gpu: whether the models are on a GPU.
        cores: that the searches may use.
        workers: processes with both models; on a GPU each has one of its own, on a CPU they share the cores.
    """
    return min(MAX_SEARCHES, 128 * workers if on_gpu else min(256, max(32, 16 * cores)))


def file_limit() -> int:
    """Return how many files a server may open; it raises the usual 1,024 to some ten thousand where it may."""
    soft, hard = (limit % 2**63 for limit in resource.getrlimit(resource.RLIMIT_NOFILE))  # no limit is -1
    return max(soft, min(_FILES, hard))


def raise_file_limit() -> None:
    """Let this process open `file_limit` files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < (most := file_limit()):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def connections_by_file_limit() -> int:
    """Return how many connections leave a quarter of the files that a server may open for everything else."""
    most = file_limit()
    return max(1, min(2**16, most - max(most // 4, 64)))


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`. Names other than `localhost` are not trusted to be local."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
