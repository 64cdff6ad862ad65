"""Every family: scores added step by step equal its published recipe fed whole to transformers."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import plain_families
import pytest
import torch
from paths import PROBLEM, STEPS, begin, child, score_answer, score_path, score_step, settle, want
from tiny_models import edit_json

from espalier.engine.engine import Engine
from espalier.engine.errors import RequestTooLargeError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.prm.base import PrmFamily, StepPath
from espalier.prm.families import load_verifier
from espalier.prm.limits import PathLimits
from espalier.prm.scorer import ScoreStatus
from espalier.prm.verifier import StepSession, Verifier

Make = Callable[..., tuple[Engine, Verifier]]
STEPWISE = [
    "qwen2.5-math-prm",
    "reasonflux-prm",
    "skywork-o1-open-prm",
    "rlhflow",
    "versaprm",
    "math-shepherd",
    "token-classifier",
    "chat-classifier",
    "pure",
    "value-guided",
    "universal-prm",
    "eurus-prm",
    "yes-no",
    "likelihood",
    "judge",
]
TAGS = {
    "qwen2.5-math-prm": ("<extra_0>", "<extra 0>"),
    "reasonflux-prm": ("<extra_0>", "<extra 0>"),
    "rlhflow": ("<|eot_id|>", "<|eot id|>"),
    "value-guided": ("<｜User｜>", "< ｜User｜>"),
    "yes-no": ("<|im_end|>", "<|im end|>"),
}


@pytest.mark.parametrize("name", STEPWISE)
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS.keys())
def test_scores_added_step_by_step_equal_the_recipe_on_the_whole_text(
    name: str, steps: list[str], verifier_of: Make, family_folders: dict[str, Path]
):
    engine, verifier = verifier_of(name, max_batch_tokens=29)
    scores = score_path(engine, begin(engine, verifier), steps)
    expected = plain_families.plain_scores(name, family_folders, PROBLEM, steps)
    assert len(scores) == len(steps) == len(expected)
    assert scores == pytest.approx(expected, abs=1e-5)
    if name == "eurus-prm":  # its scores are a thousandth of log-probabilities: let the rewards be right, not 0.5
        rewards = torch.logit(torch.tensor([scores, expected], dtype=torch.float64))
        assert rewards[0].tolist() == pytest.approx(rewards[1].tolist(), abs=1e-6)
    assert len({round(score, 5) for score in scores}) == len(scores), "a degenerate verifier would prove nothing"


@pytest.mark.parametrize("name", STEPWISE)
def test_control_tokens_in_a_callers_text_are_text(name: str, verifier_of: Make):
    """None is a token of a prompt or a step, so that a problem opens no turn, closes none, and is no place to read."""
    engine, verifier = verifier_of(name)
    tokenizer = verifier.family.model.tokenizer
    control = {tokenizer.token_id(token) for token in tokenizer.control_tokens}
    tags = " ".join(sorted(tokenizer.control_tokens))
    assert control

    def counted(ids: Sequence[int]) -> int:
        return sum(token in control for token in ids)

    assert counted(verifier.prompt(f"{PROBLEM} {tags}")) == counted(verifier.prompt(PROBLEM))
    plain, tagged = (
        [work for step in scored_steps(verifier, problem, steps) for work in step]
        for problem, steps in ((PROBLEM, ["a", "b"]), (f"{PROBLEM} {tags}", [f"a {tags}", f"b {tags} <think>"]))
    )
    assert counted(tagged) == counted(plain)
    broken = [verifier.family.plain_text.of(text) for text in (f"a {tags}", f"b {tags} <think>")]
    assert score_path(engine, begin(engine, verifier), [f"a {tags}", f"b {tags} <think>"]) == score_path(
        engine, begin(engine, verifier), broken
    )


def scored_steps(verifier: Verifier, problem: str, steps: list[str]) -> list[Sequence[int]]:
    """The tokens that a session feeds for each step."""
    plain = verifier.family.plain_text
    return [verifier.family.read(plain.path(problem, steps[: i + 1])).token_ids for i in range(len(steps))]


@pytest.mark.parametrize("name", STEPWISE)
def test_a_path_in_place_has_the_same_bits_as_by_forks(name: str, verifier_of: Make):
    steps = STEPS["eight steps"]
    engine, verifier = verifier_of(name)
    forked = score_path(engine, begin(engine, verifier), steps)
    assert score_path(engine, begin(engine, verifier), steps, in_place=True) == forked


@pytest.mark.parametrize("name", STEPWISE)
def test_siblings_are_scored_each_on_its_own(name: str, verifier_of: Make, family_folders: dict[str, Path]):
    engine, verifier = verifier_of(name, max_batch_tokens=13)
    session, root = begin(engine, verifier)
    parent = score_step(engine, session, root, "38+47=85\n\n")
    steps = ["So 85\n\n", "So 86\n\n", "\\boxed{85}", "He loses 12 of them, and the rest is his.\n\n"]
    nodes = [child(parent, step) for step in steps]
    for node in nodes:
        assert want(session, node).status is ScoreStatus.PENDING
    values = settle(engine, session)
    for node in nodes:
        expected = plain_families.plain_scores(name, family_folders, PROBLEM, ["38+47=85\n\n", node.text])[1]
        assert values[node] == pytest.approx(expected, abs=1e-5)
    session.close()


@pytest.mark.parametrize("name", STEPWISE)
def test_every_token_is_computed_once_and_nothing_is_tokenised_otherwise_later(name: str, verifier_of: Make):
    engine, verifier = verifier_of(name)
    steps = tuple(STEPS["eight steps"])
    begun = begin(engine, verifier)
    score_path(engine, begun, list(steps))
    whole = verifier.family.full_path(StepPath(PROBLEM, steps))
    probes = whole.num_probe_tokens * (len(steps) - 1)  # the last one's is in the whole text
    probes += verifier.family.other_probe_tokens * len(steps)
    assert isinstance(begun[0], StepSession)
    assert begun[0].reopened == 0
    assert engine.stats()["verifier"].computed_tokens == len(whole.token_ids) + probes


@pytest.mark.parametrize("name", TAGS)
def test_a_step_and_a_problem_that_hold_the_familys_mark_are_read_as_plain_text(
    name: str, verifier_of: Make, family_folders: dict[str, Path]
):
    mark, plain = TAGS[name]
    steps = [f"A step with {mark} inside {mark}{mark}\n\n", "the next\n\n"]
    problem = f"{PROBLEM} {mark} Why?"
    engine, verifier = verifier_of(name)
    scores = score_path(engine, begin(engine, verifier, problem), steps)
    expected = plain_families.plain_scores(
        name, family_folders, problem.replace(mark, plain), [step.replace(mark, plain) for step in steps]
    )
    assert scores == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", STEPWISE)
def test_a_step_longer_than_its_limit_has_no_score_and_takes_nothing(name: str, verifier_of: Make):
    engine, verifier = verifier_of(name)
    left = [10_000]
    session, root = begin(engine, verifier, budget=lambda node: left[0])
    nodes = [child(root, "38+47=85 " * 30) for _ in range(3)]
    exact = want(session, nodes[0]).tokens
    alone = exact - verifier.family.other_probe_tokens
    settle(engine, session)
    held = engine.stats()["verifier"].live_sequences
    left[0] = exact - 1
    assert want(session, nodes[1]).status is ScoreStatus.OVER_BUDGET
    assert not engine.busy
    assert engine.stats()["verifier"].live_sequences == held
    left[0] = exact
    assert want(session, nodes[2]).tokens == exact
    assert list(settle(engine, session)) == [nodes[2]]
    session.close()
    session, root = begin(engine, verifier, limits=PathLimits(session.prompt_tokens, 10_000, alone - 1))
    assert want(session, child(root, nodes[0].text)).status is ScoreStatus.UNREADABLE
    session.close()


def test_a_problem_that_fills_the_context_is_refused_with_the_numbers(verifier_of: Make):
    engine, verifier = verifier_of("token-classifier")
    with pytest.raises(RequestTooLargeError, match=r"600 verifier tokens and the verifier's context is 512"):
        verifier.prompt("3" * 600)
    assert engine.stats()["verifier"].live_sequences == 0


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS.keys())
def test_an_outcome_models_score_is_that_of_the_whole_answer(
    steps: list[str], verifier_of: Make, family_folders: dict[str, Path]
):
    engine, verifier = verifier_of("outcome")
    score = score_answer(engine, verifier, steps)
    with torch.inference_mode():
        expected = plain_families.outcome(family_folders["outcome"], PROBLEM, steps)
    assert score == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("pad", ["<|eot_id|>", "<|end_header_id|>", None])
def test_an_outcome_model_whose_template_ends_in_its_padding_is_read_where_transformers_read_it(
    pad: str | None, verifier_of: Make, family_folders: dict[str, Path], tmp_path: Path
):
    folder = Path(shutil.copytree(family_folders["outcome"], tmp_path / "outcome"))
    pad_id = None if pad is None else plain_families.hf_tokenizer(folder).convert_tokens_to_ids(pad)
    edit_json(folder / "config.json", {"pad_token_id": pad_id})
    engine, verifier = verifier_of(load_verifier(Checkpoint(folder), torch.float32, "cpu"))
    score = score_answer(engine, verifier, STEPS["two steps"])
    with torch.inference_mode():
        expected = plain_families.outcome(folder, PROBLEM, STEPS["two steps"])
        at_the_end = plain_families.outcome(family_folders["outcome"], PROBLEM, STEPS["two steps"])
    assert score == pytest.approx(expected, abs=1e-5)
    assert (abs(expected - at_the_end) > 1e-3) == (pad == "<|eot_id|>"), "only a template that ends in it tells"


@pytest.mark.parametrize("name", STEPWISE)
def test_a_readings_marks_are_within_what_is_set_aside(name: str, load_family: Callable[..., PrmFamily]):
    family = load_family(name)
    for step in ("x", "12"):
        steps = ("a", "b", step)
        text = len(family.model.tokenizer.encode(step))
        added = len(family.full_path(StepPath(PROBLEM, steps)).token_ids)
        added -= len(family.full_path(StepPath(PROBLEM, steps[:2])).token_ids)
        assert added <= text + family.max_special_tokens + 4
