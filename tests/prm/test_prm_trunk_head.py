"""Trunk heads: scores read from the generator's own states, against transformers fed whole paths."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_prm_in_search import BEAM, BEST_OF_N, nodes_of, run
from transformers import AutoModelForCausalLM
from trunk_heads import write_head

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError, ScoreMismatchError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model
from espalier.engine.work import Generated, StopCause
from espalier.prm.path_evidence import Combination, sigmoid
from espalier.prm.scorer import ScoredSearch
from espalier.prm.scorers.trunk_head import TrunkHead, add_trunk_head
from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.run.generator import Generator
from espalier.search.run.load import load_orchestrator, load_verifier_alone
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.settings import RuntimeSettings
from espalier.search.tree import Node

Write = Callable[..., Path]
Make = Callable[..., Orchestrator]


@pytest.fixture
def head(load_model: Callable[[str], Model], tmp_path: Path) -> Write:
    talker = load_model("talker")
    return lambda layers=2, seed=0: write_head(tmp_path / f"{layers}-{seed}", talker.digest, 48, layers, seed)


@pytest.fixture
def search_with(head: Write, load_model: Callable[[str], Model], make_engine: Callable[..., Engine]) -> Make:
    def make(layers: int = 2, full_rescore: bool = False, **options: object) -> Orchestrator:
        model, scorer = add_trunk_head(Checkpoint(head(layers)), load_model("talker"), full_rescore)
        engine = make_engine(model, **{"kv_memory_bytes": 2**23, **options})
        return Orchestrator(engine, Generator(engine, "", {"temperature": 1.0, "top_p": 1.0}), scorer)

    return make


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("request_", [BEAM, BEST_OF_N], ids=["beam", "best-of-n"])
def test_scores_are_those_of_transformers_fed_whole_paths(
    layers: int,
    request_: SearchRequest,
    search_with: Make,
    head: Write,
    tiny_checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
):
    orchestrator = search_with(layers, max_batch_tokens=64)
    seen: list[tuple[list[int], float]] = []
    score = TrunkHead.score

    def remember(self: TrunkHead, done: Generated) -> float:
        seen.append((orchestrator.engine.token_ids(done.sequence), score(self, done)))
        return seen[-1][1]

    monkeypatch.setattr(TrunkHead, "score", remember)
    results = run(orchestrator, *(replace(request_, seed=seed) for seed in range(3)))
    plain = AutoModelForCausalLM.from_pretrained(tiny_checkpoints["talker"], dtype=torch.float32).eval()
    tensors = Checkpoint(head(layers))
    assert len(seen) > 15
    for ids, found in seen:
        with torch.inference_mode():
            x = plain.model(torch.tensor([ids])).last_hidden_state[0, -2]
            for i in range(layers):
                weight = tensors.take(f"score.{i}.weight", torch.float32, "cpu")
                x = weight @ (x.relu() if i else x) + tensors.take(f"score.{i}.bias", torch.float32, "cpu")
        assert found == pytest.approx(x.sigmoid().item(), abs=1e-5)
    scored = [node.score for result in results for node in result.nodes if node.score is not None]
    assert set(scored) <= {found for _, found in seen}
    assert len({round(found, 6) for found in scored}) > 5
    for result in results:
        assert result.usage.verifier_tokens == 0
        assert result.usage.verifier_tree_tokens == 0
        assert set(result.digests) == {"generator", "verifier"}
        for node in result.nodes[1:]:
            cut_off = node.termination in ("length", "budget", "degenerate")
            assert (node.score is None) == (cut_off or not node.text.strip())


@pytest.mark.parametrize(
    "algorithm", [AlgorithmName.BEAM, AlgorithmName.BEST_OF_N, AlgorithmName.MCTS, AlgorithmName.DVTS]
)
def test_the_full_rescore_finds_the_same_scores_and_sees_a_wrong_one(
    algorithm: AlgorithmName, search_with: Make, monkeypatch: pytest.MonkeyPatch
):
    requests = [replace(BEAM, algorithm=algorithm, seed=seed) for seed in range(3)]
    plain = run(search_with(), *requests)
    checked = run(search_with(full_rescore=True), *requests)
    assert list(map(nodes_of, checked)) == list(map(nodes_of, plain))
    assert [one.usage.generator_tokens for one in checked] == [one.usage.generator_tokens for one in plain]
    score = TrunkHead.score
    monkeypatch.setattr(TrunkHead, "score", lambda self, done: score(self, done) * (1 + isinstance(done, Generated)))
    orchestrator = search_with(full_rescore=True)
    with pytest.raises(ScoreMismatchError, match="trunk-head gives step 1"):
        run(orchestrator, requests[0])
    orchestrator.close()


@pytest.mark.parametrize("full_rescore", [False, True])
def test_scarce_memory_and_cancelling_change_nothing(full_rescore: bool, search_with: Make):
    requests = [replace(BEAM, seed=seed) for seed in range(4)]
    ample = run(search_with(full_rescore=full_rescore, kv_memory_bytes=2**24, reserved_share=1.0), *requests)
    scarce = search_with(full_rescore=full_rescore, kv_memory_bytes=2**19, slab_bytes=2**14, reserved_share=0.0)
    assert list(map(nodes_of, run(scarce, *requests))) == list(map(nodes_of, ample))
    name = scarce.submit(requests[0])
    for _ in range(12):
        scarce.step()
    scarce.cancel(name)
    while scarce.busy:
        scarce.step()
    assert scarce.engine.stats()["generator"].live_blocks == 0


@pytest.mark.parametrize("algorithm", [AlgorithmName.BEAM, AlgorithmName.BEST_OF_N])
def test_launching_ahead_changes_no_search_that_runs_alone(algorithm: AlgorithmName, search_with: Make):
    """Alone, its branches may all stop with a step in flight."""
    requests = [replace(BEAM, algorithm=algorithm, seed=seed) for seed in range(4)]
    plain, ahead = search_with(), search_with(launch_ahead=True)
    for request in requests:
        assert nodes_of(run(ahead, request)[0]) == nodes_of(run(plain, request)[0])


def test_a_search_without_scores_reads_no_head(search_with: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TrunkHead, "score", None)
    (result,) = run(search_with(), replace(BEST_OF_N, algorithm=AlgorithmName.MAJORITY))
    assert result.candidates
    assert all(node.score is None for node in result.nodes)


@pytest.mark.parametrize("blanks", [0, 1, 2])
def test_evidence_goes_on_behind_steps_without_text(blanks: int):
    weights = Combination((0.5, 1.0, 2.0, 0.25, 0.0), -1.0)
    scorer = TrunkHead("digest", combination=weights)
    session = scorer.begin(cast(ScoredSearch, SimpleNamespace(engine=None)))

    def sampled(logit: float, *log_probabilities: float) -> Generated:
        given = [0] * len(log_probabilities), "", list(log_probabilities), StopCause.DELIMITER, 0, 0
        return Generated(cast(Any, None), (0,), cast(Any, None), *given, values=np.array([logit]))

    node = Node(0, None, ())
    for blank in range(blanks):  # in front, too: there is no evidence yet
        node = Node(blank + 1, node, (*node.path, 0))
    node = first = Node(3, node, (*node.path, 0))
    one = session.score_sampled(first, sampled(0.3, -1.0, -2.0))
    for blank in range(blanks):
        node = Node(blank + 4, node, (*node.path, 0))
    last = Node(6, node, (*node.path, 0))
    both = session.score_sampled(last, sampled(2.0, -0.5))
    p, q = sigmoid(0.3), sigmoid(2.0)
    assert one == pytest.approx(weights.score((p, p, p, -1.5, 0.0)))
    assert both == pytest.approx(weights.score((q, (p + q) / 2, p, -3.5 / 3, 0.0)))


class TestLoading:
    @pytest.fixture
    def settings(self, tmp_path: Path) -> Callable[..., RuntimeSettings]:
        from espalier.engine.models.hub import locate

        demo = Checkpoint(locate("demo-generator"))

        def make(digest: str = demo.digest(), **options: object) -> RuntimeSettings:
            folder = write_head(tmp_path / "head", digest, 256, 1)
            return RuntimeSettings(verifier=str(folder), kv_memory=2**26, **options)

        return make

    @pytest.mark.parametrize("verify", [False, True])
    def test_a_folder_is_all_that_is_named(self, verify: bool, settings: Callable[..., RuntimeSettings]):
        orchestrator = load_orchestrator(settings(verify_incremental=verify))
        (result,) = run(orchestrator, SearchRequest("Tom has 38 coins. (a) He finds 47 more. How many?"))
        assert result.answer
        assert all(candidate.score is not None for candidate in result.candidates)
        assert list(orchestrator.engine.schedulers) == ["generator"]
        described = orchestrator.describe_models()
        assert described["verifier_family"] == "trunk-head"
        assert len(described["verifier"]) == 64
        orchestrator.close()

    def test_a_head_of_another_generator_is_refused(self, settings: Callable[..., RuntimeSettings]):
        with pytest.raises(CheckpointError, match=r"hidden states of talker \(digest aaaaaaaaaaaa….*learn-verifier"):
            load_orchestrator(settings("a" * 64))

    def test_it_scores_no_texts(self, settings: Callable[..., RuntimeSettings]):
        with pytest.raises(CheckpointError, match="scores steps as a generator samples them, not given texts"):
            load_verifier_alone(settings())

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"trunk": None}, "lacks the digest of its trunk"),
            ({"trunk": {"name": "x"}}, "lacks the digest of its trunk"),
        ],
    )
    def test_what_config_json_must_say(self, change: dict, message: str, head: Write, load_model: Callable):
        folder = head()
        said = json.loads((folder / "config.json").read_text()) | change
        (folder / "config.json").write_text(json.dumps(said))
        with pytest.raises(CheckpointError, match=message):
            add_trunk_head(Checkpoint(folder), load_model("talker"))

    @pytest.mark.parametrize(
        ("tensors", "message"),
        [
            ({"other.bias": torch.zeros(1)}, "no layers score.0"),
            ({"score.0.weight": torch.zeros(1, 47), "score.0.bias": torch.zeros(1)}, "has shape"),
            ({"score.0.weight": torch.zeros(1, 48)}, "no tensor 'score.0.bias'"),
            (
                {"score.0.weight": torch.zeros(1, 48), "score.0.bias": torch.zeros(1), "more": torch.zeros(1)},
                "does not use: more",
            ),
        ],
    )
    def test_which_tensors_it_must_hold(self, tensors: dict, message: str, head: Write, load_model: Callable):
        folder = head()
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            add_trunk_head(Checkpoint(folder), load_model("talker"))
