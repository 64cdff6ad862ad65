"""A caller that holds every slot keeps nobody out, through both endpoints, with logins and without."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import pytest
from callers_files import callers_file
from raw_client import bearer, raw_stub
from scripted_orchestrator import ScriptedOrchestrator
from server_thread import PATIENCE, ServerThread, wait_until

from espalier.v1 import search_pb2 as pb

MANY = 60
"""Searches of one caller, of which 32 find a slot."""
Call = Callable[[str], object]


@contextmanager
def crowd(server: ServerThread, fake: ScriptedOrchestrator, call: Call) -> Iterator[None]:
    """Hold and await slots by many calls at once."""
    session = server.server.session
    with ThreadPoolExecutor(MANY) as pool:
        calls = [pool.submit(call, "hold") for _ in range(MANY)]
        try:
            wait_until(lambda: session.queue.held + session.queue.waiting == MANY)
            yield
        finally:
            fake.release.set()
            for each in calls:
                each.result(PATIENCE)


def over_grpc(stack: ExitStack, server: ServerThread, name: str | None = None) -> Call:
    """Calls over a connection of their own."""
    stub = stack.enter_context(raw_stub(server.address, grpc__use_local_subchannel_pool=1))
    metadata = bearer(name) if name else ()
    return lambda problem: stub.SolveProblem(pb.SolveProblemRequest(problem=problem), PATIENCE, metadata=metadata)


def over_http(stack: ExitStack, server: ServerThread, name: str | None = None) -> Call:
    """Calls over as many connections as there are calls at once."""
    limits = httpx2.Limits(max_connections=None)
    client = stack.enter_context(httpx2.Client(timeout=PATIENCE, trust_env=False, limits=limits))
    headers = {"authorization": f"Bearer {name}"} if name else {}

    def call(problem: str) -> None:
        response = client.post(f"{server.url}/v1/searches", json={"problem": problem, "stream": False}, headers=headers)
        assert response.status_code == 200, response.text

    return call


@pytest.mark.parametrize("endpoint", [over_grpc, over_http])
@pytest.mark.parametrize("login", [False, True])
def test_five_small_searches_do_not_wait_for_anothers_sixty(
    login: bool,
    endpoint: Callable[..., Call],
    start: Callable[..., ServerThread],
    fake: ScriptedOrchestrator,
    tmp_path: Path,
):
    options = {"callers": callers_file(tmp_path, crowd="", other="")} if login else {}
    server = start(http_port=0, **options)
    with ExitStack() as stack:
        many, few = (endpoint(stack, server, name if login else None) for name in ("crowd", "other"))
        with crowd(server, fake, many), ThreadPoolExecutor(5) as pool:
            list(pool.map(few, ["solve"] * 5))
            assert not fake.release.is_set()
    accounts = {(options.caller, bool(options.connection)) for options in fake.options.values()}
    assert accounts == ({("crowd", False), ("other", False)} if login else {("127.0.0.1", True)})


def test_both_calls_of_one_connection_are_of_one_account(
    start: Callable[..., ServerThread], fake: ScriptedOrchestrator
):
    server = start()
    with ExitStack() as stack:
        one, other = over_grpc(stack, server), over_grpc(stack, server)
        for call in (one, one, other):
            call("solve")
    first, second, third = (options.connection for options in fake.options.values())
    assert first == second != third
