"""Heads on decoders with recurrent layers: a verifier's, and one on the generator's own trunk, against transformers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hybrids import write_hybrid_talker, write_hybrid_verifier
from plain import plain_classifier_scores
from plain_families import yes_no as plain_yes_no
from test_prm_in_search import BEAM, BEST_OF_N, run, scored_paths
from transformers import AutoModelForCausalLM
from trunk_heads import write_head

from espalier.engine.engine import Engine
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.engine.work import Generated, Scored
from espalier.prm.base import PrmFamily
from espalier.prm.families import load_verifier
from espalier.prm.families.asked import YesNo
from espalier.prm.scorer import Scorer
from espalier.prm.scorers.trunk_head import TrunkHead, add_trunk_head
from espalier.prm.verifier import Verifier
from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.run.generator import Generator
from espalier.search.run.orchestrator import Orchestrator

MCTS = replace(BEAM, algorithm=AlgorithmName.MCTS, simulations=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid_talker(tmp_path_factory.mktemp("talker"))


@pytest.fixture(scope="module")
def talker(folder: Path) -> Model:
    return load_generator(Checkpoint(folder), torch.float32, "cpu")


@pytest.fixture
def search_with(make_engine: Callable[..., Engine], talker: Model) -> Callable[..., Orchestrator]:
    def make(family: PrmFamily | None = None, scorer: Scorer | None = None, model: Model = talker) -> Orchestrator:
        engine = make_engine(model, family and family.model, kv_memory_bytes=2**23, max_batch_tokens=48)
        generator = Generator(engine, "", {"temperature": 1.0, "top_p": 1.0})
        return Orchestrator(engine, generator, scorer or (family and Verifier(family, full_rescore=True)))

    return make


def check_paths(orchestrator: Orchestrator, request: SearchRequest, plain: Callable[[list[str]], list[float]]) -> None:
    """Run searches, and compare the scores of each path with those that `plain` gives for its steps."""
    paths = [path for result in run(orchestrator, request, replace(request, seed=1)) for path in scored_paths(result)]
    paths = [path for path in paths if len(path) > 1] or paths
    assert len(paths) > 5
    for path in paths:
        assert [step.score for step in path] == pytest.approx(plain([step.text for step in path]), abs=1e-4)


@pytest.mark.parametrize("request_", [BEAM, BEST_OF_N, MCTS], ids=["beam", "best-of-n", "mcts"])
def test_a_head_on_a_hybrid_scores_steps_as_transformers_does(
    request_: SearchRequest, search_with: Callable[..., Orchestrator], tmp_path_factory: pytest.TempPathFactory
):
    written = write_hybrid_verifier(tmp_path_factory.mktemp("verifier"))
    family = load_verifier(Checkpoint(written), torch.float32, "cpu")
    check_paths(
        search_with(family), request_, lambda steps: plain_classifier_scores(written, BEAM.problem, steps, "\n", False)
    )


@pytest.mark.parametrize("own", [False, True], ids=["another model", "the generator itself"])
def test_a_hybrid_asked_about_each_step_forgets_the_question_again(
    own: bool, folder: Path, talker: Model, search_with: Callable[..., Orchestrator]
):
    checkpoint = Checkpoint(folder)
    family = YesNo.of_generator(checkpoint, talker) if own else YesNo.load(checkpoint, torch.float32, "cpu")
    check_paths(search_with(family), BEAM, lambda steps: plain_yes_no(folder, BEAM.problem, steps))


def test_a_head_on_a_hybrids_own_trunk_reads_the_states_that_transformers_computes(
    folder: Path,
    talker: Model,
    search_with: Callable[..., Orchestrator],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    head = Checkpoint(write_head(tmp_path, talker.digest, talker.config.hidden_size, layers=2))
    model, scorer = add_trunk_head(head, talker, full_rescore=True)
    orchestrator = search_with(scorer=scorer, model=model)
    seen: list[tuple[list[int], float]] = []
    score = TrunkHead.score

    def remember(self: TrunkHead, done: Generated | Scored) -> float:
        if isinstance(done, Generated):
            seen.append((orchestrator.engine.token_ids(done.sequence), score(self, done)))
        return score(self, done)

    monkeypatch.setattr(TrunkHead, "score", remember)
    run(orchestrator, BEAM, replace(MCTS, seed=1))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tensors = Checkpoint(head.folder)
    assert len({found for _, found in seen}) > 15
    for ids, found in seen:
        with torch.inference_mode():
            x = plain.model(torch.tensor([ids])).last_hidden_state[0, -2]
        for i in range(2):
            weight = tensors.take(f"score.{i}.weight", torch.float32, "cpu")
            x = weight @ (x.relu() if i else x) + tensors.take(f"score.{i}.bias", torch.float32, "cpu")
        assert found == pytest.approx(x.sigmoid().item(), abs=1e-5)
