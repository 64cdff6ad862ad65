"""Connection settings of a client: address, TLS and login."""

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from espalier.search.client.errors import ConnectionSettingsError
from espalier.search.service.settings import is_loopback

_LARGEST_PORT = 65535
_ENDPOINT = re.compile(r"(?:\[([^\s\[\]]+)\]|([^\s:/\[\]]+)):(\d{1,5})", re.ASCII)
_TOKEN = re.compile(r"[\x21-\x7e]+")

CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    # Results with whole trees can exceed gRPC's default limit of 4 MiB.
    ("grpc.max_receive_message_length", 64 * 2**20),
    # HTTP proxies from the environment often do not support HTTP/2, and would also apply to localhost.
    ("grpc.enable_http_proxy", 0),
    # A server whose machine disappeared is noticed, and routers between keep the connection of a long search.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # a minute by default, whatever the line above says
    # After a failure a channel refuses calls until it connects again; retries must find that it has tried.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


def host_of(endpoint: str) -> str | None:
    """Return the host of HOST:PORT or [IPv6]:PORT; None if `endpoint` is neither."""
    match = _ENDPOINT.fullmatch(endpoint)
    return (match[1] or match[2]) if match and 1 <= int(match[3]) <= _LARGEST_PORT else None


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates that a client trusts, and the one that it shows; all files are PEM.

    Attributes:
        ca: certificates of trusted authorities; None for the system's.
        certificate: the client's certificate chain, for servers that ask for one.
        key: private key of `certificate`.
        server_name: name that the server's certificate must bear; None for the endpoint's host.
    """

    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files.

        Raises:
            ConnectionSettingsError: a file cannot be read or used, or certificate and key do not belong together.
        """
        if (self.certificate is None) != (self.key is None):
            raise ConnectionSettingsError("a client's certificate and its key are given together, or neither is")
        checked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # gRPC would notice a bad file only when it connects
        roots = pair = None
        try:
            if self.ca is not None:
                checked.load_verify_locations(self.ca)
                roots = Path(self.ca).read_bytes()
        except (OSError, ssl.SSLError) as error:
            raise ConnectionSettingsError(f"no certificates of authorities in {self.ca}: {error}") from error
        try:
            if self.certificate is not None and self.key is not None:
                checked.load_cert_chain(self.certificate, self.key)
                pair = Path(self.key).read_bytes(), Path(self.certificate).read_bytes()
        except (OSError, ssl.SSLError) as error:
            raise ConnectionSettingsError(
                f"the client's certificate {self.certificate} and its key {self.key} cannot be used together: {error}"
            ) from error
        return grpc.ssl_channel_credentials(roots or system_roots(), *(pair or ()))


def system_roots() -> bytes | None:
    """Return the certificates that the system trusts; None to take those that come with gRPC.

    gRPC for Python ignores the system's, among them those that an organisation adds for its own servers.
    """
    paths = ssl.get_default_verify_paths()
    if paths.cafile:
        return Path(paths.cafile).read_bytes()
    hashed = sorted(Path(paths.capath).glob("*.[0-9]")) if paths.capath else []
    return b"\n".join({file.read_bytes(): None for file in hashed if file.is_file()}) or None


@dataclass(frozen=True, slots=True)
class Connection:
    """Address of a server, and the login for it.

    Attributes:
        endpoint: HOST:PORT.
        token: sent with each call; None for no login, or one by certificate.
        tls: None for a connection without encryption.
        insecure_token: whether a token may go to another machine without encryption.

    Raises:
        ConnectionSettingsError: `endpoint` is not HOST:PORT, or the token cannot be sent, or others could read it.
    """

    endpoint: str
    token: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    insecure_token: bool = False

    def __post_init__(self) -> None:
        host = host_of(self.endpoint)
        if host is None:
            raise ConnectionSettingsError(f"the endpoint must be HOST:PORT, is {self.endpoint!r}")
        if self.token is None:
            return
        if not _TOKEN.fullmatch(self.token):  # the message must not show it
            raise ConnectionSettingsError("the token must be printable ASCII without spaces")
        if self.tls is None and not is_loopback(host) and not self.insecure_token:
            raise ConnectionSettingsError(
                f"the token would go to {host} without encryption; use TLS, or pass insecure_token (--insecure-token) "
                "to accept that"
            )

    @property
    def options(self) -> list[tuple[str, int | str]]:
        """Options of the channel."""
        name = self.tls.server_name if self.tls else None
        return [*CHANNEL_OPTIONS, *([("grpc.ssl_target_name_override", name)] if name else [])]

    @property
    def login(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token is not None else ()
