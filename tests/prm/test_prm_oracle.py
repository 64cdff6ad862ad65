"""`--verify-incremental`: every score again from the whole text, and what happens where they differ."""

from collections.abc import Callable
from typing import Any

import pytest
from paths import PROBLEM, STEPS, begin, child, score_path, score_step, settle, want
from test_prm_exactness import STEPWISE

from espalier.engine.engine import Engine
from espalier.engine.errors import ScoreMismatchError
from espalier.prm.base import PrmFamily, ScoreInput, StepPath
from espalier.prm.families.rlhflow import RlhFlow
from espalier.prm.families.spec import SpecifiedFamily
from espalier.prm.scorer import ScoreStatus
from espalier.prm.verifier import Verifier, VerifierSession

Make = Callable[..., tuple[Engine, Verifier]]


@pytest.mark.parametrize("name", STEPWISE)
@pytest.mark.parametrize("steps", ["eight steps", "unicode", "an empty line inside"])
def test_every_familys_scores_have_the_same_bits_as_the_whole_text(name: str, steps: str, verifier_of: Make):
    engine, verifier = verifier_of(name, max_batch_tokens=29)
    plain = score_path(engine, begin(engine, verifier), STEPS[steps])
    engine, verifier = verifier_of(name, full_rescore=True, max_batch_tokens=29)
    assert score_path(engine, begin(engine, verifier), STEPS[steps]) == plain


def test_a_check_computes_the_whole_text_and_shares_nothing(verifier_of: Make):
    steps = STEPS["two steps"]
    engine, verifier = verifier_of("qwen2.5-math-prm", full_rescore=True)
    score_path(engine, begin(engine, verifier), steps)
    whole = [verifier.family.full_path(StepPath(PROBLEM, tuple(steps[:end]))).token_ids for end in (1, 2)]
    assert engine.stats()["verifier"].computed_tokens == len(whole[1]) + len(whole[0]) + len(whole[1])
    assert engine.stats()["verifier"].cache_hits == 0


def test_siblings_are_checked_one_after_the_other(verifier_of: Make):
    engine, verifier = verifier_of("universal-prm", full_rescore=True)
    session, root = begin(engine, verifier)
    for step in ("So 85", "So 86", "So 87"):
        assert want(session, child(root, step)).status is ScoreStatus.PENDING
    scores = settle(engine, session)
    assert len(scores) == 3
    assert engine.stats()["verifier"].live_sequences == 4
    session.close()


def test_a_family_that_forgets_the_answer_before_a_step_is_caught(verifier_of: Make, monkeypatch: pytest.MonkeyPatch):
    read = RlhFlow.read

    def without_the_answer(self: RlhFlow, path: StepPath) -> ScoreInput:
        reading = read(self, path)
        if reading.full_path:
            return reading
        return ScoreInput(reading.token_ids[1:], (reading.score_positions[0] - 1,))

    monkeypatch.setattr(RlhFlow, "read", without_the_answer)
    caught(verifier_of, "rlhflow")


def test_a_family_that_reads_one_token_early_is_caught(verifier_of: Make, monkeypatch: pytest.MonkeyPatch):
    read = SpecifiedFamily.read

    def early(self: SpecifiedFamily, path: StepPath) -> ScoreInput:
        reading = read(self, path)
        return ScoreInput(reading.token_ids, (reading.score_positions[0] - (len(path.steps) > 1),))

    monkeypatch.setattr(SpecifiedFamily, "read", early)
    caught(verifier_of, "qwen2.5-math-prm")


def test_a_parent_whose_kv_was_overwritten_is_caught(verifier_of: Make):
    engine, verifier = verifier_of("token-classifier", full_rescore=True)
    session, root = begin(engine, verifier)
    parent = score_step(engine, session, root, "38+47=85\n\n")
    engine.kv_pool.bytes.zero_()
    with pytest.raises(ScoreMismatchError, match="step 2 of a path"):
        score_step(engine, session, parent, "So 85")
    close(engine, session)


def test_a_score_that_is_not_a_number_is_caught(verifier_of: Make, monkeypatch: pytest.MonkeyPatch):
    def nan(self: PrmFamily, evidence: float) -> float:
        return float("nan")

    monkeypatch.setattr(SpecifiedFamily, "score", nan)
    engine, verifier = verifier_of("qwen2.5-math-prm", full_rescore=True)
    session, root = begin(engine, verifier)
    with pytest.raises(ScoreMismatchError):
        score_step(engine, session, root, "So 85")
    close(engine, session)


def caught(verifier_of: Make, name: str) -> None:
    """The first step is right, the second is caught, and the error has both numbers."""
    engine, verifier = verifier_of(name, full_rescore=True)
    session, root = begin(engine, verifier)
    parent = score_step(engine, session, root, "38+47=85\n\n")
    with pytest.raises(ScoreMismatchError, match=rf"--verify-incremental: {name} gives step 2 of a path") as error:
        score_step(engine, session, parent, "So 85")
    assert repr(error.value.incremental) in str(error.value)
    assert repr(error.value.whole) in str(error.value)
    assert abs(error.value.incremental - error.value.whole) > 1e-6
    close(engine, session)


def close(engine: Engine, session: VerifierSession[Any]) -> None:
    """Release what the failed search still holds, as its owner would."""
    engine.cancel("me")
    session.close()
    engine.check_drained()
