"""An orchestrator without an engine: the problem's text says what the search does.

solve    ends after two rounds with the answer 42        hold     runs until `release` is set or it is cancelled
nothing  ends without an answer                          flood    as hold, with 50 step reports in every engine step
fail     ends as failed                                  die      the engine step raises
bug      submitting raises an unexpected error           pool     submitting raises PoolTooSmallError
lost     the engine step raises DeviceError       budget   ends by its budget, with the answer 42
stuck    the engine step lasts until `release` is set
grow     as solve, with a report within each round

Weights are reloaded from any folder: `bad` is refused, `bug` and `slow` raise or take until `release` is set.
"""

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from espalier.engine.errors import CheckpointError, DeviceError, PoolTooSmallError
from espalier.engine.stats import RoleStats
from espalier.search.algorithms import named
from espalier.search.request import DEFAULT_OPTIONS, SearchRequest, SubmitOptions, Vote
from espalier.search.result import (
    Candidate,
    CandidateDone,
    Event,
    Finished,
    NodeRecord,
    ScoredStep,
    SearchResult,
    Started,
    StepDone,
    StopReason,
    Usage,
)
from espalier.search.run.executor import RequestDefaults
from espalier.search.server_info import KvBlocks, Occupancy

SECRET = "secret of /home/someone/weights"

STEPS = (ScoredStep("6*7=42\n\n", 0.75), ScoredStep("The answer is \\boxed{42}.", 0.5))
CANDIDATE = Candidate(node_id=2, answer="42", score=0.5, multiplicity=3, steps=STEPS)
NODES = (
    NodeRecord(0, None, (), "", None, "", 1, 0),
    NodeRecord(1, 0, (0,), STEPS[0].text, 0.75, "", 1, 6),
    NodeRecord(2, 1, (0, 0), STEPS[1].text, 0.5, "eos", 3, 9),
    NodeRecord(3, 0, (1,), "6*7=41\n\n", 0.125, "pruned", 1, 6),
)
USAGE = Usage(101, 90, 70, 60, 95, 94, 80, 4, 1, 2, 65536, 40000, 25536, 12, 5, 0.25, 0.125, 1.5, prompt_tokens=11)
WHY = "the generator's logits are not numbers"
GRADER = "math-verify 1.2.3"
NAMES = {"generator": "org/talker", "verifier": "judge"}
DIGESTS = {"generator": "ab" * 32, "verifier": "cd" * 32}


def result_of(request: SearchRequest, search_id: str, stop_reason: StopReason) -> SearchResult:
    answered = stop_reason in (StopReason.FINISHED, StopReason.BUDGET) and request.problem != "nothing"
    return SearchResult(
        search_id=search_id,
        answer="42" if answered else "",
        score=0.5 if answered else None,
        stop_reason=stop_reason,
        best=CANDIDATE if answered else None,
        candidates=(CANDIDATE,) if answered else (),
        nodes=NODES,
        usage=USAGE,
        configuration=named(request, "steps"),
        digests=DIGESTS,
        grader=GRADER,
        error=WHY if stop_reason is StopReason.FAILED else "",
    )


@dataclass
class Running:
    search_id: str
    request: SearchRequest
    on_event: Callable[[Event], None]
    due: float
    rounds: int = 0
    cancelled: bool = False


class ScriptedOrchestrator:
    """Counts what happens to it in queues a test can wait on; one engine step takes a few milliseconds."""

    def __init__(self) -> None:
        self.defaults = RequestDefaults(temperature=0.8, top_k=0, top_p=1.0, min_p=0.0, max_positions=4096)
        self.release = threading.Event()
        self.started = threading.Event()
        self.submitted: queue.Queue[str] = queue.Queue()
        self.cancelled: queue.Queue[str] = queue.Queue()
        self.ended: queue.Queue[str] = queue.Queue()
        self.options: dict[str, SubmitOptions] = {}
        self.requests: dict[str, SearchRequest] = {}
        self.looks = 0
        self.flooded = 0
        self._flood_grew = threading.Condition()
        self.closed = False
        self.late = False
        self.stats: dict[str, RoleStats] = {}
        self.thread: threading.Thread | None = None
        self.models = DIGESTS
        self.reloaded: list[str] = []
        self.preparing = threading.Event()
        self._numbers = itertools.count()
        self._live: dict[str, Running] = {}

    @property
    def busy(self) -> bool:
        self.looks += 1
        return bool(self._live)

    @property
    def idle(self) -> bool:
        return not self.busy

    @property
    def running(self) -> int:
        return len(self._live)

    @property
    def max_running(self) -> int:
        return 32

    @property
    def kv_memory_bytes(self) -> int:
        return 2**20

    @property
    def model_names(self) -> dict[str, str]:
        return NAMES

    def describe_models(self) -> dict[str, str]:
        return dict(self.models)

    def prepare_reload(self, folder: str) -> str:
        name = folder.rpartition("/")[2]
        self.preparing.set()
        if name == "bad":
            raise CheckpointError(f"{folder} differs from the generator in more than its weights: its tokenizer")
        if name == "bug":
            raise RuntimeError(SECRET)
        if name == "slow":
            assert self.release.wait(10)
        return "ef" * 32

    def reload(self, folder: str) -> None:
        self._own_thread()
        if folder.endswith("die"):
            raise DeviceError("generator", "cuda:0", RuntimeError("CUDA error: device lost"))
        self.models = {**self.models, "generator": "ef" * 32}
        self.reloaded.append(folder)

    def occupancy(self) -> Occupancy:
        return Occupancy(self.running, 0, {"generator": KvBlocks(self.running, 3, 7)}, self.stats)

    def check(self, request: SearchRequest) -> SearchRequest:
        request.validate()
        if request.problem == "bug":
            raise RuntimeError(SECRET)
        if request.problem == "pool":
            raise PoolTooSmallError(2**30, 2**20)
        return request

    def submit(
        self,
        request: SearchRequest,
        on_event: Callable[[Event], None] | None = None,
        options: SubmitOptions = DEFAULT_OPTIONS,
    ) -> str:
        self._own_thread()
        self.check(request)
        search_id = f"s{next(self._numbers)}"
        effective = replace(request, vote=request.vote or Vote.WEIGHTED)
        self.options[search_id] = options
        self.requests[search_id] = request
        now, own = time.monotonic(), request.time_limit or math.inf
        due = min(now - options.waited + own, now + options.max_seconds)
        self._live[search_id] = Running(search_id, effective, on_event or (lambda event: None), due)
        self.submitted.put(search_id)
        return search_id

    def cancel(self, search_id: str) -> None:
        self._own_thread()
        if search_id in self._live:
            self._live[search_id].cancelled = True

    def step(self) -> list[SearchResult]:
        self._own_thread()
        assert self._live, "step() of an idle orchestrator"
        ended = []
        for search in list(self._live.values()):
            if (reason := self._advance(search)) is not None:
                ended.append(self._finish(search, reason))
        if not ended:
            self.release.wait(0.005)
        return ended

    def close(self) -> None:
        for search in list(self._live.values()):
            self._finish(search, StopReason.CANCELLED)
        self.closed = True

    def _advance(self, search: Running) -> StopReason | None:
        search.rounds += 1
        if search.rounds == 1:
            search.on_event(Started(search.search_id, search.request))
            self.started.set()
        if search.cancelled:
            return StopReason.CANCELLED
        if time.monotonic() >= search.due and not self.late:
            return StopReason.DEADLINE
        match search.request.problem:
            case "die":
                raise RuntimeError(SECRET)
            case "lost":
                raise DeviceError("generator", "cuda:0", RuntimeError("CUDA error: device lost\nand so on"))
            case "fail":
                return StopReason.FAILED
            case "budget":
                return StopReason.BUDGET
            case "stuck":
                assert self.release.wait(10)
                return StopReason.FINISHED
            case "hold" | "flood":
                if search.request.problem == "flood":
                    self._flood(search)
                return StopReason.FINISHED if self.release.is_set() else None
        if search.request.problem == "grow":
            search.on_event(StepDone(search.search_id, search.rounds, 0, (), partial=True))
        search.on_event(StepDone(search.search_id, search.rounds, 4, NODES[search.rounds : search.rounds + 1]))
        if search.rounds < 2:
            return None
        search.on_event(CandidateDone(search.search_id, CANDIDATE))
        return StopReason.FINISHED

    def _flood(self, search: Running) -> None:
        with self._flood_grew:
            for _ in range(50):
                self.flooded += 1
                big = NodeRecord(self.flooded, 0, (self.flooded,), "x" * 10_000, 0.5, "", 1, 1)
                search.on_event(StepDone(search.search_id, self.flooded, 1, (big,)))
            self._flood_grew.notify_all()

    def flood_until(self, count: int) -> None:
        """Wait until that many step reports were made."""
        with self._flood_grew:
            assert self._flood_grew.wait_for(lambda: self.flooded >= count, timeout=10)

    def _finish(self, search: Running, reason: StopReason) -> SearchResult:
        result = result_of(search.request, search.search_id, reason)
        queued = USAGE.queue_seconds + self.options[search.search_id].waited
        result = replace(result, usage=replace(USAGE, queue_seconds=queued))
        del self._live[search.search_id]  # first: who hears of the end may look at once whether it runs
        search.on_event(Finished(search.search_id, result))
        if reason is StopReason.CANCELLED:
            self.cancelled.put(search.search_id)
        self.ended.put(search.search_id)
        return result

    def _own_thread(self) -> None:
        self.thread = self.thread or threading.current_thread()
        assert threading.current_thread() is self.thread, "the orchestrator is used from a second thread"
