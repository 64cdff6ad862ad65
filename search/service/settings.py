"""What an operator may set on the server; the defaults are the documented ones."""

import ipaddress
import math
from dataclasses import dataclass

from espalier.engine.errors import EspalierError


class SettingsError(EspalierError):
    """A server setting breaks a rule."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the server listens, how much it takes on, and how it stops.

    Attributes:
        host: address to listen on. Anything but loopback needs `insecure_bind`: there is neither encryption nor login.
        port: TCP port; 0 takes a free one.
        insecure_bind: allows an address that other machines can reach.
        max_searches: searches running at once; each holds KV memory. As many more may have given way to searches of a
            higher priority, and hold none.
        max_queue: calls that may wait for one of those; one more is refused.
        queue_seconds: how long a call may wait.
        search_seconds: how long a search may run.
        drain_seconds: on shutdown, how long running searches may take to end by themselves.
        event_buffer: events kept for one stream whose client reads slowly, before progress is merged.
        max_receive_bytes: largest message accepted.
        max_send_bytes: largest message sent; a larger result leaves out its tree, then its last candidates, and larger
            progress its texts and nodes.

    Raises:
        SettingsError: a value breaks its rule.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    insecure_bind: bool = False
    max_searches: int = 4
    max_queue: int = 64
    queue_seconds: float = 60.0
    search_seconds: float = 300.0
    drain_seconds: float = 30.0
    event_buffer: int = 64
    max_receive_bytes: int = 2**20
    max_send_bytes: int = 4 * 2**20

    def __post_init__(self) -> None:
        floors = {
            "max_searches": 1,
            "max_queue": 0,
            "queue_seconds": 0,
            "search_seconds": 0,
            "drain_seconds": 0,
            "event_buffer": 2,
            "max_receive_bytes": 1024,
            "max_send_bytes": 1024,
        }
        for name, floor in floors.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= floor):
                flag = "--" + name.replace("_", "-")
                raise SettingsError(f"{flag} must be a number of at least {floor}, is {value}")
        if not 0 <= self.port <= 65535:
            raise SettingsError(f"--port must be between 0 and 65535, is {self.port}")
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
