"""Who shares with whom: callers share slots equally, and the connections of one caller share what it gets."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Account(NamedTuple):
    """Who a search is charged to.

    Attributes:
        caller: a login, or the host of a caller without one.
        connection: the connection of a caller without a login, as several people may use a host; else empty.
    """

    caller: str = ""
    connection: str = ""


class Holdings:
    """How much each account holds, and each caller with all its connections."""

    def __init__(self, accounts: Iterable[Account] = ()) -> None:
        """Count each of `accounts` once for each time that it occurs."""
        self._by_account: Counter[Account] = Counter()
        self._by_caller: Counter[str] = Counter()
        for account in accounts:
            self.add(account)

    def of(self, account: Account) -> tuple[int, int]:
        """What its caller holds, and what it holds itself: a sort key by which those with less come first."""
        return self._by_caller[account.caller], self._by_account[account]

    def __iter__(self) -> Iterator[Account]:
        """The accounts that hold anything."""
        return iter(self._by_account)

    def __contains__(self, account: Account) -> bool:
        """Whether it holds anything."""
        return account in self._by_account

    def add(self, account: Account) -> None:
        """Count one more."""
        self._by_account[account] += 1
        self._by_caller[account.caller] += 1

    def remove(self, account: Account) -> None:
        """Count one less."""
        self._by_account[account] -= 1
        self._by_caller[account.caller] -= 1
        if not self._by_account[account]:
            del self._by_account[account]
        if not self._by_caller[account.caller]:
            del self._by_caller[account.caller]

    def compared(self, one: Account, other: Account) -> tuple[int, int]:
        """What two accounts hold, to be compared: all of their callers', or their own if they are of one caller."""
        level = 1 if one.caller == other.caller else 0
        return self.of(one)[level], self.of(other)[level]


class Shares:
    """What each of several accounts may have of a number of slots."""

    def __init__(self, slots: int, accounts: Iterable[Account]) -> None:
        """Share `slots` among `accounts`, each named once or more often."""
        self._connections = Counter(account.caller for account in {*accounts})
        self._of_caller = slots / max(1, len(self._connections))

    def of(self, account: Account) -> tuple[float, float]:
        """The share of its caller, and its own; see `Holdings.of`."""
        return self._of_caller, self._of_caller / self._connections[account.caller]
