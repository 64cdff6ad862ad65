"""The asyncio client with the blocking client's face, so that one test is of both."""

import asyncio
import threading
from collections.abc import Coroutine, Generator
from typing import Any

from server_thread import PATIENCE

from espalier.search.client import AsyncSearchClient, SearchClient
from espalier.search.result import Event


class AsyncInThread:
    """Runs an `AsyncSearchClient` on an event loop in a thread."""

    def __init__(self, endpoint: str, **arguments: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

        async def make() -> AsyncSearchClient:
            return AsyncSearchClient(endpoint, **arguments)

        try:
            self.client = self._call(make())
        except BaseException:
            self.end()
            raise

    def close(self) -> None:
        self._call(self.client.close())

    def end(self) -> None:
        """Stop the event loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    def solve(self, *arguments: Any, **named: Any) -> Any:
        return self._call(self.client.solve(*arguments, **named))

    def solve_many(self, *arguments: Any, **named: Any) -> Any:
        return self._call(self.client.solve_many(*arguments, **named))

    def server_info(self, *arguments: Any) -> Any:
        return self._call(self.client.server_info(*arguments))

    def health(self, *arguments: Any) -> Any:
        return self._call(self.client.health(*arguments))

    def solve_stream(self, *arguments: Any, **named: Any) -> Generator[Event, None, None]:
        events = self.client.solve_stream(*arguments, **named)
        try:
            while True:
                try:
                    yield self._call(anext(events))
                except StopAsyncIteration:
                    return
        finally:
            self._call(events.aclose())

    def _call(self, work: Any) -> Any:
        async def run() -> Any:
            return await work

        coroutine: Coroutine[Any, Any, Any] = run()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(2 * PATIENCE)


CLIENTS = {"blocking": SearchClient, "asyncio": AsyncInThread}
