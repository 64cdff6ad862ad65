"""The port of `--metrics-port`: prometheus-client's own small HTTP server, for servers without an HTTP door."""

import asyncio

from prometheus_client import CollectorRegistry, start_http_server

from espalier.search.service.errors import BindError


class MetricsPort:
    """Answers scrapes on threads of its own; it has neither encryption nor login.

    Attributes:
        port: the port that it listens on.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Start listening; 0 takes a free port.

        Raises:
            BindError: the address is in use or does not belong to this machine.
        """
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise BindError(
                f"cannot listen on {host}:{port} for metrics: {error.strerror}; choose another --metrics-port or "
                "--metrics-host"
            ) from error
        self.port = self._server.server_port

    async def close(self) -> None:
        """Stop listening."""
        await asyncio.to_thread(self._server.shutdown)  # waits for the thread's next look around
        self._server.server_close()
        self._thread.join()
