"""Penalties and biases: what is drawn under them is what transformers' own processors leave, however it is batched."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import drain, generate, release
from residues import Residues
from scripted_drafts import drafting
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from zoo_models import write_checkpoint

from espalier.engine.engine import Engine
from espalier.engine.execution.runner import ModelRunner
from espalier.engine.execution.sampling import PenaltyBatch, uniforms
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.engine.roles import GENERATOR
from espalier.engine.work import NO_PENALTIES, Generate, Generated, Penalties, Sampling
from espalier.kernels.sampling import draw_tokens

Make = Callable[..., Engine]
PROMPT = [20, 31, 20, 7, 44, 31, 9, 12, 20, 5, 6]
BIAS = ((7, 1.5), (20, -2.0), (60, 2.5))
ALL = Penalties(1.3, 0.4, 0.7, BIAS, len(PROMPT))
PENALTIES = {
    "repetition": Penalties(1.5),
    "below one": Penalties(0.8, prompt_tokens=3),
    "presence": Penalties(presence=1.5, prompt_tokens=len(PROMPT)),
    "frequency": Penalties(frequency=-0.8, prompt_tokens=len(PROMPT)),
    "bias": Penalties(bias=BIAS),
    "all": ALL,
}
TINY = ("qwen2-untied", "qwen3", "mistral", "llama-linear", "gemma3", "phi3")
ZOO = ("gpt2", "gpt_neox", "olmo2", "stablelm")
TOKENS = 16


@pytest.fixture
def folder(request: pytest.FixtureRequest, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    kind: str = request.param
    return tiny_checkpoints[kind] if kind in TINY else write_checkpoint(tmp_path / kind, kind)


@pytest.fixture
def endless(load_model: Callable[[str], Model]) -> Model:
    return dataclasses.replace(load_model("qwen2-untied"), eos_token_ids=())


def behind(logits: Any, text: list[int], sampling: Sampling) -> Any:
    """Logits as transformers' processors leave them; presence and frequency, which it lacks, as OpenAI has them."""
    ids: Any = torch.tensor([text])
    its = sampling.penalties
    if its.bias:
        logits = SequenceBiasLogitsProcessor({(token,): value for token, value in its.bias})(ids, logits)
    if its.repetition != 1:
        logits = RepetitionPenaltyLogitsProcessor(its.repetition)(ids, logits)
    counts = torch.bincount(ids[0, its.prompt_tokens :], minlength=logits.shape[1])
    return logits - its.frequency * counts - its.presence * (counts > 0)


def drawn_by_transformers(model: Any, sampling: Sampling) -> list[int]:
    """The tokens behind `PROMPT`: the whole text is fed anew for each, and drawn by the same number."""
    text = list(PROMPT)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    warpers += [TopKLogitsWarper(sampling.top_k), TopPLogitsWarper(sampling.top_p), MinPLogitsWarper(sampling.min_p)]
    for place in range(TOKENS):
        with torch.inference_mode():
            logits = behind(model(torch.tensor([text])).logits[:, -1], text, sampling)
        ids: Any = torch.tensor([text])
        left = warpers(ids, logits).clamp(min=-1e30)
        draw = torch.from_numpy(uniforms(np.array([sampling.key], np.uint64), np.array([place])))
        token, _ = draw_tokens(left, left, torch.ones(1), draw, torch.zeros(1, dtype=torch.int64))
        text.append(int(token))
    return text[len(PROMPT) :]


def children(engine: Engine, *samplings: Sampling, **how: object) -> list[tuple]:
    """What each sampling draws behind `PROMPT`, with its log-probabilities."""
    sequence = engine.open(GENERATOR, PROMPT)
    done = generate(engine, sequence, *samplings, **{"tokens": TOKENS, "delimiter": "", **how})
    release(engine, sequence, *(one.sequence for one in done))
    return [said(done, i) for i in range(len(samplings))]


def said(done: list[Generated], index: int) -> tuple[list[int], list[float]]:
    (its,) = [one for one in done if index in one.indices]
    return its.token_ids, its.log_probabilities


@pytest.mark.parametrize("folder", [*TINY, *ZOO], indirect=True)
def test_draws_are_those_that_transformers_own_processors_leave(folder: Path, make_engine: Make):
    model = dataclasses.replace(load_generator(Checkpoint(folder), torch.float32, "cpu"), eos_token_ids=())
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    filters = {"temperature": 0.9, "top_k": 60, "top_p": 0.95, "min_p": 0.01}
    samplings = [Sampling(**filters, key=i, penalties=each) for i, each in enumerate(PENALTIES.values())]
    free = [dataclasses.replace(each, penalties=NO_PENALTIES) for each in samplings]
    drawn = [ids for ids, _ in children(make_engine(model), *samplings)]  # all behind one row of logits
    assert drawn == [drawn_by_transformers(plain, each) for each in samplings]
    assert sum(ids != other for ids, (other, _) in zip(drawn, children(make_engine(model), *free), strict=True)) > 2
    for its in (ALL, PENALTIES["repetition"]):
        greedy = Penalties(its.repetition, bias=its.bias)
        ((ids, _),) = children(make_engine(model), Sampling(0.0, penalties=greedy))
        bias = {(token,): value for token, value in its.bias} or None
        how = {"do_sample": False, "repetition_penalty": its.repetition, "sequence_bias": bias, "eos_token_id": None}
        said_by_it = plain.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, pad_token_id=0, **how)
        assert ids == said_by_it[0, len(PROMPT) :].tolist()


def test_log_probabilities_are_those_of_the_model_without_penalties(make_engine: Make, endless: Model):
    ((ids, told),) = children(make_engine(endless), Sampling(0.7, key=3, penalties=ALL))
    others = tuple(set(range(endless.config.vocab_size)) - set(ids))
    for place, (token, expected) in enumerate(zip(ids, told, strict=True)):
        engine = make_engine(endless)
        sequence = engine.open(GENERATOR, PROMPT + ids[:place])
        forced = Sampling(banned=(*others, *(set(ids) - {token})))
        (one,) = generate(engine, sequence, forced, tokens=1, delimiter="")
        assert one.log_probabilities == pytest.approx([expected], abs=1e-5)
        release(engine, sequence, one.sequence)


@pytest.mark.parametrize(
    "options",
    [{"launch_ahead": True}, {"max_batch_tokens": 5}],
    ids=str,
)
def test_penalized_branches_have_the_same_bits_alone_and_in_company(make_engine: Make, endless: Model, options: dict):
    """Siblings that are one branch at first, some without penalties, beside guided and suspended ones."""
    crowd = [Sampling(1.2, key=key, penalties=its) for key, its in enumerate([*PENALTIES.values(), NO_PENALTIES] * 2)]
    works = {
        "a": {"samplings": tuple(dataclasses.replace(each, penalties=ALL) for each in crowd)},
        "b": {"samplings": tuple(crowd)},
        "c": {"samplings": tuple(dataclasses.replace(each, penalties=NO_PENALTIES) for each in crowd)},
        "d": {"samplings": tuple(crowd), "matcher": Residues()},
        "e": {"samplings": tuple(dataclasses.replace(each, banned=(7, 60), top_k=9) for each in crowd)},
    }
    alone = {
        owner: children(make_engine(endless), *how["samplings"], matcher=how.get("matcher"))
        for owner, how in works.items()
    }
    engine = make_engine(endless, **options)
    sequences = {owner: engine.open(GENERATOR, PROMPT, owner=owner) for owner in works}
    for owner, how in works.items():
        engine.submit(Generate(owner, sequences[owner], max_tokens=TOKENS, delimiter="", **how))
    done: list = []
    for step in range(6):
        done += engine.step()
        engine.suspend("abcde"[step % 5])
        done += engine.step()
        engine.resume_owner("abcde"[step % 5])
    done += drain(engine)
    for owner, how in works.items():
        its = [one for one in done if one.work.owner == owner]
        assert [said(its, i) for i in range(len(how["samplings"]))] == alone[owner]
    release(engine, *sequences.values(), *(one.sequence for one in done))


@pytest.mark.parametrize("penalties", ["repetition", "all"])
def test_a_place_within_a_draft_is_penalized_by_the_draft_before_it(make_engine: Make, endless: Model, penalties: str):
    samplings = [Sampling(0.8, key=key, penalties=PENALTIES[penalties]) for key in range(4)]
    expected = children(make_engine(endless), *samplings)
    for ids, _ in expected:
        for draft in (ids, [*ids[:5], ids[5] ^ 1, *ids[6:]], [ids[0]] * TOKENS):
            engine = drafting(make_engine, draft, 5, generator=endless)
            assert children(engine, *samplings) == expected
            assert engine.stats()[GENERATOR].drafted_tokens > 0


def test_a_draft_model_draws_under_the_penalties_of_its_branch(make_engine: Make, endless: Model):
    """So a draft model that is the generator's equal is never wrong, and draws nothing else than the bias allows."""
    samplings = [Sampling(0.8, key=key, penalties=ALL) for key in range(3)]
    expected = children(make_engine(endless), *samplings)
    engine = make_engine(endless, draft=endless, draft_tokens=4)
    assert children(engine, *samplings) == expected
    stats = engine.stats()[GENERATOR]
    assert stats.drafted_tokens == stats.accepted_tokens > 0


def test_a_step_without_penalties_copies_no_logits_and_asks_for_no_tokens(
    make_engine: Make, endless: Model, monkeypatch
):
    """And one with them does, so that what is counted here would be seen."""
    counted = {"penalized": 0, "asked": 0}

    def counting(name: str, function: Callable) -> Callable:
        def call(*args: object) -> object:
            counted[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(PenaltyBatch, "apply", counting("penalized", PenaltyBatch.apply))
    monkeypatch.setattr(ModelRunner, "_tokens_before", counting("asked", ModelRunner._tokens_before))
    children(make_engine(endless), Sampling(0.8, top_k=9, banned=(4,)))
    assert counted == {"penalized": 0, "asked": 0}
    children(make_engine(endless), Sampling(0.8, penalties=PENALTIES["bias"]))
    assert counted == {"penalized": TOKENS, "asked": 0}
    children(make_engine(endless), Sampling(0.8, penalties=PENALTIES["repetition"]))
    assert counted == {"penalized": 2 * TOKENS, "asked": TOKENS}
