"""The recipe's machinery, on a few steps: how the verifier begins, and that training goes on where it stopped."""

import copy
import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from espalier.experiments.demo import generator_path
from espalier.experiments.demo.problems import Problem, make_problem
from espalier.experiments.lab.recipe import samples
from espalier.experiments.lab.recipe.batches import IGNORED, Batch, RowMaker, collate
from espalier.experiments.lab.recipe.judge import figures, judged_steps
from espalier.experiments.lab.recipe.networks import load_exported_generator, load_exported_tokenizer
from espalier.experiments.lab.recipe.oracle import beam_search, label_steps, make_engine
from espalier.experiments.lab.recipe.problems import training_difficulty
from espalier.experiments.lab.recipe.train_verifier import common_tokens, judged_batch, untaught_verifier
from espalier.experiments.lab.recipe.training import Schedule, fit
from espalier.experiments.lab.recipe.verifier_network import COMMON, train_trunk
from espalier.search.result import NodeRecord


@pytest.fixture(autouse=True)
def no_denormals_flushed_afterwards():
    """Training flushes them in this thread, for good; other tests count on them."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(scope="module")
def generator():
    return load_exported_generator(generator_path().parent)


@pytest.fixture(scope="module")
def maker() -> RowMaker:
    return RowMaker(load_exported_tokenizer(generator_path().parent))


def _problems(count: int, operations: int = 4):
    rng = random.Random(5)
    return [make_problem(rng, training_difficulty(rng, operations)) for _ in range(count)]


def test_the_untaught_verifiers_trunk_computes_what_the_generator_does(generator, maker) -> None:
    verifier = untaught_verifier(generator, maker, seed=0)
    batch = collate([maker.solution(problem) for problem in _problems(12)], maker.pad)
    ids, learned = batch.ids, batch.labels != IGNORED
    streams: dict[str, torch.Tensor] = {}
    hooks = [
        verifier.model.layers[generator.config.num_hidden_layers].register_forward_pre_hook(
            lambda _, inputs: streams.update(trunk=inputs[0])
        )
    ]
    with torch.inference_mode():
        verifier(input_ids=ids)
        expected = generator(input_ids=ids).logits.softmax(-1)
        trunk = streams["trunk"][..., : generator.config.hidden_size]
        mine = generator.lm_head(generator.model.norm(trunk)).softmax(-1)
    hooks[0].remove()
    # Not the same bits: the codes' share in the norms is made up for on the whole only.
    assert (mine.argmax(-1) == expected.argmax(-1))[learned].float().mean() > 0.97
    assert (mine - expected).abs().sum(-1)[learned].mean() < 0.1


def test_heads_of_the_first_added_layer_begin_by_looking_one_position_back(generator, maker) -> None:
    verifier = untaught_verifier(generator, maker, seed=0)
    verifier.set_attn_implementation("eager")
    ids = collate([maker.solution(problem) for problem in _problems(2)], maker.pad).ids
    with torch.inference_mode():
        attention = verifier.model(input_ids=ids, output_attentions=True).attentions[generator.config.num_hidden_layers]
    looking_back = attention[:, :-2].diagonal(offset=-1, dim1=-2, dim2=-1)
    assert looking_back.min() > 0.9


def test_the_common_tokens_are_those_of_equations(maker) -> None:
    tokens = common_tokens(maker)
    assert len(set(tokens)) == COMMON
    assert {maker.encode(text)[0] for text in "0123456789+-="} | {maker.delimiter} <= set(tokens)


def test_a_frozen_trunk_does_not_move_and_the_layers_above_learn(generator, maker, tmp_path: Path) -> None:
    verifier = untaught_verifier(generator, maker, seed=0)
    train_trunk(verifier, False)
    before = copy.deepcopy(verifier.state_dict())

    def batch(step: int) -> Batch:
        return judged_batch(maker, random.Random(step), 128, {})

    fit("test", verifier, batch, Schedule(steps=2, tokens=128), tmp_path / "state.pt")
    moved = {name for name, value in verifier.state_dict().items() if not torch.equal(value, before[name])}
    layers = {name.split(".")[2] for name in moved if name.startswith("model.layers.")}
    assert layers == {str(generator.config.num_hidden_layers), str(generator.config.num_hidden_layers + 1)}
    assert "score.weight" in moved
    assert "model.embed_tokens.weight" not in moved


def test_training_that_was_stopped_ends_with_the_same_weights(generator, maker, tmp_path: Path) -> None:
    plan = Schedule(steps=3, tokens=64)

    def train(path: Path, stop_at: int | None = None) -> dict[str, torch.Tensor]:
        model = untaught_verifier(generator, maker, seed=0)
        train_trunk(model, False)

        def batch(step: int) -> Batch:
            if step == stop_at:
                raise KeyboardInterrupt
            return judged_batch(maker, random.Random(step), plan.tokens, {})

        fit("test", model, batch, plan, path, save_every=1)
        return model.state_dict()

    straight = train(tmp_path / "straight.pt")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "stopped.pt", stop_at=2)
    resumed = train(tmp_path / "stopped.pt")
    assert all(torch.equal(resumed[name], value) for name, value in straight.items())


@pytest.fixture(scope="module")
def engine():
    return make_engine(generator_path().parent)


def test_the_oracle_keeps_right_paths_first(engine) -> None:
    problems = _problems(6, operations=2)
    beams = beam_search(engine, problems, beam_width=2, expansion=3, seed=0)
    assert all(sum(path.count for path in beam.kept) == 2 for beam in beams)
    assert all(a.right >= b.right for beam in beams for a, b in pairwise(beam.kept))
    assert any(beam.solved for beam in beams)
    for problem, beam in zip(problems, beams, strict=True):
        for path in (*beam.kept, *beam.pruned):
            assert list(path.labels) == label_steps(problem.start, problem.operands, path.steps)
            assert not path.finished or path in beam.kept or not path.right
        assert beam.solved == (tuple(problem.steps) in {path.steps for path in beam.kept})
    engine.check_drained()


def test_with_an_expansion_of_one_every_sample_is_kept(engine) -> None:
    (beam,) = beam_search(engine, _problems(1), beam_width=8, expansion=1, seed=3)
    assert sum(path.count for path in beam.kept) == 8
    assert not beam.pruned


def test_sampling_that_was_stopped_ends_with_the_same_samples(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(samples, "_CHUNK", 2)
    pair = generator_path().parent
    assert samples.draw_samples(tmp_path / "straight", pair, seed=0, problems=4) == 4
    samples.draw_samples(tmp_path / "stopped", pair, seed=0, problems=2)
    samples.draw_samples(tmp_path / "stopped", pair, seed=0, problems=4)
    read = samples.read_samples
    straight, stopped = (read(samples.samples_path(tmp_path / name)) for name in ("straight", "stopped"))
    assert straight == stopped
    assert all(len(sample.steps) == len(sample.right) for sample in straight)
    assert {True, False} <= {label for sample in straight for label in sample.right}


def _result(*nodes: tuple[tuple[int, ...], str, float]) -> Any:
    records = [NodeRecord(i, None, path, text, score, "", 1, 1) for i, (path, text, score) in enumerate(nodes)]
    return SimpleNamespace(nodes=[NodeRecord(99, None, (), "", None, "", 1, 0), *records])


def test_a_verifier_is_judged_by_steps_that_follow_right_ones_alone() -> None:
    problem = Problem("", "", 10, (5, -3))
    result = _result(
        ((0,), "10+5=15\n\n", 0.9),
        ((1,), "10+5=16\n\n", 0.2),
        ((1, 0), "16-3=13\n\n", 0.8),  # follows a wrong one
        ((0, 0), "15-3=12\n\n", 0.4),
        ((0, 1), "15-3=13\n\n", 0.6),
    )
    judged = judged_steps([problem], [result])
    assert [(step.score, step.right) for step in judged] == [(0.9, True), (0.2, False), (0.4, True), (0.6, False)]
    found = figures(judged)
    assert found["ranking among siblings"] == {"share": 0.5, "pairs": 2}
    assert found["ranking within a problem"] == {"share": 0.75, "pairs": 4}
    assert found["best of a round is right"] == {"share": 0.5, "rounds": 2}
    assert [(row["score"], row["right"]) for row in found["reliability"]] == [(0.2, 0), (0.4, 1), (0.6, 0), (0.9, 1)]
