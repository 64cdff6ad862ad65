"""The HTTP port, on the event loop that gRPC runs on, and the limits of time and size of its connections."""

import asyncio
import socket
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from espalier.search.service.access.watched_files import ReloadingContext
from espalier.search.service.errors import BindError
from espalier.search.service.http_api.answers import error_object, to_json
from espalier.search.service.settings import ServerSettings

_HEAD_BYTES = 32 * 1024
"""Largest head of a request."""
_BACKLOG = 1024
"""Connections that the system holds until they are accepted."""
_ACCEPTED_AT_ONCE = 16
"""Connections that are accepted before any of them is looked at: those over the limit hold files until then."""
_KEEPALIVE_SECONDS = 75
"""Time that a connection may stay without a request; longer than proxies keep theirs, which is 60 for nginx."""
CERTIFICATE_NAME = "certificate_name"
"""Entry of a request's state: common name of the client's verified certificate; None without one."""
_HEADER_SECONDS = 10.0
"""Time in which the head of a request must have arrived, counted from the connection or its first byte."""
_WRITE_SECONDS = 60.0
"""Time after which a client that does not read is disconnected."""
_SEND_BYTES = 256 * 1024
"""Send buffer of the kernel; with a larger one, a slow client would be noticed too late."""


class HttpListener:
    """One HTTP port. Create and use it on one event loop."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, flag: str = "--http-port") -> None:
        """Create a listener on `http_port` of the settings, which the operator has given by `flag`."""
        self._settings = settings
        self._flag = flag
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        tls = ReloadingContext.of(settings.tls) if settings.tls else None
        http: Any = partial(Connection, max_connections=settings.connections_per_port)
        config = uvicorn.Config(
            app,
            http=http,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # else every head that is not HTTP is a line
            access_log=False,
            proxy_headers=False,  # else a caller on this machine could name any host as its own
            server_header=False,
            timeout_keep_alive=_KEEPALIVE_SECONDS,
            h11_max_incomplete_event_size=_HEAD_BYTES,
            backlog=_ACCEPTED_AT_ONCE,
            ssl_context_factory=(lambda *_: tls) if tls else None,
        )
        self._server = _Server(config)

    def bind(self) -> str:
        """Take the port.

        Returns:
            The URL.

        Raises:
            BindError: it is in use, or the address does not belong to this machine.
        """
        settings = self._settings
        wanted = settings.address(settings.http_port or 0)
        try:
            (family, *_, address) = socket.getaddrinfo(settings.host, settings.http_port, type=socket.SOCK_STREAM)[0]
            both = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
            self._socket = socket.create_server(address[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        except OSError as error:
            why = f"{error.strerror}; is another server using it? choose another with {self._flag}"
            raise BindError(f"cannot listen on {wanted}: {why}") from None
        return f"{'https' if settings.tls else 'http'}://{settings.address(self._socket.getsockname()[1])}"

    def start(self) -> None:
        """Serve on the port that `bind` took."""
        assert self._socket is not None
        self._serving = asyncio.create_task(self._server.serve([self._socket]))

    async def stop(self, seconds: float) -> None:
        """Close the port, give responses `seconds` to reach their clients, and close all connections."""
        if self._serving is None:
            if self._socket is not None:
                self._socket.close()
            return
        self._server.should_exit = True
        await asyncio.wait([self._serving], timeout=seconds)
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        await self._serving


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept, as few at a time as are listened for; then listen for more."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(_BACKLOG)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the process."""
        yield


# ---- one connection


class Connection(H11Protocol):
    """As uvicorn's, with limits that it leaves to a proxy, and the name in the client's certificate."""

    def __init__(self, *args: Any, max_connections: int, **kwargs: Any) -> None:
        """Create a connection; with `max_connections` others, one of them that is idle makes room, or it is closed."""
        super().__init__(*args, **kwargs)
        self._max_connections = max_connections
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._unsent = 0  # bytes, when it was last looked
        self._since = 0.0  # when something came last, in the loop's seconds

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] (uvicorn's)
        """Start to wait for a request."""
        super().connection_made(transport)
        self._since = self.loop.time()
        if len(self.connections) > self._max_connections:
            given_up = self._most_idle()
            given_up.transport.abort()
            if given_up is self:
                return
            self.connections.discard(given_up)  # now, as it is told of its end later
        self.app_state = {**self.app_state, CERTIFICATE_NAME: _common_name(transport)}
        _set_options(transport.get_extra_info("socket"))
        transport.set_write_buffer_limits(high=1)  # what a client does not take is noticed however little it is
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        super().connection_lost(exc)
        _stop(self._head_timer)
        _stop(self._write_timer)

    def _most_idle(self) -> "Connection":
        """The connection that waits for a request for longest, of the host with most that do; this one if none does."""
        waiting = [each for each in self.connections if isinstance(each, Connection) and each.idle and each is not self]
        hosts = Counter(each.host for each in waiting)
        return min(waiting, key=lambda each: (-hosts[each.host], each._since), default=self)

    @property
    def idle(self) -> bool:
        """True if nobody works on a request of its, which has not come, or not to its end."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    @property
    def host(self) -> str:
        """The address of its client."""
        return self.client[0] if self.client else ""

    def handle_events(self) -> None:
        """Handle what has arrived; a head that has arrived in part only must be complete in time."""
        super().handle_events()
        self._since = self.loop.time()
        if self.cycle is not None and not self.cycle.response_complete:
            _stop(self._head_timer)
            self._head_timer = None
        elif self._head_timer is None and self.conn.trailing_data[0]:
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP."""
        body = to_json(error_object(msg, "invalid_request_error", None, None))
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        answer = h11.Response(status_code=400, headers=headers, reason="Bad Request")
        for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def pause_writing(self) -> None:
        """Wait for a client that does not read."""
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(_WRITE_SECONDS, self._require_reading)

    def resume_writing(self) -> None:
        """Go on writing."""
        super().resume_writing()
        _stop(self._write_timer)

    def _require_reading(self) -> None:
        """Disconnect a client that has read nothing since this was last called, and else look again later."""
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        if self._unsent >= before:
            self.transport.abort()
        else:
            self._write_timer = self.loop.call_later(_WRITE_SECONDS, self._require_reading)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(_HEADER_SECONDS, self.transport.close)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _common_name(transport: asyncio.Transport) -> str | None:
    """Common name of the client's certificate, which the handshake has verified."""
    certificate = transport.get_extra_info("peercert") or {}
    return next((value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"), None)


def _set_options(of_client: socket.socket) -> None:
    """Send at once what is written, as a head and a body are two writes, and probe silent connections as gRPC does."""
    of_client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    of_client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
    of_client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # so that the search of a lost machine ends
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 2)):
        if hasattr(socket, name):  # macOS has other names
            of_client.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
