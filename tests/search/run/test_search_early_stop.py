"""Searches that end once their vote is decided: the same answer, for less, and the same in any order of completion."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_examples import random_examples
from scripted_engine import begin
from search_runs import BEST_OF_N, MAJORITY, crowd, outcome, run

from espalier.search.algorithms import with_defaults
from espalier.search.grading.answers import canonical
from espalier.search.request import Aggregation, AlgorithmName, EarlyStop, SearchRequest, Vote
from espalier.search.result import SearchResult, StopReason
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.trace import replay, trace_of

Make = Callable[..., Orchestrator]
STOPS = [EarlyStop.DECIDED, EarlyStop.FRUGAL]

requests = st.builds(
    SearchRequest,
    problem=st.sampled_from(["1+1?", "2+2?", "three?"]),
    algorithm=st.sampled_from([AlgorithmName.MAJORITY, AlgorithmName.BEST_OF_N]),
    beam_width=st.integers(1, 9),
    vote=st.none() | st.sampled_from(list(Vote)),
    aggregation=st.sampled_from(list(Aggregation)),
    max_steps=st.integers(1, 6),
    max_step_tokens=st.integers(1, 4) | st.just(16),
    seed=st.integers(0, 10_000),
    early_stop=st.sampled_from(STOPS),
    generator_budget=st.none() | st.integers(1, 40) | st.integers(1, 300),
    verifier_budget=st.none() | st.integers(1, 40) | st.integers(1, 300),
    merge_duplicates=st.booleans(),
)
orders = st.integers(0, 10_000)
laws = random_examples(300)


def whole(request: SearchRequest) -> SearchRequest:
    return replace(request, early_stop=EarlyStop.OFF)


def counted(result: SearchResult) -> dict[str, float]:
    """What a search cost, apart from seconds and from memory at the widest moment."""
    usage = result.to_dict()["usage"]
    return {
        name: usage[name] for name in usage if "seconds" not in name and "bytes" not in name and "block" not in name
    }


def paths_of(result: SearchResult) -> Counter[tuple[str, float | None]]:
    return Counter({(c.text, c.score): c.multiplicity for c in result.candidates})


@laws
@given(requests, orders, orders)
def test_the_answer_is_the_same_as_that_of_all_paths(request: SearchRequest, one: int, other: int):
    run, all_paths = begin(request, one), begin(whole(request), other)
    found, expected = run.finish(), all_paths.finish()
    assert found.answer == expected.answer
    assert found.stop_reason is expected.stop_reason or found.usage.stopped_paths
    assert paths_of(found) <= paths_of(expected)
    assert run.engine.live == 0
    assert not run.engine.ready
    if not found.usage.stopped_paths:
        assert outcome(found) == outcome(expected)
        assert counted(found) == counted(expected)
    else:
        assert found.usage.generated_tokens < expected.usage.generated_tokens or request.max_steps == 1
        assert found.usage.generator_tree_tokens <= expected.usage.generator_tree_tokens
        assert found.usage.verifier_tree_tokens <= expected.usage.verifier_tree_tokens


@laws
@given(requests, orders, orders)
def test_it_stops_at_the_same_place_in_any_order_of_completion(request: SearchRequest, one: int, other: int):
    first, second = begin(request, one).finish(), begin(request, other).finish()
    assert outcome(first) == outcome(second)
    assert counted(first) == counted(second)


@laws
@given(requests, orders)
def test_a_stopped_search_can_be_replayed_and_says_what_it_left_out(request: SearchRequest, order: int):
    result = begin(request, order).finish()
    assert replay(trace_of(result)) == len(result.rounds)
    cut = sum(node.multiplicity for node in result.nodes if node.termination == "pruned")
    assert result.usage.stopped_paths == cut
    if with_defaults(request).vote is Vote.NAIVE:
        assert not cut


@laws
@given(requests, orders, st.integers(0, 40))
def test_a_search_that_is_cancelled_while_paths_wait_leaves_nothing(request: SearchRequest, order: int, after: int):
    run = begin(request, order)
    run.finish(stop_after=after)
    assert run.engine.live == 0


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("vote", [Vote.MAJORITY, Vote.WEIGHTED])
def test_searches_do_stop_early(stop: EarlyStop, vote: Vote):
    stopped, saved = 0, 0
    for seed in range(60):
        request = SearchRequest(
            "1+1?", AlgorithmName.BEST_OF_N, 7, vote=vote, max_steps=6, max_step_tokens=16, seed=seed, early_stop=stop
        )
        found, expected = begin(request, seed).finish(), begin(whole(request), seed).finish()
        stopped += found.usage.stopped_paths > 0
        saved += expected.usage.generated_tokens - found.usage.generated_tokens
        assert found.stop_reason is StopReason.FINISHED
    assert stopped >= 3, stopped
    assert saved > 0


# ---- with models


@pytest.mark.parametrize("request_", [MAJORITY, BEST_OF_N], ids=["majority", "best-of-n"])
@pytest.mark.parametrize("stop", STOPS)
def test_the_paths_that_run_are_those_of_a_search_without_it(
    make_orchestrator: Make, request_: SearchRequest, stop: EarlyStop
):
    orchestrator = make_orchestrator()
    expected = run(orchestrator, whole(request_)).only
    found = run(orchestrator, replace(request_, early_stop=stop)).only
    assert canonical(found.answer) == canonical(expected.answer)
    assert paths_of(found) <= paths_of(expected)
    if not found.usage.stopped_paths:
        assert outcome(found) == outcome(expected)
    orchestrator.engine.check_drained()


def test_a_frugal_search_is_the_same_alone_in_company_and_without_memory(make_orchestrator: Make):
    frugal = replace(BEST_OF_N, early_stop=EarlyStop.FRUGAL, beam_width=9)
    alone = run(make_orchestrator(), frugal).only
    others = list(crowd(9))
    among = run(make_orchestrator(), *others[:4], frugal, *others[4:]).results[4]
    pressed = run(make_orchestrator(kv_memory_bytes=600_000, reserved_share=0.05), *others[:4], frugal).results[4]
    assert outcome(among) == outcome(pressed) == outcome(alone)
    assert among.usage.generated_tokens == alone.usage.generated_tokens
