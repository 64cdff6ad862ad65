"""Searches with run-ahead are the same as without, bit for bit, and say what was computed for it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from search_runs import ALL, BEAM, DVTS, PROBLEM, crowd, outcome, outcome_alone, run
from test_search_drafts import COSTS

from espalier.engine.roles import GENERATOR
from espalier.search.request import SearchRequest
from espalier.search.run.orchestrator import Orchestrator

Make = Callable[..., Orchestrator]
UNEVEN = {"step_rule": "text:e", "max_step_tokens": 24, "max_tokens": 80, "max_steps": 5, "temperature": 1.3}
WIDE_BEAM = replace(BEAM, beam_width=4, expansion=4, **UNEVEN)
WIDE_DVTS = replace(DVTS, beam_width=3, expansion=4, **UNEVEN)


@pytest.mark.parametrize("request_", [WIDE_BEAM, WIDE_DVTS], ids=["beam", "dvts"])
@pytest.mark.parametrize("merge", [True, False], ids=["merged", "unmerged"])
def test_a_search_with_run_ahead_is_the_same_and_costs_the_same(
    request_: SearchRequest, merge: bool, make_orchestrator: Make
):
    request_ = replace(request_, merge_duplicates=merge)
    plain = run(make_orchestrator(), request_).only
    orchestrator = make_orchestrator(run_ahead=64)
    ahead = run(orchestrator, request_).only
    assert outcome(ahead) == outcome(plain)
    assert [getattr(ahead.usage, each) for each in COSTS] == [getattr(plain.usage, each) for each in COSTS]
    assert plain.usage.ahead_tokens == 0
    assert 0 < ahead.usage.ahead_kept_tokens < ahead.usage.ahead_tokens
    stats = orchestrator.engine.stats()[GENERATOR]
    assert (stats.ahead_tokens, stats.ahead_kept_tokens) == (ahead.usage.ahead_tokens, ahead.usage.ahead_kept_tokens)
    in_vain = ahead.usage.ahead_tokens - ahead.usage.ahead_kept_tokens
    assert stats.computed_tokens == plain.usage.generator_tokens + in_vain
    orchestrator.engine.check_drained()


def test_fewer_steps_are_taken_where_paths_that_run_ahead_are_kept(make_orchestrator: Make):
    steps = []
    for rows in (0, 64):
        orchestrator = make_orchestrator(run_ahead=rows)
        run(orchestrator, WIDE_BEAM)
        steps.append(orchestrator.engine.stats()[GENERATOR].steps)
    assert steps[1] < steps[0]


@pytest.mark.parametrize("request_", ALL.values(), ids=ALL.keys())
def test_every_search_is_the_same(request_: SearchRequest, make_orchestrator: Make):
    plain = outcome_alone(request_, make_orchestrator)
    assert outcome(run(make_orchestrator(run_ahead=64), request_).only) == plain


@pytest.mark.parametrize(
    "how",
    [
        {"run_ahead": 64},
        {"run_ahead": 6, "launch_ahead": True},
        {"run_ahead": 64, "kv_memory_bytes": 900_000, "reserved_share": 0.05},
        {"run_ahead": 64, "kv_memory_bytes": 800_000, "reserved_share": 0.05, "launch_ahead": True, "block_size": 1},
        {"run_ahead": 64, "kv_memory_bytes": 900_000, "reserved_share": 0.05, "draft_tokens": 3},
        {"run_ahead": 12, "max_batch_tokens": 16},
    ],
    ids=str,
)
def test_searches_among_others_are_the_same_with_scarce_memory_and_with_drafts(how: dict, make_orchestrator: Make):
    requests = [replace(WIDE_BEAM, seed=i, problem=f"{PROBLEM} {i}") for i in range(3)]
    requests += [replace(WIDE_DVTS, seed=9), *crowd(4)]
    expected = [outcome_alone(request, make_orchestrator) for request in requests]
    orchestrator = make_orchestrator(**how)
    for request, result, alone in zip(requests, run(orchestrator, *requests).results, expected, strict=True):
        assert outcome(result) == alone, request
    stats = orchestrator.engine.stats()[GENERATOR]
    assert stats.ahead_kept_tokens > 0
    orchestrator.engine.check_drained()


def test_nothing_runs_ahead_where_a_batch_is_full(make_orchestrator: Make):
    orchestrator = make_orchestrator(run_ahead=1)
    result = run(orchestrator, WIDE_BEAM).only
    assert result.usage.ahead_tokens == 0


@pytest.mark.parametrize("given", [{"generator_budget": 200}, {"probe_every": 10}], ids=str)
def test_nothing_runs_ahead_whose_share_of_a_budget_is_not_known_or_that_is_probed_first(
    given: dict, make_orchestrator: Make
):
    request = replace(WIDE_BEAM, **given)
    orchestrator = make_orchestrator(run_ahead=64)
    ahead = run(orchestrator, request).only
    assert ahead.usage.ahead_tokens == 0
    assert outcome(ahead) == outcome(run(make_orchestrator(), request).only)


def test_a_search_that_is_cancelled_leaves_nothing_and_says_what_it_spent(make_orchestrator: Make):
    orchestrator = make_orchestrator(run_ahead=64)
    spent = []
    for steps in range(4, 40, 3):
        search_id = orchestrator.submit(replace(WIDE_BEAM, seed=steps))
        results = [result for _ in range(steps) for result in orchestrator.step()]
        orchestrator.cancel(search_id)
        while orchestrator.busy:
            results += orchestrator.step()
        spent.append(results[0].usage.ahead_tokens)
        orchestrator.engine.check_drained()
    assert sum(spent) == orchestrator.engine.stats()[GENERATOR].ahead_tokens > 0


def test_run_ahead_that_is_dropped_for_want_of_memory_is_sampled_again(make_orchestrator: Make):
    request = WIDE_BEAM
    plain = outcome_alone(request, make_orchestrator)
    orchestrator = make_orchestrator(run_ahead=64)
    orchestrator.submit(request)
    scheduler, dropped, results = orchestrator.engine.schedulers[GENERATOR], 0, []
    while orchestrator.busy:
        results += orchestrator.step()
        dropped += orchestrator.engine._make_room({0}) if scheduler.ahead else 0
    assert dropped > 0
    assert outcome(results[0]) == plain
    orchestrator.engine.check_drained()
