"""Who may start a search, who waits, who is refused: by priority, and fairly among callers."""

import asyncio

import pytest
from scripted_orchestrator import ScriptedOrchestrator
from server_thread import PATIENCE, ServerThread

from espalier.engine.errors import InvalidRequestError
from espalier.search.client import SearchClient
from espalier.search.fairness import Account
from espalier.search.request import SearchRequest
from espalier.search.service.errors import BusyError
from espalier.search.service.queues import CallQueue, TimeLimitReachedError


def test_priority_and_salt_reach_the_orchestrator(start, fake: ScriptedOrchestrator):
    server: ServerThread = start(max_priority=7, share_prompts=True)
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
        await admission.acquire(time_limit=0.01)

    with pytest.raises(TimeLimitReachedError):
        asyncio.run(scenario())


async def one_slot_beyond_shares(*callers: str) -> CallQueue:
    """A queue in which `callers` hold the slots of their shares, and further calls take turns at a single one."""
    queue = CallQueue(slots=2 * len(callers) + 2, queue=99, wait_seconds=5)
    for name in (*callers, "some other"):
        await queue.acquire(account=Account(name), cost=0.0)
        await queue.acquire(account=Account(name), cost=0.0)
    return queue


def open_the_slot(queue: CallQueue) -> None:
    queue.release(account=Account("some other"))


async def served(calls: list[tuple[str, float]]) -> list[str]:
    """The order in which callers get a slot beyond their shares, which `calls` wait for, each with its cost."""
    order = list[str]()
    queue = await one_slot_beyond_shares(*dict.fromkeys(name for name, _ in calls))

    async def call(caller: str, cost: float) -> None:
        await queue.acquire(account=Account(caller), cost=cost)
        order.append(caller)
        queue.release(account=Account(caller))

    tasks = []
    for caller, cost in calls:
        tasks.append(asyncio.create_task(call(caller, cost)))
        await asyncio.sleep(0)
    open_the_slot(queue)
    await asyncio.gather(*tasks)
    return order


def test_callers_take_turns_whoever_asked_more():
    order = asyncio.run(served([("crowd", 1.0)] * 6 + [("other", 1.0)] * 3))
    assert order == ["crowd", "other", "crowd", "other", "crowd", "other", "crowd", "crowd", "crowd"]


def test_a_turn_is_counted_in_tokens():
    order = asyncio.run(served([("large", 4.0)] * 3 + [("small", 1.0)] * 8))
    assert order[:7] == ["large", "small", "small", "small", "small", "large", "small"]


@pytest.mark.parametrize("slots", [1, 2, 32])
def test_a_caller_below_its_share_waits_for_no_slot_that_others_hold(slots: int):
    async def scenario() -> dict[Account, int]:
        queue, held = CallQueue(slots, queue=999, wait_seconds=5), dict[Account, int]()
        tasks = []
        for account in (Account("crowd"), Account("a host", "5000"), Account("a host", "5001"), Account("other")):
            held[account] = 0

            async def call(account: Account) -> None:
                await queue.acquire(account=account)
                held[account] += 1

            tasks += [asyncio.create_task(call(account)) for _ in range(60)]
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        return held

    held = list(asyncio.run(scenario()).values())
    assert held == {1: [1, 1, 0, 1], 2: [2, 1, 1, 1], 32: [32, 16, 8, 11]}[slots]


def test_connections_of_a_host_share_its_slots_and_their_number_takes_nothing_from_others():
    many = [Account("a host", str(port)) for port in range(5000, 5100)]

    async def scenario() -> None:
        queue = CallQueue(slots=4, queue=999, wait_seconds=5)
        tasks = [asyncio.create_task(queue.acquire(account=account)) for account in many]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert queue.held == 8, "their searches take turns"
        assert await queue.acquire(account=Account("another host", "6000")) == 0.0
        assert await queue.acquire(account=Account("another host", "6001")) == 0.0
        for task in tasks:
            task.cancel()

    asyncio.run(scenario())


def test_calls_of_a_lower_priority_have_no_share_in_what_higher_ones_hold():
    async def scenario() -> None:
        queue = CallQueue(slots=2, queue=9, wait_seconds=5)
        for _ in range(2):
            await queue.acquire(1, account=Account("urgent"))
        task = asyncio.create_task(queue.acquire(0, account=Account("patient")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
        queue.release(1, Account("urgent"))
        await task

    asyncio.run(scenario())


def test_a_caller_who_was_idle_has_saved_nothing_up():
    async def scenario() -> list[str]:
        queue, order = await one_slot_beyond_shares("busy", "idle"), list[str]()
        open_the_slot(queue)
        for _ in range(20):
            await queue.acquire(account=Account("busy"))
            queue.release(account=Account("busy"))
        await queue.acquire(account=Account("busy"))

        async def call(caller: str) -> None:
            await queue.acquire(account=Account(caller))
            order.append(caller)
            queue.release(account=Account(caller))

        tasks = [asyncio.create_task(call(caller)) for caller in ["busy"] * 3 + ["idle"] * 3]
        while queue.waiting < len(tasks):
            await asyncio.sleep(0)
        queue.release(account=Account("busy"))
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(scenario()) == ["idle", "busy", "idle", "busy", "idle", "busy"]


def test_a_waiting_call_rises_to_the_highest_that_waits(monkeypatch):
    now = 0.0
    monkeypatch.setattr("espalier.search.service.queues.time.monotonic", lambda: now)

    async def scenario() -> list[str]:
        nonlocal now
        queue, order = CallQueue(slots=1, queue=9, wait_seconds=500), []
        await queue.acquire(5)

        async def call(name: str, priority: int) -> None:
            await queue.acquire(priority)
            order.append(name)
            queue.release(priority)

        tasks = [asyncio.create_task(call("low", 0))]
        await asyncio.sleep(0)
        now = 4.0
        tasks.append(asyncio.create_task(call("high", 5)))
        await asyncio.sleep(0)
        now = 5.0  # low has risen by five, high is at its own
        queue.release(5)
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(scenario()) == ["low", "high"]


def test_in_a_full_queue_one_with_few_calls_takes_the_place_of_one_with_many():
    crowd, other = Account("crowd"), Account("other")

    async def scenario() -> None:
        queue = CallQueue(slots=1, queue=3, wait_seconds=5)
        for account in (crowd, other):
            await queue.acquire(account=account)
        tasks = [asyncio.create_task(queue.acquire(account=crowd)) for _ in range(3)]
        while queue.waiting < 3:
            await asyncio.sleep(0)
        with pytest.raises(BusyError, match="queue of 3 is full"):
            await queue.acquire(account=crowd)
        task = asyncio.create_task(queue.acquire(account=other))
        with pytest.raises(BusyError, match="queue of 3 is full"):
            await tasks[2]
        with pytest.raises(BusyError):  # one each is a fair share of what is left beside two
            await queue.acquire(account=other)
        queue.release(account=other)
        await task
        for waiting in tasks[:2]:
            queue.release(account=crowd)
            await waiting
        queue.release(account=other)
        assert queue.held == 1
        assert queue.waiting == 0

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
