from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from scripted_orchestrator import ScriptedOrchestrator
from server_thread import ServerThread

from espalier.search.service.observability.observer import Observer
from espalier.search.service.settings import ServerSettings


@pytest.fixture
def fake() -> ScriptedOrchestrator:
    return ScriptedOrchestrator()


@pytest.fixture
def start(fake: ScriptedOrchestrator) -> Iterator[Callable[..., ServerThread]]:
    """Starts a server, by default of `fake` and loaded, on a free port; stops it after the test."""
    running: list[ServerThread] = []

    def start_server(
        load: Callable[[], Any] | None = None, observers: Sequence[Observer] = (), **settings: Any
    ) -> ServerThread:
        server = ServerThread(load or (lambda: fake), ServerSettings(**{"port": 0, **settings}), observers)
        running.append(server)
        if load is None:
            server.wait_loaded()
        return server

    yield start_server
    for server in running:
        server.close()
