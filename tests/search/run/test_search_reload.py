"""Other weights for the generator of a running orchestrator: what is answered by them, and what is refused."""

import gc
import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hybrids import write_hybrid_talker
from search_runs import BEAM, BEST_OF_N, MAJORITY, PROBLEM, outcome
from tiny_models import disturb, edit_json

from espalier.engine.errors import CheckpointError, MisuseError
from espalier.engine.models.options import Quantization
from espalier.engine.roles import GENERATOR
from espalier.search.request import AnswerEquivalence, SearchRequest
from espalier.search.result import SearchResult
from espalier.search.rollout import RolloutRequest
from espalier.search.run.load import load_orchestrator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.running import GENERATOR_BEFORE
from espalier.search.run.settings import RuntimeSettings


@pytest.fixture
def served(tiny_checkpoints: dict[str, Path]) -> RuntimeSettings:
    return RuntimeSettings(
        generator=str(tiny_checkpoints["talker"]), verifier=str(tiny_checkpoints["classifier"]), kv_memory=2**24,
        block_size=4, max_running=8, answer_equivalence=AnswerEquivalence.EXACT_MATCH, load_cache="none",
    )  # fmt: skip


@pytest.fixture
def load() -> Iterator[Callable[[RuntimeSettings], Orchestrator]]:
    """Loads orchestrators; after the test each must hold nothing."""
    made: list[Orchestrator] = []

    def load(settings: RuntimeSettings) -> Orchestrator:
        made.append(load_orchestrator(settings))
        return made[-1]

    yield load
    for orchestrator in made:
        orchestrator.engine.check_drained()
        orchestrator.close()


@pytest.fixture
def trained(copy_of: Callable[[str], Path], tmp_path: Path) -> Path:
    """A checkpoint that differs from the talker in its weights alone."""
    return disturb(Path(shutil.move(copy_of("talker"), tmp_path / "trained")))


def results(orchestrator: Orchestrator, *requests: Any) -> list[Any]:
    ids = [orchestrator.submit(request) for request in requests]
    found: dict[str, Any] = {}
    while orchestrator.busy:
        found |= {result.search_id: result for result in orchestrator.step()}
    return [found[name] for name in ids]


def told(result: SearchResult) -> Any:
    return outcome(result), result.digests


REQUESTS = (BEAM, MAJORITY, BEST_OF_N)


@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.INT8])
def test_what_is_asked_afterwards_is_answered_as_by_a_fresh_server(
    quantization: Quantization, served: RuntimeSettings, trained: Path, load: Callable[..., Orchestrator]
):
    served = replace(served, generator_quantization=quantization)
    orchestrator, fresh = load(served), load(replace(served, generator=str(trained)))
    before = results(orchestrator, *REQUESTS)
    digest = orchestrator.prepare_reload(str(trained))
    assert orchestrator.describe_models()[GENERATOR] != digest, "nothing has changed before it is taken"
    orchestrator.reload(str(trained))
    assert orchestrator.describe_models() == fresh.describe_models()
    assert orchestrator.describe_models()[GENERATOR] == digest
    after, expected = results(orchestrator, *REQUESTS), results(fresh, *REQUESTS)
    assert list(map(told, after)) == list(map(told, expected))
    assert all(old.nodes != new.nodes for old, new in zip(before, after, strict=True))


def test_searches_in_flight_end_whole_and_say_that_they_had_begun_with_others(
    served: RuntimeSettings, trained: Path, load: Callable[..., Orchestrator]
):
    orchestrator = load(replace(served, max_running=2))
    first = orchestrator.describe_models()[GENERATOR]
    rollout = RolloutRequest(problem=PROBLEM, solutions=4, max_tokens=40, max_step_tokens=12)
    ids = [orchestrator.submit(request) for request in (BEAM, rollout, MAJORITY)]
    for _ in range(3):
        assert not orchestrator.step()
    orchestrator.reload(str(trained))
    found = {}
    while orchestrator.busy:
        found |= {result.search_id: result for result in orchestrator.step()}
    digest = orchestrator.describe_models()[GENERATOR]
    assert [found[name].stop_reason for name in ids] == ["finished"] * 3
    assert [found[name].digests[GENERATOR] for name in ids] == [digest] * 3
    assert [found[name].digests.get(GENERATOR_BEFORE) for name in ids] == [first, first, None], "the last one waited"
    (expected,) = results(load(replace(served, generator=str(trained))), MAJORITY)
    assert told(found[ids[2]]) == told(expected)


def with_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", changes)


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])


def with_another_token(folder: Path) -> None:
    written = json.loads((folder / "tokenizer.json").read_text())
    written["added_tokens"][-1]["content"] = "\\boxed{9}"
    (folder / "tokenizer.json").write_text(json.dumps(written))


def with_another_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (with_config(rope_parameters={"rope_type": "default", "rope_theta": 5000.0}), "its configuration: rotaries"),
        (with_config(max_position_embeddings=256), "its configuration: max_positions"),
        (with_config(intermediate_size=64), "its configuration: intermediate_size"),
        (
            lambda folder: edit_json(folder / "generation_config.json", {"eos_token_id": [2, 3]}),
            "the tokens that end a generation",
        ),
        (with_config(system_prompt="Be brief."), "its system prompt"),
        (with_another_token, "its tokenizer"),
        (with_another_template, "its chat template"),
        (lambda folder: edit_json(folder / "generation_config.json", {"temperature": 0.25}), "temperature"),
        (without_weights, "model.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"), "is an adapter"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_differs_in_more_than_its_weights_is_refused_and_the_old_ones_stay_whole(
    change: Callable[[Path], None], why: str, served: RuntimeSettings, trained: Path, load: Callable[..., Orchestrator]
):
    orchestrator = load(served)
    before = results(orchestrator, BEAM)
    described = orchestrator.describe_models()
    change(trained)
    with pytest.raises(CheckpointError, match=why):
        orchestrator.reload(str(trained))
    assert orchestrator.describe_models() == described
    assert list(map(told, results(orchestrator, BEAM))) == list(map(told, before))


def test_a_verifier_that_reads_the_generators_weights_keeps_them(
    served: RuntimeSettings, load: Callable[..., Orchestrator], tmp_path: Path
):
    asked = str(write_hybrid_talker(tmp_path / "asked"))
    orchestrator = load(replace(served, generator=asked, verifier="self", system_prompt=""))
    with pytest.raises(CheckpointError, match="--verifier is self or a trunk head, which"):
        orchestrator.prepare_reload(asked)


def test_weights_that_are_let_go_of_are_loaded_again(
    served: RuntimeSettings, trained: Path, load: Callable[..., Orchestrator]
):
    orchestrator = load(served)
    orchestrator.prepare_reload(str(trained))
    orchestrator.cancel_reload()
    shutil.rmtree(trained)
    with pytest.raises(CheckpointError):
        orchestrator.reload(str(trained))


def test_nothing_holds_the_old_weights(served: RuntimeSettings, trained: Path, load: Callable[..., Orchestrator]):
    orchestrator = load(served)
    results(orchestrator, *REQUESTS)
    old = weakref.ref(orchestrator.engine.model(GENERATOR).decoder.layers)
    orchestrator.reload(str(trained))
    results(orchestrator, BEAM)
    gc.collect()
    assert old() is None


def test_an_orchestrator_of_ones_own_models_has_nothing_to_reload_from(make_orchestrator: Callable[..., Orchestrator]):
    with pytest.raises(MisuseError, match="cannot be reloaded"):
        make_orchestrator().prepare_reload("anywhere")


def test_the_request_is_the_same_before_and_after(
    served: RuntimeSettings, trained: Path, load: Callable[..., Orchestrator]
):
    orchestrator = load(served)
    resolved = orchestrator.check(SearchRequest(PROBLEM))
    orchestrator.reload(str(trained))
    assert orchestrator.check(SearchRequest(PROBLEM)) == resolved
