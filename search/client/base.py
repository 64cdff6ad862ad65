"""What both clients share besides messages: their arguments, when they may be used, and what they send with a call."""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable

from espalier.engine.errors import EspalierError, MisuseError
from espalier.search.client.connection import Connection, Tls
from espalier.search.client.errors import typed_error
from espalier.search.client.retries import USUAL_RETRIES, Attempts, RetryPolicy
from espalier.search.request import SearchFields
from espalier.search.result import SearchResult
from espalier.search.service.grpc_api.interceptor import REQUEST_ID

log = logging.getLogger("espalier.client")

TIMEOUT = 600.0
"""Seconds to wait for a result where the caller does not say: twice what a server lets a search run."""
INFO_TIMEOUT = 30.0
_NOTICED = 1.0
"""Seconds from which a wait for the next attempt is logged as INFO, not DEBUG."""
HEALTH_TIMEOUT = 5.0
CONCURRENCY = 16
"""Searches of `solve_many` in progress where the caller does not say: half of the least that a server runs."""
OnProgress = Callable[[int, int, SearchResult | EspalierError], None]
"""Called with the number of finished searches, the number of all, and the outcome of the one that just finished."""


class ManyArguments(SearchFields, total=False):
    """Keyword arguments of `solve_many`, but `return_errors`."""

    concurrency: int
    timeout: float | None
    include_nodes: bool
    priority: int
    on_progress: OnProgress | None


class ClientBase(ABC):
    """The part of a client that does no input or output.

    Attributes:
        endpoint: HOST:PORT of the server.
        retry: when failed calls are tried again.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        token: str | None = None,
        tls: Tls | bool = False,
        insecure_token: bool = False,
        retry: RetryPolicy = USUAL_RETRIES,
    ) -> None:
        """Create a client; it connects on the first call.

        Args:
            endpoint: the server, HOST:PORT.
            token: login, as `espalier token` prints it; None for none, or for one by certificate.
            tls: which certificates to trust and to show. True trusts those that the system trusts; False does without
                encryption.
            insecure_token: send `token` to another machine even without encryption.
            retry: when to try a failed call again; `NO_RETRIES` for never.

        Raises:
            ConnectionSettingsError: an argument cannot be used, or `token` would be readable on its way.
        """
        self._connection = Connection(endpoint, token, Tls() if tls is True else tls or None, insecure_token)
        self.endpoint = endpoint
        self.retry = retry
        self._process = os.getpid()
        self._closed = False
        self._open(self._connection)

    @abstractmethod
    def _open(self, connection: Connection) -> None:
        """Create the channel."""

    def _require_usable(self) -> None:
        """Raise if no call is possible.

        Raises:
            MisuseError: the client is closed, or this process is a fork of the one that created it.
        """
        if self._closed:
            raise MisuseError("the client is closed; create a new one")
        if os.getpid() != self._process:  # gRPC's threads do not survive a fork: a call would wait for ever
            raise MisuseError("the client was created before this process was forked; create one in each process")

    def _require_concurrency(self, concurrency: int) -> None:
        if concurrency < 1:
            raise MisuseError(f"concurrency must be at least 1, is {concurrency}")

    def _metadata(self, request_id: str) -> tuple[tuple[str, str], ...]:
        return (*self._connection.login, (REQUEST_ID, request_id))

    def _typed(self, error: Exception, request_id: str = "") -> EspalierError:
        return typed_error(error, self.endpoint, request_id)

    def _delay_after(self, attempts: Attempts, error: EspalierError) -> float:
        """Seconds to wait before the next attempt of a call; raises `error` if there is none."""
        delay = attempts.delay_after(error)
        level = logging.INFO if delay >= _NOTICED else logging.DEBUG
        log.log(level, "%s; attempt %d of %d in %.1f s", error, attempts.failed + 1, self.retry.attempts, delay)
        return delay
