"""The blocking client of the gRPC service: the asyncio client, on an event loop in a thread of its own."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial, wraps
from queue import SimpleQueue
from threading import RLock, Thread, current_thread
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from espalier.search.client.async_client import AsyncSearchClient, OnProgress
from espalier.search.client.connection import Tls
from espalier.search.client.errors import DEFAULT_RETRIES, RetryPolicy, ServiceError, cancelled
from espalier.search.client.score_session import AsyncScoreSession
from espalier.search.scores import ScoreResult

P = ParamSpec("P")
T = TypeVar("T")
_Work = Callable[..., Coroutine[Any, Any, T]]


def _blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """The method of a blocking class that waits for a coroutine of its counterpart for asyncio."""

    @wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._usable.run(method, self._asynchronous, *args, **kwargs)

    return call


def _iterating(
    method: Callable[Concatenate[AsyncSearchClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate["SearchClient", P], Generator[T, None, None]]:
    """The method of `SearchClient` that iterates over an asynchronous generator of `AsyncSearchClient`."""

    @wraps(method)
    def call(self: "SearchClient", *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        yield from self._usable.iterate(method(self._asynchronous, *args, **kwargs))

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
        self._asynchronous = self._thread.client
        self.endpoint, self.retry = endpoint, retry
        self._finalizer = weakref.finalize(self, self._thread.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the searches in progress and close the connection; closing twice is allowed."""
        self._finalizer()

    @property
    def _usable(self) -> "_ClientThread":
        self._asynchronous.require_usable()
        return self._thread

    solve = _blocking(AsyncSearchClient.solve)
    solve_many = _blocking(AsyncSearchClient.solve_many)
    solve_stream = _iterating(AsyncSearchClient.solve_stream)
    score = _blocking(AsyncSearchClient.score)
    rollout = _blocking(AsyncSearchClient.rollout)

    @wraps(AsyncSearchClient.score_session)
    def score_session(self, *args: Any, **kwargs: Any) -> "ScoreSession":
        """Open a session, to which steps come one after another; see `AsyncSearchClient.score_session`."""
        return ScoreSession(self._asynchronous.score_session(*args, **kwargs), self._usable)

    server_info = _blocking(AsyncSearchClient.server_info)
    reload = _blocking(AsyncSearchClient.reload)
    health = _blocking(AsyncSearchClient.health)


class ScoreSession:
    """A session of scores on a server; a context manager, which closes it. `AsyncScoreSession` describes the methods.

    Several threads may use it at a time.
    """

    def __init__(self, session: AsyncScoreSession, thread: "_ClientThread") -> None:
        """Open a session on its client's thread; see `SearchClient.score_session`."""
        self._asynchronous, self._usable = session, thread
        thread.run(session.open)

    @property
    def result(self) -> ScoreResult | None:
        """Usage of the session; None until it has ended."""
        return self._asynchronous.result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._usable.run(self._asynchronous.__aexit__, *raised)

    score = _blocking(AsyncScoreSession.score)
    score_many = _blocking(AsyncScoreSession.score_many)
    release = _blocking(AsyncScoreSession.release)
    close = _blocking(AsyncScoreSession.close)


class _ClientThread:
    """A client of asyncio on the event loop of a thread of its own."""

    def __init__(self, make: Callable[[], AsyncSearchClient]) -> None:
        """Start the thread, and create the client there; raises what `make` raises."""
        self._lock = RLock()  # a collected generator may come to `_start` again while its thread holds it
        self._open = True
        self._stopping = asyncio.Event()
        made: Future[AsyncSearchClient] = Future()
        self._thread = Thread(target=lambda: asyncio.run(self._serve(make, made)), name="espalier-client", daemon=True)
        self._thread.start()
        self.client = made.result()

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

    def run(self, work: _Work[T], *args: Any, on_progress: OnProgress | None = None, **kwargs: Any) -> T:
        """Wait for `work`; what ends the wait early, such as an interrupt, cancels it.

        `on_progress` is called on the thread that waits.
        """
        callbacks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        if on_progress:
            kwargs["on_progress"] = lambda *progress: callbacks.put(partial(on_progress, *progress))
        future = self._start(lambda: work(*args, **kwargs))
        future.add_done_callback(lambda _: callbacks.put(None))
        try:
            for callback in iter(callbacks.get, None):
                callback()
            return future.result()
        finally:
            future.cancel()

    def iterate(self, items: Any) -> Generator[Any, None, None]:
        """Iterate over an asynchronous generator; that ends when this is closed or collected."""

        async def following() -> Any:
            return await anext(items)

        async def close() -> None:
            while items.ag_running:  # until what an interrupt has cancelled has ended
                await asyncio.sleep(0)
            await items.aclose()

        try:
            while True:
                try:
                    item = self.run(following)
                except StopAsyncIteration:
                    return
                yield item
        finally:
            with suppress(ServiceError):  # closed: all calls have ended
                self._start(close)  # without waiting: the collector may run on the event loop's thread

    def _start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> "Future[T]":
        with self._lock:
            if not self._open:
                raise cancelled()
            return asyncio.run_coroutine_threadsafe(work(), self._loop)

    def stop(self) -> None:
        """End all calls, close the client and end the thread."""
        with self._lock:
            if self._open:
                self._open = False
                self._loop.call_soon_threadsafe(self._stopping.set)
        if current_thread() is not self._thread:
            self._thread.join()
