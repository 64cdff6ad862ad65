"""A server on an event loop in a thread, so that tests can use the ordinary blocking client."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from espalier.search.server_info import ServerInfo
from espalier.search.service.server import Server
from espalier.search.service.session import Observer
from espalier.search.service.settings import ServerSettings

PATIENCE = 10.0  # seconds any single wait may take before the test fails
LOADING = 60.0  # the same of models, which on some executors new processes load


class ServerThread:
    def __init__(self, load: Callable[[], Any], settings: ServerSettings, observers: Sequence[Observer] = ()) -> None:
        self._loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.thread.start()
        self.server: Server = self.call(self._make(load, settings, observers))
        self.address, self.url = self.call(self.server.start())

    async def _make(self, load: Callable[[], Any], settings: ServerSettings, observers: Sequence[Observer]) -> Server:
        return Server(load, settings, observers)

    def call(self, work: Coroutine[Any, Any, Any], patience: float = PATIENCE) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(patience)

    def wait_loaded(self) -> None:
        async def loaded() -> None:
            await asyncio.shield(self.server.engine.loaded)

        self.call(loaded(), LOADING)

    def info(self) -> ServerInfo:
        """What a caller would be told; asked past the endpoint, so that no login is needed."""
        return self.call(self.server.session.info())

    def close(self) -> None:
        self.call(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.thread.join(PATIENCE)
        self._loop.close()


def wait_until(true: Callable[[], bool]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def wait_for_health(address: str, wanted: str) -> None:
    """Follow the health service until it says `wanted`."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="espalier.v1.SearchService")
        for response in stub.Watch(request, timeout=PATIENCE):
            if health_pb2.HealthCheckResponse.ServingStatus.Name(response.status) == wanted:
                return
