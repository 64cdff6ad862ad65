"""Workers that do what a test says: it takes their orders from `orders`, and makes their reports."""

from collections import deque
from collections.abc import Callable
from typing import Any

from espalier.engine.errors import FatalError
from espalier.engine.stats import RoleStats
from espalier.experiments.executors.worker import (
    Cancel,
    Loaded,
    Lost,
    NoAnswerError,
    Order,
    PrepareReload,
    Reload,
    Report,
    Run,
    Stepped,
)
from espalier.search.request import SearchRequest
from espalier.search.result import Event, Finished, SearchResult, StopReason, Usage
from espalier.search.run.executor import Rejected, RequestDefaults, request_of
from espalier.search.server_info import KvBlocks, Occupancy

DEFAULTS = RequestDefaults(temperature=0.7, top_k=0, top_p=0.9, min_p=0.0, max_positions=512)
IDLE = {"generator": KvBlocks(0, 3, 7), "verifier": KvBlocks(0, 1, 9)}
MODELS = {"generator": "ab", "verifier": "cd"}
LOADED = Loaded("1.2.3", MODELS, 2**20, {"cores": 1}, DEFAULTS, Occupancy(0, 0, IDLE))


class FakeWorkers:
    """A `Transport`.

    Attributes:
        running: the searches that each worker was given and that it has not ended.
        orders: all orders, with the worker of each.
        answers: an answer, an exception or None for silence, by worker; the default is the request itself.
        asked: the worker that each request was to be checked by.
        prepared: what workers were asked to load beside, with the worker of each.
        digests: the answer to that, or an exception, by worker.
        on_reload: called with each order to take such weights, and its worker.
        restarted: the workers that were to be ended.
    """

    def __init__(self, count: int, loads: bool = True) -> None:
        self.workers = count
        self.running: list[dict[str, Run]] = [{} for _ in range(count)]
        self.orders: list[tuple[int, Order]] = []
        self.answers: dict[int, Any] = {}
        self.asked: list[int] = []
        self.restarted: list[int] = []
        self.prepared: list[tuple[int, PrepareReload]] = []
        self.digests: list[Any] = []
        self.on_reload: Callable[[int, Reload], object] = lambda worker, order: None
        self.closed = False
        self._reports: deque[tuple[int, Report]] = deque()
        for worker in range(count if loads else 0):
            self.load(worker)

    # ---- the executor's side

    def send(self, worker: int, order: Order) -> None:
        self.orders.append((worker, order))
        if isinstance(order, Run):
            self.running[worker][order.search_id] = order
        if isinstance(order, Reload):
            self.on_reload(worker, order)

    def check(self, worker: int, request: Any, seconds: float) -> Any:
        if isinstance(request, PrepareReload):
            self.prepared.append((worker, request))
            answer = self.digests[worker] if request.folder else ""
        else:
            self.asked.append(worker)
            answer = self.answers.get(worker, request)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def restart(self, worker: int) -> None:
        self.restarted.append(worker)

    def poll(self, seconds: float) -> list[tuple[int, Report]]:
        found = []
        while self._reports:  # one by one: a test may add reports on another thread
            found.append(self._reports.popleft())
        return found

    def close(self) -> None:
        self.closed = True

    # ---- the test's side

    def load(self, worker: int, loaded: Loaded = LOADED) -> None:
        self._reports.append((worker, loaded))

    def lose(self, worker: int, why: str = "it was killed") -> None:
        self.running[worker].clear()
        self._reports.append((worker, Lost(FatalError(why))))

    def report(
        self,
        worker: int,
        *events: Event | Rejected,
        kv_blocks: dict[str, KvBlocks] = IDLE,
        stats: dict[str, RoleStats] | None = None,
    ) -> None:
        self._reports.append((worker, Stepped(Occupancy(0, 0, kv_blocks, stats or {}), events)))

    def finish(self, worker: int, search_id: str, reason: StopReason = StopReason.FINISHED) -> None:
        """Report a result whose answer is the problem and the seed."""
        request = request_of(self.running[worker].pop(search_id).request)
        self.report(worker, Finished(search_id, result_of(search_id, request, reason)))

    def finish_all(self) -> None:
        for worker, running in enumerate(self.running):
            for search_id in list(running):
                self.finish(worker, search_id)

    def cancelled(self, worker: int) -> list[str]:
        """The searches that a worker was told to stop."""
        return [order.search_id for to, order in self.orders if to == worker and isinstance(order, Cancel)]

    def where(self, search_id: str) -> int | None:
        """The worker that has a search."""
        return next((worker for worker, running in enumerate(self.running) if search_id in running), None)


def result_of(search_id: str, request: SearchRequest, reason: StopReason) -> SearchResult:
    answer = f"{request.problem}/{request.seed}"
    of_request = {"search_id": search_id, "stop_reason": reason, "usage": Usage(), "configuration": request}
    return SearchResult(**of_request, answer=answer, grader="exact-match")


SILENT = NoAnswerError("no answer")
