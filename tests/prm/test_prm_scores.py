from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_driver import drain, release
from plain import plain_classifier_scores, plain_math_prm_scores

from espalier.engine.checkpoint import Checkpoint
from espalier.engine.engine import Engine
from espalier.engine.errors import RequestTooLargeError
from espalier.engine.sequence import Sequence
from espalier.engine.work import Scored
from espalier.prm.base import StepPath
from espalier.prm.families import load_verifier
from espalier.prm.verifier import Verification, Verifier

PROBLEM = "Tom starts with 38 coins. He finds 47 more.\nHow many has he?"
STEPS = {
    "one step": ["38+47=85\n\n"],
    "two steps": ["38+47=85\n\n", "\\boxed{85}"],
    "six steps": [f"## Step {i}: add\n{i}+{i}={2 * i}\n\n" for i in range(1, 7)],
    "an empty line inside": ["First\n\n\nthen 3\n\n", "So\n \nthe answer\n\n"],
    "trailing and leading newlines": ["\n\nFirst\n\n\n\n", "Second", "Third\n"],
    "unicode": ["Größe: 3·4 = 12 ≈ 𝟙𝟚\n\n", "日本語のステップ 🪙\n\n"],
    "latex": ["\\[ \\frac{1}{2} \\cdot \\sqrt{x} = 3 \\]\n\n", "$$\\boxed{\\frac{3}{4}}$$\n\n"],
    "spaces around": ["  a step \n\n", "\tanother\t\n\n"],
}
FAMILIES = ["classifier", "chat-classifier", "math-prm"]


@pytest.fixture
def make_verifier(
    tiny_checkpoints: dict[str, Path], make_engine: Callable[..., Engine]
) -> Callable[..., tuple[Engine, Verifier]]:
    """An engine whose verifier is a tiny checkpoint of the named family."""

    def make(name: str, **options: int) -> tuple[Engine, Verifier]:
        family = load_verifier(Checkpoint(tiny_checkpoints[name]), torch.float32, "cpu")
        engine = make_engine("qwen2-tied", family.model, **options)
        return engine, Verifier(engine, family)

    return make


def plain_scores(name: str, folder: Path, problem: str, steps: list[str]) -> list[float]:
    """All steps at once through transformers."""
    if name == "math-prm":
        return plain_math_prm_scores(folder, problem, steps)
    chat = name == "chat-classifier"
    return plain_classifier_scores(folder, problem, steps, "\n\n" if chat else "\n", chat)


def begin(engine: Engine, verifier: Verifier) -> Verification:
    """The verification of the problem, its root computed."""
    verification = verifier.begin("me", PROBLEM)
    verification.prefill()
    (done,) = drain(engine)
    assert isinstance(done, Scored)
    assert verification.take(done) == (verification.root, None)
    return verification


def settle(engine: Engine, verification: Verification) -> dict[Sequence, float]:
    """Run until every step that is being scored has its score."""
    scores = {}
    while engine.busy:
        for done in engine.step():
            assert isinstance(done, Scored)
            if (verdict := verification.take(done)) is not None:
                scores[verdict.sequence] = verdict.score
        engine.check_integrity()
    return scores


def score_step(
    engine: Engine, verification: Verification, parent: Sequence, *steps: str, **how: bool
) -> tuple[float, Sequence]:
    scoring = verification.score(parent, steps, 10_000, **how)
    assert scoring is not None
    ((sequence, score),) = settle(engine, verification).items()
    assert sequence is scoring.sequence
    return score, sequence


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS.keys())
def test_scores_added_step_by_step_equal_the_whole_text_through_transformers(
    name: str,
    steps: list[str],
    make_verifier: Callable[..., tuple[Engine, Verifier]],
    tiny_checkpoints: dict[str, Path],
):
    engine, verifier = make_verifier(name)
    verification = begin(engine, verifier)
    root = verification.root
    scores, path = [], [root]
    for end in range(1, len(steps) + 1):
        score, sequence = score_step(engine, verification, path[-1], *steps[:end])
        scores.append(score)
        path.append(sequence)
    release(engine, *path)
    expected = plain_scores(name, tiny_checkpoints[name], PROBLEM, steps)
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 4) for score in scores}) == len(scores), "a degenerate verifier would prove nothing"


@pytest.mark.parametrize("name", FAMILIES)
def test_siblings_that_share_their_parents_blocks_are_scored_each_on_its_own(
    name: str, make_verifier: Callable[..., tuple[Engine, Verifier]], tiny_checkpoints: dict[str, Path]
):
    engine, verifier = make_verifier(name, max_batch_tokens=13)
    verification = begin(engine, verifier)
    root = verification.root
    _, parent = score_step(engine, verification, root, "38+47=85\n\n")
    steps = ["So 85\n\n", "So 86\n\n", "\\boxed{85}", "He loses 12 of them, and the rest is his.\n\n"]
    works = [verification.score(parent, ("38+47=85\n\n", step), 100) for step in steps]
    values = settle(engine, verification)
    for step, work in zip(steps, works, strict=True):
        assert work is not None
        expected = plain_scores(name, tiny_checkpoints[name], PROBLEM, ["38+47=85\n\n", step])[1]
        assert values[work.sequence] == pytest.approx(expected, abs=1e-5)
    release(engine, root, parent, *values)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_token_of_a_path_is_computed_once(name: str, make_verifier: Callable[..., tuple[Engine, Verifier]]):
    engine, verifier = make_verifier(name)
    verification = begin(engine, verifier)
    tokens = verification.prompt_tokens
    assert engine.stats()["verifier"].computed_tokens == tokens
    path, steps = [verification.root], STEPS["six steps"]
    for end in range(1, len(steps) + 1):
        path.append(score_step(engine, verification, path[-1], *steps[:end])[1])
        tokens += len(verifier.family.read(StepPath(PROBLEM, tuple(steps[:end]))).token_ids)
    assert engine.stats()["verifier"].computed_tokens == tokens
    release(engine, *path)


def test_scoring_in_place_extends_the_parents_own_sequence(
    make_verifier: Callable[..., tuple[Engine, Verifier]], tiny_checkpoints: dict[str, Path]
):
    engine, verifier = make_verifier("classifier")
    verification = begin(engine, verifier)
    root = verification.root
    scores = []
    for end in (1, 2):
        score, sequence = score_step(engine, verification, root, *STEPS["two steps"][:end], in_place=True)
        assert sequence is root
        scores.append(score)
    release(engine, root)
    expected = plain_scores("classifier", tiny_checkpoints["classifier"], PROBLEM, STEPS["two steps"])
    assert scores == pytest.approx(expected, abs=1e-5)


def test_a_step_that_holds_the_tag_is_read_once_at_its_own_end(
    make_verifier: Callable[..., tuple[Engine, Verifier]], tiny_checkpoints: dict[str, Path]
):
    engine, verifier = make_verifier("math-prm")
    tag = verifier.family.model.tokenizer.token_id("<extra_0>")
    steps = ["A step with <extra_0> inside <extra_0><extra_0>\n\n", "the next\n\n"]
    for step in steps:
        reading = verifier.family.read(StepPath(PROBLEM, (step,)))
        ids = reading.token_ids
        assert [i for i, token in enumerate(ids) if token == tag] == [*reading.read_at] == [len(ids) - 1]
    verification = begin(engine, verifier)
    root = verification.root
    first, parent = score_step(engine, verification, root, steps[0])
    second, child = score_step(engine, verification, parent, *steps)
    release(engine, root, parent, child)
    plain = [step.replace("<extra_0>", "<extra 0>") for step in steps]
    expected = plain_scores("math-prm", tiny_checkpoints["math-prm"], PROBLEM, plain)
    assert [first, second] == pytest.approx(expected, abs=1e-5)


def test_a_step_longer_than_its_limit_is_not_scored_and_takes_nothing(
    make_verifier: Callable[..., tuple[Engine, Verifier]],
):
    engine, verifier = make_verifier("classifier")
    verification = begin(engine, verifier)
    root = verification.root
    needed = len(verifier.family.read(StepPath(PROBLEM, ("38+47=85",))).token_ids)
    assert verification.score(root, ("38+47=85",), needed - 1) is None
    assert not engine.busy
    assert engine.stats()["verifier"].live_sequences == 1
    scoring = verification.score(root, ("38+47=85",), needed)
    assert scoring is not None
    (exact,) = settle(engine, verification)
    release(engine, root, exact)


def test_a_problem_that_fills_the_context_is_refused_with_the_numbers(
    make_verifier: Callable[..., tuple[Engine, Verifier]],
):
    engine, verifier = make_verifier("classifier")
    with pytest.raises(RequestTooLargeError, match=r"600 verifier tokens and the verifier's context is 512"):
        verifier.begin("test", "3" * 600)
    assert engine.stats()["verifier"].live_sequences == 0
