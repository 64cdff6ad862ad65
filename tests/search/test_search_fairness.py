"""Accounts take turns, whoever asks more, and none waits for what another does."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from espalier.search.fairness import Account, AccountThreads, Holdings, Shares, Turns

ONE, TWO = Account("one"), Account("two")


def test_callers_share_equally_and_connections_share_what_their_caller_gets():
    accounts = [ONE, TWO, *(Account("host", str(port)) for port in range(4))]
    shares = Shares(12, accounts * 2)
    assert shares.of(ONE) == (4.0, 4.0)
    assert shares.of(Account("host", "3")) == (4.0, 1.0)


def test_holdings_are_counted_by_account_and_by_caller():
    holdings = Holdings([ONE, Account("host", "1"), Account("host", "2")])
    assert holdings.of(Account("host", "1")) == (2, 1)
    assert holdings.of(Account("host", "3")) == (2, 0)
    holdings.remove(ONE)
    assert (ONE in holdings, holdings.total) == (False, 2)
    assert holdings.compared(Account("host", "1"), Account("host", "2")) == (1, 1)
    assert holdings.compared(Account("host", "1"), TWO) == (2, 0)


class Work:
    """Takes a place at turns and holds it until told; notes who got one."""

    def __init__(self, turns: Turns) -> None:
        self.order: list[Account] = []
        self._turns = turns
        self._pool = ThreadPoolExecutor(32)
        self._may_end = threading.Semaphore(0)
        self._noted = threading.Condition()

    def ask(self, account: Account, cost: float = 1.0) -> None:
        before = len(self._turns._waiting) + len(self.order)
        self._pool.submit(self._work, account, cost)
        self.until(lambda: len(self._turns._waiting) + len(self.order) > before)

    def _work(self, account: Account, cost: float) -> None:
        self._turns.take(account)
        with self._noted:
            self.order.append(account)
            self._noted.notify_all()
        self._may_end.acquire()
        self._turns.give_back(account, cost)

    def until(self, true: Callable[[], bool]) -> None:
        for _ in range(2000):
            with self._noted:
                if true():
                    return
                self._noted.wait(0.005)
        raise AssertionError("nothing happens")

    def got(self, count: int) -> list[Account]:
        """Who got places, once as many have."""
        self.until(lambda: len(self.order) >= count)
        return self.order[:count]

    def end_one(self) -> None:
        self._may_end.release()

    def end_all(self) -> None:
        self._may_end.release(99)
        self._pool.shutdown()


@pytest.fixture
def working() -> Iterator[Callable[..., Work]]:
    """Makes turns with work at them; whatever a test leaves is ended."""
    made: list[Work] = []

    def make(places: int, each: int) -> Work:
        made.append(Work(Turns(places, each, max(1, places - 1))))
        return made[-1]

    yield make
    for work in made:
        work.end_all()


def test_a_free_place_goes_to_the_one_that_has_paid_least(working: Callable[..., Work]):
    work = working(1, each=1)
    for account, cost in ((ONE, 9.0), (ONE, 1.0), (TWO, 1.0), (TWO, 1.0), (ONE, 1.0)):
        work.ask(account, cost)
    for count in range(1, 5):
        work.got(count)
        work.end_one()
    assert work.got(5) == [ONE, TWO, TWO, ONE, ONE]


def test_a_free_place_goes_to_the_one_that_holds_fewest(working: Callable[..., Work]):
    work = working(4, each=3)
    for account in (ONE, ONE, ONE, ONE, TWO, TWO):
        work.ask(account)
    assert work.got(4) == [ONE, ONE, ONE, TWO]
    work.ask(Account("three"))
    work.end_one()
    work.got(5)
    assert work.order[4] in (Account("three"), TWO)
    assert work.order.count(ONE) == 3


def test_who_holds_fewer_places_goes_first_whatever_it_has_paid(working: Callable[..., Work]):
    three = Account("three")
    work = working(3, each=2)
    turns = work._turns
    turns.take(TWO)
    turns.give_back(TWO, 9.0)
    for account in (ONE, three, three):
        turns.take(account)
    work.ask(ONE)
    work.ask(TWO)
    turns.give_back(three, 1.0)
    assert work.got(1) == [TWO]
    turns.give_back(three, 1.0)
    assert work.got(2) == [TWO, ONE]


def test_an_interrupted_wait_for_a_place_leaves_it_to_others(monkeypatch: pytest.MonkeyPatch):
    turns = Turns(1, 1, 1)
    turns.take(ONE)

    def interrupted(self: Future, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            turns.take(TWO)
        assert turns.waiting == 0
        turns.give_back(ONE)
        with pytest.raises(KeyboardInterrupt):  # just as the place was taken
            turns.take(TWO)
    turns.take(ONE)


@pytest.mark.parametrize("connections", [1, 3])
def test_no_caller_holds_every_place(connections: int, working: Callable[..., Work]):
    work = working(3, each=1)
    for i in range(4):
        work.ask(Account("host", str(i % connections)))
    work.ask(TWO)
    assert work.got(min(connections, 2) + 1)[-1] == TWO


def test_work_of_one_account_does_not_wait_for_anothers_and_is_a_few_at_once():
    threads, stop, running = AccountThreads(2, "test"), threading.Event(), threading.Semaphore(0)

    def block() -> None:
        running.release()
        stop.wait(10)

    blocked = [threads.submit(ONE, block) for _ in range(6)]
    assert all(running.acquire(timeout=10) for _ in range(2))
    assert not running.acquire(timeout=0.05)
    assert [threads.submit(TWO, lambda: 7).result(10) for _ in range(3)] == [7] * 3
    assert not any(future.done() for future in blocked)
    stop.set()
    threads.close()
    assert all(future.done() for future in blocked)


def test_threads_of_an_account_end_with_its_work():
    threads, before = AccountThreads(2, "of-an-account"), threading.active_count()
    for i in range(20):
        threads.submit(Account("host", str(i)), lambda: None).result(10)
    for _ in range(1000):
        if threading.active_count() <= before:
            break
        threading.Event().wait(0.01)
    assert threading.active_count() <= before
