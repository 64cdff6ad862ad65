"""The searches that wait, and those that run until others have to: slots are shared equally among accounts."""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from copy import deepcopy

from espalier.search.fairness import Account, Holdings
from espalier.search.run.running import AnyRunning

_TURN_SECONDS = 5.0
"""Minimum time that a search runs before it gives way to an account that holds no more; those who gave way wait as
long. Its KV is computed again each time, which takes a small part of that."""


class SearchQueue:
    """The order in which searches start, and those that give way to one.

    The highest priority goes first. Of equal ones, the caller with the fewest searches running does, then of its
    connections the one with the fewest, then the one whose last start is longest ago; of an account, the search that
    came first.

    Where a search finds no room, others give way: those of lower priority, and of equal priority

    - those of accounts that still hold at least as much without it as this one with it: max-min fairness;
    - if this account holds nothing, those of any other that have had their turn: there are more accounts than room.

    Attributes:
        running: in order of their last start.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Make an empty queue with a clock in seconds."""
        self.running: list[AnyRunning] = []
        self._clock = clock
        self._waiting: dict[Account, list[AnyRunning]] = {}  # each in order
        self._held = Holdings()
        self._starts = itertools.count(1)
        self._last_start: dict[Account, int] = {}  # of accounts that wait or run

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, search: AnyRunning) -> None:
        """Let a search wait, a new one or one that gives way and is removed from the running ones next."""
        search.since = self._clock()
        waiting = self._waiting.setdefault(search.account, [])
        bisect.insort(waiting, search, key=lambda other: (-other.priority, other.arrival))

    def remove(self, search: AnyRunning) -> None:
        """Remove a search that may wait."""
        waiting = self._waiting.get(search.account, [])
        if search in waiting:
            waiting.remove(search)
            if not waiting:
                del self._waiting[search.account]
            self._forget_idle(search.account)

    def start(self, search: AnyRunning) -> None:
        """Let a waiting search run."""
        self.running.append(search)
        self._held.add(search.account)
        self._last_start[search.account] = next(self._starts)
        self.remove(search)
        search.since = self._clock()

    def end(self, search: AnyRunning) -> None:
        """Remove a running search."""
        self.running.remove(search)
        self._held.remove(search.account)
        self._forget_idle(search.account)

    def _forget_idle(self, account: Account) -> None:
        if account not in self._held and account not in self._waiting:
            self._last_start.pop(account, None)

    def next(self) -> AnyRunning | None:
        """The search that starts next; None if none waits."""

        def order(search: AnyRunning) -> tuple[int, tuple[int, int], int, int]:
            account = search.account
            return -search.priority, self._held.of(account), self._last_start.get(account, 0), search.arrival

        return min((waiting[0] for waiting in self._waiting.values()), key=order, default=None)

    def giving_way(self, search: AnyRunning) -> Iterator[AnyRunning]:
        """The running searches that may give way to a waiting one, in the order in which they do."""
        lower = [other for other in self.running if other.priority < search.priority]
        yield from sorted(lower, key=lambda other: (other.priority, -other.arrival))
        yield from self._above_share(search)

    def _above_share(self, search: AnyRunning) -> Iterator[AnyRunning]:
        """Those of equal priority: the newest of the account that holds most, again and again."""
        account, held, now = search.account, deepcopy(self._held), self._clock()
        may_rotate = held.of(account)[1] == 0 and (not search.suspended or now - search.since >= _TURN_SECONDS)
        running: dict[Account, list[AnyRunning]] = defaultdict(list)
        for other in sorted(self.running, key=lambda other: other.arrival):
            if other.priority == search.priority and other.account != account:
                running[other.account].append(other)

        def newest(other: Account) -> AnyRunning | None:
            """The newest search of another account, or of those that have had their turn, if it may give way."""
            theirs, ours = held.compared(other, account)
            if theirs > ours + 1:
                return running[other][-1]
            had_turn = (each for each in reversed(running[other]) if now - each.since >= _TURN_SECONDS)
            return next(had_turn, None) if may_rotate and ours == 0 else None

        while givers := [giver for other in running if (giver := newest(other))]:
            giver = max(givers, key=lambda other: (held.of(other.account), other.arrival))
            yield giver
            held.remove(giver.account)
            running[giver.account].remove(giver)
            if not running[giver.account]:
                del running[giver.account]
