"""The Python entry to a verifier alone: whole solutions, sessions, and what is left of them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from espalier import Scorer
from espalier.engine.errors import CheckpointError, InvalidRequestError, MisuseError
from espalier.search.result import StopReason
from espalier.search.scores import ScoreRequest

PROBLEM = "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"
STEPS = ["38+47=85", "85-12=73"]


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with Scorer("demo-verifier", kv_memory=2**28, threads=1) as scorer:
        yield scorer


@pytest.fixture(autouse=True)
def drained(scorer: Scorer) -> Iterator[None]:
    yield
    with scorer.held() as orchestrator:
        assert not orchestrator.busy
        orchestrator.engine.check_drained()


def test_one_solution_or_several_are_scored(scorer: Scorer) -> None:
    one = scorer.score(PROBLEM, STEPS)
    several = scorer.score(PROBLEM, [STEPS, ["38+47=75"]])
    assert one.solutions == several.solutions[:1]
    assert scorer.score(ScoreRequest(PROBLEM, (tuple(STEPS),))).solutions == one.solutions
    right, wrong = (solution.score for solution in several.solutions)
    assert right is not None
    assert wrong is not None
    assert right > 0.9 > 0.1 > wrong


def test_a_session_scores_steps_as_they_come(scorer: Scorer) -> None:
    expected = scorer.score(PROBLEM, STEPS).solutions[0].step_scores
    with scorer.session(PROBLEM) as session:
        first, other = session.score_many([(0, STEPS[0]), (0, "38+47=75")])
        session.release(other.node)
        assert (first.score, session.score(STEPS[1], first.node).score) == expected
        with pytest.raises(InvalidRequestError, match="there is no node 2"):
            session.score(STEPS[1], other.node)
    assert session.close().usage.nodes == 3
    with pytest.raises(MisuseError, match="the session has ended: finished"):
        session.score(STEPS[0])


def test_sessions_of_several_threads_are_open_at_once(scorer: Scorer) -> None:
    def run(_: int) -> list[float | None]:
        with scorer.session(PROBLEM, max_nodes=8) as session:
            node, scores = 0, list[float | None]()
            for step in STEPS:
                scored = session.score(step, node)
                node = scored.node
                scores.append(scored.score)
            return scores

    expected = list(scorer.score(PROBLEM, STEPS).solutions[0].step_scores)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(8))) == [expected] * 8


def test_a_session_that_has_ended_says_why_and_does_not_hang(scorer: Scorer) -> None:
    with scorer.session(PROBLEM) as other, scorer.session(PROBLEM, verifier_budget=1) as session:
        scored = session.score(STEPS[0])
        assert (scored.score, scored.reason) == (None, "the session has ended: budget")
        assert session.close().stop_reason is StopReason.BUDGET
        assert other.score(STEPS[0]).score is not None


def test_fields_are_checked(scorer: Scorer) -> None:
    with pytest.raises(InvalidRequestError, match="max_nodes"):
        scorer.session(PROBLEM, max_nodes=0)
    with pytest.raises(InvalidRequestError, match="max_paths"):
        scorer.session(PROBLEM, max_paths=1)
    with pytest.raises(TypeError, match="not one text"):
        scorer.score(PROBLEM, STEPS[0])


def test_what_scores_no_given_texts_is_refused() -> None:
    with pytest.raises(CheckpointError, match="not given texts"):
        Scorer("confidence")


def test_a_closed_scorer_ends_its_sessions() -> None:
    scorer = Scorer("demo-verifier", kv_memory=2**28, threads=1)
    session = scorer.session(PROBLEM)
    session.score(STEPS[0])
    scorer.close()
    scorer.close()
    assert session.close().stop_reason is StopReason.CANCELLED
    with pytest.raises(MisuseError, match="the scorer is closed"):
        scorer.score(PROBLEM, STEPS)
