"""Votes weighted by the generator's confidence in its own paths."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from search_runs import BEAM, MAJORITY, outcome, run

from espalier.engine.errors import InvalidRequestError
from espalier.search.growth.confidence import path_confidence
from espalier.search.request import AlgorithmName, EarlyStop, SearchRequest, Vote
from espalier.search.rules import DEFAULT_GROUP
from espalier.search.run.orchestrator import Orchestrator

BY_CONFIDENCE = [vote for vote in Vote if vote.reads_confidence]


def test_confidences_are_of_the_whole_path_of_its_tail_and_of_its_least_sure_group():
    tokens = [-0.1] * 4 + [-2.0] * 2 + [-0.1] * 2 + [-0.5] * 2  # ten tokens, groups of three
    assert path_confidence(tokens, Vote.CONFIDENCE) == pytest.approx(math.exp(-5.6 / 10))
    assert path_confidence(tokens, Vote.TAIL_CONFIDENCE) == pytest.approx(math.exp(-1.1 / 3))
    assert path_confidence(tokens, Vote.LOWEST_CONFIDENCE) == pytest.approx(math.exp(-4.1 / 3))


def test_groups_of_long_paths_have_their_published_size():
    doubt = [-3.0] * DEFAULT_GROUP
    tokens = [-0.1] * 4 * DEFAULT_GROUP + doubt + [-0.2] * DEFAULT_GROUP
    assert path_confidence(tokens, Vote.LOWEST_CONFIDENCE) == pytest.approx(math.exp(-3.0))
    assert path_confidence(tokens, Vote.TAIL_CONFIDENCE) == pytest.approx(math.exp(-0.2))


@pytest.mark.parametrize("vote", BY_CONFIDENCE)
def test_one_token_is_its_own_group_and_no_token_has_no_confidence(vote: Vote):
    assert path_confidence([-0.7], vote) == pytest.approx(math.exp(-0.7))
    assert path_confidence([], vote) == 0.0


@pytest.mark.parametrize("vote", BY_CONFIDENCE)
def test_a_majority_by_confidence_needs_no_verifier_and_weighs_its_paths(
    vote: Vote, make_orchestrator: Callable[..., Orchestrator]
):
    request = replace(MAJORITY, beam_width=12, vote=vote, early_stop=EarlyStop.OFF, temperature=1.0)
    result = run(make_orchestrator("talker", None), request).only
    nodes = {node.node_id: node for node in result.nodes}
    weights: dict[str, float] = {}
    for candidate in result.candidates:
        node, total, tokens = nodes[candidate.node_id], 0.0, 0
        while node.parent_id is not None:
            total, tokens = total + (node.log_probability or 0.0), tokens + node.tokens
            node = nodes[node.parent_id]
        if vote is Vote.CONFIDENCE:
            assert candidate.score == pytest.approx(math.exp(total / tokens), abs=1e-6)
        assert candidate.score is not None
        assert 0 < candidate.score <= 1
        weights[candidate.answer] = weights.get(candidate.answer, 0) + candidate.multiplicity * candidate.score
    assert result.candidates
    weights.pop("", None)
    if weights:
        assert weights[result.answer] == max(weights.values())


@pytest.mark.parametrize("vote", BY_CONFIDENCE)
def test_confidences_do_not_depend_on_company_and_early_stop_keeps_the_answer(
    vote: Vote, make_orchestrator: Callable[..., Orchestrator]
):
    request = replace(MAJORITY, beam_width=9, vote=vote, early_stop=EarlyStop.OFF)
    requests = [replace(request, seed=seed) for seed in range(4)]
    together = run(make_orchestrator("talker", None), *requests).results
    for each, among in zip(requests, together, strict=True):
        alone = run(make_orchestrator("talker", None), each).only
        assert outcome(alone) == outcome(among)
        early = run(make_orchestrator("talker", None), replace(each, early_stop=EarlyStop.DECIDED)).only
        assert early.answer == alone.answer


def test_a_beam_may_be_voted_on_by_confidence_and_keeps_its_steps_scores(
    make_orchestrator: Callable[..., Orchestrator],
):
    scored = run(make_orchestrator(), BEAM).only
    sure = run(make_orchestrator(), replace(BEAM, vote=Vote.CONFIDENCE)).only
    assert [candidate.steps for candidate in sure.candidates] == [candidate.steps for candidate in scored.candidates]
    assert [c.score for c in sure.candidates] != [c.score for c in scored.candidates] or not sure.candidates


def test_adaptive_does_not_take_them():
    with pytest.raises(InvalidRequestError, match="vote: adaptive is decided by the votes majority"):
        SearchRequest("1+1?", AlgorithmName.ADAPTIVE, vote=Vote.CONFIDENCE).validate()
