from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from scripted_orchestrator import ScriptedOrchestrator
from server_thread import PATIENCE, ServerThread
from tool_callers import tool_caller, write_tool_caller

from espalier.search.run.orchestrator import Orchestrator
from espalier.search.service.settings import ServerSettings


@pytest.fixture
def serve(start: Callable[..., ServerThread]) -> Callable[..., ServerThread]:
    """Starts a server with both endpoints; see `start`."""

    def start_server(load: Callable[[], Any] | None = None, **settings: Any) -> ServerThread:
        return start(load, **{"http_port": 0, **settings})

    return start_server


@pytest.fixture
def http() -> Iterator[Callable[..., httpx2.Client]]:
    """Makes clients of a server that speak plain HTTP."""
    made: list[httpx2.Client] = []

    def make(server: ServerThread, **options: Any) -> httpx2.Client:
        made.append(httpx2.Client(base_url=server.url or "", timeout=PATIENCE, trust_env=False, **options))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def chat() -> Iterator[Callable[..., openai.OpenAI]]:
    """Makes OpenAI's clients of a server; they do not repeat calls."""
    made: list[openai.OpenAI] = []

    def make(server: ServerThread, **options: Any) -> openai.OpenAI:
        given = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE, **options}
        made.append(openai.OpenAI(base_url=f"{server.url}/v1", **given))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def say(
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
    make_orchestrator: Callable[..., Orchestrator],
    serve: Callable[..., ServerThread],
) -> Callable[..., ServerThread]:
    """Starts a server of a generator that says a script."""

    checkpoint = write_tool_caller(tiny_checkpoints["talker"], tmp_path / "caller")

    def start(*script: str) -> ServerThread:
        orchestrator = make_orchestrator(tool_caller(checkpoint, *script), None, kv_memory_bytes=2**24)
        server = serve(lambda: orchestrator, max_searches=2)
        server.wait_loaded()
        return server

    return start


@pytest.fixture(scope="module")
def shared() -> Iterator[httpx2.Client]:
    """A client of a server that a module's tests share; none of them leaves anything behind in it."""
    fake = ScriptedOrchestrator()
    server = ServerThread(lambda: fake, ServerSettings(port=0, http_port=0))
    server.wait_loaded()
    with httpx2.Client(base_url=server.url or "", timeout=PATIENCE, trust_env=False) as client:
        yield client
    server.close()
