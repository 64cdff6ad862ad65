"""Work before and after a search that would hold the event loop up, done on threads, for callers in turn."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from espalier.search.fairness import Account, Turns
from espalier.search.service.errors import BusyError, as_exception

T = TypeVar("T")

_REFUSALS_A_SECOND = 20.0
"""Refusals that one account is told of at once; of more later, so that asking again at once gains nothing."""
_MAX_REFUSAL_SECONDS = 5.0
"""Seconds by which a refusal may come later."""


class ThreadedWork:
    """Short work on threads, by default one at a time, at which accounts take turns; see `Turns`.

    Use it on one event loop.
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
