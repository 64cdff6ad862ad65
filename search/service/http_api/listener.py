"""HTTP server on the event loop that gRPC runs on."""

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from espalier.search.service.access.tls import ReloadingContext
from espalier.search.service.errors import BindError
from espalier.search.service.http_api.connection import Connection
from espalier.search.service.settings import ServerSettings

_HEAD_BYTES = 32 * 1024
"""Largest head of a request."""
_BACKLOG = 1024
"""Connections that the system holds until they are accepted."""
_ACCEPTED_AT_ONCE = 16
"""Connections that are accepted before any of them is looked at: those over the limit hold files until then."""
_KEEPALIVE_SECONDS = 75
"""Time that a connection may stay without a request; longer than proxies keep theirs, which is 60 for nginx."""


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
        scheme = "https" if settings.tls else "http"
        return f"{scheme}://{settings.address(self._socket.getsockname()[1])}"

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
