"""`--verifier self`: the generator asked about its own steps, on its own weights."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from paths import PROBLEM
from tiny_models import edit_json

from espalier.engine.errors import CheckpointError, InvalidRequestError
from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.result import SearchResult
from espalier.search.run.load import RuntimeSettings, load_orchestrator, load_verifier_alone
from espalier.search.run.orchestrator import Orchestrator

REQUEST = SearchRequest(
    PROBLEM, AlgorithmName.BEAM, beam_width=2, expansion=3, max_steps=3, max_tokens=60, max_step_tokens=20, seed=3
)


@pytest.fixture
def settings(family_folders: dict[str, Path]) -> RuntimeSettings:
    return RuntimeSettings(str(family_folders["yes-no"]), "self", kv_memory=2**23, system_prompt="")


@pytest.fixture
def copied(settings: RuntimeSettings, tmp_path: Path) -> RuntimeSettings:
    """With a copy of the generator that a test may change."""
    return replace(settings, generator=str(shutil.copytree(settings.generator, tmp_path / "generator")))


def searched(orchestrator: Orchestrator) -> SearchResult:
    orchestrator.submit(REQUEST)
    while True:
        if results := orchestrator.step():
            (result,) = results
            assert isinstance(result, SearchResult)
            return result


def test_the_generators_weights_serve_both(settings: RuntimeSettings):
    orchestrator = load_orchestrator(settings)
    models = orchestrator.engine.models
    assert models["verifier"].decoder is models["generator"].decoder
    assert models["verifier"].digest == models["generator"].digest
    assert orchestrator.describe_models()["verifier_family"] == "yes-no"


@pytest.mark.parametrize("full_rescore", [False, True])
def test_its_scores_are_those_of_the_same_checkpoint_as_a_verifier(full_rescore: bool, settings: RuntimeSettings):
    own = searched(load_orchestrator(replace(settings, verify_incremental=full_rescore)))
    other = searched(load_orchestrator(replace(settings, verifier=settings.generator, verifier_family="yes-no")))
    assert [node.score for node in own.nodes] == [node.score for node in other.nodes]
    assert len({node.score for node in own.nodes}) > 3
    assert own.usage.verifier_tokens == other.usage.verifier_tokens > 0


def test_given_texts_are_scored_by_it_too(settings: RuntimeSettings):
    engine, verifier = load_verifier_alone(settings)
    assert verifier.name == "yes-no"
    assert list(engine.models) == ["verifier"]


def test_a_generator_without_a_chat_template_is_not_asked_and_its_weights_are_not_read(copied: RuntimeSettings):
    (Path(copied.generator) / "chat_template.jinja").unlink()
    read: list[int] = []
    with pytest.raises(CheckpointError, match=r"has no chat template, so it cannot be asked .* or confidence"):
        load_orchestrator(copied, lambda done, _: read.append(done))
    assert not read


def test_a_generator_without_a_token_for_an_answer_is_not_asked():
    with pytest.raises(CheckpointError, match="no single token for 'Yes', which the model answers with"):
        load_orchestrator(RuntimeSettings(verifier="self"))


def test_a_template_without_the_turns_between_is_refused(copied: RuntimeSettings):
    (Path(copied.generator) / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    with pytest.raises(CheckpointError, match="leaves out a turn of three"):
        load_orchestrator(copied)


def test_it_may_be_asked_as_a_judge(family_folders: dict[str, Path]):
    settings = RuntimeSettings(
        str(family_folders["judge"]), "self", "judge", kv_memory=2**24, system_prompt="", verify_incremental=True
    )
    orchestrator = load_orchestrator(settings)
    own = searched(orchestrator)
    assert orchestrator.engine.models["verifier"].decoder is orchestrator.engine.models["generator"].decoder
    assert orchestrator.describe_models()["verifier_family"].startswith("judge JudgeSettings(letters=5")
    other = searched(load_orchestrator(replace(settings, verifier=settings.generator)))
    assert [node.score for node in own.nodes] == [node.score for node in other.nodes]
    assert len({node.score for node in own.nodes}) > 3
    with pytest.raises(CheckpointError, match="needs a model of its own; --verifier self takes yes-no, judge"):
        load_orchestrator(replace(settings, verifier_family="likelihood"))


@pytest.mark.parametrize(
    "wrong", [{"letters": 27}, {"letters": True}, {"repeats": 0}, {"criteria": "one"}, {"criteria": []}, {"more": 1}]
)
def test_what_a_judge_asks_is_checked(wrong: dict[str, object], copied: RuntimeSettings):
    edit_json(Path(copied.generator) / "config.json", {"prm": wrong})
    with pytest.raises(CheckpointError, match="has letters, from 2 to 26, repeats, from 1 to 6, and criteria, 1 to 8"):
        load_orchestrator(replace(copied, verifier_family="judge"))


@pytest.mark.parametrize("verifier", ["self", "confidence"])
def test_a_family_or_a_reference_of_no_checkpoint_is_refused(verifier: str, settings: RuntimeSettings):
    given = replace(settings, verifier=verifier, verifier_family="thinkprm", verifier_reference="other")
    with pytest.raises(InvalidRequestError, match="names no checkpoint") as caught:
        load_orchestrator(given)
    fields = ["verifier_reference"] if verifier == "self" else ["verifier_family", "verifier_reference"]
    assert [violation.field for violation in caught.value.violations] == fields
