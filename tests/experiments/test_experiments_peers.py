"""The benchmarks' contestants compute what they are said to compute."""

import dataclasses

import numpy as np
import pytest
import torch
from engine_driver import generate, read, release
from plain import plain_classifier_scores

from espalier.engine.checkpoint import locate
from espalier.engine.model import Model
from espalier.engine.sampling import Sampling
from espalier.experiments.peers.dense_loop import DenseLoop
from espalier.experiments.peers.search_and_learn import SearchAndLearn, _Beam

GREEDY = Sampling(temperature=0.0)


class WatchedLoop(DenseLoop):
    """Takes the likeliest token instead of sampling, and keeps the logits."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.decoder, model.head)
        self.logits: list[torch.Tensor] = []

    def _sample(self, hidden: torch.Tensor) -> torch.Tensor:
        self.logits.append(self._head(hidden))
        return self.logits[-1].argmax(dim=-1)


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen2-untied", "llama3-rope"])
def test_dense_loop_and_engine_give_the_same_logits_and_greedy_tokens(load_model, make_engine, name):
    model = dataclasses.replace(load_model(name), eos_token_ids=())
    engine = make_engine(model)
    prompts = torch.randint(4, 300, (3, 11), generator=torch.Generator().manual_seed(0))
    new_tokens = 9

    loop = WatchedLoop(model)
    tokens = [loop.prefill(prompts, new_tokens)]
    for _ in range(new_tokens - 1):
        tokens.append(loop.decode(tokens[-1]))
    dense = torch.stack(tokens, dim=1)
    assert dense.shape == (3, new_tokens)

    for row, prompt in enumerate(prompts.tolist()):
        sequence = engine.open("generator", prompt)
        (ours,) = generate(engine, sequence, GREEDY, tokens=new_tokens, delimiter="", in_place=True)
        assert list(ours.token_ids) == dense[row].tolist()
        release(engine, sequence)
        whole = engine.open("generator", [])
        logits = read(engine, whole, prompt + dense[row].tolist()[:-1])[len(prompt) - 1 :]
        release(engine, whole)
        np.testing.assert_allclose(logits, torch.stack([step[row] for step in loop.logits]).numpy(), atol=1e-4)


def test_dense_loop_samples_from_the_softmax(load_model):
    model = load_model("qwen2-untied")
    torch.manual_seed(0)
    prompt = torch.arange(5, 12).repeat(4000, 1)
    drawn = torch.bincount(DenseLoop(model.decoder, model.head).prefill(prompt, 1), minlength=model.config.vocab_size)
    watched = WatchedLoop(model)
    watched.prefill(prompt[:1], 1)
    expected = torch.softmax(watched.logits[0][0], dim=-1)
    assert (drawn / 4000 - expected).abs().max() < 0.05


PROBLEM = "A store has 47 pins in stock. It makes 25 more. It sends out 24. How many pins does it have now?"
TEXTS = ("47+25=72\n\n", "47+25=73\n\n73-24=49\n\n", "47+25=72\n\n72-24=48\n\n\\boxed{48}")


@pytest.fixture(scope="module")
def baseline() -> SearchAndLearn:
    return SearchAndLearn(locate("demo-generator"), locate("demo-verifier"))


def test_baseline_scores_a_path_as_the_verifiers_reference_does(baseline):
    beams = [_Beam([], text, 0.0, complete=False) for text in TEXTS]
    baseline._score(baseline._prompt_ids(PROBLEM), beams)
    for beam in beams:
        steps = [step for step in beam.text.split("\n\n") if step]
        scores = plain_classifier_scores(locate("demo-verifier"), PROBLEM, steps, "\n\n", chat=True)
        assert beam.score == pytest.approx(scores[-1], abs=1e-5)


def test_baseline_solves_and_counts_what_it_reads_again(baseline):
    torch.manual_seed(0)
    baseline.generated_tokens = baseline.verifier_tokens = 0
    answer = baseline.solve(PROBLEM, 4, 2)
    assert answer.isdigit()
    prompt = len(baseline._prompt_ids(PROBLEM))
    assert baseline.generated_tokens > 4
    assert baseline.verifier_tokens > 4 * prompt + baseline.generated_tokens  # the prompt for each candidate and step
