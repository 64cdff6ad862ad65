"""Queues of calls: for slots of searches, and for turns at what is done on threads. Used on the event loop."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from espalier.search.fairness import NOBODY, Account, Holdings, Shares, Turns
from espalier.search.service.errors import BusyError, as_exception

T = TypeVar("T")

MAX_HELD = 4
"""Slots held at most, suspended searches included, in multiples of those that there are."""

_CALLERS = 1024
"""Callers that are remembered before those with nothing to remember are dropped."""

_REFUSALS_A_SECOND = 20.0
"""Refusals that one account is told of at once; of more later, so that asking again at once gains nothing."""
_MAX_REFUSAL_SECONDS = 5.0
"""Seconds by which a refusal may come later."""


class TimeLimitReachedError(Exception):
    """A call's own time limit ended while it waited."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """A waiting call; `slot` is done when it may start, or fails when it must leave."""

    account: Account
    priority: int
    cost: float
    arrival: int
    since: float
    slot: asyncio.Future[None]


class CallQueue:
    """A fixed number of slots with a bounded queue, shared out fairly among callers.

    The call of highest priority goes first; of equal ones that of the caller which was given the least so far, by the
    estimated tokens of its searches. A caller that was idle is given no more than its share later: it starts where
    those who waited are (start-time fair queueing, Goyal et al. 1996). A waiting call rises by one priority a second,
    up to the highest that waits, so that none waits for ever. When the queue is full, a caller with fewer waiting
    calls takes the place of the newest of the caller that has most.

    Of a caller's calls, those of the connection that holds fewest slots go first.

    A call does not wait for slots held at lower priorities, nor for those of others while its caller, or its
    connection, holds less than its equal share: it is admitted as if they were free, and the orchestrator suspends
    other searches. In total, callers hold at most `MAX_HELD` times the number of slots, and only those below their
    share more than twice.

    gRPC's `maximum_concurrent_rpcs` would also refuse health checks, so admission happens in the handler.

    Attributes:
        slots: their number; it may change while no call holds one or waits.
    """

    def __init__(self, slots: int, queue: int, wait_seconds: float) -> None:
        self.slots = slots
        self._held: Counter[int] = Counter()  # held slots by priority
        self._holdings = Holdings()
        self._queue = queue
        self._wait_seconds = wait_seconds
        self._arrivals = itertools.count()
        self._waiters: list[_Waiter] = []
        self._given: dict[str, float] = {}  # estimated tokens by caller, counted from where it last joined
        self._level = 0.0  # what the caller admitted last had been given: where new ones join

    @property
    def waiting(self) -> int:
        """Number of queued calls."""
        return len(self._waiters)

    @property
    def held(self) -> int:
        """Number of slots that are held."""
        return self._held.total()

    async def acquire(
        self, priority: int = 0, time_limit: float | None = None, account: Account = NOBODY, cost: float = 1.0
    ) -> float:
        """Acquire a slot, waiting for one if necessary; the caller must call `release` once.

        Args:
            priority: calls of a larger priority are admitted first, and ignore slots held at smaller ones.
            time_limit: seconds after which the call's own time limit ends; None for none.
            account: who asks.
            cost: estimated tokens of the search, in which callers' shares are counted.

        Returns:
            Seconds waited.

        Raises:
            BusyError: the queue is full, or no slot became free in time.
            TimeLimitReachedError: `time_limit` ended first.
        """
        start = time.monotonic()
        caller = account.caller
        if not any(waiter.account.caller == caller for waiter in self._waiters):
            self._given[caller] = max(self._given.get(caller, 0.0), self._level)
        waiter = _Waiter(
            account, priority, cost, next(self._arrivals), start, asyncio.get_running_loop().create_future()
        )
        if self._may_start(waiter, self._shares(priority, account)):
            self._admit(waiter)
            return 0.0
        if len(self._waiters) >= self._queue:
            self._make_room_for(caller)
        self._waiters.append(waiter)
        own = time_limit is not None and time_limit <= self._wait_seconds
        seconds = time_limit if time_limit is not None and own else self._wait_seconds
        try:
            async with asyncio.timeout(seconds):
                await waiter.slot
        except BaseException as error:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif not waiter.slot.cancelled() and waiter.slot.exception() is None:  # assigned at the same moment
                self.release(priority, account)
            if isinstance(error, TimeoutError):
                if own:
                    raise TimeLimitReachedError from None
                raise BusyError(f"the server stayed busy for {seconds:g} s; try again later") from None
            raise
        return time.monotonic() - start

    def release(self, priority: int = 0, account: Account = NOBODY) -> None:
        """Release a slot that `account` acquired with `priority`, and admit the next waiting calls."""
        self._held[priority] -= 1
        self._holdings.remove(account)
        while (waiter := self._next()) is not None:
            self._waiters.remove(waiter)
            self._admit(waiter)
            waiter.slot.set_result(None)

    def _admit(self, waiter: _Waiter) -> None:
        self._held[waiter.priority] += 1
        self._holdings.add(waiter.account)
        caller = waiter.account.caller
        self._level = max(self._level, self._given[caller])
        self._given[caller] += waiter.cost
        if len(self._given) > _CALLERS:  # one at or below the level would join there again
            waiting = {waiter.account.caller for waiter in self._waiters}
            self._given = {name: own for name, own in self._given.items() if own > self._level or name in waiting}

    def _next(self) -> _Waiter | None:
        """The waiting call that goes first, of those that may start."""
        now = time.monotonic()
        waiters = [waiter for waiter in self._waiters if not waiter.slot.done()]
        top = max((waiter.priority for waiter in waiters), default=0)

        def place(waiter: _Waiter) -> tuple[float, float, int, int]:
            risen = min(top, waiter.priority + int(now - waiter.since))
            _, of_connection = self._holdings.of(waiter.account)
            return -risen, self._given[waiter.account.caller], of_connection, waiter.arrival

        shares = {priority: self._shares(priority) for priority in {waiter.priority for waiter in waiters}}
        ready = (waiter for waiter in waiters if self._may_start(waiter, shares[waiter.priority]))
        return min(ready, key=place, default=None)

    def _make_room_for(self, caller: str) -> None:
        """Send the newest waiting call of the caller that has most away, if `caller` has fewer.

        Raises:
            BusyError: it has not.
        """
        waiting = Counter(waiter.account.caller for waiter in self._waiters)
        most = max(waiting.values(), default=0)
        full = BusyError(f"the server is busy and its queue of {self._queue} is full; try again later")
        if waiting[caller] + 1 >= most:
            raise full
        newest = max((w for w in self._waiters if waiting[w.account.caller] == most), key=lambda waiter: waiter.arrival)
        self._waiters.remove(newest)
        if not newest.slot.done():
            newest.slot.set_exception(full)

    def _shares(self, priority: int, *others: Account) -> Shares:
        """Shares of the slots not held at priorities above `priority`, of all that hold slots or wait, and `others`."""
        above = sum(count for held, count in self._held.items() if held > priority)
        accounts = (*self._holdings, *(waiter.account for waiter in self._waiters), *others)
        return Shares(self.slots - above, accounts)

    def _may_start(self, waiter: _Waiter, shares: Shares) -> bool:
        total, more = self._held.total(), 2 * self.slots
        if sum(count for held, count in self._held.items() if held >= waiter.priority) < self.slots and total < more:
            return True
        of_caller, own = shares.of(waiter.account)
        held_of_caller, held = self._holdings.of(waiter.account)
        return (held_of_caller < of_caller and total < MAX_HELD * self.slots) or (held < own and total < more)


# ---- work on threads


class ThreadedWork:
    """Work before and after a search that would hold the event loop up, on threads, for accounts in turn; see `Turns`.

    By default one piece of work is done at a time.
    """

    def __init__(self, max_waiting: int, places: int = 1) -> None:
        """Create free places, of which no caller has all if there are several.

        Args:
            max_waiting: limit on the work that waits; may be changed later.
            places: work that is done at a time.
        """
        self.max_waiting = max_waiting
        self._turns = Turns(places, each=1, of_caller=max(1, places - 1))
        self._next_refusal = dict[Account, float]()  # earliest times, in the loop's seconds

    async def run(self, account: Account, cost: float, work: Callable[[], T]) -> T:
        """Do `work` on another thread once it is the account's turn; returns or raises what it does.

        If the call is cancelled, work that has begun keeps its place until its end.

        Args:
            account: who asks.
            cost: how long it takes, in any unit.
            work: what to do.

        Raises:
            BusyError: too much waits, and of the accounts this one asks for most.
        """
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._turns.ask(account, turn, cost)
        if self._turns.waiting > self.max_waiting:
            self._refuse_last()
        try:
            await turn
        except BaseException:
            waited = self._turns.withdraw(turn)
            if not turn.cancelled() and turn.exception() is not None:  # refused
                await asyncio.sleep(self._until_refusal(account, loop.time()))
            elif not waited and not turn.cancelled():  # cancelled as its turn came
                self._turns.give_back(account, -cost)
            raise
        done = loop.run_in_executor(None, partial(_done, work))
        done.add_done_callback(lambda _: self._turns.give_back(account))
        return await asyncio.shield(done)

    def _until_refusal(self, account: Account, now: float) -> float:
        """Seconds until an account is told of its next refusal."""
        self._next_refusal = {other: at for other, at in self._next_refusal.items() if at > now}
        at = min(self._next_refusal.get(account, now), now + _MAX_REFUSAL_SECONDS)
        self._next_refusal[account] = at + 1 / _REFUSALS_A_SECOND
        return at - now

    def _refuse_last(self) -> None:
        """Send away what would end last, so belongs to an account that asks for much."""
        last = self._turns.last()
        self._turns.withdraw(last)
        if not last.done():
            others = self._turns.waiting
            text = f"{others} calls wait to be read and checked, and yours ask for most; try again later"
            last.set_exception(BusyError(text))


def _done(work: Callable[[], T]) -> T:
    try:
        return work()
    except BaseException as error:
        raise as_exception(error) from error
