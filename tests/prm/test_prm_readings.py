"""What a verifier does with a reading: texts that merge, probes that are given up, tokens that are asked about."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_driver import drain, read, release
from paths import PROBLEM, begin, child, score_path, score_step, settle, want

from espalier.engine.engine import Engine
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.work import Score, Scored
from espalier.prm.base import PrmFamily, Sampled, ScoreInput, StepPath, without_label, without_special_tokens
from espalier.prm.families import load_verifier
from espalier.prm.scorer import ScoreStatus
from espalier.prm.verifier import StepSession, Verifier

Make = Callable[..., tuple[Engine, Verifier]]
MERGING = """
name = "merging"
[prompt]
kind = "text"
text = "{problem}\\n\\n"
[step]
tag = "\\n"
between = "\\n"
encode = "whole"
[head]
layers = ["score"]
"""


@pytest.fixture
def merging(family_folders: dict[str, Path], tmp_path: Path) -> PrmFamily:
    """A family whose tag is merged with the newline that the next step brings: a path is no beginning of its child."""
    file = tmp_path / "merging.toml"
    file.write_text(MERGING)
    return load_verifier(Checkpoint(family_folders["token-classifier"]), torch.float32, "cpu", str(file))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_path_that_is_tokenised_otherwise_is_read_anew_with_the_same_score(
    in_place: bool, merging: PrmFamily, verifier_of: Make
):
    engine, verifier = verifier_of(merging)
    session, root = begin(engine, verifier)
    steps = ("38+47=85", "So 85", "\\boxed{85}")
    path = [root]
    for end in (1, 2, 3):
        path.append(score_step(engine, session, path[-1], steps[end - 1], in_place=in_place and end > 1))
    scores = [node.score for node in path[1:]]
    assert isinstance(session, StepSession)
    assert session.reopened == 2, "all but the first step"
    session.close()
    for end in (1, 2, 3):
        whole = merging.full_path(StepPath(PROBLEM, steps[:end]))
        sequence = engine.open("verifier", [])
        values = read(engine, sequence, list(whole.token_ids), list(whole.score_positions))
        assert merging.score(merging.evidence(values, None, Sampled())) == scores[end - 1]
        release(engine, sequence)


def test_a_path_read_anew_takes_full_blocks_back_from_the_prefix_cache(merging: PrmFamily, verifier_of: Make):
    engine, verifier = verifier_of(merging)
    session, root = begin(engine, verifier)
    first = score_step(engine, session, root, "38+47=85")
    before = engine.stats()["verifier"].cache_hits
    score_step(engine, session, first, "So 85")
    assert isinstance(session, StepSession)
    assert session.reopened == 1
    assert engine.stats()["verifier"].cache_hits - before >= session.prompt_tokens // 4 - 1  # blocks of four
    session.close()


class FromTheFirstStep(PrmFamily):
    """Reads the marks of all steps for the newest one: its text begins as its parent's, its score positions do too."""

    def __init__(self, inner: PrmFamily) -> None:
        self.info, self.model, self._inner = inner.info, inner.model, inner

    def prompt_ids(self, problem: str) -> list[int]:
        return self._inner.prompt_ids(problem)

    def read(self, path: StepPath) -> ScoreInput:
        ends = [
            self._inner.full_path(StepPath(path.problem, path.steps[:end])) for end in range(1, len(path.steps) + 1)
        ]
        return ScoreInput(ends[-1].token_ids, tuple(end.score_positions[0] for end in ends), full_path=True)

    def evidence(self, values: np.ndarray, before: float | None, sampled: Sampled) -> float:
        return float(values.min())


def test_a_path_whose_score_is_read_inside_its_parents_tokens_is_read_anew(verifier_of: Make, load_family: Callable):
    steps = ["38+47=85", "So 85", "\\boxed{85}"]
    engine, verifier = verifier_of("token-classifier")
    each = score_path(engine, begin(engine, verifier), steps)
    engine, verifier = verifier_of(FromTheFirstStep(load_family("token-classifier")))
    begun = begin(engine, verifier)
    lowest = score_path(engine, begun, steps)
    assert lowest == [min(each[:end]) for end in (1, 2, 3)]
    assert len(set(each)) == 3
    assert isinstance(begun[0], StepSession)
    assert begun[0].reopened == 2


def test_a_probes_tail_is_given_up_and_costs_its_own_tokens_only(verifier_of: Make):
    engine, verifier = verifier_of("universal-prm")
    session, root = begin(engine, verifier)
    tokens = want(session, child(root, "38+47=85")).tokens
    settle(engine, session)
    end = verifier.family.model.tokenizer.token_id("<|im_end|>")
    _, sequence = session.sequences()
    assert engine.token_ids(sequence)[-1] != end
    kept = len(engine.token_ids(sequence)) - session.prompt_tokens
    assert engine.stats()["verifier"].computed_tokens == session.prompt_tokens + kept + 1
    assert tokens == kept + 1
    assert engine.stats()["verifier"].live_sequences == 2
    session.close()


@pytest.mark.parametrize("steps", [1, 2])
def test_a_session_that_is_closed_midway_leaves_nothing(steps: int, verifier_of: Make):
    engine, verifier = verifier_of("universal-prm", full_rescore=True)
    session, root = begin(engine, verifier)
    assert want(session, child(root, "38+47=85")).status is ScoreStatus.PENDING
    for step in range(steps):  # with the probe, or with the check, under way
        for done in engine.step():
            assert isinstance(done, Scored)
            assert len(list(session.take(done))) == step
    assert session.pending == steps - 1
    assert engine.stats()["verifier"].live_sequences == 3
    engine.cancel("me")
    session.close()
    engine.check_drained()


@pytest.mark.parametrize("max_batch_tokens", [3, 2048])
def test_a_target_goes_with_its_own_read_in_any_chunk_of_a_batch(
    max_batch_tokens: int, verifier_of: Make, load_family: Callable[[str], PrmFamily]
):
    family = load_family("eurus-prm")
    engine, _ = verifier_of(family, max_batch_tokens=max_batch_tokens)
    ids, targets = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22, 23]], [(30, 31, 32), (40,)]
    sequences = [engine.open("verifier", []) for _ in ids]
    reads = [(1, 2, 6), (3,)]
    for sequence, tokens, at, asked in zip(sequences, ids, reads, targets, strict=True):
        engine.submit(Score("me", sequence, tuple(tokens), at, asked))
    together = {done.work.sequence: done.values for done in drain(engine) if isinstance(done, Scored)}
    for sequence, tokens, at, asked in zip(sequences, ids, reads, targets, strict=True):
        for place, (position, target) in enumerate(zip(at, asked, strict=True)):
            alone = engine.open("verifier", [])
            engine.submit(Score("me", alone, tuple(tokens[: position + 1]), (position,), (target,)))
            (done,) = drain(engine)
            assert isinstance(done, Scored)
            assert np.array_equal(together[sequence][place], done.values[0])
            release(engine, alone)
    release(engine, *sequences)


def test_as_many_targets_as_reads_or_none(verifier_of: Make):
    engine, _ = verifier_of("eurus-prm")
    sequence = engine.open("verifier", [])
    with pytest.raises(ValueError, match="a target for each of its reads"):
        engine.submit(Score("me", sequence, (1, 2, 3), (0, 1), (5,)))
    release(engine, sequence)


def test_marks_are_spelt_as_plain_text_and_nothing_else_changes():
    assert without_special_tokens("a <extra_0> b", ("<extra_0>",)) == "a <extra 0> b"
    assert without_special_tokens("a <s> b", ("<s>",)) == "a < s> b"
    assert without_special_tokens("a_b <extra_1>", ("<extra_0>", "<s>")) == "a_b <extra_1>"


@pytest.mark.parametrize(
    ("step", "bare"),
    [
        ("Step 2: so 5", "so 5"),
        ("## Step 2: so 5", "so 5"),
        ("Step 3: so 5", "Step 3: so 5"),
        ("# a heading", "# a heading"),
        ("So Step 2: is", "So Step 2: is"),
    ],
)
def test_a_step_that_brings_its_own_number_is_not_numbered_twice(step: str, bare: str):
    assert without_label(step, "Step 2:") == bare


def test_several_lines_have_the_worst_ones_score(verifier_of: Make):
    engine, verifier = verifier_of("skywork-o1-open-prm")
    session, root = begin(engine, verifier)
    lines = ["38+47=85", "so 85 coins", "which is all"]
    reading = verifier.family.read(StepPath(PROBLEM, ("\n".join(lines),)))
    assert len(reading.score_positions) == 3
    whole = score_step(engine, session, root, "\n".join(lines)).score
    sequences, scores = [], []
    for end in (1, 2, 3):
        fork = engine.fork(session.sequences()[0], 1)[0]
        ids = verifier.family.read(StepPath(PROBLEM, ("\n".join(lines[:end]),))).token_ids
        scores.append(float(read(engine, fork, list(ids), [len(ids) - 1])[0, 0]))
        sequences.append(fork)
    assert whole == min(scores)
    assert len(set(scores)) == 3
    release(engine, *sequences)
    session.close()


@pytest.mark.parametrize("reward", [37.0, 40.0, -40.0, 800.0, -800.0])
def test_an_implicit_reward_of_any_size_gives_a_score_that_the_next_step_can_go_on_from(
    reward: float, load_family: Callable[[str], PrmFamily]
):
    def values(*rewards: float) -> np.ndarray:
        return np.array(rewards)[:, None]

    family = load_family("eurus-prm")
    evidence = family.evidence(values(reward), None, Sampled())
    score = family.score(evidence)
    assert 0 < score < 1
    assert abs(score - (reward > 0)) < 1e-15
    assert family.score(family.evidence(values(0.0), evidence, Sampled())) == score
    back = family.score(family.evidence(values(-30.0 if reward > 0 else 30.0), evidence, Sampled()))
    assert 1 / (1 + np.exp(-6.1)) > max(back, 1 - back) > 1 / (1 + np.exp(-5.9)), "6 are left of 36"
