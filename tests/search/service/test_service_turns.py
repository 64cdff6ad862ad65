"""Reading and checking requests on threads, in turn: no caller waits until all of another's are done."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import httpx2
import pytest
from callers_files import callers_file
from raw_client import bearer, raw_stub
from scripted_orchestrator import ScriptedOrchestrator
from server_thread import PATIENCE, ServerThread, wait_until

from espalier.engine.guidance import compiled
from espalier.engine.guidance.grammar import Grammar
from espalier.search.fairness import Account
from espalier.search.request import SearchRequest
from espalier.search.service.errors import BusyError
from espalier.search.service.queues import ThreadedWork
from espalier.v1 import search_pb2 as pb

LONG = "long " * 6000


# ---- on plain data


class Desk:
    """Turns at one place, each of which ends when the test lets it; the first does nothing."""

    def __init__(self, max_waiting: int = 1000) -> None:
        self.turns = ThreadedWork(max_waiting)
        self.order: list[str] = []
        self.open = threading.Semaphore(0)
        self.tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self.turns.run(Account("first"), 0, self.open.acquire))
        ]

    async def ask(self, caller: str, cost: float = 1.0) -> asyncio.Task[Any]:
        def work() -> None:
            self.order.append(caller)
            self.open.acquire()

        self.tasks.append(asyncio.create_task(self.turns.run(Account(caller), cost, work)))
        await asyncio.sleep(0)
        return self.tasks[-1]

    async def until(self, begun: int) -> list[str]:
        """Let turns end until so many have begun; returns whose."""
        while len(self.order) < begun:
            before = len(self.order)
            self.open.release()
            while len(self.order) == before:
                await asyncio.sleep(0.001)
        return self.order

    async def work(self) -> list[str]:
        """Let everything end."""
        self.open.release(10_000)
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return self.order


@pytest.mark.parametrize("begun", [0, 1, 25, 48])
def test_a_caller_who_comes_later_waits_for_one_piece_of_anothers_work(begun: int):
    async def scenario() -> list[str]:
        desk = Desk()
        for _ in range(50):
            await desk.ask("crowd")
        await desk.until(begun)
        await desk.ask("other")
        return (await desk.work())[begun:]

    assert asyncio.run(scenario()).index("other") <= 1


@pytest.mark.parametrize("begun", [0, 1, 25, 48])
def test_small_work_goes_before_large_work_of_many_callers(begun: int):
    async def scenario() -> list[str]:
        desk = Desk()
        for number in range(50):
            await desk.ask(f"crowd {number}", 100)
        await desk.until(begun)
        await desk.ask("other", 1)
        return (await desk.work())[begun:]

    assert asyncio.run(scenario())[0] == "other"


def test_refusals_of_one_caller_are_paced_and_anothers_is_not_delayed_by_them():
    async def scenario() -> tuple[list[str], float]:
        desk = Desk(max_waiting=1)
        refused = list[str]()

        async def ask(caller: str, cost: float) -> None:
            try:
                await desk.turns.run(Account(caller), cost, int)
            except BusyError:
                refused.append(caller)

        loop = asyncio.get_running_loop()
        start = loop.time()
        tasks = [asyncio.create_task(ask("crowd", 1)) for _ in range(9)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(ask("other", 100)) for _ in range(2)]
        while len(refused) < 10:
            await asyncio.sleep(0.001)
        seconds = loop.time() - start
        await desk.work()
        await asyncio.gather(*tasks)
        return refused, seconds

    refused, seconds = asyncio.run(scenario())
    assert seconds > 0.3  # the eighth of one caller, at 20 a second
    assert set(refused[:3]) == {"crowd", "other"}


def test_large_work_has_its_turn_beside_an_endless_row_of_small():
    async def scenario() -> list[str]:
        desk = Desk()
        await desk.ask("large", 10)

        def again(name: str, number: int) -> None:
            desk.order.append("small")
            if "large" not in desk.order and number < 100:
                loop.call_soon_threadsafe(lambda: desk.tasks.append(loop.create_task(small(name, number + 1))))

        async def small(name: str, number: int) -> None:
            await desk.turns.run(Account(name), 1, lambda: again(name, number))

        loop = asyncio.get_running_loop()
        desk.tasks += [asyncio.create_task(small(name, 1)) for name in ("a", "b")]
        await asyncio.sleep(0)
        return await desk.work()

    order = asyncio.run(scenario())
    assert order.index("large") <= 20, "each row was given as much before"


def test_a_caller_whose_work_is_done_is_given_no_more_than_its_share_later():
    async def scenario() -> list[str]:
        desk = Desk()
        for _ in range(20):
            await desk.ask("busy")
        await desk.until(15)
        for _ in range(10):
            await desk.ask("idle")
        return (await desk.work())[15:]

    assert sorted(asyncio.run(scenario())[:6]) == ["busy"] * 3 + ["idle"] * 3


def test_where_too_much_waits_whoever_asks_for_most_is_sent_away():
    async def scenario() -> tuple[list[bool], list[str]]:
        desk = Desk(max_waiting=4)
        crowd = [await desk.ask("crowd") for _ in range(5)]
        other = await desk.ask("other")
        greedy = await desk.ask("greedy", 100)
        order = await desk.work()
        return [isinstance(task.exception(), BusyError) for task in (*crowd, other, greedy)], order

    refused, order = asyncio.run(scenario())
    assert refused == [False, False, False, True, True, False, True]
    assert sorted(order) == ["crowd", "crowd", "crowd", "other"]


def test_work_that_was_sent_away_is_not_counted():
    async def scenario() -> list[str]:
        desk = Desk(max_waiting=2)
        await asyncio.sleep(0)
        for _ in range(50):
            await desk.ask("crowd", 10)
        (await desk.ask("left", 1)).cancel()
        await asyncio.sleep(0)
        await desk.ask("other", 15)
        return await desk.work()

    assert asyncio.run(scenario()) == ["crowd", "other"], "the crowd's second, of 20 in all, had to make room"


def test_a_call_that_is_cancelled_while_it_waits_leaves_and_one_at_work_keeps_its_place():
    async def scenario() -> tuple[int, list[str]]:
        desk = Desk()
        waiting, left = await desk.ask("waiting"), await desk.ask("left")
        left.cancel()
        desk.tasks[0].cancel()
        await asyncio.sleep(0.02)
        assert desk.tasks[0].cancelled()
        held = desk.turns._turns.waiting
        assert not waiting.done()
        return held, await desk.work()

    assert asyncio.run(scenario()) == (1, ["waiting"])


def test_a_turn_that_comes_as_its_call_is_cancelled_goes_to_the_next():
    async def scenario() -> list[str]:
        desk = Desk()
        first, _ = await desk.ask("first"), await desk.ask("second")
        desk.open.release()
        while desk.turns._turns.waiting == 2:
            await asyncio.sleep(0)
        first.cancel()
        return await desk.until(1)

    assert asyncio.run(scenario()) == ["second"]


def test_what_work_raises_is_raised_and_its_place_is_free_again():
    async def scenario() -> list[str]:
        desk = Desk()
        desk.open.release()

        def fail() -> None:
            raise ValueError("so it is")

        for _ in range(3):
            with pytest.raises(ValueError, match="so it is"):
                await desk.turns.run(Account("one"), 1, fail)
        await desk.ask("other")
        return await desk.work()

    assert asyncio.run(scenario()) == ["other"]


# ---- through the endpoints


class SlowChecks(ScriptedOrchestrator):
    """Checks of long problems wait for `pass_one`, and `checked` tells the order of all."""

    def __init__(self) -> None:
        super().__init__()
        self.pass_one = threading.Semaphore(0)
        self.begun = 0
        self.checked: list[str] = []

    def check(self, request: SearchRequest) -> Any:
        checked = super().check(request)
        if threading.current_thread() is not self.thread:
            if request.problem.startswith("long"):
                self.begun += 1
                assert self.pass_one.acquire(timeout=PATIENCE)
            self.checked.append(request.problem[:4])
        return checked


@pytest.fixture
def fake() -> SlowChecks:
    return SlowChecks()


Ask = Callable[[str, str], "Future[Any]"]


@contextmanager
def grpc_callers(server: ServerThread) -> Iterator[Ask]:
    """Calls over one connection for each name, with the name for a token."""
    with ExitStack() as stack:
        stubs = {
            name: stack.enter_context(raw_stub(server.address, grpc__use_local_subchannel_pool=1))
            for name in ("ann", "bob")
        }
        yield lambda name, problem: stubs[name].SolveProblem.future(
            pb.SolveProblemRequest(problem=problem), timeout=PATIENCE, metadata=bearer(name)
        )


def http_callers(path: str, body: Callable[[str], dict[str, Any]]) -> Callable[[ServerThread], Any]:
    @contextmanager
    def callers(server: ServerThread) -> Iterator[Ask]:
        """Calls over a connection each, with the name for a token."""
        with (
            ThreadPoolExecutor(64) as pool,
            httpx2.Client(base_url=server.url or "", timeout=PATIENCE, trust_env=False) as client,
        ):

            def ask(name: str, problem: str) -> "Future[Any]":
                headers = {"authorization": f"Bearer {name}"}
                return pool.submit(lambda: client.post(path, json=body(problem), headers=headers).raise_for_status())

            yield ask

    return callers


ENDPOINTS: dict[str, Callable[[ServerThread], Any]] = {
    "grpc": grpc_callers,
    "searches": http_callers("/v1/searches", lambda problem: {"problem": problem, "stream": False}),
    "openai": http_callers(
        "/v1/chat/completions",
        lambda problem: {"model": "espalier", "messages": [{"role": "user", "content": problem}]},
    ),
}


@pytest.mark.parametrize("logins", [True, False], ids=["logins", "connections"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_small_call_is_checked_before_a_crowd_of_anothers_long_ones(
    endpoint: str, logins: bool, start, tmp_path, fake: SlowChecks
):
    settings = {"callers": callers_file(tmp_path, ann="", bob="")} if logins else {}
    server: ServerThread = start(http_port=0, **settings)
    with ENDPOINTS[endpoint](server) as ask:
        crowd = [ask("ann", LONG) for _ in range(40)]
        wait_until(lambda: fake.begun == 1 and server.call(_waiting(server)) == 39)
        small = ask("bob", "solve")
        wait_until(lambda: server.call(_waiting(server)) == 40)
        fake.pass_one.release()
        small.result(PATIENCE)
        assert fake.checked == ["long", "solv"]
        fake.pass_one.release(39)
        for each in crowd:
            each.result(PATIENCE)


async def _waiting(server: ServerThread) -> int:
    return server.server.session._checking._turns.waiting


def test_a_caller_with_too_many_calls_to_be_checked_is_told_to_come_back(start, fake: SlowChecks):
    server: ServerThread = start(max_searches=2, max_queue=4)
    with grpc_callers(server) as ask:
        crowd = [ask("ann", LONG) for _ in range(10)]
        wait_until(lambda: sum(each.done() for each in crowd) == 1)
        small = ask("bob", "solve")
        wait_until(lambda: sum(each.done() for each in crowd) == 2)
        assert {each.code() for each in crowd if each.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}  # pyright: ignore[reportAttributeAccessIssue]
        fake.pass_one.release(9)
        assert small.result(PATIENCE).result.answer == "42"
        fake.release.set()
        for each in crowd:
            each.exception(PATIENCE)


def test_a_form_that_takes_long_to_compile_holds_up_no_request_without_one(
    start: Callable[..., ServerThread], make_orchestrator: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    """Two connections with a hostile form each made all others wait for eight seconds a request."""
    entered, release, tried = threading.Semaphore(0), threading.Event(), compiled._tried

    def slow(grammar: Grammar) -> int:
        if "slow" in grammar.source:
            entered.release()
            release.wait(PATIENCE)
        return tried(grammar)

    monkeypatch.setattr(compiled, "_tried", slow)
    orchestrator = make_orchestrator(verifier=None)
    server = start(lambda: orchestrator, http_port=0)
    server.wait_loaded()

    def ask(form: str = "") -> str:
        body = {"problem": "x", "algorithm": "chain", "max_tokens": 4, "stream": False, "text_form": form}
        with httpx2.Client(base_url=server.url or "", timeout=PATIENCE, trust_env=False) as client:
            return client.post("/v1/searches", json=body).text

    with ThreadPoolExecutor(4) as pool:
        held = [pool.submit(ask, f"slow{i}") for i in range(2)]
        for _ in held:
            assert entered.acquire(timeout=PATIENCE)
        assert "finished" in ask()
        assert not any(each.done() for each in held)
        release.set()
        assert all("finished" in each.result(PATIENCE) for each in held)
