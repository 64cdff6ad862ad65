"""Sessions of scores with verifiers of every family, without a generator: steps that come one after another."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from paths import PROBLEM
from score_sessions import Session
from test_prm_exactness import STEPWISE

from espalier.engine.engine import Engine, EngineSettings
from espalier.prm.base import PrmFamily
from espalier.prm.verifier import Verifier
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.scores import ScoreRequest, ScoreSessionRequest

STEPS = ("38+47=85\n\n", "Then he has 85, and more.\n\n", "85-12=73\n\n")
OTHER = "38+47=75\n\n"
REQUEST = ScoreSessionRequest(PROBLEM, max_nodes=8, max_tokens=512)


@pytest.mark.parametrize(
    ("name", "full_rescore"),
    [*((name, check) for name in (*STEPWISE, "outcome") for check in (False, True)), ("thinkprm", False)],
)
def test_a_session_gives_the_scores_of_whole_solutions_within_what_was_set_aside(
    name: str, full_rescore: bool, load_family: Callable[[str], PrmFamily]
):
    family = load_family(name)
    settings = EngineSettings(kv_memory_bytes=2**24, block_size=4, max_batch_tokens=64)
    engine = Engine({"verifier": family.model}, settings)
    orchestrator = Orchestrator(engine, None, Verifier(family, full_rescore))
    solutions = [STEPS[: end + 1] for end in range(len(STEPS))] + [(STEPS[0], OTHER)]
    results: list[Any] = []
    orchestrator.submit(ScoreRequest(PROBLEM, tuple(solutions)))
    while orchestrator.busy:
        results += orchestrator.step()
    expected = [solution.step_scores[-1] for solution in results[0].solutions]

    session = Session(orchestrator, replace(REQUEST, max_tokens=512 + 8 * family.other_probe_tokens))
    peaks: list[tuple[int, int]] = []
    session.on_step = lambda: peaks.append(
        (engine.stats()["verifier"].live_blocks, engine.admission.reserved_blocks["verifier"])
    )
    scores = session.score((1, 0, STEPS[0]))
    scores += session.score((2, 1, STEPS[1]), (4, 1, OTHER), release=(1,))
    scores[2:2] = session.score((3, 2, STEPS[2]))
    assert scores == [expected[0], expected[1], expected[2], expected[3]]
    session.end()
    assert max(live for live, _ in peaks) > 0
    assert all(live <= reserved for live, reserved in peaks if reserved)
    engine.check_drained()
