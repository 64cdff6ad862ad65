"""Retry policy of failed calls: plain data and arithmetic."""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from espalier.engine.errors import EspalierError, MisuseError
from espalier.search.client.errors import ServiceError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Policy of retries.

    A search changes nothing on the server, and the same request with the same seed gives the same answer, so trying it
    again is safe. What is wrong with a request (INVALID_ARGUMENT) stays wrong and is never tried again.

    Attributes:
        attempts: of one call, the first included.
        first_delay: seconds before the second attempt; doubles with each further one.
        largest_delay: limit of that, in seconds; a server may ask for more.
        jitter: share of a delay by which it may be longer, at random, so that clients do not come back all at once.
        codes: names of the gRPC status codes that are tried again.
        codes_with_delay: those that are tried again only if the server says when (RetryInfo).

    Raises:
        MisuseError: a value is out of range, or a code would never succeed.
    """

    attempts: int = 4
    first_delay: float = 0.2
    largest_delay: float = 10.0
    jitter: float = 0.5
    codes: frozenset[str] = frozenset({"UNAVAILABLE"})
    codes_with_delay: frozenset[str] = frozenset({"RESOURCE_EXHAUSTED"})

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise MisuseError(f"attempts must be at least 1, is {self.attempts}")
        for name in ("first_delay", "largest_delay", "jitter"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise MisuseError(f"{name} must be at least 0, is {value}")
        if "INVALID_ARGUMENT" in self.codes | self.codes_with_delay:
            raise MisuseError("INVALID_ARGUMENT is never tried again: the same request is refused again")

    def delay(self, attempt: int, error: EspalierError) -> float | None:
        """Return the seconds to wait after a failed attempt, counted from 1, without jitter; None to give up."""
        if attempt >= self.attempts or not isinstance(error, ServiceError):
            return None
        asked = error.retry_seconds
        if error.code not in self.codes and (error.code not in self.codes_with_delay or asked is None):
            return None
        backoff = min(self.largest_delay, self.first_delay * 2.0 ** min(attempt - 1, 64))
        return max(backoff, asked or 0.0)


DEFAULT_RETRIES = RetryPolicy()
NO_RETRIES = RetryPolicy(attempts=1)


class Attempts:
    """The attempts of one call, which share its deadline."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout: float | None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Start the deadline: `timeout` seconds from now, or none."""
        self._policy = policy
        self._clock = clock
        self._draw = draw
        self._end = None if timeout is None else clock() + timeout
        self._before: EspalierError | None = None
        self.failed = 0

    def left(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self._end is None else max(0.0, self._end - self._clock())

    def delay_after(self, error: EspalierError) -> float:
        """Count a failed attempt, and return the seconds to wait before the next one.

        Raises:
            EspalierError: `error`, if there is no next attempt or it would begin after the deadline. Its cause is the
                error of the attempt before.
        """
        self.failed += 1
        delay, left = self._policy.delay(self.failed, error), self.left()
        if delay is not None:
            delay *= 1 + self._policy.jitter * self._draw()
            if left is None or delay < left:
                self._before = error
                return delay
        raise error from self._before
