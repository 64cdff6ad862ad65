"""A server without an engine, for tests of the service and its clients."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from scripted_orchestrator import ScriptedOrchestrator
    from server_thread import ServerThread

    from espalier.search.service.session import Observer


@pytest.fixture(autouse=True)
def no_helpers(one_thread: None) -> None:
    """Every test of this folder computes on one thread."""


@pytest.fixture
def fake() -> "ScriptedOrchestrator":
    from scripted_orchestrator import ScriptedOrchestrator

    return ScriptedOrchestrator()


@pytest.fixture
def start(fake: "ScriptedOrchestrator") -> "Iterator[Callable[..., ServerThread]]":
    """Starts a server, by default of `fake` and loaded, on a free port; stops it after the test."""
    from server_thread import ServerThread

    from espalier.search.service.settings import ServerSettings

    running: list[ServerThread] = []

    def start_server(
        load: Callable[[], Any] | None = None, observers: "Sequence[Observer]" = (), **settings: Any
    ) -> ServerThread:
        server = ServerThread(load or (lambda: fake), ServerSettings(**{"port": 0, **settings}), observers)
        running.append(server)
        if load is None:
            server.wait_loaded()
        return server

    yield start_server
    for server in running:
        server.close()
