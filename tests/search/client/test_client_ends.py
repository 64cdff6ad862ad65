"""Whatever ends a call on the client's side ends its search on the server."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import pytest
from failing_server import failing_server
from forked_process import is_true_when_forked
from server_thread import PATIENCE, wait_until

from espalier.engine.errors import MisuseError
from espalier.search.client import AsyncSearchClient, RetryPolicy, SearchClient, ServiceError
from espalier.search.result import Started
from espalier.search.service.errors import Failure

LONG_WAIT = Failure("UNAVAILABLE", "not_ready", "in an hour", retry_seconds=3600)


# ---- both clients


def test_closing_the_iterator_cancels_the_search(start, fake, connect):
    events = connect(start().address).solve_stream("hold")
    assert isinstance(next(events), Started)
    events.close()
    assert fake.cancelled.get(timeout=PATIENCE)


def test_closing_the_client_ends_its_calls_and_their_searches(start, fake, connect):
    client = connect(start().address)
    events = client.solve_stream("hold")
    next(events)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(client.solve, "hold"), pool.submit(client.solve_many, ["hold"] * 2)]
        for _ in range(4):
            fake.submitted.get(timeout=PATIENCE)
        closing = threading.Thread(target=client.close)
        closing.start()
        for call in (*(call.result for call in calls), lambda: next(events)):
            with pytest.raises(ServiceError, match="cancelled") as caught:
                call()
            assert caught.value.code == "CANCELLED"
        closing.join(PATIENCE)
    for _ in range(4):
        assert fake.cancelled.get(timeout=PATIENCE)


def test_closing_the_client_ends_the_waits_between_attempts(connect):
    with failing_server([LONG_WAIT] * 9) as server, ThreadPoolExecutor(2) as pool:
        client = connect(server.address, retry=RetryPolicy(attempts=9))
        calls = [pool.submit(client.solve, "solve", None), pool.submit(client.solve_many, ["solve"], timeout=None)]
        wait_until(lambda: len(server.arrivals) == 2)
        client.close()
        for call in calls:
            with pytest.raises(ServiceError, match="cancelled"):
                call.result(PATIENCE)


# ---- the blocking client


def test_dropping_the_iterator_cancels_the_search(start, fake):
    with SearchClient(start().address) as client:
        events = client.solve_stream("hold")
        assert isinstance(next(events), Started)
        del events
        gc.collect()

        assert fake.cancelled.get(timeout=PATIENCE)


def test_a_dropped_client_ends_its_thread_and_not_before_its_iterators(start):
    events = SearchClient(start().address).solve_stream("solve")
    assert [type(event).__name__ for event in events][-1] == "Finished"
    del events
    gc.collect()
    wait_until(lambda: not [each for each in threading.enumerate() if each.name == "espalier-client"])


def test_a_program_that_never_closes_its_client_ends(start):
    code = f"from espalier import SearchClient\nclient = SearchClient('{start().address}')\nprint(client.health())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.mark.parametrize(
    "call", ["client.solve('hold')", "list(client.solve_stream('hold'))", "client.solve_many(['hold'] * 9)"]
)
def test_an_interrupt_ends_the_searches(start, fake, call: str):
    server = start()
    code = f"from espalier import SearchClient\nwith SearchClient('{server.address}') as client:\n    {call}"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        try:
            fake.submitted.get(timeout=PATIENCE)
            if "many" in call:
                wait_until(lambda: server.info().occupancy.running == 9)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert "KeyboardInterrupt" in errors
    wait_until(lambda: server.info().admitted_calls == 0)
    assert fake.cancelled.qsize() >= 1


def test_an_interrupt_that_is_caught_ends_the_search_while_its_traceback_is_kept(start, fake):
    def interrupt() -> None:
        fake.submitted.get(timeout=PATIENCE)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with SearchClient(start().address) as client:
            threading.Thread(target=interrupt).start()
            with pytest.raises(KeyboardInterrupt) as kept:
                client.solve("hold", PATIENCE)
            assert fake.cancelled.get(timeout=PATIENCE)
            assert kept.traceback
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_process_that_is_forked_cannot_use_its_parents_client(start):
    with SearchClient(start().address) as client:
        client.solve("solve", PATIENCE)

        def is_refused() -> bool:
            with pytest.raises(MisuseError, match="forked"):
                client.solve("solve", PATIENCE)
            return True

        assert is_true_when_forked(is_refused)
        assert client.solve("solve", PATIENCE).answer == "42"


# ---- the asyncio client


def test_a_cancelled_task_cancels_its_search_and_stays_cancelled(start, fake):
    async def scenario(address: str) -> None:
        async with AsyncSearchClient(address) as client:
            for work in (client.solve("hold"), client.solve_many(["hold"])):
                task = asyncio.create_task(work)
                await asyncio.to_thread(fake.submitted.get, timeout=PATIENCE)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert await asyncio.to_thread(fake.cancelled.get, timeout=PATIENCE)

    asyncio.run(scenario(start().address))


def test_a_timeout_of_asyncio_cancels_the_search(start, fake):
    async def scenario(address: str) -> None:
        async with AsyncSearchClient(address) as client:

            async def events() -> list[object]:
                return [event async for event in client.solve_stream("hold")]

            with pytest.raises(TimeoutError):
                await asyncio.wait_for(events(), 0.2)
            assert await asyncio.to_thread(fake.cancelled.get, timeout=PATIENCE)

    asyncio.run(scenario(start().address))


def test_leaving_an_iteration_closes_it(start, fake):
    async def scenario(address: str) -> None:
        async with AsyncSearchClient(address) as client:
            async with aclosing(client.solve_stream("hold")) as events:
                async for event in events:
                    assert isinstance(event, Started)
                    break
            assert await asyncio.to_thread(fake.cancelled.get, timeout=PATIENCE)

    asyncio.run(scenario(start().address))


def test_many_tasks_share_one_client(start):
    async def scenario(address: str) -> None:
        async with AsyncSearchClient(address) as client:
            results = await asyncio.gather(*(client.solve("solve", PATIENCE, seed=seed) for seed in range(40)))
            assert [result.configuration.seed for result in results] == list(range(40))

    asyncio.run(scenario(start().address))


def test_the_asyncio_client_is_made_and_used_on_one_event_loop(start):
    address = start().address
    with pytest.raises(MisuseError, match="created in a coroutine"):
        AsyncSearchClient(address)

    async def make() -> AsyncSearchClient:
        return AsyncSearchClient(address)

    async def use(client: AsyncSearchClient) -> None:
        with pytest.raises(MisuseError, match="another event loop"):
            await client.health()
        with pytest.raises(MisuseError, match="another event loop"):
            await anext(client.solve_stream("solve"))

    with asyncio.Runner() as one, asyncio.Runner() as other:
        client = one.run(make())
        other.run(use(client))
        one.run(client.close())
