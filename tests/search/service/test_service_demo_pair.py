"""The service over the real engine and the bundled models: what no scripted orchestrator can show."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from exposition import scrape
from openai import OpenAI
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from server_thread import ServerThread

from espalier.experiments.runs.benchmarks import load_benchmark
from espalier.search.client import SearchClient
from espalier.search.request import AlgorithmName, EarlyStop, SearchRequest
from espalier.search.result import Finished, Started, StepDone
from espalier.search.run.load import load_orchestrator
from espalier.search.run.settings import RuntimeSettings
from espalier.search.service.observability.tracing import Tracing

LONG = 120.0
"""Seconds; the first search of a machine may compile the attention kernel."""


@pytest.fixture(scope="module")
def orchestrator() -> Any:
    return load_orchestrator(RuntimeSettings(kv_memory=2**30, max_running=8))


@pytest.fixture
def server(orchestrator: Any, start: Callable[..., ServerThread]) -> ServerThread:
    running = start(lambda: orchestrator, max_searches=8, http_port=0)
    running.wait_loaded()
    return running


def problems(count: int) -> list[str]:
    return [p.problem for p in load_benchmark("demo", count)]


def wait_until_idle(orchestrator: Any) -> None:
    deadline = time.monotonic() + LONG
    while orchestrator.busy and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_streamed_search_starts_steps_and_ends_with_the_same_result_as_a_unary_one(server: ServerThread) -> None:
    request = SearchRequest(problems(1)[0], beam_width=2, expansion=2, max_step_tokens=32)
    with SearchClient(server.address) as client:
        events = list(client.solve_stream(request, timeout=LONG))
        alone = client.solve(request, timeout=LONG)
    assert isinstance(events[0], Started)
    assert any(isinstance(event, StepDone) for event in events)
    assert isinstance(events[-1], Finished)
    assert events[-1].result.answer == alone.answer
    assert [step.text for step in events[-1].result.best.steps] == [step.text for step in alone.best.steps]


@pytest.mark.parametrize("algorithm", list(AlgorithmName))
def test_every_algorithm_is_served_and_says_what_it_ran_with(algorithm: AlgorithmName, server: ServerThread) -> None:
    request = SearchRequest(
        problems(1)[0], algorithm, 2, 2, max_step_tokens=32, simulations=20, iterations=2, lookahead_steps=2,
        exploration=0.5, rebase_temperature=0.2, confidence=0.9,
    )  # fmt: skip
    with SearchClient(server.address) as client:
        *_, last = client.solve_stream(request, timeout=LONG)
    assert isinstance(last, Finished)
    ran_with = last.result.configuration
    for name, value in request.to_dict().items():
        assert getattr(ran_with, name) == value or value is None, name
    assert last.result.candidates


def test_a_client_that_vanishes_mid_stream_leaves_no_live_block(server: ServerThread, orchestrator: Any) -> None:
    request = SearchRequest(problems(1)[0], AlgorithmName.MAJORITY, beam_width=64, temperature=2.0)
    client = SearchClient(server.address)
    stream = iter(client.solve_stream(request, timeout=LONG))
    assert isinstance(next(stream), Started)
    client.close()
    wait_until_idle(orchestrator)
    orchestrator.engine.check_drained()
    with SearchClient(server.address) as other:
        assert other.solve(SearchRequest(problems(1)[0], AlgorithmName.GREEDY), timeout=LONG).nodes == ()


def test_clients_at_once_get_the_answers_they_would_get_alone(server: ServerThread, orchestrator: Any) -> None:
    requests = [SearchRequest(text, beam_width=2, expansion=2, max_step_tokens=32) for text in problems(6)]

    def solve(request: SearchRequest) -> tuple[str, str]:
        with SearchClient(server.address) as client:
            result = client.solve(request, timeout=LONG)
        return result.answer, result.best.text if result.best else ""

    alone = [solve(request) for request in requests]
    together: dict[int, tuple[str, str]] = {}
    threads = [threading.Thread(target=lambda i=i, r=r: together.update({i: solve(r)})) for i, r in enumerate(requests)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert [together.get(i) for i in range(len(requests))] == alone
    wait_until_idle(orchestrator)
    orchestrator.engine.check_drained()


def test_metrics_and_spans_tell_what_the_results_told(orchestrator: Any, start: Callable[..., ServerThread]) -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    server = start(lambda: orchestrator, [Tracing(provider)], share_prompts=True)
    server.wait_loaded()
    before = orchestrator.engine.stats()
    first, second, third = problems(3)
    requests = [
        SearchRequest(first, beam_width=2, expansion=2, max_step_tokens=32),
        SearchRequest(first, beam_width=2, expansion=2, max_step_tokens=32, seed=5),
        SearchRequest(second, AlgorithmName.MAJORITY, beam_width=32, temperature=0.7, early_stop=EarlyStop.FRUGAL),
        SearchRequest(third, AlgorithmName.BEST_OF_N, beam_width=4, generator_budget=60),
    ]
    with SearchClient(server.address) as client:
        events = [list(client.solve_stream(request, timeout=LONG)) for request in requests]
    usages = [each[-1].result.usage for each in events if isinstance(each[-1], Finished)]
    wait_until_idle(orchestrator)
    seen, stats = scrape(server), orchestrator.engine.stats()

    def total(field: str) -> float:
        return sum(getattr(usage, field) for usage in usages)

    assert seen.series("espalier_searches_total", "outcome") == {"finished": 3, "budget": 1}
    assert seen.value("espalier_sampled_tokens_total") == total("generated_tokens")
    assert seen.value("espalier_stopped_tokens_total") == total("stopped_tokens") > 0
    assert seen.value("espalier_stopped_paths_total") == total("stopped_paths") > 0
    for role in ("generator", "verifier"):
        assert seen.value("espalier_computed_tokens_total", role=role) == total(f"{role}_tokens")
        assert seen.value("espalier_tree_tokens_total", role=role) == total(f"{role}_tree_tokens")
        assert seen.value("espalier_saved_tokens_total", role=role) == total(f"{role}_saved_tokens") > 0
        of_engine = seen.value("espalier_engine_batch_tokens_sum", role=role)
        assert of_engine == stats[role].computed_tokens
        assert of_engine - before[role].computed_tokens == total(f"{role}_tokens")
        assert seen.value("espalier_engine_step_seconds_count", role=role) == stats[role].steps
        assert seen.value("espalier_kv_blocks", role=role, state="live") == 0
        hits = seen.value("espalier_prefix_cache_hit_blocks_total", role=role)
        assert hits == stats[role].cache_hits > before[role].cache_hits, "the second search has the first one's problem"
    rounds = sum(isinstance(event, StepDone) for each in events for event in each)
    names = Counter(span.name for span in spans.get_finished_spans())
    assert names == {"SolveProblemStream": 4, "search": 4, "round": rounds}
    provider.shutdown()


def test_a_chat_gets_the_answer_that_grpc_gives(server: ServerThread) -> None:
    (problem,) = problems(1)
    request = SearchRequest(problem, beam_width=2, expansion=2, max_step_tokens=32, seed=5)
    with SearchClient(server.address) as client:
        result = client.solve(request, timeout=LONG)
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=LONG) as chat:
        asked = {
            "model": "espalier@beam-n2-m2",
            "messages": [{"role": "user", "content": problem}],
            "seed": 5,
            "extra_body": {"espalier": {"max_step_tokens": 32}},
        }
        whole = chat.chat.completions.create(**asked)
        chunks = list(chat.chat.completions.create(**asked, stream=True))
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert result.best is not None
    assert content == whole.choices[0].message.content == result.best.text
    assert whole.espalier["answer"] == result.answer
    assert whole.usage.completion_tokens == result.usage.generated_tokens
    assert whole.usage.prompt_tokens == result.usage.prompt_tokens > 0


def test_a_conversation_goes_on_and_its_client_may_leave_it(server: ServerThread, orchestrator: Any) -> None:
    first, second = problems(2)
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=LONG) as chat:
        messages: list[Any] = [{"role": "system", "content": "Be right."}, {"role": "user", "content": first}]
        one = chat.chat.completions.create(model="espalier@greedy", messages=messages, max_tokens=64)
        messages += [one.choices[0].message.model_dump(), {"role": "user", "content": second}]
        two = chat.chat.completions.create(model="espalier@greedy", messages=messages, max_tokens=64)
        assert two.usage.prompt_tokens > one.usage.prompt_tokens + len(one.choices[0].message.content) / 8
        stream = chat.chat.completions.create(
            model="espalier@majority-64", messages=messages, temperature=2, stream=True
        )
        next(iter(stream))
        stream.close()
    wait_until_idle(orchestrator)
    orchestrator.engine.check_drained()


def test_a_problem_that_the_pair_was_not_taught_has_a_warning_at_every_door(server: ServerThread) -> None:
    asked = "A train leaves at noon. How far is it now?"
    options: dict[str, Any] = {"algorithm": "greedy", "max_tokens": 8, "include_nodes": False}
    with SearchClient(server.address) as client:
        (warning,) = client.solve(asked, **options).warnings
        *_, last = client.solve_stream(asked, **options)
        assert client.solve(problems(2)[1], **options).warnings == ()
    assert isinstance(last, Finished)
    assert last.result.warnings == (warning,)
    assert "never taught the words noon, far, is" in warning
    body = {"problem": asked, "algorithm": "greedy", "max_tokens": 8, "stream": False}
    assert httpx2.post(f"{server.url}/v1/searches", json=body, timeout=LONG).json()["warnings"] == [warning]
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=LONG) as chat:
        messages: list[Any] = [{"role": "user", "content": asked}]
        whole: Any = chat.chat.completions.create(model="espalier@greedy", messages=messages, max_tokens=8)
    assert whole.espalier["warnings"] == [warning]


@pytest.mark.parametrize("verifier", ["", "confidence"])
def test_whatever_is_listed_runs_and_what_needs_a_verifier_is_refused_where_there_is_none(
    verifier: str, start: Callable[..., ServerThread]
) -> None:
    settings = RuntimeSettings(verifier=verifier, kv_memory=2**28)
    server = start(lambda: load_orchestrator(settings), max_searches=8, http_port=0)
    server.wait_loaded()
    served = httpx2.get(f"{server.url}/v1/server", timeout=LONG).json()
    assert served["default_search"] == ("beam" if verifier else "majority")
    assert set(AlgorithmName) - set(served["searches"]) == (
        set() if verifier else {"best-of-n", "beam", "dvts", "lookahead", "rebase", "particle", "mcts", "auto"}
    )
    problem = problems(1)[0]
    with SearchClient(server.address) as client:
        plain = client.solve(problem, beam_width=2, expansion=2, timeout=LONG)
    assert plain.configuration.algorithm == served["default_search"]
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=LONG) as chat:
        messages: list[Any] = [{"role": "user", "content": problem}]
        listed = [model.id for model in chat.models.list()]
        assert {"espalier", "espalier@plain", "espalier@majority-16"} <= set(listed)
        assert ("espalier@beam-n4-m4" in listed) == bool(verifier)
        for name in listed:
            whole: Any = chat.chat.completions.create(model=name, messages=messages, max_tokens=8)
            if name == "espalier":
                assert whole.espalier["configuration"]["algorithm"] == served["default_search"]
            ready = httpx2.get(f"{server.url}/v2/models/{name}/ready")
            assert ready.status_code == (404 if name.endswith("@plain") else 200), name
    for name in served["searches"]:
        assert httpx2.get(f"{server.url}/v2/models/espalier@{name}").status_code == 200, name
    if not verifier:
        for path in ("v1/models/espalier@beam", "v2/models/espalier@beam", "v2/models/espalier@beam/ready"):
            refused = httpx2.get(f"{server.url}/{path}")
            assert refused.status_code == 404
            assert "espalier@beam needs a verifier and none is loaded; the server's --verifier names" in refused.text
        body = {"model": "espalier@beam", "messages": [{"role": "user", "content": problem}]}
        refused = httpx2.post(f"{server.url}/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert "beam needs a verifier and none is loaded" in refused.text
