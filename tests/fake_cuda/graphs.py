"""CUDA graphs of the fake device: operations recorded once, replayed over the same memory."""

from collections.abc import Callable
from weakref import WeakSet


class Pool:
    """Memory that graphs share. As with torch's allocator, no graph may join once all of its graphs are gone."""

    def __init__(self) -> None:
        self.graphs = WeakSet[Graph]()
        self.used = False


class Graph:
    """What was recorded."""

    def __init__(self, count_replay: Callable[[], None]) -> None:
        self.work: list[Callable[[], object]] = []
        self._count_replay = count_replay

    def replay(self) -> None:
        self._count_replay()
        for work in self.work:
            work()

    def pool(self) -> Pool:
        """The memory pool that it was recorded in."""
        return self._pool

    def begin(self, pool: Pool | None) -> None:
        """Join a pool, or one of its own.

        Raises:
            RuntimeError: for a pool whose graphs are gone.
        """
        pool = Pool() if pool is None else pool
        if pool.used and not pool.graphs:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED: the graphs of this memory pool are gone")
        pool.used = True
        pool.graphs.add(self)
        self._pool = pool
