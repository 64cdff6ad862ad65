"""Learning a trunk head: features, training, and the command from a generator to a verifier."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from espalier.engine.engine import Engine
from espalier.engine.errors import EspalierError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model
from espalier.experiments.cli.commands.learning import judge
from espalier.experiments.prm_evaluation.metrics import auc_of_problems
from espalier.experiments.runs.benchmarks import Problem
from espalier.experiments.runs.record import CutPaths, Unanswered
from espalier.experiments.verifier_training.combining import train_own_evidence
from espalier.experiments.verifier_training.features import HIDDEN, LAST, OwnReader, Readings
from espalier.experiments.verifier_training.rollouts import RolloutSampler, cut_solutions
from espalier.experiments.verifier_training.training import best_head, solution_pairs
from espalier.experiments.verifier_training.tree_file import TreeRecord
from espalier.prm.scorers.trunk_head import add_trunk_head
from espalier.search.grading.math_verify import Grader
from espalier.search.rollout import RolloutSettings, StepRecord
from espalier.search.run.generator import Generator

SETTINGS = RolloutSettings(solutions=6, temperature=1.0, max_steps=4, max_step_tokens=12, max_tokens=40)
TRUNK = {"name": "talker", "digest": "d"}


def test_features_are_transformers_hidden_states_and_are_taken_once(
    load_model: Callable[[str], Model],
    make_engine: Callable[..., Engine],
    grader: Grader,
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
):
    model = replace(load_model("talker"), other_heads={HIDDEN: lambda hidden: hidden})
    engine = make_engine(model, kv_memory_bytes=2**23)
    problems = [Problem(str(i), f"Tom has {i} coins. How many?", "1", None) for i in range(60)]
    unsorted = RolloutSampler(engine, Generator(engine, "", {}), SETTINGS, grader, 8).sample(problems)
    trees = sorted(unsorted, key=lambda tree: int(tree.problem_id))
    before = engine.stats()["generator"].computed_tokens
    done: list[int] = []
    features = OwnReader(engine, trees, tmp_path / "features").read(lambda: done.append(1))
    engine.check_drained()
    assert len(done) == 60
    own = sum(len(tree.prompt_token_ids) + sum(len(step.token_ids) for step in tree.steps) for tree in trees)
    assert engine.stats()["generator"].computed_tokens - before <= own
    assert len(list((tmp_path / "features").iterdir())) == 2

    expected: list[np.ndarray] = []
    rows: list[tuple[float, int, int]] = []
    plain = AutoModelForCausalLM.from_pretrained(tiny_checkpoints["talker"], dtype=torch.float32).eval().model
    for number, tree in enumerate(trees[:6]):
        for index, step in enumerate(tree.steps):
            if step.end == "length" or not step.text.strip():
                continue
            ids = [*tree.prompt_token_ids, *(token for i in tree.lineage(index) for token in tree.steps[i].token_ids)]
            with torch.inference_mode():
                expected.append(plain(torch.tensor([ids])).last_hidden_state[0, -2].numpy())
            rows.append((round(step.value, 4), step.samples, number))
    some = features.problems < 6
    found = list(
        zip(
            np.round(features.values[some].astype(float), 4).tolist(),
            features.samples[some].tolist(),
            features.problems[some].tolist(),
            strict=True,
        )
    )
    assert sorted(found) == sorted(rows)
    distance = np.abs(features.states[some][:, None] - np.array(expected)[None]).max(-1)
    assert (distance.min(1) < 1e-4).all()
    assert (distance.min(0) < 1e-4).all()

    computed = engine.stats()["generator"].computed_tokens
    again = OwnReader(engine, trees, tmp_path / "features").read(lambda: None)
    assert engine.stats()["generator"].computed_tokens == computed, "nothing is left to compute"
    assert np.array_equal(again.states, features.states)
    longer = [replace(tree, steps=[replace(step, value=0.5) for step in tree.steps]) for tree in trees]
    assert set(OwnReader(engine, longer, tmp_path / "features").read(lambda: None).values.tolist()) == {0.5}


def separable(problems: int = 60, hidden: int = 48, labels: bool = True) -> Readings:
    """States whose first value, on a scale and with an offset of its own, tells right from wrong with some noise."""
    draw = np.random.default_rng(0)
    rows = 20 * problems
    states = draw.normal(size=(rows, hidden)).astype(np.float32) * 7 + 3
    values = (states[:, 0] + draw.normal(size=rows) > 3).astype(np.float32) if labels else np.ones(rows, np.float32)
    samples = draw.integers(1, 5, rows)
    first, nothing = np.full(rows, -1), np.ones((rows, 2))
    numbers, steps = np.repeat(np.arange(problems), 20), np.tile(np.arange(20), problems)
    return Readings(states, values, samples, numbers, first, values.astype(np.int64), nothing, nothing, steps)


def test_a_head_learns_what_states_tell_and_its_folder_scores_so(load_model: Callable[[str], Model], tmp_path: Path):
    talker = load_model("talker")
    trunk = TRUNK | {"digest": talker.digest}
    features = separable()
    summary = train_own_evidence(features, tmp_path / "head", trunk, {"benchmark": "made"}, seed=0)
    measured = summary["measured"]
    assert measured["auc"] > 0.9
    assert measured["auc_within_a_problem"] > 0.9
    assert measured["expected_calibration_error"] < 0.1
    assert measured["problems"] == 6
    assert summary["problems_by_use"] == {"teach": 54, "measure": 6}
    assert summary == json.loads((tmp_path / "head" / "training.json").read_text())
    assert (tmp_path / "head" / "reliability.svg").stat().st_size > 1000
    model, _ = add_trunk_head(Checkpoint(tmp_path / "head"), talker)
    logits = model.head_named("trunk-head")(torch.from_numpy(features.states))[:, 0].numpy()
    assert ((logits > 0) == (features.values > 0.5)).mean() > 0.85
    again = train_own_evidence(features, tmp_path / "again", trunk, {"benchmark": "made"}, seed=0)
    assert again == summary
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("head", "again")]
    assert same[0] == same[1]


def test_scores_of_the_teaching_problems_are_by_heads_that_were_not_taught_them():
    noise = np.random.default_rng(3).integers(0, 2, 240).astype(np.float32)  # nothing that a state could tell
    readings = separable(12, hidden=300)
    readings = replace(readings, values=noise, right=noise.astype(np.int64))
    teach = np.arange(10)
    head, scores, _, chosen = best_head(readings, teach, 0)
    taught = np.isin(readings.problems, teach)
    assert np.isnan(scores[~taught]).all()
    with torch.no_grad():
        own = head(torch.from_numpy(readings.states))[:, 0].numpy()
    pairs = solution_pairs(readings, teach)
    assert pairs.share_ahead(own) > 0.9, "300 values tell 200 steps apart"
    assert pairs.share_ahead(scores) == pytest.approx(0.5, abs=0.1)
    assert chosen["auc_by_layer"]["last"] == pytest.approx(pairs.share_ahead(scores), abs=1e-6)


def test_a_middle_layer_is_taken_only_where_it_ranks_better_by_a_hundredth():
    readings = separable()
    blurred = readings.states + np.random.default_rng(1).normal(size=readings.states.shape).astype(np.float32) * 7
    for last, middle, layer in ((blurred, readings.states, 5), (readings.states, readings.states, None)):
        both = replace(readings, states=np.concatenate([last, middle], 1), layers=(LAST, 5))
        assert best_head(both, np.arange(60), 0).summary.get("layer") == layer


def test_one_problem_alone_may_have_right_solutions():
    readings = separable(10)
    alone = replace(readings, values=readings.values * (readings.problems == 3))
    head, scores, *_ = best_head(replace(alone, right=alone.values.astype(np.int64)), np.arange(10), 0)
    assert np.isfinite(scores).all()
    assert torch.isfinite(head.weight).all()


def test_what_nothing_can_be_learned_from_is_refused(tmp_path: Path):
    with pytest.raises(EspalierError, match="at least 10 problems with steps, there are 9"):
        train_own_evidence(separable(9), tmp_path, TRUNK, {}, 0)
    with pytest.raises(EspalierError, match="all steps have the same value"):
        train_own_evidence(separable(labels=False), tmp_path, TRUNK, {}, 0)


def test_from_a_generator_to_a_search_with_its_verifier_by_two_commands(espalier, tmp_path: Path):
    flags = ("learn-verifier", "--out", tmp_path / "mine", "--limit", 20, "-N", 4)
    learned = espalier(*flags)
    assert learned.code == 0, learned.err
    assert "within a problem" in learned.out
    assert "no verdict on it: " in learned.err
    assert "of the 2 other problems have right and wrong solutions, too few to tell" in learned.err
    folder = tmp_path / "mine" / "verifier"
    weights = (folder / "model.safetensors").read_bytes()
    ran = espalier("solve", "Tom has 38 coins. (a) He finds 47 more. How many?", "--verifier", folder, "--json")
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    assert result["usage"]["verifier_tokens"] == 0
    assert all(candidate["score"] is not None for candidate in result["candidates"])
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "mine" / "features").iterdir()}
    assert espalier(*flags).code == 0  # resumes: neither rollouts nor features are made again
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert (folder / "model.safetensors").read_bytes() == weights


def test_solutions_that_were_cut_are_counted_and_are_no_ground_for_a_verdict(espalier, tmp_path: Path):
    """All of 48 tokens or fewer, where solutions take about 100: what is wrong is the limit."""
    flags = ("learn-verifier", "--out", tmp_path / "cut", "--limit", 20, "-N", 2, "--labels", "monte-carlo")
    ran = espalier(*flags, "--continuations", 2, "--max-tokens", 32, "--max-steps", 3)
    assert re.search(r"^(\d+) of 40 paths were cut: .* --max-", ran.out, re.MULTILINE), ran.out


@pytest.mark.parametrize(
    ("aucs", "cut", "said"),
    [
        ([0.5] * 40, 0, "hardly better than chance"),
        ([0.4, 0.6] * 20, 0, "hardly better than chance"),
        ([0.0, 1.0] * 20, 0, "40 of the 41 other problems have right and wrong solutions, too few to tell"),
        ([0.3], 0, "1 of the 41 other problems"),
        ([], 0, "0 of the 41 other problems"),
        ([0.9, 0.8] * 20, 0, ""),
        ([0.9, 0.8] * 20, 46, "no verdict on it, as too many solutions did not come to their end: 46 of 48 paths were"),
        ([0.5] * 40, 46, "no verdict on it, as too many solutions"),
    ],
)
def test_a_verifier_is_judged_only_where_enough_was_sampled(capsys, aucs: list[float], cut: int, said: str):
    found = auc_of_problems([(value, 1.0) for value in aucs])
    measured = {"problems": 41, "ranks": found and asdict(found)}
    judge(measured, CutPaths({Unanswered.MAX_TOKENS: cut} if cut else {}, 48))
    judged = capsys.readouterr().err
    assert said in judged
    assert bool(judged) == bool(said)


def test_solutions_are_cut_by_one_of_four_limits():
    steps = [
        StepRecord(None, "a", [1] * 30, [], 3),
        StepRecord(0, "b", [1] * 10, [], 2, "length"),  # max_tokens
        StepRecord(0, "b", [1] * 9, [], 1, "length"),  # max_steps
        StepRecord(None, "c", [1] * 32, [], 4, "length"),  # max_step_tokens
        StepRecord(None, "d", [1] * 31, [], 5, "length"),  # none of them: the context
        StepRecord(None, "e", [1] * 31, [], 6, "eos"),
    ]
    settings = RolloutSettings(max_tokens=40, max_steps=2, max_step_tokens=32)
    cut = cut_solutions([TreeRecord("1", "?", "1", steps=steps)], settings)
    reasons = (Unanswered.MAX_TOKENS, Unanswered.MAX_STEPS, Unanswered.MAX_STEP_TOKENS, Unanswered.CONTEXT)
    assert (cut.counts, cut.paths) == (dict(zip(reasons, (2, 1, 4, 5), strict=True)), 18)
    assert str(cut).startswith("12 of 18 paths were cut: 5 cut at the end of the generator's context, ")
