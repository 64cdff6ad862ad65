"""What an operator may set on the server; the defaults are the documented ones."""

import ipaddress
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Interval

from espalier.engine.errors import EspalierError
from espalier.search.schema import Option, parse_size, violations


class SettingsError(EspalierError):
    """A server setting breaks a rule."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the server listens, how much it takes on, and how it stops.

    Raises:
        SettingsError: a value breaks its rule, or other machines could reach the server without `insecure_bind`.
    """

    help_panel: ClassVar = "Server"
    env_prefix: ClassVar = "ESPALIER_"

    host: Annotated[str, Option("Address to listen on; other than loopback needs --insecure-bind.")] = "127.0.0.1"
    port: Annotated[int, Interval(ge=0, le=65535), Option("TCP port; 0 takes a free one.")] = 50051
    insecure_bind: Annotated[
        bool, Option("Listen on an address that other machines can reach: there is neither encryption nor login.")
    ] = False
    max_searches: Annotated[
        int,
        Interval(ge=1),
        Option(
            "Searches that run at once; each holds KV memory. As many more may be suspended for searches of a higher "
            "priority, and hold none."
        ),
    ] = 4
    max_queue: Annotated[int, Interval(ge=0), Option("Calls that may wait for one of those; one more is refused.")] = 64
    queue_seconds: Annotated[float, Interval(ge=0), Option("How long a call may wait.")] = 60.0
    search_seconds: Annotated[float, Interval(ge=0), Option("How long a search may run.")] = 300.0
    drain_seconds: Annotated[
        float, Interval(ge=0), Option("How long a stopping server lets running searches end by themselves.")
    ] = 30.0
    event_buffer: Annotated[
        int, Interval(ge=2), Option("Events kept for a stream whose client reads slowly, before progress is merged.")
    ] = 64
    max_receive_bytes: Annotated[
        int, Interval(ge=1024), Option("Largest message accepted, like 1M.", parse=parse_size)
    ] = 2**20
    max_send_bytes: Annotated[
        int,
        Interval(ge=1024),
        Option(
            "Largest message sent, like 4M; a larger result leaves out its tree, then its last candidates, and larger "
            "progress its texts and nodes.",
            parse=parse_size,
        ),
    ] = 4 * 2**20

    def __post_init__(self) -> None:
        if wrong := violations(self):
            raise SettingsError("; ".join(f"--{w.field.replace('_', '-')} {w.description}" for w in wrong))
        if not self.insecure_bind and not is_loopback(self.host):
            raise SettingsError(
                f"--host {self.host} can be reached from other machines, and there is neither encryption nor login; "
                f"listen on 127.0.0.1, or pass --insecure-bind to accept that"
            )

    def address(self, port: int) -> str:
        """`HOST:PORT` as gRPC writes it, an IPv6 address in brackets."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than `localhost` is not trusted to stay local."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
