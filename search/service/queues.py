"""Queues of calls: for slots of searches, and for turns at what is done on threads. Used on the event loop.

And queues of events of one search on their way to its call: bounded, and cut to the size that may be sent.
"""

import asyncio
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from espalier.search.completion import TextSampled
from espalier.search.fairness import NOBODY, Account, Holdings, Shares, Turns
from espalier.search.result import CandidateDone, Event, Finished, StepDone
from espalier.search.run.executor import AnyEvent
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
        return Shares(self.slots - above, (*self._holdings, *(waiter.account for waiter in self._waiters), *others))

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
            text = f"{self._turns.waiting} calls wait to be read and checked, and yours ask for most; try again later"
            last.set_exception(BusyError(text))


def _done(work: Callable[[], T]) -> T:
    try:
        return work()
    except BaseException as error:
        raise as_exception(error) from error


# ---- events


T = TypeVar("T")


class EventBuffer:
    """A bounded queue from one search or completion to one call; any thread may `push`, the rest is the event loop's.

    gRPC would queue any number of messages for a client that does not read. Once `capacity` events wait here, the
    oldest step report is dropped, as later ones supersede it and take over its changes of the tree, or else the oldest
    candidate, as the result lists all. `Started` and the last event are never dropped; order is kept. Text is not
    either: it joins what waits of the same choice, so that a choice waits once at most.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._events: deque[AnyEvent] = deque()
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._woken = asyncio.Event()

    def __len__(self) -> int:
        return len(self._events)

    def push(self, event: AnyEvent) -> None:
        """Add an event; drops older progress if the buffer is full. Whoever waits for it must be woken, see `wake`."""
        with self._lock:
            if len(self._events) >= self._capacity:
                if isinstance(event, TextSampled) and self._join(event):
                    return
                event = self._make_room(event)
            self._events.append(event)

    def wake(self) -> None:
        """Let `take` look for events."""
        self._woken.set()

    def fail(self, error: Exception) -> None:
        """Make `take` raise `error` immediately; waiting events are discarded."""
        with self._lock:
            self._events.clear()
        self._error = error
        self.wake()

    async def take(self) -> list[AnyEvent]:
        """Wait for events, and return all that have arrived.

        Raises:
            Exception: the error passed to `fail`.
        """
        while self._error is None:
            with self._lock:
                events = [*self._events]
                self._events.clear()
            if events:
                return events
            self._woken.clear()  # what was pushed since is followed by a `wake` that is yet to come
            await self._woken.wait()
        raise self._error

    def _join(self, arriving: TextSampled) -> bool:
        """Add text to what waits of its choice; False if nothing does."""
        for index, event in enumerate(self._events):
            if isinstance(event, TextSampled) and event.index == arriving.index:
                self._events[index] = arriving.including(event)
                return True
        return False

    def _make_room(self, arriving: AnyEvent) -> AnyEvent:
        """Drop an event if possible; returns `arriving` with what it takes over."""
        reports = [(index, event) for index, event in enumerate(self._events) if isinstance(event, StepDone)]
        if reports:
            oldest, report = reports.pop(0)
            if reports:
                index, later = reports[0]
                self._events[index] = later.including(report)
            elif isinstance(arriving, StepDone):
                arriving = arriving.including(report)
            if reports or not report.nodes or isinstance(arriving, StepDone | Finished):
                del self._events[oldest]
                return arriving
        for index, event in enumerate(self._events):
            if isinstance(event, CandidateDone):
                del self._events[index]
                break
        return arriving


def fitted(
    event: Event, encode: Callable[[Event, dict[str, int]], T], size: Callable[[T], int], limit: int
) -> T | None:
    """Encode an event within a size limit; None for progress that cannot be cut enough.

    A result loses its tree, then its last candidates, and is returned even if it is still too large. Progress, which
    the result repeats, loses its nodes and its steps.

    Args:
        event: what happened.
        encode: makes a message of an event and the numbers of what it lacks, by their fields `omitted_…`.
        size: of a message, in bytes.
        limit: largest size, in bytes.
    """
    message = None
    for smaller, omitted in _smaller(event):
        message = encode(smaller, omitted)
        if size(message) <= limit:
            return message
    return message if isinstance(event, Finished) else None


def _smaller(event: Event) -> Iterator[tuple[Event, dict[str, int]]]:
    """An event, and then with less and less, and how much of what is omitted."""
    yield event, {}
    match event:
        case Finished(result=result):
            whole, omitted = len(result.candidates), {"omitted_nodes": len(result.nodes)}
            result = replace(result, nodes=())
            yield replace(event, result=result), omitted
            while result.candidates:  # halved, because encoding takes as long as measuring
                result = replace(result, candidates=result.candidates[: len(result.candidates) // 2])
                yield replace(event, result=result), {**omitted, "omitted_candidates": whole - len(result.candidates)}
        case StepDone():
            best = event.best and replace(event.best, steps=())
            yield replace(event, kept=(), nodes=(), best=best), {"omitted_nodes": len(event.nodes)}
        case CandidateDone():
            yield replace(event, candidate=replace(event.candidate, steps=())), {}
        case _:
            pass
