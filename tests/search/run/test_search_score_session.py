"""Sessions of scores over a real engine: steps that come one after another."""

import gc
import inspect
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from score_sessions import Session
from search_runs import BEAM, outcome, outcome_alone

from espalier.engine.errors import InvalidRequestError, PoolTooSmallError
from espalier.engine.roles import VERIFIER
from espalier.prm.scorers.tokens import Confidence
from espalier.search.request import SubmitOptions
from espalier.search.result import StopReason
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.scores import OpenNodes, ScoreRequest, ScoreResult, ScoreSessionRequest, SessionStep, SessionTurn
from espalier.search.tree import Node

Make = Callable[..., Orchestrator]
PROBLEM = "Tom starts with 38 coins. He finds 47 more."
FIRST, SECOND, OTHER = "38+47=85\n\n", "Then he loses 12 of them.\n\n", "38+47=75\n\n"
REQUEST = ScoreSessionRequest(PROBLEM, max_nodes=32, max_tokens=1024)
PATHS = ((FIRST, SECOND), (FIRST, OTHER, SECOND), (OTHER,))


def whole(orchestrator: Orchestrator, *solutions: tuple[str, ...]) -> ScoreResult:
    """The scores of solutions that are known from the beginning."""
    orchestrator.submit(ScoreRequest(PROBLEM, solutions))
    results: list[Any] = []
    while orchestrator.busy:
        results += orchestrator.step()
    return results[0]


def test_steps_that_come_later_get_the_scores_of_whole_solutions(make_orchestrator: Make) -> None:
    session = Session(make_orchestrator(), REQUEST)
    scores = session.score((1, 0, FIRST), (2, 0, OTHER))
    scores += session.score((3, 1, SECOND), (4, 1, OTHER))
    scores += session.score((5, 4, SECOND))
    result, expected = session.end(), whole(make_orchestrator(), *PATHS)
    assert [(scores[0], scores[2]), (scores[0], scores[3], scores[4]), (scores[1],)] == [
        solution.step_scores for solution in expected.solutions
    ]
    assert result.usage.verifier_tokens == expected.usage.verifier_tokens, "each token is read once"
    assert result.usage.nodes == 5
    assert result.stop_reason is StopReason.FINISHED
    assert (result.scorer, result.digests) == (expected.scorer, expected.digests)


def test_a_step_and_those_below_it_may_come_together(make_orchestrator: Make) -> None:
    session = Session(make_orchestrator(), REQUEST)
    together = session.score((7, 0, FIRST), (5, 7, OTHER), (6, 5, SECOND))
    assert tuple(together) == whole(make_orchestrator(), PATHS[1]).solutions[0].step_scores
    assert session.end().stop_reason is StopReason.FINISHED


def test_released_nodes_hold_no_blocks_and_their_children_go_on(make_orchestrator: Make) -> None:
    orchestrator = make_orchestrator(block_size=4)

    def live() -> int:
        return orchestrator.occupancy().kv_blocks[VERIFIER].live

    session = Session(orchestrator, REQUEST)
    session.score((1, 0, FIRST), (2, 0, OTHER))
    session.score((3, 1, SECOND))
    held = live()
    session.score(release=(2,))
    orchestrator.step()
    assert live() < held
    session.score((4, 3, OTHER), release=(1, 3))
    (score,) = session.score((5, 4, SECOND))
    expected = whole(make_orchestrator(), (FIRST, SECOND, OTHER, SECOND)).solutions[0].step_scores
    assert score == expected[-1]
    session.score(release=(4, 5))
    orchestrator.step()
    session.score((6, 0, FIRST))
    assert session.end().usage.nodes == 6


def test_a_path_longer_than_pythons_stack_is_released(make_orchestrator: Make) -> None:
    session = Session(make_orchestrator(), replace(REQUEST, max_nodes=128))
    deepest = 100
    session.score(*((i, i - 1, "1\n\n") for i in range(1, deepest + 1)))
    session.tell(release=tuple(range(1, deepest + 1)))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + deepest - 20)
    try:
        session.orchestrator.step()
    finally:
        sys.setrecursionlimit(limit)
    assert session.end().stop_reason is StopReason.FINISHED


def test_an_idle_session_lets_the_orchestrator_rest(make_orchestrator: Make) -> None:
    orchestrator = make_orchestrator()
    assert orchestrator.idle
    session = Session(orchestrator, REQUEST)
    assert not orchestrator.idle
    session.score((1, 0, FIRST))
    for _ in range(3):
        orchestrator.step()
    assert orchestrator.idle
    assert orchestrator.busy
    session.tell((2, 1, SECOND))
    assert not orchestrator.idle
    session.end()


def test_sessions_beside_searches_change_neither(make_orchestrator: Make) -> None:
    alone = whole(make_orchestrator(), PATHS[1]).solutions[0].step_scores
    orchestrator = make_orchestrator()
    found: list[Any] = []
    orchestrator.submit(BEAM, found.append)
    session = Session(orchestrator, REQUEST)
    scores = [session.score((i + 1, i, step))[0] for i, step in enumerate(PATHS[1])]
    assert tuple(scores) == alone
    session.end()
    assert outcome(found[-1].result) == outcome_alone(BEAM, make_orchestrator)


def test_a_step_beyond_what_the_session_holds_says_which_limit(make_orchestrator: Make) -> None:
    session = Session(make_orchestrator(), replace(REQUEST, max_nodes=2))
    assert None not in session.score((1, 0, FIRST), (2, 0, OTHER))
    assert session.score((3, 0, SECOND), (4, 3, FIRST)) == [None, None]
    assert "max_nodes=2; release nodes" in session.scores[3].reason
    assert session.scores[4].reason == "a step before it has no score"
    assert session.score((5, 1, SECOND), release=(2,)) == [None], "what is released counts from the next turn on"
    assert None not in session.score((6, 1, SECOND))
    session.end()


def test_tokens_beyond_what_the_session_holds_say_so_and_come_back_when_nodes_are_released(
    make_orchestrator: Make,
) -> None:
    orchestrator = make_orchestrator()
    tokens = len(orchestrator.engine.model(VERIFIER).tokenizer.encode(FIRST)) + 2
    session = Session(orchestrator, replace(REQUEST, max_tokens=2 * tokens))
    assert None not in session.score((1, 0, FIRST), (2, 0, FIRST))
    assert session.score((3, 0, FIRST)) == [None]
    assert f"max_tokens={2 * tokens}; release nodes" in session.scores[3].reason
    session.score(release=(1,))
    assert None not in session.score((4, 0, FIRST))
    assert session.end().stop_reason is StopReason.FINISHED


def test_a_budget_is_never_exceeded(make_orchestrator: Make) -> None:
    prompt = len(make_orchestrator().check(ScoreRequest(PROBLEM, ((FIRST,),))).verifier_prompt)  # type: ignore[union-attr]
    session = Session(make_orchestrator(), replace(REQUEST, verifier_budget=prompt + 12))
    steps = [(i + 1, 0, FIRST) for i in range(4)]
    assert None in session.score(*steps)
    assert {each.reason for each in session.scores.values() if each.score is None} == {"verifier_budget is used up"}
    result = session.end()
    assert result.usage.verifier_tokens <= prompt + 12
    assert result.stop_reason is StopReason.BUDGET
    ended = Session(make_orchestrator(), replace(REQUEST, verifier_budget=1))
    ended.tell((1, 0, FIRST))
    assert ended.end().stop_reason is StopReason.BUDGET


def test_a_session_ends_at_its_time_limit(make_orchestrator: Make) -> None:
    session = Session(make_orchestrator(), replace(REQUEST, time_limit=0.05))
    while session.result is None:
        session.orchestrator.step()
    assert session.result.stop_reason is StopReason.DEADLINE
    assert not session.orchestrator.busy


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_cancelled_session_leaves_nothing(steps: int, make_orchestrator: Make) -> None:
    orchestrator = make_orchestrator()
    session = Session(orchestrator, REQUEST)
    session.tell(*((i + 1, i, FIRST) for i in range(6)))
    for _ in range(steps):
        orchestrator.step()
    orchestrator.cancel(session.name)
    orchestrator.step()
    assert session.result
    assert session.result.stop_reason is StopReason.CANCELLED
    orchestrator.engine.check_drained()


def test_an_idle_session_gives_way_to_a_search_of_higher_priority_and_goes_on(make_orchestrator: Make) -> None:
    orchestrator = make_orchestrator(max_running=1)
    session = Session(orchestrator, REQUEST)
    first = session.score((1, 0, FIRST))
    name = orchestrator.submit(BEAM, options=SubmitOptions(priority=5))
    ended: list[str] = []
    while name not in ended:
        ended += [result.search_id for result in orchestrator.step()]
    scores = first + session.score((2, 1, SECOND))
    assert tuple(scores) == whole(make_orchestrator(), (FIRST, SECOND)).solutions[0].step_scores
    session.end()


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_steps_and_releases_gives_each_path_its_scores(seed: int, make_orchestrator: Make) -> None:
    drawn = random.Random(seed)
    orchestrator = make_orchestrator(block_size=4)
    session = Session(orchestrator, REQUEST)
    paths: dict[int, tuple[str, ...]] = {0: ()}
    got: dict[tuple[str, ...], float | None] = {}
    for node in range(1, 25):
        parent = drawn.choice(list(paths))
        path = (*paths[parent], drawn.choice((FIRST, SECOND, OTHER)))
        released = tuple(drawn.sample(sorted(set(paths) - {0}), min(len(paths) - 1, drawn.randrange(3))))
        if drawn.random() < 0.5:
            got[path] = session.score((node, parent, path[-1]), release=released)[0]
        else:
            session.tell((node, parent, path[-1]), release=released)
        paths[node] = path
        for each in released:
            del paths[each]
    result = session.end()
    assert len(session.scores) == 24
    assert result.usage.verifier_tokens == result.usage.verifier_tree_tokens
    expected = whole(make_orchestrator(), *got)
    for path, scored in zip(got, expected.solutions, strict=True):
        assert got[path] == scored.step_scores[-1]
    orchestrator.engine.check_drained()


def test_turns_that_do_not_fit_are_refused_by_name() -> None:
    nodes = OpenNodes()
    nodes.take(SessionTurn((SessionStep(1, 0, "a"), SessionStep(2, 1, "b"))))
    wrong = [
        (SessionTurn((SessionStep(2, 0, "c"),)), "steps[0].node"),
        (SessionTurn((SessionStep(3, 9, "c"),)), "steps[0].parent"),
        (SessionTurn((SessionStep(3, 0, " "),)), "steps[0].text"),
        (SessionTurn((SessionStep(3, 0, "\ud800"),)), "steps[0].text"),
        (SessionTurn((SessionStep(0, 0, "c"),)), "steps[0].node"),
        (SessionTurn((SessionStep(2**63, 0, "c"),)), "steps[0].node"),
        (SessionTurn(release=(0,)), "release"),
        (SessionTurn(release=(9,)), "release"),
        (SessionTurn((SessionStep(3, 0, "c"),) * 5000), "steps"),
    ]
    for turn, place in wrong:
        with pytest.raises(InvalidRequestError) as refused:
            nodes.take(turn)
        assert refused.value.violations[0].field == place
    nodes.take(SessionTurn((SessionStep(3, 2, "c"),), release=(1, 2)))
    with pytest.raises(InvalidRequestError, match="there is no node 1, or it was released"):
        nodes.take(SessionTurn((SessionStep(4, 1, "d"),)))


def test_what_cannot_be_scored_is_refused_by_name(make_orchestrator: Make) -> None:
    with pytest.raises(InvalidRequestError, match="no verifier is loaded; --verifier names"):
        make_orchestrator(verifier=None).check(REQUEST)
    orchestrator = make_orchestrator(verifier=None)
    sampled = Orchestrator(orchestrator.engine, orchestrator._generator, Confidence())
    with pytest.raises(InvalidRequestError, match="confidence scores steps as they are sampled"):
        sampled.check(REQUEST)
    for wrong in ({"problem": " "}, {"max_nodes": 0}, {"max_tokens": 2**21}, {"seed": -1}, {"time_limit": 0}):
        with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
            orchestrator.check(replace(REQUEST, **wrong))


def test_a_session_that_can_never_fit_says_what_to_lower(make_orchestrator: Make) -> None:
    with pytest.raises(PoolTooSmallError, match="raise --kv-memory, or lower max_nodes or max_tokens of the session"):
        make_orchestrator().check(replace(REQUEST, max_tokens=2**20))
    with pytest.raises(PoolTooSmallError, match="or lower the number or the length of the solutions"):
        make_orchestrator().check(ScoreRequest(PROBLEM, tuple((FIRST * 20, str(i)) for i in range(256))))


def test_steps_that_a_session_does_not_hold_leave_nothing_behind(make_orchestrator: Make) -> None:
    """A chain of them would otherwise grow by its length squared: 20,000 steps took a gigabyte."""
    session = Session(make_orchestrator(), replace(REQUEST, max_nodes=1))
    first = session.score((1, 0, FIRST))
    before = sum(type(each) is Node for each in gc.get_objects())
    steps = range(2, 500)
    scores = session.score(*((node, node - 1, OTHER) for node in steps), release=tuple(steps[:-1]))
    assert (first, set(scores)) == ([session.scores[1].score], {None})
    assert "max_nodes=1" in session.scores[2].reason
    assert session.scores[3].reason == "a step before it has no score"
    assert sum(type(each) is Node for each in gc.get_objects()) - before < 10
    assert session.end().usage.nodes == 499
