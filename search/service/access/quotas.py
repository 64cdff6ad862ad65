"""Quotas of callers: calls in progress and tokens a minute. Used on the event loop."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from espalier.search.service.access.callers import Caller
from espalier.search.service.errors import QuotaError


@dataclass(slots=True)
class _Account:
    """Tokens that a caller may still take, as of a time; negative when its last search took more."""

    tokens: float
    at: float


class Quotas:
    """Counts the calls in progress and the tokens of each caller that has limits.

    A minute's tokens may be taken at once, and come back evenly. What a search takes is known at its end, so a call is
    refused while its caller's earlier searches have taken more than came back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._calls: Counter[str] = Counter()
        self._accounts: dict[str, _Account] = {}

    @contextmanager
    def call(self, caller: Caller) -> Iterator[None]:
        """Count a call in progress.

        Raises:
            QuotaError: the caller has used up its calls or its tokens.
        """
        if caller.max_searches is not None and self._calls[caller.name] >= caller.max_searches:
            raise QuotaError(f"{caller.name} may have {caller.max_searches} searches in progress, and has them", 1.0)
        if caller.tokens_per_minute is not None and (owed := -self._account(caller).tokens) >= 0:
            seconds = 60 * (owed + 1) / caller.tokens_per_minute
            raise QuotaError(
                f"{caller.name} may take {caller.tokens_per_minute} tokens a minute, and has taken them", seconds
            )
        self._calls[caller.name] += 1
        try:
            yield
        finally:
            self._calls[caller.name] -= 1
            self._calls += Counter()  # drops those with none

    def take(self, caller: Caller, tokens: int) -> None:
        """Charge the tokens of a search that has ended."""
        if caller.tokens_per_minute is not None:
            self._account(caller).tokens -= tokens

    def _account(self, caller: Caller) -> _Account:
        assert caller.tokens_per_minute is not None
        now, most = self._clock(), float(caller.tokens_per_minute)
        account = self._accounts.setdefault(caller.name, _Account(most, now))
        account.tokens = min(most, account.tokens + (now - account.at) / 60 * most)
        account.at = now
        return account
