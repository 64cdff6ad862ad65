"""Callers are kept apart, and those in a hurry go first."""

import asyncio
from types import SimpleNamespace

import pytest
from scripted_orchestrator import ScriptedOrchestrator
from server_thread import PATIENCE, ServerThread

from espalier.engine.errors import InvalidRequestError
from espalier.search.client import SearchClient
from espalier.search.request import SearchRequest
from espalier.search.service.call_queue import CallQueue
from espalier.search.service.callers import Salts, caller_of
from espalier.search.service.errors import BusyError


def context(peer: str, **metadata: str) -> SimpleNamespace:
    return SimpleNamespace(peer=lambda: peer, invocation_metadata=lambda: tuple(metadata.items()))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (context("ipv4:10.0.0.1:5000"), context("ipv4:10.0.0.1:6000"), True),
        (context("ipv4:10.0.0.1:5000"), context("ipv4:10.0.0.2:5000"), False),
        (context("ipv6:[::1]:5000"), context("ipv6:[::1]:6000"), True),
        (context("unix:/run/a"), context("unix:/run/b"), False),
        (context("ipv4:10.0.0.1:1", authorization="a"), context("ipv4:10.0.0.2:2", authorization="a"), True),
        (context("ipv4:10.0.0.1:1", authorization="a"), context("ipv4:10.0.0.1:1", authorization="b"), False),
    ],
)
def test_a_caller_is_known_by_its_token_or_else_its_host(one: SimpleNamespace, other: SimpleNamespace, same: bool):
    salts = Salts()
    assert (salts.of(caller_of(one)) == salts.of(caller_of(other))) == same


def test_nobody_else_can_work_out_a_salt():
    assert len(Salts().of("caller")) == 32
    assert Salts().of("caller") != Salts().of("caller"), "the key is the process's own"


def test_priority_and_salt_reach_the_orchestrator(start, fake: ScriptedOrchestrator):
    server: ServerThread = start()
    with SearchClient(server.address) as client:
        first = client.solve(SearchRequest("solve"), PATIENCE, priority=7)
        second = client.solve(SearchRequest("solve"), PATIENCE)
    options, others = fake.options[first.search_id], fake.options[second.search_id]
    assert (options.priority, len(options.salt)) == (7, 32)
    assert (others.priority, others.salt) == (0, options.salt)


@pytest.mark.parametrize("priority", [-101, 101])
def test_a_priority_out_of_bounds_is_refused_by_name(priority: int, start):
    with SearchClient(start().address) as client, pytest.raises(InvalidRequestError, match="priority"):
        client.solve(SearchRequest("solve"), PATIENCE, priority=priority)


def test_of_those_who_wait_the_one_of_highest_priority_goes_first():
    async def scenario() -> list[int]:
        admission, order = CallQueue(slots=1, queue=8, wait_seconds=5), []

        async def call(priority: int) -> None:
            await admission.acquire(priority)
            order.append(priority)
            admission.release(priority)

        await admission.acquire(2)
        calls = [asyncio.create_task(call(priority)) for priority in (0, -1, 2, 1)]
        while admission.waiting < len(calls):
            await asyncio.sleep(0)
        admission.release(2)
        await asyncio.gather(*calls)
        return order

    assert asyncio.run(scenario()) == [2, 1, 0, -1]


def test_a_call_of_higher_priority_waits_for_no_slot_that_a_lower_one_holds():
    async def scenario() -> None:
        admission = CallQueue(slots=2, queue=8, wait_seconds=5)
        for priority in (0, 1, 1):  # the third takes the place of the first
            assert await admission.acquire(priority) == 0.0
        waiting = {name: asyncio.create_task(admission.acquire(name)) for name in (0, 1)}
        while admission.waiting < 2:
            await asyncio.sleep(0)
        await admission.acquire(2)  # four slots of two: no more, whatever the priority
        urgent = asyncio.create_task(admission.acquire(3))
        while admission.waiting < 3:
            await asyncio.sleep(0)
        admission.release(1)
        await urgent
        for held in (3, 2):
            admission.release(held)
        await waiting[1]
        admission.release(1)
        await asyncio.sleep(0)
        assert not waiting[0].done(), "the first of all goes on before it"
        admission.release(0)
        await waiting[0]
        admission.release(0)
        admission.release(1)
        assert await admission.acquire() == await admission.acquire() == 0.0

    asyncio.run(scenario())


def test_nobody_waits_longer_for_a_slot_than_the_search_may_take():
    async def scenario() -> None:
        admission = CallQueue(slots=1, queue=8, wait_seconds=60)
        await admission.acquire()
        await admission.acquire(at_most=0.01)

    with pytest.raises(BusyError, match=r"stayed busy for 0\.01 s"):
        asyncio.run(scenario())


@pytest.mark.parametrize("grants_before_the_cancel_arrives", [False, True])
def test_a_slot_given_to_a_call_that_leaves_at_that_moment_goes_to_the_next(grants_before_the_cancel_arrives: bool):
    async def scenario() -> None:
        admission = CallQueue(slots=1, queue=8, wait_seconds=5)
        await admission.acquire()
        leaving, staying = (asyncio.create_task(admission.acquire()) for _ in range(2))
        while admission.waiting < 2:
            await asyncio.sleep(0)
        if grants_before_the_cancel_arrives:
            admission.release()
            leaving.cancel()
        else:
            leaving.cancel()
            admission.release()
        async with asyncio.timeout(5):
            await staying
        with pytest.raises(asyncio.CancelledError):
            await leaving
        admission.release()
        assert await admission.acquire() == 0.0

    asyncio.run(scenario())
