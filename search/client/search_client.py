"""The blocking client of the gRPC service: the asyncio client, on an event loop in a thread of its own."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future
from contextlib import closing
from functools import wraps
from threading import RLock, Thread, current_thread
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar, Unpack, overload

from espalier.engine.errors import EspalierError
from espalier.search.client.async_client import AsyncSearchClient, ManyArguments, OnProgress, Outcomes
from espalier.search.client.connection import Tls
from espalier.search.client.errors import cancelled
from espalier.search.client.retries import DEFAULT_RETRIES, RetryPolicy
from espalier.search.request import SearchRequest
from espalier.search.result import SearchResult

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[AsyncSearchClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["SearchClient", P], T]:
    """The method of `SearchClient` that waits for a coroutine of `AsyncSearchClient`."""

    @wraps(method)
    def call(self: "SearchClient", *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.run(lambda client: method(client, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[AsyncSearchClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate["SearchClient", P], Generator[T, None, None]]:
    """The method of `SearchClient` that iterates over an asynchronous generator of `AsyncSearchClient`."""

    @wraps(method)
    def call(self: "SearchClient", *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        yield from self._thread.iterate(lambda client: method(client, *args, **kwargs))

    return call


class SearchClient:
    """Sends searches to one server. Thread-safe; call `close`, or use it as a context manager.

    A process that is forked from the one that created it cannot use it: create one in each.

    Attributes:
        endpoint: HOST:PORT of the server.
        retry: when failed calls are tried again.

    Example:
        with SearchClient("127.0.0.1:50051") as client:
            print(client.solve("What is 6 * 7?", beam_width=4, expansion=4).answer)
    """

    def __init__(
        self,
        endpoint: str,
        *,
        token: str | None = None,
        tls: Tls | bool = False,
        insecure_token: bool = False,
        retry: RetryPolicy = DEFAULT_RETRIES,
    ) -> None:
        """Create a client; it connects on the first call. Arguments and errors are those of `AsyncSearchClient`."""
        self._thread = _ClientThread(
            lambda: AsyncSearchClient(endpoint, token=token, tls=tls, insecure_token=insecure_token, retry=retry)
        )
        self.endpoint, self.retry = endpoint, retry
        self._finalizer = weakref.finalize(self, self._thread.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the searches in progress and close the connection; closing twice is allowed."""
        self._finalizer()

    solve = _blocking(AsyncSearchClient.solve)
    solve_stream = _iterating(AsyncSearchClient.solve_stream)
    server_info = _blocking(AsyncSearchClient.server_info)
    health = _blocking(AsyncSearchClient.health)

    @overload
    def solve_many(
        self,
        requests: Iterable[SearchRequest | str],
        *,
        return_errors: Literal[False] = ...,
        on_progress: OnProgress | None = ...,
        **arguments: Unpack[ManyArguments],
    ) -> list[SearchResult]: ...

    @overload
    def solve_many(
        self,
        requests: Iterable[SearchRequest | str],
        *,
        return_errors: bool,
        on_progress: OnProgress | None = ...,
        **arguments: Unpack[ManyArguments],
    ) -> list[SearchResult | EspalierError]: ...

    def solve_many(
        self,
        requests: Iterable[SearchRequest | str],
        *,
        return_errors: bool = False,
        on_progress: OnProgress | None = None,
        **arguments: Unpack[ManyArguments],
    ) -> Any:
        """Run many searches, several at a time; see `AsyncSearchClient.solve_many`.

        `on_progress` is called on the thread of the caller.
        """
        outcomes = Outcomes(on_progress)
        with closing(self._outcomes(requests, return_errors, **arguments)) as finished:
            for outcome in finished:
                outcomes.add(*outcome)
        return outcomes.in_order()

    _outcomes = _iterating(AsyncSearchClient.outcomes)


class _ClientThread:
    """A client of asyncio on the event loop of a thread of its own."""

    def __init__(self, make: Callable[[], AsyncSearchClient]) -> None:
        """Start the thread, and create the client there; raises what `make` raises."""
        self._lock = RLock()  # a collected generator may come to `_post` again while its thread holds it
        self._open = True
        self._stopping = asyncio.Event()
        made: Future[AsyncSearchClient] = Future()
        self._thread = Thread(target=lambda: asyncio.run(self._serve(make, made)), name="espalier-client", daemon=True)
        self._thread.start()
        self._client = made.result()

    async def _serve(self, make: Callable[[], AsyncSearchClient], made: "Future[AsyncSearchClient]") -> None:
        self._loop = asyncio.get_running_loop()
        try:
            client = make()
        except Exception as error:
            made.set_exception(error)
            return
        made.set_result(client)
        await self._stopping.wait()
        await client.close()
        while calls := asyncio.all_tasks() - {asyncio.current_task()}:  # they end with errors that say so
            await asyncio.wait(calls)

    def run(self, call: Callable[[AsyncSearchClient], Coroutine[Any, Any, T]]) -> T:
        """Wait for a coroutine; what ends the wait early, such as an interrupt, cancels it.

        Raises:
            MisuseError: see `AsyncSearchClient.require_usable`.
            Exception: what the coroutine raises.
        """
        self._client.require_usable()
        return self._wait(lambda: call(self._client))

    def iterate(self, call: Callable[[AsyncSearchClient], AsyncGenerator[T, None]]) -> Generator[T, None, None]:
        """Iterate over an asynchronous generator, which ends when this one is closed or collected."""
        self._client.require_usable()
        items: Any = call(self._client)

        async def following() -> T:
            return await anext(items)

        async def close() -> None:
            while items.ag_running:  # until what an interrupt has cancelled has ended
                await asyncio.sleep(0)
            await items.aclose()

        try:
            while True:
                try:
                    item = self._wait(following)
                except StopAsyncIteration:
                    return
                yield item
        finally:
            self._post(close)  # without waiting for it: the collector may run on the event loop's thread

    def _wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        future = self._post(work)
        if future is None:
            raise cancelled()
        try:
            return future.result()
        finally:
            future.cancel()

    def _post(self, work: Callable[[], Coroutine[Any, Any, T]]) -> "Future[T] | None":
        """Start a coroutine; None if the client is closed."""
        with self._lock:
            return asyncio.run_coroutine_threadsafe(work(), self._loop) if self._open else None

    def stop(self) -> None:
        """End all calls, close the client and end the thread."""
        with self._lock:
            if self._open:
                self._open = False
                self._loop.call_soon_threadsafe(self._stopping.set)
        if current_thread() is not self._thread:
            self._thread.join()
