"""Budgets of tokens and time: never exceeded, the same in company, and always with what was found so far."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from search_runs import ALL, BEAM, BEST_OF_N, MAJORITY, crowd, outcome, run

from espalier.engine.errors import InvalidRequestError
from espalier.search.request import AlgorithmName, SearchRequest, SubmitOptions
from espalier.search.result import Candidate, SearchResult, StepDone, StopReason
from espalier.search.run.orchestrator import Orchestrator

Make = Callable[..., Orchestrator]
SCORED = {name: request for name, request in ALL.items() if name not in ("greedy", "chain", "majority", "adaptive")}


def complete(candidates: tuple[Candidate, ...], result: SearchResult) -> bool:
    ends = {node.node_id: node.termination for node in result.nodes}
    return all(ends[candidate.node_id] in ("eos", "boxed", "pruned") for candidate in candidates)


def every_other(requests: dict[str, SearchRequest], budgets: list[int]) -> list[Any]:
    """Pairs of a request and a budget; every other one, at odd places and at even places by turns, is slow."""
    return [
        pytest.param(request, budget, id=f"{name}-{budget}", marks=pytest.mark.slow if (i + j) % 2 else ())
        for i, (name, request) in enumerate(requests.items())
        for j, budget in enumerate(budgets)
    ]


@pytest.mark.parametrize(("request_", "budget"), every_other(ALL, [1, 8, 9, 40, 100, 250]))
def test_the_generators_budget_is_never_exceeded(request_: SearchRequest, budget: int, make_orchestrator: Make):
    orchestrator = make_orchestrator()
    result = run(orchestrator, replace(request_, generator_budget=budget)).only
    orchestrator.engine.check_drained()
    assert result.usage.generated_tokens <= budget
    free = run(orchestrator, request_).only
    if free.usage.generated_tokens > budget:
        assert result.stop_reason is StopReason.BUDGET
    assert complete(result.candidates, result)


@pytest.mark.parametrize(("request_", "budget"), every_other(SCORED, [1, 30, 60, 100, 200]))
def test_the_verifiers_budget_is_never_exceeded(request_: SearchRequest, budget: int, make_orchestrator: Make):
    orchestrator = make_orchestrator()
    result = run(orchestrator, replace(request_, verifier_budget=budget)).only
    orchestrator.engine.check_drained()
    usage = result.usage
    if result.rounds:
        assert usage.verifier_tree_tokens <= budget
    else:  # the problem alone is over it, so nothing was read
        assert usage.verifier_tokens == usage.generator_tokens == 0
        assert result.stop_reason is StopReason.BUDGET
    free = run(orchestrator, request_).only
    if free.usage.verifier_tree_tokens > budget and request_.algorithm is not AlgorithmName.AUTO:
        # Auto may finish within a budget that does not pay for all it would do without one.
        assert result.stop_reason is StopReason.BUDGET
    assert complete(result.candidates, result)
    assert all(step.score is not None or not step.text.strip() for c in result.candidates for step in c.steps)


def test_budgets_are_used_up_but_for_what_one_round_cannot_share_out(make_orchestrator: Make):
    for budget in range(20, 120, 7):
        result = run(make_orchestrator(), replace(BEAM, generator_budget=budget, seed=budget)).only
        if result.stop_reason is StopReason.BUDGET and not any(n.termination == "budget" for n in result.nodes):
            assert budget - result.usage.generated_tokens < BEAM.candidates


@pytest.mark.parametrize("request_", ALL.values(), ids=ALL.keys())
def test_a_budget_cuts_the_same_alone_and_in_company(request_: SearchRequest, make_orchestrator: Make):
    cut = replace(request_, generator_budget=60, verifier_budget=120)
    alone = run(make_orchestrator(), cut).only
    among = run(make_orchestrator(), *crowd(5), cut, *crowd(3)).results[5]
    assert outcome(among) == outcome(alone)


@pytest.mark.parametrize("request_", ALL.values(), ids=ALL.keys())
def test_a_budget_that_suffices_changes_nothing(request_: SearchRequest, make_orchestrator: Make):
    free = run(make_orchestrator(), request_).only
    ample = run(make_orchestrator(), replace(request_, generator_budget=10**6, verifier_budget=10**6)).only
    assert outcome(ample) == outcome(free)
    assert ample.stop_reason is StopReason.FINISHED


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("steps", [1, 2, 5, 12, 25])
@pytest.mark.parametrize("request_", [BEAM, BEST_OF_N, MAJORITY], ids=["beam", "best-of-n", "majority"])
def test_a_search_whose_time_is_over_ends_within_one_step_with_the_best_it_has(
    request_: SearchRequest, steps: int, make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch
):
    orchestrator, clock = make_orchestrator(), Clock()
    monkeypatch.setattr(orchestrator, "_clock", clock)
    events = []
    orchestrator.submit(replace(request_, time_limit=2.0), events.append)
    for _ in range(steps):
        clock.now += 1.9 / steps
        if ended := orchestrator.step():
            assert ended[0].stop_reason is StopReason.FINISHED
            return
    clock.now = 52.0
    (result,) = orchestrator.step()
    assert result.stop_reason in (StopReason.DEADLINE, StopReason.FINISHED)
    assert complete(result.candidates, result)
    assert (result.best is None) == (not any(candidate.answer for candidate in result.candidates))
    assert result.usage.queue_seconds + result.usage.seconds == pytest.approx(2.0)
    orchestrator.engine.check_drained()


def test_a_search_whose_time_is_over_in_the_queue_ends_there(make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch):
    orchestrator, clock = make_orchestrator(max_running=1), Clock()
    monkeypatch.setattr(orchestrator, "_clock", clock)
    orchestrator.submit(BEAM)
    waiting = orchestrator.submit(replace(BEAM, time_limit=1.0), options=SubmitOptions(waited=0.75))
    assert orchestrator.step() == []
    clock.now += 0.25
    (result,) = orchestrator.step()
    assert (result.search_id, result.stop_reason, result.answer) == (waiting, StopReason.DEADLINE, "")
    assert result.usage.queue_seconds == 1.0
    orchestrator.close()
    orchestrator.engine.check_drained()


@pytest.mark.parametrize("own", [None, 50.0])
def test_a_limit_of_the_submission_ends_a_search_and_is_no_part_of_its_request(
    own: float | None, make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch
):
    orchestrator, clock = make_orchestrator(), Clock()
    monkeypatch.setattr(orchestrator, "_clock", clock)
    orchestrator.submit(replace(BEAM, time_limit=own), options=SubmitOptions(waited=9.0, max_seconds=2.0))
    assert orchestrator.step() == []
    clock.now += 2.0
    (result,) = orchestrator.step()
    assert (result.stop_reason, result.configuration.time_limit) == (StopReason.DEADLINE, own)
    orchestrator.engine.check_drained()


def test_every_round_tells_the_best_so_far(make_orchestrator: Make):
    watched = run(make_orchestrator(), *(replace(BEAM, seed=seed) for seed in range(8)))
    for result in watched.results:
        steps = [event for event in watched.events[result.search_id] if isinstance(event, StepDone)]
        assert steps[-1].best == result.best
        first = next((i for i, step in enumerate(steps) if step.best), len(steps))
        assert all(step.best for step in steps[first:]), "what was found is not lost"
    assert any(result.best for result in watched.results)


@pytest.mark.parametrize("request_", ALL.values(), ids=ALL.keys())
def test_saved_tokens_are_those_of_candidates_read_one_by_one_less_the_computed(
    request_: SearchRequest, make_orchestrator: Make
):
    orchestrator = make_orchestrator()
    prompt = len(orchestrator._generator.prompt_ids(request_.problem))
    result = run(orchestrator, request_).only
    tokens = {node.path: node.tokens for node in result.nodes}
    alone = 0
    for told in (told for done in result.rounds for told in done.told):
        path = sum(tokens[told.path[: i + 1]] for i in range(len(told.path)))
        alone += told.multiplicity * (prompt + path)
    assert alone > 0
    assert result.usage.generator_saved_tokens == max(0, alone - result.usage.generator_tokens)
    assert (result.usage.verifier_saved_tokens > 0) == (result.usage.verifier_tokens > 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("generator_budget", 0), ("verifier_budget", -1), ("time_limit", 0.0), ("time_limit", float("nan"))],
)
def test_a_budget_of_nothing_is_refused_by_name(field: str, value: float, make_orchestrator: Make):
    with pytest.raises(InvalidRequestError, match=field):
        make_orchestrator().submit(replace(BEAM, **{field: value}))
