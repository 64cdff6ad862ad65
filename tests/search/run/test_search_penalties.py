"""Penalties and biases of requests and of checkpoints, in everything that samples from the generator."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import plain_logits
from search_runs import ALL, BEAM, BEST_OF_N, GREEDY, MAJORITY, PROBLEM, outcome, run
from tiny_models import edit_json

from espalier.engine.engine import Engine
from espalier.engine.errors import InvalidRequestError
from espalier.engine.models.gguf.file import sampling
from espalier.experiments.planning.inspection import inspect_checkpoint
from espalier.search.completion import CompletionRequest
from espalier.search.request import SearchRequest, make_request
from espalier.search.rollout import RolloutRequest
from espalier.search.run.generation_config import not_applied, sampling_defaults
from espalier.search.run.generator import Generator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.solver import Solver

Make = Callable[..., Engine]
TALK = {"temperature": 1.0, "top_p": 1.0}
PENALIZED = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": "30:2.5,31:-3"}
SAMPLED = CompletionRequest((PROBLEM,), samples=3, temperature=1.0, max_tokens=30, seed=5, stop=("\n\n\n",))
ROLLOUT = RolloutRequest(problem=PROBLEM, solutions=3, max_tokens=30, max_step_tokens=10, seed=4)


@pytest.fixture
def searches(make_engine: Make) -> Callable[..., Orchestrator]:
    def make(configured: dict[str, Any] | None = None, **options: Any) -> Orchestrator:
        engine = make_engine("talker", **options)
        return Orchestrator(engine, Generator(engine, "", TALK | (configured or {})), None)

    return make


def sampled(orchestrator: Orchestrator, request: Any) -> Any:
    """All that a request drew, and not what it is called."""
    result = run(orchestrator, request).only
    if isinstance(request, SearchRequest):
        return [(node.text, node.log_probability, node.probe) for node in result.nodes]
    if isinstance(request, RolloutRequest):
        return [(step.token_ids, step.log_probabilities) for step in result.steps]
    return [(choice.token_ids, choice.text) for choice in result.choices]


@pytest.mark.parametrize(
    "request_",
    [MAJORITY, GREEDY, replace(MAJORITY, probe_every=5), SAMPLED, ROLLOUT],
    ids=["search", "greedy", "probed", "completion", "rollout"],
)
def test_the_checkpoints_repetition_penalty_holds_where_a_request_has_none(
    request_: Any, searches: Callable[..., Orchestrator]
):
    configured = {"repetition_penalty": 1.4}
    plain = sampled(searches(), request_)
    of_request = sampled(searches(), replace(request_, repetition_penalty=1.4))
    assert sampled(searches(configured), request_) == of_request != plain
    assert sampled(searches(configured), replace(request_, repetition_penalty=1.0)) == plain
    resolved = run(searches(configured), request_).only.configuration
    assert (resolved.repetition_penalty, resolved.presence_penalty, resolved.frequency_penalty) == (1.4, None, None)


def test_a_greedy_path_of_several_steps_is_that_of_transformers_processors(
    searches: Callable[..., Orchestrator], tiny_checkpoints: dict[str, Path]
):
    """Tokens of the prompt count for the repetition penalty alone; those of all steps of the path count for each."""
    orchestrator = searches()
    generator = orchestrator.engine.model("generator")
    prompt = orchestrator._resolver.generator.prompt_ids(PROBLEM)
    text = list(prompt)
    while len(text) < len(prompt) + 40 and text[-1] not in generator.eos_token_ids:
        logits = plain_logits(tiny_checkpoints["talker"], text)[-1].clone()
        for token, value in ((30, 2.5), (31, -3.0)):
            logits[token] += value
        before = torch.tensor(sorted(set(text)))
        logits[before] = torch.where(logits[before] < 0, logits[before] * 1.4, logits[before] / 1.4)
        counts = torch.bincount(torch.tensor(text[len(prompt) :], dtype=torch.int64), minlength=len(logits))
        text.append(int((logits - 0.3 * counts - 0.5 * (counts > 0)).argmax()))
    request = replace(GREEDY, max_steps=9, max_step_tokens=5, end_at_box=False, **PENALIZED)
    found = run(orchestrator, request).only
    said = generator.tokenizer.decode(text[len(prompt) :])
    assert "".join(node.text for node in found.nodes) == said.removesuffix("<|im_end|>")[: len(said)]
    assert len(found.nodes) > 3


def test_penalized_searches_of_every_algorithm_are_the_same_in_company_with_drafts_and_ahead(
    make_orchestrator: Callable[..., Orchestrator],
):
    requests = [replace(request, problem=f"{PROBLEM} {i}", **PENALIZED) for i, request in enumerate(ALL.values())]
    requests += [replace(BEAM, seed=9), replace(BEST_OF_N, **PENALIZED, answer_form="[0-9]+", seed=3)]
    alone = [outcome(run(make_orchestrator(), request).only) for request in requests]
    together = run(make_orchestrator(launch_ahead=True, draft_tokens=3, max_batch_tokens=64), *requests).results
    assert [outcome(result) for result in together] == alone


def test_what_is_out_of_range_is_refused_by_its_name(searches: Callable[..., Orchestrator]):
    wrong = {
        "repetition_penalty": (0, -1, 101, float("nan")),
        "presence_penalty": (-2.5, 2.5),
        "frequency_penalty": (-2.5, 2.5),
        "logit_bias": ("5", "5:101", "5:x", "-5:1", "5:nan", "5:1,5:2", ",".join(f"{i}:1" for i in range(1025))),
    }
    orchestrator = searches()
    for name, values in wrong.items():
        for value in values:
            for request in (GREEDY, SAMPLED, ROLLOUT):
                with pytest.raises(InvalidRequestError, match=name):
                    orchestrator.submit(replace(request, **{name: value}))
    vocabulary = orchestrator.engine.model("generator").config.vocab_size
    for request in (GREEDY, SAMPLED, ROLLOUT):
        with pytest.raises(InvalidRequestError, match=f"logit_bias.*below {vocabulary}.* has {vocabulary}"):
            orchestrator.submit(replace(request, logit_bias=f"3:1,{vocabulary}:1"))
        run(orchestrator, replace(request, logit_bias=f"3:1,{vocabulary - 1}:-100"))


def test_a_bias_may_be_given_as_a_mapping():
    assert make_request(PROBLEM, {"logit_bias": {13: -100, "5": 2.5}}).logit_bias == "5:2.5,13:-100.0"
    for name, value in (("logit_bias", {5: "x"}), ("answer_form", {"type": "object"}), ("stop_when", {"agree": 3})):
        with pytest.raises(InvalidRequestError, match=name):
            make_request(PROBLEM, {name: value})


def test_an_empty_bias_beside_a_penalty_is_none(searches: Callable[..., Orchestrator]):
    fields = {"repetition_penalty": 1.2, "max_tokens": 8}
    given, left_out = (run(searches(), make_request(PROBLEM, fields | bias)).only for bias in ({"logit_bias": ""}, {}))
    assert outcome(given) == outcome(left_out)


def test_a_gguf_files_penalty_is_its_checkpoints_and_what_is_not_applied_is_told():
    found = sampling({"general.sampling.penalty_repeat": 1.1, "general.sampling.mirostat": 2})
    assert sampling_defaults(found)["repetition_penalty"] == 1.1
    assert not_applied(found) == "generation_config.json has mirostat 2, which is not applied"
    harmless = {"typical_p": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None, "num_beams": 1, "do_sample": True}
    assert not_applied(harmless) == ""


def test_the_bundled_pair_with_a_penalty_says_what_transformers_says_and_that_some_is_not_applied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Without it the path ends with 73; see lm-evaluation-harness 3154 for scores that differ by engines for this."""
    folder = shutil.copytree(Path(__file__).parents[3] / "experiments/demo/generator", tmp_path / "model")
    edit_json(
        folder / "generation_config.json", {"repetition_penalty": 1.3, "no_repeat_ngram_size": 0, "typical_p": 0.9}
    )
    caplog.set_level(logging.WARNING)
    with Solver(str(folder), verifier="") as solver:
        problem = "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"
        assert solver.solve(problem, algorithm="greedy").answer == "63"
        assert solver.solve(problem, algorithm="greedy", repetition_penalty=1.0).answer == "73"
    warning = "generation_config.json has typical_p 0.9, which is not applied"
    assert [record.message for record in caplog.records].count(warning) == 1
    found = inspect_checkpoint(str(folder), torch.float32)
    assert found.sampling["repetition_penalty"] == 1.3
    assert warning in found.warnings
