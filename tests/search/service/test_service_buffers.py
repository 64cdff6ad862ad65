import asyncio

import pytest
from scripted_orchestrator import CANDIDATE, NODES, result_of

from espalier.search.request import SearchRequest
from espalier.search.result import CandidateDone, Finished, Started, StepDone, StopReason
from espalier.search.service.call_queue import CallQueue
from espalier.search.service.errors import BusyError
from espalier.search.service.event_buffer import EventBuffer

REQUEST = SearchRequest("x")
STARTED = Started("s", REQUEST)
FINISHED = Finished("s", result_of(REQUEST, "s", StopReason.FINISHED))


def step(depth: int) -> StepDone:
    return StepDone("s", depth, 1, NODES[:1])


async def drain(buffer: EventBuffer) -> list:
    return [await buffer.next() for _ in range(len(buffer))]


def test_a_full_buffer_keeps_the_first_and_last_event_and_the_latest_steps():
    async def scenario() -> list:
        buffer = EventBuffer(4)
        for event in (STARTED, *map(step, range(100)), FINISHED):
            buffer.push(event)
            assert len(buffer) <= 4
        return await drain(buffer)

    assert asyncio.run(scenario()) == [STARTED, step(98), step(99), FINISHED]


def test_a_full_buffer_gives_up_steps_before_candidates():
    candidate = CandidateDone("s", CANDIDATE)

    async def scenario() -> list:
        buffer = EventBuffer(3)
        for event in (STARTED, step(1), candidate, candidate, candidate, FINISHED):
            buffer.push(event)
            assert len(buffer) <= 3
        return await drain(buffer)

    assert asyncio.run(scenario()) == [STARTED, candidate, FINISHED]


def test_a_buffer_with_room_keeps_everything_in_order():
    events = [STARTED, step(1), CandidateDone("s", CANDIDATE), step(2), FINISHED]

    async def scenario() -> list:
        buffer = EventBuffer(5)
        for event in events:
            buffer.push(event)
        return await drain(buffer)

    assert asyncio.run(scenario()) == events


def test_a_failure_reaches_a_waiting_reader():
    async def scenario() -> None:
        buffer = EventBuffer(2)
        asyncio.get_running_loop().call_soon(buffer.fail, BusyError("broken"))
        async with asyncio.timeout(5):
            await buffer.next()

    with pytest.raises(BusyError, match="broken"):
        asyncio.run(scenario())


def test_admission_serves_waiters_in_order_and_refuses_one_too_many():
    async def scenario() -> list[str]:
        admission = CallQueue(slots=1, queue=2, wait_seconds=5)
        order: list[str] = []

        async def call(name: str) -> None:
            await admission.acquire()
            order.append(name)
            admission.release()

        await admission.acquire()
        first, second = asyncio.create_task(call("first")), asyncio.create_task(call("second"))
        while admission.waiting < 2:
            await asyncio.sleep(0)
        with pytest.raises(BusyError, match="queue of 2 is full"):
            await admission.acquire()
        admission.release()
        await asyncio.gather(first, second)
        return order

    assert asyncio.run(scenario()) == ["first", "second"]


def test_a_waiter_that_leaves_or_waits_too_long_takes_no_slot_with_it():
    async def scenario() -> None:
        admission = CallQueue(slots=1, queue=2, wait_seconds=0.01)
        await admission.acquire()
        left = asyncio.create_task(admission.acquire())
        while not admission.waiting:
            await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(BusyError, match="stayed busy"):
            await admission.acquire()
        await asyncio.wait([left])
        assert left.cancelled()
        assert admission.waiting == 0
        admission.release()
        await admission.acquire()

    asyncio.run(scenario())
