"""The asyncio client of the gRPC service."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from espalier.engine.errors import EspalierError, MisuseError
from espalier.search.client.base import (
    CONCURRENCY,
    HEALTH_TIMEOUT,
    INFO_TIMEOUT,
    TIMEOUT,
    ClientBase,
    ManyArguments,
    OnProgress,
)
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


class AsyncSearchClient(ClientBase):
    """Sends searches to one server; the methods and arguments of `SearchClient`, as coroutines.

    Create it in a coroutine, and use it on the same event loop. A cancelled task ends its search on the server. Leave
    an iteration early with `contextlib.aclosing`, else its search ends only when the garbage is collected.

    Example:
        async with AsyncSearchClient("127.0.0.1:50051") as client:
            print((await client.solve("What is 6 * 7?", beam_width=4, expansion=4)).answer)
    """

    def _open(self, connection: Connection) -> None:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise MisuseError("an AsyncSearchClient is created in a coroutine; elsewhere use SearchClient") from None
        endpoint, options = connection.endpoint, connection.options
        if connection.tls is None:
            self._channel = grpc.aio.insecure_channel(endpoint, options)
        else:
            self._channel = grpc.aio.secure_channel(endpoint, connection.tls.credentials(), options)
        self._stub: Any = SearchServiceStub(self._channel)  # pyright: ignore[reportArgumentType] - takes both kinds
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._closing = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel the searches in progress and close the connection; closing twice is allowed."""
        self._closed = True
        self._closing.set()
        await self._channel.close()

    async def solve(
        self,
        request: SearchRequest | str,
        timeout: float | None = TIMEOUT,
        include_nodes: bool = False,
        priority: int = 0,
        *,
        request_id: str | None = None,
        **fields: Unpack[SearchFields],
    ) -> SearchResult:
        """Run one search and wait for its result; see `SearchClient.solve`."""
        message = solve_message(request, fields, include_nodes, priority)
        attempts = Attempts(self.retry, timeout)
        return await self._unary(self._stub.SolveProblem, message, result_of, attempts, request_id)

    async def solve_stream(
        self,
        request: SearchRequest | str,
        timeout: float | None = TIMEOUT,
        include_nodes: bool = False,
        priority: int = 0,
        *,
        request_id: str | None = None,
        **fields: Unpack[SearchFields],
    ) -> AsyncGenerator[Event, None]:
        """Run one search and yield its events as they arrive; see `SearchClient.solve_stream`."""
        message = stream_message(request, fields, include_nodes, priority)
        request_id = request_id_to_send(request_id)
        attempts = Attempts(self.retry, timeout)
        while True:
            begun = False
            call = self._start(self._stub.SolveProblemStream, message, attempts, request_id)
            try:
                async for event in self._events(call, request_id):
                    begun = True
                    yield event
                return
            except EspalierError as error:
                if begun:
                    raise
                failed = error
            finally:
                call.cancel()
            await self._wait(self._delay_after(attempts, failed))

    @overload
    async def solve_many(
        self,
        requests: Iterable[SearchRequest | str],
        *,
        return_errors: Literal[False] = ...,
        **arguments: Unpack[ManyArguments],
    ) -> list[SearchResult]: ...

    @overload
    async def solve_many(
        self, requests: Iterable[SearchRequest | str], *, return_errors: bool, **arguments: Unpack[ManyArguments]
    ) -> list[SearchResult | EspalierError]: ...

    async def solve_many(
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
        """Run many searches, several at a time, and return their results in order; see `SearchClient.solve_many`."""
        self._require_concurrency(concurrency)
        messages = [solve_message(request, fields, include_nodes, priority) for request in several(requests)]
        places = asyncio.Semaphore(concurrency)
        done = 0

        async def one(message: pb.SolveProblemRequest) -> SearchResult | EspalierError:
            nonlocal done
            async with places:
                attempts = Attempts(self.retry, timeout)
                try:
                    outcome = await self._unary(self._stub.SolveProblem, message, result_of, attempts, None)
                except EspalierError as error:
                    if not return_errors:
                        raise
                    outcome = error
            done += 1
            if on_progress:
                on_progress(done, len(messages), outcome)
            return outcome

        searches = [asyncio.create_task(one(message)) for message in messages]
        try:
            return await asyncio.gather(*searches)
        finally:
            for search in searches:
                search.cancel()
            await asyncio.gather(*searches, return_exceptions=True)

    async def server_info(self, timeout: float | None = INFO_TIMEOUT) -> ServerInfo:
        """Return what the server serves, and what it holds now; see `SearchClient.server_info`."""
        attempts = Attempts(self.retry, timeout)
        return await self._unary(self._stub.GetServerInfo, pb.GetServerInfoRequest(), info_of, attempts, None)

    async def health(self, timeout: float | None = HEALTH_TIMEOUT) -> bool:
        """Return whether the server accepts searches; see `SearchClient.health`."""
        return await self._unary(self._health.Check, HEALTH_REQUEST, serves, Attempts(NO_RETRIES, timeout), None)

    async def _unary(
        self, method: Any, message: Any, read: Callable[[Any], T], attempts: Attempts, request_id: str | None
    ) -> T:
        request_id = request_id_to_send(request_id)
        while True:
            call = self._start(method, message, attempts, request_id)
            try:
                return read(await call)
            except (grpc.RpcError, ValueError) as error:
                failed = self._typed(error, request_id)
            except asyncio.CancelledError:
                self._require_own_end(request_id)
                raise
            finally:
                call.cancel()
            await self._wait(self._delay_after(attempts, failed))

    def _start(self, method: Callable[..., Any], message: Any, attempts: Attempts, request_id: str) -> Any:
        self._require_usable()
        if asyncio.get_running_loop() is not self._loop:
            raise MisuseError("the client was created on another event loop; create one on each")
        return method(message, timeout=attempts.left(), metadata=self._metadata(request_id))

    async def _events(self, call: Any, request_id: str) -> AsyncIterator[Event]:
        """The events of a call; raises typed errors."""
        try:
            async for response in call:
                event = event_from_wire(response)
                if event is not None:
                    yield event
        except (grpc.RpcError, ValueError) as error:
            raise self._typed(error, request_id) from None
        except asyncio.CancelledError:
            self._require_own_end(request_id)
            raise

    def _require_own_end(self, request_id: str) -> None:
        """Raise unless it is this task that was cancelled: gRPC raises the same when a closed client ends a call.

        Raises:
            ServiceError: CANCELLED.
        """
        task = asyncio.current_task()
        if self._closed and task is not None and not task.cancelling():
            raise cancelled(request_id) from None

    async def _wait(self, seconds: float) -> None:
        """Wait; raises `ServiceError` CANCELLED as soon as the client is closed."""
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            return
        raise cancelled()
