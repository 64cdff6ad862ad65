"""The recipe's machinery, on a few steps: how the verifier begins, and that training goes on where it stopped."""

import copy
import random
from pathlib import Path

import pytest
import torch

from espalier.experiments.demo import generator_path
from espalier.experiments.demo.batches import IGNORED, Batch, RowMaker, collate
from espalier.experiments.demo.export import load_exported_generator, load_exported_tokenizer
from espalier.experiments.demo.networks import GENERATOR_LAYERS
from espalier.experiments.demo.oracle_beam import beam_search
from espalier.experiments.demo.problems import make_problem, training_difficulty
from espalier.experiments.demo.train_verifier import common_tokens, judged_batch, untaught_verifier
from espalier.experiments.demo.training import Schedule, fit
from espalier.experiments.demo.verifier_network import COMMON, train_trunk


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
        verifier.model.layers[GENERATOR_LAYERS].register_forward_pre_hook(
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
        attention = verifier.model(input_ids=ids, output_attentions=True).attentions[GENERATOR_LAYERS]
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
    assert layers == {str(GENERATOR_LAYERS), str(GENERATOR_LAYERS + 1)}
    assert "score.weight" in moved
    assert "model.embed_tokens.weight" not in moved


def test_training_that_was_stopped_ends_with_the_same_weights(generator, maker, tmp_path: Path) -> None:
    plan = Schedule(steps=4, tokens=64)

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


def test_the_oracle_keeps_right_paths_first(generator, maker) -> None:
    problems = _problems(6, operations=2)
    beams = beam_search(generator, maker, problems, beam_width=2, expansion=3)
    assert [len(beam) for beam in beams] == [2] * 6
    assert all(first.right >= second.right for first, second in beams)
    assert all(path.steps == tuple(problems[path.problem].steps) for beam in beams for path in beam if path.right)
    assert any(path.right for beam in beams for path in beam)
