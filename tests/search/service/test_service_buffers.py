import asyncio
from dataclasses import replace

import pytest
from scripted_orchestrator import CANDIDATE, NODES, result_of

from espalier.search.request import SearchRequest
from espalier.search.result import CandidateDone, Finished, Started, StepDone, StopReason
from espalier.search.service.errors import BusyError
from espalier.search.service.queues import CallQueue, EventBuffer

REQUEST = SearchRequest("x")
STARTED = Started("s", REQUEST)
FINISHED = Finished("s", result_of(REQUEST, "s", StopReason.FINISHED))


def step(depth: int) -> StepDone:
    return StepDone("s", depth, 1, NODES[:1])


async def drain(buffer: EventBuffer) -> list:
    return await buffer.take() if len(buffer) else []


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


def grown(first: int, count: int, score: float = 0.5) -> StepDone:
    """A report of nodes that are new."""
    nodes = tuple(replace(NODES[1], node_id=first + i, score=score) for i in range(count))
    return StepDone("s", 1, count, (), nodes=nodes)


def known(events: list) -> dict[int, float | None]:
    """Scores by node, as a reader of the events knows them."""
    return {node.node_id: node.score for event in events if isinstance(event, StepDone) for node in event.nodes}


def test_a_report_that_is_dropped_leaves_its_changes_to_the_next():
    reports = [grown(1, 2), grown(2, 2, 0.75), grown(4, 1), grown(1, 1, 0.25), grown(5, 3)]

    async def scenario(capacity: int) -> list:
        buffer = EventBuffer(capacity)
        for event in (STARTED, *reports, FINISHED):
            buffer.push(event)
            assert len(buffer) <= capacity
        return await drain(buffer)

    whole = known(reports)
    assert whole == {1: 0.25, 2: 0.75, 3: 0.75, 4: 0.5, 5: 0.5, 6: 0.5, 7: 0.5}
    for capacity in (3, 4, 5, 9):
        events = asyncio.run(scenario(capacity))
        assert known(events) == whole
        assert all(node_ids(event) == sorted(node_ids(event)) for event in events)
    # Only the result, which has all nodes, takes the place of the last report.
    assert asyncio.run(scenario(2)) == [STARTED, FINISHED]


def node_ids(event: object) -> list[int]:
    return [node.node_id for node in event.nodes] if isinstance(event, StepDone) else []


def test_a_report_of_changes_stays_where_nothing_takes_them_over():
    candidate = CandidateDone("s", CANDIDATE)

    async def scenario() -> list:
        buffer = EventBuffer(3)
        for event in (STARTED, grown(1, 1), candidate, candidate, grown(2, 1)):
            buffer.push(event)
            assert len(buffer) <= 3
        return await drain(buffer)

    events = asyncio.run(scenario())
    assert known(events) == {1: 0.5, 2: 0.5}
    assert candidate in events


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
            await buffer.take()

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
