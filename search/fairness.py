"""Fair shares: callers share equally, and the connections of one caller share what it gets."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

_Result = TypeVar("_Result")
_REMEMBERED = 1024
"""Accounts that are remembered before those with nothing to remember are dropped."""


class Account(NamedTuple):
    """Account that a search is charged to.

    Attributes:
        caller: a login, or the host of a caller without one.
        connection: the connection of a caller without a login, as several people may use a host; else empty.
    """

    caller: str = ""
    connection: str = ""


NOBODY = Account()
"""The account of a process that works for itself alone."""


class Holdings:
    """Counts of what each account holds, and each caller with all its connections."""

    def __init__(self, accounts: Iterable[Account] = ()) -> None:
        """Count each of `accounts` once for each time that it occurs."""
        self._by_account: Counter[Account] = Counter()
        self._by_caller: Counter[str] = Counter()
        for account in accounts:
            self.add(account)

    @property
    def total(self) -> int:
        """Sum of what all hold."""
        return self._by_caller.total()

    def of(self, account: Account) -> tuple[int, int]:
        """Return what its caller holds, and what it holds itself: a sort key by which those with less come first."""
        return self._by_caller[account.caller], self._by_account[account]

    def __iter__(self) -> Iterator[Account]:
        """The accounts that hold anything."""
        return iter(self._by_account)

    def __contains__(self, account: Account) -> bool:
        """Return whether it holds anything."""
        return account in self._by_account

    def add(self, account: Account) -> None:
        """Count one more."""
        self._by_account[account] += 1
        self._by_caller[account.caller] += 1

    def remove(self, account: Account) -> None:
        """Count one less."""
        self._by_account -= Counter([account])  # which drops what is 0
        self._by_caller -= Counter([account.caller])

    def compared(self, one: Account, other: Account) -> tuple[int, int]:
        """Return what two accounts hold: all of their callers', or their own if they are of one caller."""
        level = 1 if one.caller == other.caller else 0
        return self.of(one)[level], self.of(other)[level]


class Shares:
    """Equal shares of a number of slots for several accounts."""

    def __init__(self, slots: int, accounts: Iterable[Account]) -> None:
        """Share `slots` among `accounts`, each named once or more often."""
        self._connections = Counter(account.caller for account in {*accounts})
        self._of_caller = slots / max(1, len(self._connections))

    def of(self, account: Account) -> tuple[float, float]:
        """The share of its caller, and its own; see `Holdings.of`."""
        return self._of_caller, self._of_caller / self._connections[account.caller]


class _Waiter(NamedTuple):
    """Work that waits; `turn` is done when it may start."""

    account: Account
    cost: float
    turn: "Future[None] | asyncio.Future[None]"


class Turns:
    """Places that accounts take turns at. Thread-safe, but futures of asyncio need the thread of their loop.

    A free place goes to the caller that holds fewest, then to its account that holds fewest, then to the work that
    would end first if every account that asks had an equal share (self-clocked fair queueing, Golestani 1994): small
    work goes before large work, and none waits for ever. An account that comes back after a while has no credit from
    it.
    """

    def __init__(self, places: int, each: int, of_caller: int) -> None:
        """Create free places.

        Args:
            places: how many there are.
            each: how many an account may hold.
            of_caller: how many a caller with several accounts may hold.
        """
        self._places, self._each, self._of_caller = places, each, of_caller
        self._lock = threading.Lock()
        self._held = Holdings()
        self._waiting: list[_Waiter] = []  # in order of arrival
        self._paid: dict[Account, float] = {}  # counted from where each last joined
        self._level = 0.0  # what the one that took the last place had paid: where new ones join

    @property
    def waiting(self) -> int:
        """Amount of work that waits."""
        return len(self._waiting)

    def ask(self, account: Account, turn: "Future[None] | asyncio.Future[None]", cost: float = 0.0) -> None:
        """Ask for a place; `give_back` must follow once `turn` is done.

        Args:
            account: who asks.
            turn: done when the place is taken; it may be cancelled before.
            cost: what the use of the place will cost, as far as it is known.
        """
        with self._lock:
            self._paid[account] = max(self._paid.get(account, 0.0), self._level)
            self._waiting.append(_Waiter(account, cost, turn))
            self._fill_places()

    def take(self, account: Account) -> None:
        """Wait for a place on this thread; `give_back` must follow."""
        turn: Future[None] = Future()
        self.ask(account, turn)
        try:
            turn.result()
        except BaseException:  # an interrupt
            if not self.withdraw(turn):
                self.give_back(account)
            raise

    def give_back(self, account: Account, cost: float = 0.0) -> None:
        """Give a place back, and charge what its use has cost besides what was known before."""
        with self._lock:
            self._held.remove(account)
            self._paid[account] += cost
            self._fill_places()
            if len(self._paid) > _REMEMBERED:  # one at or below the level would join there again
                here = {*self._held, *(waiter.account for waiter in self._waiting)}
                self._paid = {name: paid for name, paid in self._paid.items() if paid > self._level or name in here}

    def withdraw(self, turn: "Future[None] | asyncio.Future[None]") -> bool:
        """Forget work that waits; returns whether it did."""
        with self._lock:
            before = len(self._waiting)
            self._waiting = [waiter for waiter in self._waiting if waiter.turn is not turn]
            return len(self._waiting) < before

    def last(self) -> "Future[None] | asyncio.Future[None]":
        """The turn of the waiting work that would end last: of an account that asks for much."""
        return max(reversed([*self._ends()]), key=lambda each: each[0])[1].turn

    def _ends(self) -> Iterator[tuple[float, _Waiter]]:
        """Yield waiting work with what its account will have paid at its end."""
        paid = dict(self._paid)
        for waiter in self._waiting:
            paid[waiter.account] += waiter.cost
            yield paid[waiter.account], waiter

    def _fill_places(self) -> None:
        while self._held.total < self._places:
            ready = [(self._held.of(waiter.account), end, waiter) for end, waiter in self._ends() if self._may(waiter)]
            if not ready:
                return
            *_, waiter = min(ready, key=lambda each: each[:2])
            self._waiting.remove(waiter)
            if waiter.turn.cancelled():
                continue
            self._held.add(waiter.account)
            self._level = max(self._level, self._paid[waiter.account])
            self._paid[waiter.account] += waiter.cost
            waiter.turn.set_result(None)

    def _may(self, waiter: _Waiter) -> bool:
        of_caller, own = self._held.of(waiter.account)
        return own < self._each and of_caller < self._of_caller


class AccountThreads:
    """Threads for the work of several accounts: what one has to do never waits for another's."""

    def __init__(self, each: int, name: str) -> None:
        """Set how many threads an account gets, and the beginning of their names."""
        self._each, self._name = each, name
        self._lock = threading.Lock()
        self._threads: WeakValueDictionary[Account, ThreadPoolExecutor] = WeakValueDictionary()

    def submit(self, account: Account, work: Callable[[], _Result]) -> "Future[_Result]":
        """Have work done on one of the account's threads, which end once nobody waits for what they have worked out."""
        with self._lock:
            threads = self._threads.get(account) or ThreadPoolExecutor(self._each, self._name)
            self._threads[account] = threads
            future = threads.submit(work)
        future.add_done_callback(lambda _: threads)  # only to refer to them
        return future

    def close(self) -> None:
        """Wait for all work."""
        for threads in list(self._threads.values()):
            threads.shutdown()
