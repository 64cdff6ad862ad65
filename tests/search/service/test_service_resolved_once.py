"""A request is validated, rendered and tokenised once, whichever way it comes and wherever it runs."""

import pickle
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from openai import OpenAI
from server_thread import PATIENCE, ServerThread

from espalier.engine.models.tokenizer import TextTokenizer
from espalier.experiments.executors.worker import Order, Report, Worker
from espalier.experiments.executors.worker_executor import WorkerExecutor
from espalier.search import conversation
from espalier.search.client import SearchClient
from espalier.search.request import AnswerEquivalence, SearchRequest
from espalier.search.run import generator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.settings import RuntimeSettings
from espalier.search.solver import Solver

PROBLEM = "Tom starts with 38 coins."
FIELDS: dict[str, Any] = {"beam_width": 2, "expansion": 2, "max_steps": 3, "max_step_tokens": 8, "max_tokens": 24}
RUNTIME = RuntimeSettings(answer_equivalence=AnswerEquivalence.EXACT_MATCH)


@pytest.fixture
def orchestrator(make_orchestrator: Callable[..., Orchestrator]) -> Orchestrator:
    return make_orchestrator()


@pytest.fixture
def counted(orchestrator: Orchestrator, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each piece of work was done for `PROBLEM`."""
    seen: Counter[str] = Counter()

    def count(owner: Any, name: str, label: Callable[..., str | None]) -> None:
        real = getattr(owner, name)

        def counting(*args: Any, **named: Any) -> Any:
            if done := label(*args):
                seen[done] += 1
            return real(*args, **named)

        monkeypatch.setattr(owner, name, counting)

    tokenizers = {id(model.tokenizer): f"{role} prompt tokenised" for role, model in orchestrator.engine.models.items()}
    count(conversation, "violations", lambda given, *_: "validated" if isinstance(given, SearchRequest) else None)
    count(generator, "render_turns", lambda _t, _s, problem, *_: "rendered" if PROBLEM in problem else None)
    count(TextTokenizer, "encode", lambda self, text: tokenizers.get(id(self)) if PROBLEM in text else None)
    return seen


ONCE = {"validated": 1, "rendered": 1, "generator prompt tokenised": 1, "verifier prompt tokenised": 1}


def by_grpc(server: ServerThread) -> None:
    with SearchClient(server.address) as client:
        assert client.solve(PROBLEM, timeout=PATIENCE, **FIELDS).candidates


def by_grpc_stream(server: ServerThread) -> None:
    with SearchClient(server.address) as client:
        assert len(list(client.solve_stream(PROBLEM, timeout=PATIENCE, **FIELDS))) > 2


def by_http(server: ServerThread) -> None:
    body = {"problem": PROBLEM, "stream": False, **FIELDS}
    assert httpx2.post(f"{server.url}/v1/searches", json=body, timeout=PATIENCE).json()["candidates"]


def by_http_stream(server: ServerThread) -> None:
    response = httpx2.post(f"{server.url}/v1/searches", json={"problem": PROBLEM, **FIELDS}, timeout=PATIENCE)
    assert "event: result" in response.text


def by_openai(server: ServerThread) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE) as chat:
        messages: list[Any] = [{"role": "user", "content": PROBLEM}]
        own = {"espalier": {name: FIELDS[name] for name in ("max_steps", "max_step_tokens")}}
        model = "espalier@beam-n2-m2"
        assert chat.chat.completions.create(model=model, messages=messages, max_tokens=24, extra_body=own).choices


@pytest.mark.parametrize("solve", [by_grpc, by_grpc_stream, by_http, by_http_stream, by_openai])
def test_a_served_request_is_resolved_once(
    solve: Callable[[ServerThread], None],
    orchestrator: Orchestrator,
    counted: Counter[str],
    start: Callable[..., ServerThread],
) -> None:
    server = start(lambda: orchestrator, http_port=0)
    server.wait_loaded()
    solve(server)
    assert counted == ONCE


def test_a_problem_in_process_is_resolved_once(
    orchestrator: Orchestrator, counted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier.search.run.load.load_orchestrator", lambda *_: orchestrator)
    with Solver() as solver:
        assert solver.solve(PROBLEM, **FIELDS).candidates
    assert counted == ONCE


class Here:
    """A `Transport` to one worker on a thread of this process; messages are pickled all the same."""

    workers = 1

    def __init__(self) -> None:
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.worker = Worker(RUNTIME, self.reports.put)
        self.thread = threading.Thread(target=self.worker.run)
        self.thread.start()

    def send(self, worker: int, order: Order) -> None:
        self.worker.tell(pickle.loads(pickle.dumps(order)))

    def check(self, worker: int, request: SearchRequest, seconds: float) -> Any:
        return pickle.loads(pickle.dumps(self.worker.check(pickle.loads(pickle.dumps(request)))))

    def restart(self, worker: int) -> None:
        raise AssertionError("it hangs")

    def poll(self, seconds: float) -> list[tuple[int, Report]]:
        try:
            return [(0, self.reports.get(timeout=max(seconds, 0.001)))]
        except queue.Empty:
            return []

    def close(self) -> None:
        self.worker.stop()
        self.thread.join(PATIENCE)


@pytest.fixture
def workers(orchestrator: Orchestrator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    monkeypatch.setattr("espalier.search.run.load.load_orchestrator", lambda _: orchestrator)
    here = Here()
    yield here
    here.close()


@pytest.mark.parametrize("solve", [by_grpc_stream, by_openai])
def test_a_request_that_a_worker_serves_is_resolved_once(
    solve: Callable[[ServerThread], None],
    workers: Here,
    counted: Counter[str],
    start: Callable[..., ServerThread],
) -> None:
    server = start(lambda: WorkerExecutor(workers, RUNTIME), http_port=0)
    server.wait_loaded()
    solve(server)
    assert counted == ONCE


def test_a_request_that_an_evaluation_gives_to_workers_is_resolved_once(workers: Here, counted: Counter[str]) -> None:
    executor = WorkerExecutor(workers, RUNTIME)
    executor.submit(SearchRequest(PROBLEM, **FIELDS))
    results = []
    while executor.busy:
        results += executor.step()
    assert [bool(result.candidates) for result in results] == [True]
    assert counted == ONCE
