"""The server: gRPC and HTTP, loading, health, and graceful shutdown."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from espalier.kserve.inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from espalier.search.run.executor import Executor
from espalier.search.service.access.callers import Callers
from espalier.search.service.access.calls import AccessLog
from espalier.search.service.access.watched_files import CERTIFICATE_STAYS, TlsFiles, WatchedFiles
from espalier.search.service.engine_thread import EngineThread
from espalier.search.service.errors import BindError
from espalier.search.service.grpc_api.servicer import INFERENCE, CallInterceptor, SolveServicer
from espalier.search.service.http_api.app import make_app, make_metrics_app
from espalier.search.service.http_api.listener import HttpListener
from espalier.search.service.kserve.servicer import InferenceServicer
from espalier.search.service.model_names import ModelNames
from espalier.search.service.observability.metrics import Metrics
from espalier.search.service.observability.tracing import traced
from espalier.search.service.session import Observer, Session
from espalier.search.service.settings import ServerSettings, is_loopback, raise_file_limit
from espalier.v1 import search_pb2
from espalier.v1.search_pb2_grpc import add_SearchServiceServicer_to_server

log = logging.getLogger("espalier.service")

SERVICE = search_pb2.DESCRIPTOR.services_by_name["SearchService"].full_name
HEALTH_NAMES = ("", SERVICE, INFERENCE.full_name)

# Seconds for the engine to finish its current step after a stop, and for responses to reach their clients.
STOP_SECONDS = 15.0
FLUSH_SECONDS = 1.0
_HEALTH_SECONDS = 0.5
"""Time between two looks at whether searches are accepted, for those who ask by gRPC."""


class Addresses(NamedTuple):
    """Addresses of a server: `HOST:PORT` of gRPC, and the URL of HTTP; None without."""

    grpc: str
    http: str | None


OnReady = Callable[[Addresses], None]


class Server:
    """One server and its engine thread. Create and use it on one event loop.

    The health service reports NOT_SERVING until the orchestrator is loaded, while no worker can be given searches,
    after the engine has died, and from the start of `drain`.

    Attributes:
        metrics: of this server alone.
        metrics_address: `HOST:PORT` of `--metrics-port` once started; None without one.
    """

    def __init__(
        self, load: Callable[[], Executor], settings: ServerSettings, observers: Sequence[Observer] = ()
    ) -> None:
        """Create a server that has not started.

        Args:
            load: see `serve`.
            settings: address and limits.
            observers: notified of ended calls and searches, as the log and the metrics are.
        """
        self._settings = settings
        self.engine = EngineThread(load, settings.event_buffer)
        self.metrics = Metrics()
        self.session = Session(self.engine, settings, (AccessLog(settings.log_format), self.metrics, *observers))
        self.metrics.watch(self.session)
        names = ModelNames(settings.served_name, int(time.time()), lambda: self.engine.scores)
        self.metrics_address: str | None = None
        callers = Callers(settings.callers, certificates=settings.tls_client_ca is not None)
        self._http = self._metrics_port = None
        if settings.http_port is not None:
            self._http = HttpListener(make_app(self.session, names, callers, self.metrics), settings)
        if (port := settings.of_metrics_port) is not None:
            self._metrics_port = HttpListener(make_metrics_app(port, self.metrics), port, "--metrics-port")
        self._credentials = _reloading_credentials(settings.tls) if settings.tls else None
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue] (its stubs lack it)
        interceptor = CallInterceptor(self.session, callers)
        self._server = grpc.aio.server(interceptors=[interceptor], options=server_options(settings))
        add_SearchServiceServicer_to_server(SolveServicer(self.session), self._server)
        add_GRPCInferenceServiceServicer_to_server(InferenceServicer(self.session, names), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        described = (*HEALTH_NAMES[1:], health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*described, reflection.SERVICE_NAME), self._server)
        self._reporter: asyncio.Task[None] | None = None

    async def start(self) -> Addresses:
        """Start listening and loading.

        Raises:
            BindError: an address is in use or does not belong to this machine.
        """
        wanted = self._settings.address(self._settings.port)
        # Bind first, as loading takes minutes: an address in use is reported immediately.
        try:
            if self._credentials:
                port = self._server.add_secure_port(wanted, self._credentials)
            else:
                port = self._server.add_insecure_port(wanted)
        except RuntimeError:
            port = 0
        if port == 0:
            raise BindError(f"cannot listen on {wanted}: is another server using it? choose another with --port")
        url = self._http.bind() if self._http else None
        if self._settings.exposed:
            log.warning("%s is reachable from other machines %s (--insecure-bind)", wanted, self._settings.exposed)
        if self._metrics_port:
            metrics_url = self._metrics_port.bind()
            self._metrics_port.start()
            self.metrics_address = metrics_url.removeprefix("http://")
            log.info("metrics are at %s/metrics", metrics_url)
            if not is_loopback(self._settings.metrics_host):
                log.warning("%s is reachable from other machines without login (--insecure-bind)", self.metrics_address)
        await self._set_health(serving=False)
        await self._server.start()
        if self._http:
            self._http.start()
        self.engine.start()
        self._reporter = asyncio.create_task(self._report_health())
        return Addresses(self._settings.address(port), url)

    async def drain(self) -> None:
        """Refuse new searches, and wait up to the drain time for running ones."""
        self.session.refuse_new()
        try:
            # A health watcher that does not read can block the health service, but must not block the shutdown.
            async with asyncio.timeout(FLUSH_SECONDS):
                await self._health.enter_graceful_shutdown()
        except TimeoutError:
            log.warning("not every health watcher could be notified of the shutdown")
        try:
            async with asyncio.timeout(self._settings.drain_seconds):
                await self.session.idle.wait()
        except TimeoutError:
            log.warning("cancelling searches that are still running after %g s", self._settings.drain_seconds)

    async def stop(self) -> bool:
        """Cancel running searches, end the engine thread and close the port.

        Returns:
            Whether the engine had not died and finished its last step in time.
        """
        self.session.refuse_new()
        loading = not self.engine.loaded.done()
        ended = await self.engine.stop(FLUSH_SECONDS if loading else STOP_SECONDS)
        listeners = [listener for listener in (self._http, self._metrics_port) if listener]
        await asyncio.gather(self._server.stop(FLUSH_SECONDS), *(each.stop(FLUSH_SECONDS) for each in listeners))
        if self._reporter is not None:
            self._reporter.cancel()
            await asyncio.wait([self._reporter])
        if not ended and not loading:
            log.error("the engine did not finish its last step within %g s", STOP_SECONDS)
        return self.engine.closed.result() if ended else loading

    async def _report_health(self) -> None:
        # `wait`, because cancelling a task that awaits a future also cancels the future.
        await asyncio.wait([self.engine.loaded])
        serving = False
        while not self.engine.over.done():
            if self.session.ready != serving:
                serving = not serving
                await self._set_health(serving)
            await asyncio.wait([self.engine.over], timeout=_HEALTH_SECONDS)
        await self._set_health(serving=False)

    async def _set_health(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in HEALTH_NAMES:
            await self._health.set(name, status)


def serve(load: Callable[[], Executor], settings: ServerSettings, ready: OnReady | None = None) -> int:
    """Serve until SIGTERM or SIGINT, or until the engine dies. Call it on the main thread.

    The first signal refuses new searches, drains and stops; a second one exits immediately.

    Args:
        load: creates the orchestrator. Called on the engine thread after the port is open; it must not fork, as gRPC's
            threads are running.
        settings: address and limits.
        ready: called with the addresses once searches can be submitted.

    Returns:
        The exit code: 0, or 1 if the engine died.

    Raises:
        BindError: an address is in use or does not belong to this machine.
        TracingError: the environment asks for traces that cannot be made; see `observability.tracing`.
        Exception: any exception of `load`.
    """
    raise_file_limit()
    with traced() as observers:
        return asyncio.run(_serve(partial(Server, load, settings, observers), ready))


async def _serve(make: Callable[[], Server], ready: OnReady | None) -> int:
    stopping = asyncio.Event()
    _stop_on_signals(stopping)
    server = make()
    try:
        addresses = await server.start()
        stop_asked = asyncio.ensure_future(stopping.wait())
        await asyncio.wait([server.engine.loaded, stop_asked], return_when=asyncio.FIRST_COMPLETED)
        if server.engine.loaded.done():
            server.engine.loaded.result()  # raises the exception of `load`
            if ready is not None:
                ready(addresses)
        await asyncio.wait([server.engine.over, stop_asked], return_when=asyncio.FIRST_COMPLETED)
        if not server.engine.over.done():
            await server.drain()
    finally:
        in_order = await server.stop()
    return 0 if in_order else 1


def _stop_on_signals(stopping: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def handle(number: signal.Signals) -> None:
        if stopping.is_set():
            os._exit(128 + number)
        log.info("%s: refusing new searches and waiting for running ones", number.name)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)


def server_options(settings: ServerSettings) -> list[tuple[str, int]]:
    """Return the gRPC channel arguments of a server."""
    return [
        ("grpc.so_reuseport", 0),  # on by default: a second server on the port would silently take half of the calls
        # The interceptor refuses what is over the limit, with details; gRPC what is far over it, without.
        ("grpc.max_receive_message_length", 4 * settings.max_receive_bytes),
        ("grpc.max_allowed_incoming_connections", settings.connections_per_port),
        ("grpc.max_send_message_length", settings.max_send_bytes),
        # Connections that say nothing, or ask for nothing, hold no place for long: two minutes and for ever else.
        ("grpc.server_handshake_timeout_ms", 20_000),
        ("grpc.max_connection_idle_ms", 300_000),
        # Keepalive pings detect clients whose machine disappeared, so that their searches end.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.ping_timeout_ms", 20_000),  # a minute by default, whatever the line above says
        # Clients may do the same every few seconds, also between calls; by default the third such ping ends all calls.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ]


def _reloading_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return credentials of a gRPC port that follow changes of the files; see `TlsFiles.context`."""

    def read() -> grpc.ServerCertificateConfiguration:
        files.context()  # checks them; gRPC would do so only in a handshake
        authority = files.client_authority.read_bytes() if files.client_authority else None
        pair = files.key.read_bytes(), files.certificate.read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], authority)

    def latest() -> Any:  # None, which the stubs do not know: no change
        return watched.value if watched.refresh() else None

    watched = WatchedFiles(files.all, read, CERTIFICATE_STAYS)
    return grpc.dynamic_ssl_server_credentials(
        watched.value, latest, require_client_authentication=files.client_authority is not None
    )
