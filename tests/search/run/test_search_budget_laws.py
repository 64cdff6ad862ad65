"""Budgets over random searches and orders of completion: exact, shared out evenly, and never in the way of an end."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_examples import random_examples
from scripted_engine import VERIFIER_PROMPT, Row, begin, draw
from search_runs import outcome
from search_runs import run as run_whole

from espalier.engine.work import Sampling, stream_key
from espalier.search.algorithms import needs_verifier
from espalier.search.algorithms.auto import AutoSearch
from espalier.search.growth.budget import Budget
from espalier.search.request import Aggregation, AlgorithmName, SearchRequest, Vote
from espalier.search.result import CandidateDone, Event, SearchResult, StopReason
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.running import UsageMeter
from espalier.search.tree import Node

MOST = 2**62


def adaptive(request: SearchRequest) -> bool:
    """Whether the search is one that takes no votes by confidence."""
    return request.algorithm is AlgorithmName.ADAPTIVE


requests = st.builds(
    SearchRequest,
    problem=st.sampled_from(["1+1?", "2+2?", "three?"]),
    algorithm=st.sampled_from(list(AlgorithmName)),
    beam_width=st.integers(1, 5),
    expansion=st.integers(1, 4),
    aggregation=st.sampled_from(list(Aggregation)),
    vote=st.none() | st.sampled_from(list(Vote)),
    max_steps=st.integers(1, 6),
    max_step_tokens=st.integers(1, 4) | st.just(16),
    seed=st.integers(0, 10_000),
    lookahead_steps=st.integers(1, 3),
    simulations=st.integers(1, 10),
    iterations=st.integers(1, 3),
    generator_budget=st.none() | st.integers(1, 40) | st.integers(1, 300),
    verifier_budget=st.none() | st.integers(1, 40) | st.integers(1, 300),
).filter(lambda request: not request.vote or not request.vote.reads_confidence or not adaptive(request))
orders = st.integers(0, 10_000)
laws = random_examples(200)


def told_by_rounds(result: SearchResult) -> list[tuple[int, int]]:
    """Of each round, the children asked for and the samples that what was told stands for."""
    return [
        (sum(asked.children for asked in one.asked), sum(told.multiplicity for told in one.told))
        for one in result.rounds
    ]


@laws
@given(requests, orders)
def test_no_budget_is_over_at_any_moment_whatever_comes_first(request: SearchRequest, order: int):
    run = begin(request, order)

    def watch() -> None:
        assert run.meter.generated_tokens <= (request.generator_budget or MOST)
        if run.meter.generated_tokens:
            assert run.meter.verifier_tree_tokens <= (request.verifier_budget or MOST)

    result = run.finish(watch)
    assert run.engine.live == 0
    assert not run.engine.ready
    if request.verifier_budget and needs_verifier(request) and request.verifier_budget <= VERIFIER_PROMPT:
        assert result.usage.generated_tokens == result.usage.verifier_tokens == 0


@laws
@given(requests, orders, st.integers(10, 150), st.sampled_from([AlgorithmName.BEST_OF_N, AlgorithmName.ADAPTIVE]))
def test_a_path_of_many_steps_takes_no_more_than_its_one_share(
    request: SearchRequest, order: int, budget: int, name: AlgorithmName
):
    run = begin(replace(request, algorithm=name, vote=Vote.WEIGHTED, verifier_budget=budget), order)
    result = run.finish()
    assert run.meter.verifier_tree_tokens <= budget or not result.rounds
    assert run.engine.live == 0


@laws
@given(requests, orders, orders)
def test_a_budget_cuts_the_same_in_any_order_of_completion(request: SearchRequest, one: int, other: int):
    first, second = begin(request, one), begin(request, other)
    first.finish()
    second.finish()
    assert outcome(first.result) == outcome(second.result)
    assert first.meter.generated_tokens == second.meter.generated_tokens
    assert first.meter.verifier_tree_tokens == second.meter.verifier_tree_tokens
    assert first.result.rounds == second.result.rounds


@laws
@given(requests, orders, st.integers(VERIFIER_PROMPT, 150))
def test_auto_reckons_with_what_is_left_of_the_verifiers_budget(request: SearchRequest, order: int, budget: int):
    run = begin(replace(request, algorithm=AlgorithmName.AUTO, verifier_budget=budget), order)
    affordable = AutoSearch._affordable

    def watched(search: AutoSearch) -> int:
        assert search._left()[1] == budget - run.meter.verifier_tree_tokens
        return affordable(search)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoSearch, "_affordable", watched)
        run.finish()


@laws
@given(requests, orders)
def test_every_child_that_was_asked_for_is_told_of_once(request: SearchRequest, order: int):
    result = begin(request, order).finish()
    for asked, told in told_by_rounds(result):
        assert told == asked


@laws
@given(requests, orders)
def test_a_search_ends_for_want_of_tokens_only_where_a_round_would_get_less_than_one_each(
    request: SearchRequest, order: int
):
    run = begin(request, order)
    result = run.finish()
    cut = any(node.termination == "budget" for node in result.nodes)
    if result.stop_reason is not StopReason.BUDGET or cut:
        return
    scored = needs_verifier(request)
    left = (request.generator_budget or MOST) - run.meter.generated_tokens
    verifier_left = ((request.verifier_budget if scored else None) or MOST) - run.meter.verifier_tree_tokens
    most = max(request.candidates, request.beam_width)  # a round of any algorithm asks for no more children
    assert min(left, verifier_left) < most


@laws
@given(requests, orders)
def test_budgets_that_nobody_comes_near_change_nothing(request: SearchRequest, order: int):
    free = replace(request, generator_budget=None, verifier_budget=None)
    ample = replace(request, generator_budget=10**6, verifier_budget=10**6)
    assert outcome(begin(ample, order).finish()) == outcome(begin(free, order).finish())


@laws
@given(requests, orders, st.integers(0, 60))
def test_a_search_that_is_stopped_at_any_moment_holds_nothing_and_keeps_what_it_found(
    request: SearchRequest, order: int, moment: int
):
    run, found = begin(request, order), []
    run.search._on_event = lambda event: found.append(event) if says_an_answer(event) else None
    result = run.finish(stop_after=moment)
    assert run.engine.live == 0
    ends = {node.node_id: node.termination for node in result.nodes}
    assert all(ends[candidate.node_id] in ("eos", "boxed", "pruned") for candidate in result.candidates)
    assert (result.best is None) == (not any(candidate.answer for candidate in result.candidates))
    assert (result.best is None) == (not found), "an answer that was found, and overtaken, is not lost"
    assert "" not in {node.termination for node in result.nodes if node.node_id and is_leaf(node.node_id, result)}


@random_examples(100)
@given(st.integers(0, 10_000), orders, st.integers(2, 4))
def test_samples_become_one_node_where_their_text_and_their_end_are_alike(seed: int, order: int, most: int):
    request = SearchRequest("1+1?", AlgorithmName.BEAM, 8, 8, max_step_tokens=most, seed=seed)
    result = begin(request, order).finish()
    drawn: Counter[tuple[str, str]] = Counter()
    for i in range(64):
        tokens = draw(Row("generator"), Sampling(key=stream_key(seed, request.problem, (i,))), most)
        text = "".join(tokens).removesuffix("<eos>")
        ends = {"<eos>": "eos", "\n\n": "boxed" if "boxed" in text else ""}
        drawn[text, ends.get(tokens[-1], "") if text.strip() else "degenerate"] += 1
    texts = {node.path: node.text for node in result.nodes}
    assert {(texts[told.path], told.termination): told.multiplicity for told in result.rounds[0].told} == drawn


def says_an_answer(event: Event) -> bool:
    return isinstance(event, CandidateDone) and bool(event.candidate.answer)


def is_leaf(node_id: int, result: SearchResult) -> bool:
    return all(node.parent_id != node_id for node in result.nodes)


@laws
@given(st.integers(1, 500), st.integers(0, 400), st.integers(1, 64))
def test_what_is_dealt_is_all_there_is_but_for_less_than_a_token_each(budget: int, spent: int, paths: int):
    meter = UsageMeter()
    meter.generated_tokens = spent
    dealt = Budget(SearchRequest("?", generator_budget=budget), meter, uses_verifier=True)
    enough = dealt.begin_round(paths)
    assert enough == (budget - spent >= paths)
    if enough:
        given_out = sum(dealt.generator_left(root) for root in [Node(0, None, ())] * paths)
        assert 0 <= budget - spent - given_out < paths


@pytest.mark.parametrize("examples", [12, pytest.param(40, marks=pytest.mark.slow)])
def test_budgets_hold_over_a_real_engine_alone_and_in_company(
    examples: int, make_orchestrator: Callable[..., Orchestrator]
):
    @settings(max_examples=examples)
    @given(requests)
    def check(request_: SearchRequest) -> None:
        orchestrator = make_orchestrator(kv_memory_bytes=2**23)
        alone = run_whole(orchestrator, request_).only
        orchestrator.engine.check_drained()
        assert alone.usage.generated_tokens <= (request_.generator_budget or MOST)
        if alone.rounds:
            assert alone.usage.verifier_tree_tokens <= (request_.verifier_budget or MOST)
        other = replace(request_, problem="another one", seed=request_.seed + 1)
        among = run_whole(orchestrator, other, request_, replace(other, algorithm=AlgorithmName.BEAM)).results[1]
        assert outcome(among) == outcome(alone)
        orchestrator.engine.check_drained()

    check()
