"""Checkpoints whose tokenizer has tokens that were added without resizing the embedding: common, and usable."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from search_runs import ALL, BEAM, GREEDY, MAJORITY, outcome, run
from tiny_models import edit_json
from tokenizers import AddedToken, Tokenizer

from espalier.engine.errors import CheckpointError, InvalidRequestError, NoEmbeddingError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.prm.families import load_verifier
from espalier.search.result import StopReason
from espalier.search.run.orchestrator import Orchestrator

Make = Callable[..., Orchestrator]
PAD, WORD = "[PAD]", "ponies"
"""A control token, which texts of callers never become, and one that is a word of a text like any other."""
SPELT = "\\boxed{1}"
"""What the generator often says."""
HELD = replace(BEAM, problem=f"{BEAM.problem} {PAD} {PAD}")
HELD_WORD = replace(BEAM, problem=f"{BEAM.problem} {WORD} {WORD}")


def add_token(folder: Path, token: str = PAD, special: bool = True) -> int:
    """Add a token behind all that the embedding has rows for, in place of one of that name; its id."""
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace(json.dumps(token), json.dumps("<was another>")))
    tokenizer = Tokenizer.from_file(str(file))
    rows = Checkpoint(folder).config["vocab_size"]
    filler = [AddedToken(f"<filler{i}>", special=True) for i in range(rows - tokenizer.get_vocab_size())]
    tokenizer.add_tokens([*filler, AddedToken(token, special=special, normalized=False)])
    tokenizer.save(str(file))
    found = tokenizer.token_to_id(token)
    assert found is not None
    assert found >= rows
    return found


@pytest.fixture
def padded(copy_of: Callable[[str], Path]) -> Callable[..., tuple[Path, int]]:
    """A checkpoint with such a token, by name, and the token's id."""

    def make(name: str, token: str = PAD) -> tuple[Path, int]:
        folder = copy_of(name)
        return folder, add_token(folder, token, special=token == PAD)

    return make


def generator_of(folder: Path) -> Model:
    return load_generator(Checkpoint(folder), torch.float32, "cpu")


def test_such_a_generator_loads_with_a_warning_and_searches_as_without_the_token(
    padded: Callable, make_orchestrator: Make, caplog: pytest.LogCaptureFixture
):
    folder, token_id = padded("talker")
    with caplog.at_level(logging.WARNING, "espalier.engine"):
        orchestrator = make_orchestrator(generator_of(folder))
    assert f"'[PAD]' (id {token_id})" in caplog.text
    assert "the generator has an embedding for" in caplog.text
    plain = make_orchestrator()
    for request in (GREEDY, MAJORITY):
        assert outcome(run(orchestrator, request).only) == outcome(run(plain, request).only)


def test_checkpoints_whose_tokens_all_have_an_embedding_are_not_warned_of(
    make_orchestrator: Make, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING, "espalier.engine"):
        make_orchestrator()
    assert caplog.text == ""


def test_a_problem_that_looks_like_such_a_token_of_the_generator_is_text(padded: Callable, make_orchestrator: Make):
    orchestrator = make_orchestrator(generator_of(padded("talker")[0]))
    assert run(orchestrator, HELD).only.stop_reason is StopReason.FINISHED


def test_a_problem_that_looks_like_a_control_token_of_the_verifier_is_text(padded: Callable, make_orchestrator: Make):
    orchestrator = make_orchestrator(verifier=padded("classifier")[0])
    assert run(orchestrator, HELD).only.stop_reason is StopReason.FINISHED


def test_a_problem_that_holds_such_a_token_is_refused_by_name(padded: Callable, make_orchestrator: Make):
    folder, token_id = padded("classifier", WORD)
    orchestrator = make_orchestrator(verifier=folder)
    with pytest.raises(NoEmbeddingError) as caught:
        orchestrator.submit(HELD_WORD)
    assert isinstance(caught.value, InvalidRequestError)
    assert caught.value.tokens == {token_id: WORD}
    (violation,) = caught.value.violations
    assert violation.field == "problem"
    assert f"'ponies' (id {token_id}), for which the verifier has no embedding" in violation.description
    assert not orchestrator.busy
    assert run(orchestrator, BEAM).only.stop_reason is StopReason.FINISHED


def test_many_such_tokens_are_named_in_part(padded: Callable, make_orchestrator: Make):
    folder, _ = padded("classifier", WORD)
    for i in range(20):
        add_token(folder, f"added{i}!", special=False)
    orchestrator = make_orchestrator(verifier=folder)
    with pytest.raises(NoEmbeddingError, match=r"added7!.* and 12 more"):
        orchestrator.submit(replace(BEAM, problem="".join(f"added{i}!" for i in range(20))))


@pytest.mark.parametrize("name", ["beam", "best-of-n", "dvts", "lookahead", "rebase", "mcts"])
@pytest.mark.parametrize("budget", [None, 250])
def test_a_step_that_spells_such_a_token_has_no_score_and_other_paths_go_on(
    name: str, budget: int | None, copy_of: Callable[[str], Path], make_orchestrator: Make
):
    folder = copy_of("classifier")
    add_token(folder, SPELT, special=False)
    request = replace(ALL[name], verifier_budget=budget)
    requests = [replace(request, seed=seed) for seed in range(8)]
    results = run(make_orchestrator(verifier=folder), *requests).results
    plain = run(make_orchestrator(), *requests).results
    assert {result.stop_reason for result in results} <= {StopReason.FINISHED, *([StopReason.BUDGET] if budget else [])}
    nodes = [node for result in results for node in result.nodes]
    spelt = [node for node in nodes if SPELT in node.text]
    assert spelt
    assert all(node.score is None for node in spelt)
    going_on = {"", "budget"} if name == "best-of-n" else set()  # whole paths are scored where they end
    assert {node.termination for node in spelt} <= {"length", "duplicate", "degenerate", "pruned", *going_on}
    assert any(node.score is not None for node in nodes)
    assert any(result.candidates for result in results)
    assert not any(SPELT in candidate.text for result in results for candidate in result.candidates)
    assert any(SPELT in candidate.text for result in plain for candidate in result.candidates)


def test_a_crowd_with_such_steps_and_problems_loses_nobody(padded: Callable, make_orchestrator: Make):
    orchestrator = make_orchestrator(verifier=padded("classifier", WORD)[0])
    plain = make_orchestrator()
    requests = replace(BEAM, max_steps=2, max_step_tokens=None, max_tokens=100), GREEDY
    for request in requests:
        orchestrator.submit(request)
        with pytest.raises(InvalidRequestError):
            orchestrator.submit(HELD_WORD)
    ended = []
    while orchestrator.busy:
        ended += orchestrator.step()
    expected = [outcome(run(plain, request).only) for request in requests]
    assert sorted(map(outcome, ended), key=repr) == sorted(expected, key=repr)


def test_a_generator_that_can_never_end_is_an_error(padded: Callable):
    folder, token_id = padded("talker")
    edit_json(folder / "config.json", {"eos_token_id": token_id})
    edit_json(folder / "generation_config.json", {"eos_token_id": [token_id, 2**20]})
    with pytest.raises(CheckpointError, match=f"end token {token_id}, 1048576 is beyond the embedding"):
        generator_of(folder)


def test_of_several_end_tokens_those_with_an_embedding_do(padded: Callable):
    folder, token_id = padded("talker")
    end = Checkpoint(folder).config["eos_token_id"]
    edit_json(folder / "generation_config.json", {"eos_token_id": [end, token_id]})
    assert generator_of(folder).eos_token_ids == (0, end)  # the first is <|endoftext|>


def test_a_generator_whose_template_needs_such_a_token_is_an_error(padded: Callable, make_orchestrator: Make):
    folder, token_id = padded("talker")
    template = folder / "chat_template.jinja"
    template.write_text(PAD + template.read_text())
    with pytest.raises(CheckpointError, match=rf"'\[PAD\]' \(id {token_id}\).*every prompt"):
        make_orchestrator(generator_of(folder))


def test_a_verifier_whose_mark_has_no_embedding_is_an_error(copy_of: Callable[[str], Path]):
    folder = copy_of("math-prm")
    assert TextTokenizer(Checkpoint(folder)).token_id("<extra_0>") is not None
    token_id = add_token(folder, "<extra_0>")
    with pytest.raises(
        CheckpointError, match=rf"'<extra_0>' \(id {token_id}\), which qwen2.5-math-prm adds to every path"
    ):
        load_verifier(Checkpoint(folder), torch.float32, "cpu")


def test_a_tokenizer_with_holes_between_its_ids_loads(copy_of: Callable[[str], Path], make_orchestrator: Make):
    folder = copy_of("talker")
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    described["model"]["vocab"]["zq"] = 2_000
    file.write_text(json.dumps(described))
    assert TextTokenizer(Checkpoint(folder)).vocab_size == 2_001
    assert run(make_orchestrator(generator_of(folder)), MAJORITY).only.stop_reason is StopReason.FINISHED
