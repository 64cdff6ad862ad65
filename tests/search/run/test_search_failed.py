"""A search for which a model computes no numbers fails with the reason; nobody else notices."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from search_runs import ALL, crowd, outcome, outcome_alone, run
from tiny_models import edit_tensors

from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.request import SearchRequest, SubmitOptions
from espalier.search.result import StopReason
from espalier.search.run.orchestrator import Orchestrator

Make = Callable[..., Orchestrator]
POISON = "§"
LIKELY = {name: replace(request, min_p=0.05) for name, request in ALL.items()}
"""Searches that never sample it."""


@pytest.fixture
def poisoned(copy_of: Callable[[str], Path]) -> Callable[..., Path]:
    """A copy of a checkpoint, by name, that computes no numbers for texts with `POISON` in them.

    It is sampled if it is `likely`, as any character of a random model is.
    """

    def poison(name: str, likely: bool = False) -> Path:
        folder = copy_of(name)
        file = folder / "model.safetensors"
        tensors, token = load_file(file), TextTokenizer(Checkpoint(folder)).encode(POISON)[-1]
        tensors["model.embed_tokens.weight"][token] = torch.nan
        if "lm_head.weight" in tensors and not likely:
            tensors["lm_head.weight"][token] = 0.0
        edit_tensors(file, tensors)
        return folder

    return poison


@pytest.fixture
def generator(poisoned: Callable[..., Path]) -> Model:
    return load_generator(Checkpoint(poisoned("talker")), torch.float32, "cpu")


def fails(request: SearchRequest) -> SearchRequest:
    return replace(request, problem=f"{request.problem} {POISON}")


@pytest.mark.parametrize(
    ("name", "launch_ahead"), [*((name, False) for name in LIKELY), ("beam", True), ("best-of-n", True)]
)
def test_a_generators_search_without_numbers_fails_alone(
    name: str, launch_ahead: bool, generator: Model, make_orchestrator: Make
):
    request_ = LIKELY[name]
    orchestrator = make_orchestrator(generator, launch_ahead=launch_ahead)
    first, failed, last = run(orchestrator, request_, fails(request_), replace(request_, seed=50)).results
    assert failed.stop_reason is StopReason.FAILED
    assert "the generator's logits are not numbers" in failed.error
    assert (failed.answer, failed.candidates) == ("", ())
    for result in (first, last):
        assert (result.stop_reason, result.error) == (StopReason.FINISHED, "")
        assert outcome(result) == outcome(run(make_orchestrator(generator), result.configuration).only)


@pytest.mark.parametrize("share", [0.05, 1.0])
def test_a_verifiers_search_without_numbers_fails_alone(
    share: float, poisoned: Callable[..., Path], make_orchestrator: Make
):
    """In a crowd that has to give up its memory, too."""
    orchestrator = make_orchestrator(
        verifier=poisoned("classifier"), kv_memory_bytes=600_000, reserved_share=share, prefix_cache=share < 1
    )
    others = [replace(other, min_p=0.05) for other in crowd(8)]
    *results, failed = run(orchestrator, *others, fails(LIKELY["beam"])).results
    assert failed.stop_reason is StopReason.FAILED
    assert "the verifier's logits are not numbers" in failed.error
    assert [outcome(result) for result in results] == [outcome_alone(other, make_orchestrator) for other in others]


def test_what_a_failed_search_had_found_is_in_its_result(poisoned: Callable[..., Path], make_orchestrator: Make):
    """Paths that are complete before one of the others samples the poison."""
    generator = load_generator(Checkpoint(poisoned("talker", likely=True)), torch.float32, "cpu")
    results = run(make_orchestrator(generator), *(replace(ALL["majority"], seed=seed) for seed in range(40))).results
    found = [result for result in results if result.stop_reason is StopReason.FAILED and result.candidates]
    assert any(result.answer for result in found)


def test_the_engine_goes_on_with_searches_that_come_later(generator: Model, make_orchestrator: Make):
    orchestrator = make_orchestrator(generator)
    beam = run(orchestrator, LIKELY["beam"]).only
    assert run(orchestrator, fails(LIKELY["beam"])).only.stop_reason is StopReason.FAILED
    assert outcome(run(orchestrator, LIKELY["beam"]).only) == outcome(beam)
    assert beam.stop_reason is StopReason.FINISHED


@pytest.mark.parametrize("steps", range(1, 6))
@pytest.mark.parametrize("which", ["failing", "other"])
def test_a_cancellation_while_a_batch_without_numbers_is_in_flight_harms_nobody(
    which: str, steps: int, generator: Model, make_orchestrator: Make
):
    """A cancellation waits for what is in flight, and so learns of the failure before a step does."""
    orchestrator, beam = make_orchestrator(generator, launch_ahead=True), LIKELY["beam"]
    ids = {"failing": fails(beam), "other": replace(beam, seed=50), "last": beam}
    ids = {name: orchestrator.submit(request) for name, request in ids.items()}
    ended = {}
    for _ in range(steps):
        ended |= {result.search_id: result for result in orchestrator.step()}
    orchestrator.cancel(ids[which])
    while orchestrator.busy:
        ended |= {result.search_id: result for result in orchestrator.step()}
    results = {name: ended[search_id] for name, search_id in ids.items()}
    allowed = {StopReason.FAILED, StopReason.CANCELLED} if which == "failing" else {StopReason.FAILED}
    assert results["failing"].stop_reason in allowed
    reason = StopReason.CANCELLED if which == "other" else StopReason.FINISHED
    assert results["other"].stop_reason is reason
    assert outcome(results["last"]) == outcome(run(make_orchestrator(generator), beam).only)


@pytest.mark.parametrize("steps", range(1, 5))
@pytest.mark.parametrize("launch_ahead", [False, True])
def test_a_search_fails_while_an_urgent_one_takes_its_place(
    launch_ahead: bool, steps: int, generator: Model, make_orchestrator: Make
):
    orchestrator, beam = make_orchestrator(generator, launch_ahead=launch_ahead, max_running=1), LIKELY["beam"]
    failing, ended = orchestrator.submit(fails(beam)), {}
    for step in range(10_000):
        if step == steps:
            urgent = orchestrator.submit(beam, options=SubmitOptions(1))
        elif step > steps and not orchestrator.busy:
            break
        ended |= {result.search_id: result for result in orchestrator.step()} if orchestrator.busy else {}
    assert ended[failing].stop_reason is StopReason.FAILED
    assert outcome(ended[urgent]) == outcome(run(make_orchestrator(generator), beam).only)
