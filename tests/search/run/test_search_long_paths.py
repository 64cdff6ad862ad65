"""Long paths: what the host does for each step, and memory that is reserved for paths of the expected length."""

import cProfile
import itertools
import pstats
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import scripted
from search_runs import CHAIN, MAJORITY, outcome, run
from thinkers import SHAPES, write_thinker
from tiny_models import edit_json

from espalier.engine.errors import PoolTooSmallError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.resolve import Resolver

LONG = replace(CHAIN, max_steps=None, max_step_tokens=None, max_tokens=3600)


@pytest.fixture
def context() -> int:
    """Longest context of `talker`."""
    return 4096


@pytest.fixture
def talker(tiny_checkpoints: dict[str, Path], tmp_path: Path, context: int) -> Model:
    """A generator of a long context that says words at random and never ends."""
    checkpoint = write_thinker(tiny_checkpoints["talker"], tmp_path / "long", SHAPES["opened by the prompt"])
    edit_json(checkpoint.folder / "config.json", {"max_position_embeddings": context})
    model = load_generator(Checkpoint(checkpoint.folder), torch.float32, "cpu")
    letters = [i for i, text in enumerate(model.tokenizer.token_bytes) if text.isalpha() and text.isascii()]
    draws = random.Random(1)
    return scripted(model, (draws.choice(letters) for _ in itertools.count()))


@pytest.mark.parametrize("rule", ["tokens:8", "tokens:32"])
def test_the_hosts_work_for_a_step_does_not_grow_with_its_path(
    rule: str, talker: Model, make_orchestrator: Callable[..., Orchestrator]
):
    """Counted in Python's function calls, generators resumed and all, over 160 tokens near the 500th and the last."""
    orchestrator = make_orchestrator(talker, None, kv_memory_bytes=2**25, block_size=16)
    orchestrator.submit(replace(LONG, thinking="2400", step_rule=rule))

    def calls(steps: int) -> int:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(steps):
            assert orchestrator.step() == []
        profile.disable()
        return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]

    for _ in range(480):
        assert orchestrator.step() == []
    early = calls(160)
    for _ in range(1600):
        assert orchestrator.step() == []
    assert calls(160) <= 1.05 * early
    orchestrator.close()


@pytest.mark.parametrize(
    ("context", "tokens"),
    [
        (4096, 700),
        pytest.param(9216, 8192, marks=pytest.mark.slow),
        pytest.param(34_816, 32_768, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("searches", [16, 1])
def test_many_long_paths_finish_in_a_tenth_of_the_memory_that_they_need_together(
    searches: int, tokens: int, talker: Model, make_orchestrator: Callable[..., Orchestrator]
):
    request = replace(LONG, thinking=str(tokens * 3 // 7), max_tokens=tokens, step_rule="tokens:32")
    several = replace(request, algorithm=AlgorithmName.MAJORITY, beam_width=16 // searches, merge_duplicates=False)
    requests = [replace(several, seed=seed) for seed in range(searches)]
    ample = make_orchestrator(talker, None, kv_memory_bytes=2**28, block_size=16)
    blocks = ample.check(request).blocks["generator"]
    memory = 16 * blocks * ample.engine.schedulers["generator"].pools[0].layout.block_bytes
    scarce = make_orchestrator(talker, None, kv_memory_bytes=memory // 10, block_size=16, reserved_share=0.05)
    results = run(scarce, *requests).results
    assert {result.stop_reason for result in results} == {"finished"}
    assert all(result.usage.appended_tokens > 0 for result in results)
    assert sum(result.usage.generated_tokens for result in results) > 16 * tokens // 2
    assert scarce.engine.stats()["generator"].preemptions > 0
    scarce.engine.check_drained()


BY_TOKENS = {"step_rule": "tokens:32", "merge_duplicates": False}


@pytest.mark.parametrize(
    ("request_", "verifier", "share", "launch_ahead"),
    [
        pytest.param(*case, launch_ahead, marks=() if launch_ahead == (i % 2 == 0) else pytest.mark.slow)
        for i, case in enumerate(
            [
                (replace(MAJORITY, beam_width=16), None, 6),
                (replace(MAJORITY, beam_width=16, **BY_TOKENS), None, 6),
                (replace(MAJORITY, algorithm=AlgorithmName.BEST_OF_N, beam_width=8), "classifier", 1.7),
            ]
        )
        for launch_ahead in (False, True)
    ],
)
def test_a_search_whose_paths_do_not_fit_the_pool_together_finds_the_same(
    request_: SearchRequest,
    verifier: str | None,
    share: float,
    launch_ahead: bool,
    make_orchestrator: Callable[..., Orchestrator],
):
    def make(memory: int, **options: Any) -> Orchestrator:
        return make_orchestrator("qwen2-untied", verifier, kv_memory_bytes=memory, **options)

    requests = [replace(request_, max_tokens=900, max_steps=None, seed=seed) for seed in (1, 2)]
    ample = make(2**26)
    expected = list(map(outcome, run(ample, *requests).results))
    blocks = ample.check(requests[0]).blocks
    memory = sum(count * ample.engine.admission.pools[name].layout.block_bytes for name, count in blocks.items())
    scarce = make(int(memory / share), reserved_share=0.9, launch_ahead=launch_ahead)
    assert scarce.check(requests[0]).blocks["generator"] < blocks["generator"]
    assert list(map(outcome, run(scarce, *requests).results)) == expected
    assert verifier or scarce.engine.stats()["generator"].preemptions > 0
    scarce.engine.check_drained()


def expecting(orchestrator: Orchestrator, tokens: int) -> Orchestrator:
    orchestrator._resolver = Resolver(orchestrator.engine, orchestrator._generator, orchestrator._scorer, tokens)
    return orchestrator


def test_searches_reserve_memory_for_paths_of_the_expected_length(make_orchestrator: Callable[..., Orchestrator]):
    plain = make_orchestrator()
    request = replace(MAJORITY, max_tokens=200, max_steps=None)
    most = plain.check(request).blocks["generator"]
    usual = expecting(make_orchestrator(), 20).check(request).blocks["generator"]
    assert usual < most / 4
    assert expecting(make_orchestrator(), 500).check(request).blocks["generator"] == most


def test_more_searches_run_at_once_with_the_same_results(make_orchestrator: Callable[..., Orchestrator]):
    requests = [replace(MAJORITY, max_tokens=150, max_steps=None, seed=seed) for seed in range(6)]
    limits = {"kv_memory_bytes": 2**21, "reserved_share": 0.9}
    plain = run(make_orchestrator("talker", None, **limits), *requests)
    expected = run(expecting(make_orchestrator("talker", None, **limits), 15), *requests)
    assert expected.most_running > plain.most_running
    assert list(map(outcome, expected.results)) == list(map(outcome, plain.results))


def test_a_search_that_could_not_finish_alone_is_refused_whatever_is_expected(
    make_orchestrator: Callable[..., Orchestrator],
):
    small = expecting(make_orchestrator(kv_memory_bytes=2**19), 10)
    with pytest.raises(PoolTooSmallError):
        small.submit(replace(MAJORITY, max_tokens=4000, max_steps=None, beam_width=1))
