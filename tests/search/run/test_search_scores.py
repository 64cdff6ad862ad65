"""Scores of given steps over a real engine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plain import plain_classifier_scores
from search_runs import BEAM, crowd, outcome, outcome_alone

from espalier.engine.errors import InvalidRequestError
from espalier.prm.scorers.tokens import Confidence
from espalier.search.common_fields import Aggregation
from espalier.search.conversation import ChatMessage, ChatRole
from espalier.search.result import Finished, StopReason
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.scores import ScoreRequest, ScoreResult

Make = Callable[..., Orchestrator]
PROBLEM = "Tom starts with 38 coins. He finds 47 more."
FIRST, SECOND, OTHER = "38+47=85\n\n", "Then he loses 12 of them.\n\n", "38+47=75\n\n"
REQUEST = ScoreRequest(PROBLEM, ((FIRST, SECOND), (FIRST, OTHER, SECOND), (OTHER,)))


def score(orchestrator: Orchestrator, request: ScoreRequest, *beside: object) -> ScoreResult:
    events: list[object] = []
    name = orchestrator.submit(request, events.append)
    for other in beside:
        orchestrator.submit(other)
    results = {}
    while orchestrator.busy:
        results |= {result.search_id: result for result in orchestrator.step()}
        orchestrator.engine.check_integrity()
    assert events == [Finished(name, results[name])]
    return results[name]


def test_the_scores_are_those_of_the_whole_texts(make_orchestrator: Make, tiny_checkpoints: dict[str, Path]) -> None:
    result = score(make_orchestrator(), REQUEST)
    for steps, scored in zip(REQUEST.solutions, result.solutions, strict=True):
        expected = plain_classifier_scores(tiny_checkpoints["classifier"], PROBLEM, list(steps), "\n", chat=False)
        assert list(scored.step_scores) == pytest.approx(expected, abs=1e-5)
        assert scored.score == scored.step_scores[-1]
    assert result.stop_reason is StopReason.FINISHED


def test_steps_that_solutions_begin_with_are_read_once(make_orchestrator: Make) -> None:
    together = score(make_orchestrator(), REQUEST)
    each = [score(make_orchestrator(), replace(REQUEST, solutions=(steps,))) for steps in REQUEST.solutions]
    assert [result.solutions[0] for result in each] == list(together.solutions)
    assert together.usage.verifier_tokens < sum(result.usage.verifier_tokens for result in each)
    assert together.usage.verifier_tokens == together.usage.verifier_tree_tokens
    assert together.usage.nodes == 5


def test_scores_are_those_that_a_search_gave_the_same_steps(make_orchestrator: Make) -> None:
    orchestrator = make_orchestrator()
    orchestrator.submit(BEAM)
    found = []
    while orchestrator.busy:
        found += orchestrator.step()
    by_id = {node.node_id: node for node in found[0].nodes}
    leaf = max((node for node in found[0].nodes if node.score is not None), key=lambda node: node.depth)
    path = []
    while leaf.parent_id is not None:
        path.insert(0, leaf)
        leaf = by_id[leaf.parent_id]
    assert len(path) > 1
    again = score(orchestrator, ScoreRequest(BEAM.problem, (tuple(node.text for node in path),)))
    assert list(again.solutions[0].step_scores) == [node.score for node in path]


def test_scores_beside_searches_change_neither(make_orchestrator: Make) -> None:
    alone = score(make_orchestrator(), REQUEST).solutions
    assert score(make_orchestrator(), REQUEST, *crowd(4)).solutions == alone
    orchestrator = make_orchestrator()
    orchestrator.submit(REQUEST)
    name = orchestrator.submit(BEAM)
    results = {}
    while orchestrator.busy:
        results |= {result.search_id: result for result in orchestrator.step()}
    assert outcome(results[name]) == outcome_alone(BEAM, make_orchestrator)


def test_a_solution_is_scored_as_the_request_aggregates(make_orchestrator: Make) -> None:
    for aggregation in Aggregation:
        (first, *_) = score(make_orchestrator(), replace(REQUEST, aggregation=aggregation)).solutions
        one, other = first.step_scores
        expected = {"last": other, "min": min(one, other), "prod": one * other, "mean": (one + other) / 2}
        assert first.score == pytest.approx(expected[aggregation])


def test_earlier_turns_are_read_with_the_problem(make_orchestrator: Make) -> None:
    history = (ChatMessage(ChatRole.USER, "What is 2 + 3?"), ChatMessage(ChatRole.ASSISTANT, "5"))
    plain = score(make_orchestrator(), REQUEST)
    other = score(make_orchestrator(), replace(REQUEST, history=history))
    assert other.usage.verifier_tree_tokens > plain.usage.verifier_tree_tokens
    assert other.solutions != plain.solutions


@pytest.mark.parametrize("left", [-1, 0, 7])
def test_a_budget_is_never_exceeded_and_says_what_it_left_out(left: int, make_orchestrator: Make) -> None:
    whole = score(make_orchestrator(), REQUEST)
    problem = (
        whole.usage.verifier_tree_tokens
        - score(make_orchestrator(), replace(REQUEST, solutions=((FIRST, SECOND),))).usage.verifier_tree_tokens
    )
    budget = max(1, problem + left)
    result = score(make_orchestrator(), replace(REQUEST, verifier_budget=budget))
    assert result.stop_reason is StopReason.BUDGET
    assert result.usage.verifier_tokens <= budget
    assert {scored.reason for scored in result.solutions if scored.score is None} == {"verifier_budget is used up"}


@pytest.mark.parametrize("verifier", ["classifier", "math-prm", "skywork", "rlhflow", "outcome"])
def test_every_kind_of_family_scores_given_steps(
    verifier: str, make_orchestrator: Make, tiny_checkpoints: dict[str, Path]
) -> None:
    if verifier not in tiny_checkpoints:
        pytest.skip(f"no tiny checkpoint {verifier}")
    result = score(make_orchestrator(verifier=verifier), REQUEST)
    assert all(scored.score is not None and 0 <= scored.score <= 1 for scored in result.solutions)


def test_a_cancelled_request_leaves_nothing(make_orchestrator: Make) -> None:
    orchestrator = make_orchestrator()
    name = orchestrator.submit(REQUEST)
    orchestrator.step()
    orchestrator.cancel(name)
    (result,) = orchestrator.step()
    assert result.stop_reason is StopReason.CANCELLED
    orchestrator.engine.check_drained()


def test_what_cannot_be_scored_is_refused_by_name(make_orchestrator: Make) -> None:
    with pytest.raises(InvalidRequestError, match="no verifier is loaded; --verifier names"):
        make_orchestrator(verifier=None).check(REQUEST)
    orchestrator = make_orchestrator(verifier=None)
    sampled = Orchestrator(orchestrator.engine, orchestrator._generator, Confidence())
    with pytest.raises(InvalidRequestError, match="confidence scores steps as they are sampled"):
        sampled.check(REQUEST)
    for solutions in ((), ((),), (("a", " "),), (("a",),) * 257, (("a",) * 257,), (("a",) * 200,) * 30, (("\ud800",),)):
        with pytest.raises(InvalidRequestError, match="solutions"):
            orchestrator.check(replace(REQUEST, solutions=solutions))
    with pytest.raises(InvalidRequestError, match="problem"):
        orchestrator.check(replace(REQUEST, problem=" "))
