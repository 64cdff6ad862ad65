"""Work before and after a search that would hold the event loop up, done on threads, for callers in turn."""

import asyncio
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

from espalier.search.service.errors import BusyError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """Work that waits; `turn` is done when it may start, or fails when it must leave."""

    caller: Hashable
    cost: float
    tag: float
    arrival: int
    turn: asyncio.Future[None]

    @property
    def place(self) -> tuple[float, int]:
        return self.tag, self.arrival


class Turns:
    """A few places for short work, which callers get in turn (weighted fair queueing, Demers, Keshav and Shenker 1989).

    The order is that in which work would end if every caller that asks had an equal share of the places all the time.
    So one whose work is small goes before those whose work is large, also where these are many, and nobody waits for
    ever.

    When too much waits, what has the largest tag, so belongs to a caller that asks for much, is sent away.

    Create and use it on one event loop.
    """

    def __init__(self, places: int, most_waiting: int) -> None:
        """Create free places.

        Args:
            places: work that is done at once.
            most_waiting: work that may wait for them; it may be changed later.
        """
        self.most_waiting = most_waiting
        self._free = places
        self._arrivals = itertools.count()
        self._waiters: list[_Waiter] = []
        self._level = 0.0  # what a caller that asks all the time has been given in equal shares
        self._asked: dict[
            Hashable, float
        ] = {}  # the level at which callers will have got all they asked for; if above it

    @property
    def waiting(self) -> int:
        """How much work waits."""
        return len(self._waiters)

    async def run(self, caller: Hashable, cost: float, work: Callable[[], T]) -> T:
        """Do `work` on another thread once it is the caller's turn; returns or raises what it does.

        If the call is cancelled, work that has begun keeps its place until its end.

        Args:
            caller: who asks.
            cost: how long it takes, in any unit.
            work: what to do.

        Raises:
            BusyError: too much waits, and of the callers this one asks for most.
        """
        await self._take_place(caller, cost)
        done = asyncio.get_running_loop().run_in_executor(None, work)
        done.add_done_callback(lambda _: self._give_back())
        return await asyncio.shield(done)

    async def _take_place(self, caller: Hashable, cost: float) -> None:
        tag = max(self._level, self._asked.get(caller, 0.0)) + cost
        if self._free:
            self._free -= 1
            self._asked[caller] = tag
            self._begin(cost)
            return
        waiter = _Waiter(caller, cost, tag, next(self._arrivals), asyncio.get_running_loop().create_future())
        if len(self._waiters) >= self.most_waiting:
            self._make_room_for(waiter)
        self._asked[caller] = tag
        self._waiters.append(waiter)
        try:
            await waiter.turn
        except BaseException:
            if waiter in self._waiters:
                self._remove(waiter)
            elif not waiter.turn.cancelled() and waiter.turn.exception() is None:  # cancelled as its turn came
                self._give_back()
            raise

    def _give_back(self) -> None:
        """Give the place of work that has ended to what is next."""
        if not self._waiters:
            self._free += 1
            self._asked.clear()  # everyone has got what they asked for
            return
        first = min(self._waiters, key=lambda waiter: waiter.place)
        self._waiters.remove(first)
        self._begin(first.cost)
        if first.turn.done():  # cancelled, and not told yet
            self._give_back()
        else:
            first.turn.set_result(None)

    def _begin(self, cost: float) -> None:
        self._level += cost / max(1, len(self._asked))
        self._asked = {caller: asked for caller, asked in self._asked.items() if asked > self._level}

    def _make_room_for(self, arriving: _Waiter) -> None:
        """Send the waiting work with the largest tag away if that of `arriving` is smaller.

        Raises:
            BusyError: it is not.
        """
        last = max(self._waiters, key=lambda waiter: waiter.place, default=arriving)
        busy = BusyError(
            f"{len(self._waiters)} calls wait to be read and checked, and yours ask for most; try again later"
        )
        if last.place <= arriving.place or last is arriving:
            raise busy
        self._remove(last)
        if not last.turn.done():
            last.turn.set_exception(busy)

    def _remove(self, waiter: _Waiter) -> None:
        """Forget work that its caller does not get after all."""
        self._waiters.remove(waiter)
        if waiter.caller in self._asked:
            self._asked[waiter.caller] -= waiter.cost
