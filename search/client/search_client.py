"""The blocking client of the gRPC service."""

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import grpc
from grpc_health.v1 import health_pb2_grpc

from espalier.engine.errors import EspalierError
from espalier.search.client.base import (
    CONCURRENCY,
    HEALTH_TIMEOUT,
    INFO_TIMEOUT,
    TIMEOUT,
    ClientBase,
    ManyArguments,
    OnProgress,
)
from espalier.search.client.calls import Calls
from espalier.search.client.connection import Connection
from espalier.search.client.errors import cancelled
from espalier.search.client.messages import (
    HEALTH_REQUEST,
    info_of,
    request_id_to_send,
    result_of,
    serves,
    solve_message,
    stream_message,
)
from espalier.search.client.retries import NO_RETRIES, Attempts
from espalier.search.request import SearchFields, SearchRequest, several
from espalier.search.result import Event, SearchResult
from espalier.search.service.grpc_api.convert import event_from_wire
from espalier.search.service.session import ServerInfo
from espalier.v1 import search_pb2 as pb
from espalier.v1.search_pb2_grpc import SearchServiceStub

T = TypeVar("T")


class SearchClient(ClientBase):
    """Sends searches to one server. Thread-safe; call `close`, or use it as a context manager.

    A process that is forked from the one that created it cannot use it: create one in each.

    Example:
        with SearchClient("127.0.0.1:50051") as client:
            print(client.solve("What is 6 * 7?", beam_width=4, expansion=4).answer)
    """

    def _open(self, connection: Connection) -> None:
        if connection.tls is None:
            self._channel = grpc.insecure_channel(connection.endpoint, connection.options)
        else:
            self._channel = grpc.secure_channel(connection.endpoint, connection.tls.credentials(), connection.options)
        self._stub: Any = SearchServiceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._calls = Calls()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the searches in progress and close the connection; closing twice is allowed."""
        self._closed = True
        self._calls.cancel()
        self._channel.close()

    def solve(
        self,
        request: SearchRequest | str,
        timeout: float | None = TIMEOUT,
        include_nodes: bool = False,
        priority: int = 0,
        *,
        request_id: str | None = None,
        **fields: Unpack[SearchFields],
    ) -> SearchResult:
        """Run one search and wait for its result.

        Args:
            request: the problem and how to search it, or the problem's text.
            timeout: seconds to wait for the result in all, retries included, after which the server cancels the
                search; None waits without limit.
            include_nodes: whether the result includes the search tree.
            priority: in [-100, 100]; the server runs searches of a larger priority first.
            request_id: the caller's id of the call, for the server's log; None makes one.
            **fields: fields of `SearchRequest`, such as `algorithm="dvts", beam_width=4, seed=7`.

        Raises:
            InvalidRequestError: a field breaks a rule or a limit of the server; lists every such field.
            ServiceError: the call failed for any other reason.
        """
        message = solve_message(request, fields, include_nodes, priority)
        return self._solve(message, timeout, request_id, self._calls)

    def solve_stream(
        self,
        request: SearchRequest | str,
        timeout: float | None = TIMEOUT,
        include_nodes: bool = False,
        priority: int = 0,
        *,
        request_id: str | None = None,
        **fields: Unpack[SearchFields],
    ) -> Generator[Event, None, None]:
        """Run one search and yield its events as they arrive: `Started` first, `Finished` last.

        Closing the generator cancels the search. It is tried again only as long as it has yielded nothing. Takes the
        arguments of `solve`, and raises its errors during iteration.
        """
        message = stream_message(request, fields, include_nodes, priority)
        request_id = request_id_to_send(request_id)
        attempts = Attempts(self.retry, timeout)
        while True:
            begun = False
            call = self._start(self._stub.SolveProblemStream, message, attempts, request_id)
            with self._calls.running(call):
                try:
                    for event in self._events(call, request_id):
                        begun = True
                        yield event
                    return
                except EspalierError as error:
                    if begun:
                        raise
                    failed = error
            self._calls.wait(self._delay_after(attempts, failed))

    @overload
    def solve_many(
        self,
        requests: Iterable[SearchRequest | str],
        *,
        return_errors: Literal[False] = ...,
        **arguments: Unpack[ManyArguments],
    ) -> list[SearchResult]: ...

    @overload
    def solve_many(
        self, requests: Iterable[SearchRequest | str], *, return_errors: bool, **arguments: Unpack[ManyArguments]
    ) -> list[SearchResult | EspalierError]: ...

    def solve_many(
        self,
        requests: Iterable[SearchRequest | str],
        *,
        concurrency: int = CONCURRENCY,
        timeout: float | None = TIMEOUT,
        include_nodes: bool = False,
        priority: int = 0,
        return_errors: bool = False,
        on_progress: OnProgress | None = None,
        **fields: Unpack[SearchFields],
    ) -> Any:
        """Run many searches, several at a time.

        Args:
            requests: requests, or problems' texts.
            concurrency: searches in progress at once.
            timeout: of each search, from its own start; see `solve`.
            include_nodes: see `solve`.
            priority: see `solve`.
            return_errors: whether a failed search has its error in the place of its result, and the others go on.
                Else the first error cancels the others and is raised.
            on_progress: called on this thread when a search finishes.
            **fields: fields of `SearchRequest`, applied to all.

        Returns:
            The results, in the order of `requests`.

        Raises:
            MisuseError: `concurrency` is below 1.
            TypeError: `requests` is a single problem, or holds what is none.
            InvalidRequestError, ServiceError: see `solve`. Nothing has started if a request cannot even be sent.
        """
        self._require_concurrency(concurrency)
        messages = [solve_message(request, fields, include_nodes, priority) for request in several(requests)]
        calls = Calls()
        with self._calls.running(calls), ThreadPoolExecutor(concurrency) as pool:
            searches = [pool.submit(self._solve, message, timeout, None, calls) for message in messages]
            try:
                for done, search in enumerate(as_completed(searches), 1):
                    error = search.exception()
                    if error and not (return_errors and isinstance(error, EspalierError)):
                        raise error
                    if on_progress:
                        on_progress(done, len(searches), error or search.result())
            finally:  # also on an interrupt; leaving the pool waits for its threads
                calls.cancel()
                pool.shutdown(wait=False, cancel_futures=True)
        return [search.exception() or search.result() for search in searches]

    def server_info(self, timeout: float | None = INFO_TIMEOUT) -> ServerInfo:
        """Return what the server serves, and what it holds now; raises `ServiceError` as `solve` does."""
        attempts = Attempts(self.retry, timeout)
        return self._unary(self._stub.GetServerInfo, pb.GetServerInfoRequest(), info_of, attempts, None, self._calls)

    def health(self, timeout: float | None = HEALTH_TIMEOUT) -> bool:
        """Return whether the server accepts searches: it does not while it loads or drains. Asks once.

        Raises:
            ServiceError: it cannot be reached.
        """
        attempts = Attempts(NO_RETRIES, timeout)
        return self._unary(self._health.Check, HEALTH_REQUEST, serves, attempts, None, self._calls)

    def _solve(
        self, message: pb.SolveProblemRequest, timeout: float | None, request_id: str | None, calls: Calls
    ) -> SearchResult:
        attempts = Attempts(self.retry, timeout)
        return self._unary(self._stub.SolveProblem, message, result_of, attempts, request_id, calls)

    def _unary(
        self,
        method: Any,
        message: Any,
        read: Callable[[Any], T],
        attempts: Attempts,
        request_id: str | None,
        calls: Calls,
    ) -> T:
        request_id = request_id_to_send(request_id)
        while True:
            call = self._start(method.future, message, attempts, request_id)
            with calls.running(call):
                try:
                    return read(call.result())
                except (grpc.RpcError, grpc.FutureCancelledError, ValueError) as error:
                    failed = self._typed(error, request_id)
            calls.wait(self._delay_after(attempts, failed))

    def _start(self, method: Callable[..., Any], message: Any, attempts: Attempts, request_id: str) -> Any:
        self._require_usable()
        try:
            return method(message, timeout=attempts.left(), metadata=self._metadata(request_id))
        except ValueError:  # another thread has closed the channel since
            raise cancelled(request_id) from None

    def _events(self, call: Any, request_id: str) -> Iterator[Event]:
        """The events of a call; raises typed errors."""
        try:
            for response in call:
                event = event_from_wire(response)
                if event is not None:
                    yield event
        except (grpc.RpcError, ValueError) as error:
            raise self._typed(error, request_id) from None
