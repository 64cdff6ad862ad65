"""Confidence: scores from the probabilities of the tokens drawn, against transformers fed whole paths."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from plain import plain_logits
from test_prm_in_search import BEAM, BEST_OF_N, run

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError
from espalier.engine.work import Generated
from espalier.prm.scorers.tokens import Confidence, LowestConfidence
from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.run.generator import Generator
from espalier.search.run.load import load_orchestrator, load_verifier_alone
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.settings import RuntimeSettings


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("kind", [Confidence, LowestConfidence])
@pytest.mark.parametrize("request_", [BEAM, BEST_OF_N], ids=["beam", "best-of-n"])
def test_scores_are_those_of_transformers_probabilities(
    kind: type[Confidence] | type[LowestConfidence],
    request_: SearchRequest,
    merge: bool,
    make_engine: Callable[..., Engine],
    tiny_checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
):
    engine = make_engine("talker", kv_memory_bytes=2**23)
    orchestrator = Orchestrator(engine, Generator(engine, "", {"temperature": 1.0, "top_p": 1.0}), kind())
    seen: list[tuple[list[int], Generated, float]] = []
    score = kind.score

    def remember(self: Confidence, done: Generated) -> float:
        seen.append((engine.token_ids(done.sequence), done, score(self, done)))
        return seen[-1][-1]

    monkeypatch.setattr(kind, "score", remember)
    request = replace(request_, merge_duplicates=merge)
    results = run(orchestrator, *(replace(request, seed=seed) for seed in range(6)))
    assert len(seen) > 15
    for ids, done, found in seen:
        logits = plain_logits(tiny_checkpoints["talker"], ids)
        count = len(done.token_ids)
        of_tokens = torch.log_softmax(logits, -1)[-count - 1 : -1].gather(1, torch.tensor(ids[-count:])[:, None])[:, 0]
        np.testing.assert_allclose(done.log_probabilities, of_tokens, atol=1e-5)
        size = count if kind is Confidence else min(count, 16)
        expected = min(of_tokens[start : start + size].mean().exp().item() for start in range(count - size + 1))
        assert found == pytest.approx(expected, abs=1e-5)
    scores = {node.score for result in results for node in result.nodes if node.score is not None}
    assert scores <= {found for _, _, found in seen}
    assert len(scores) > 5
    assert all(result.usage.verifier_tokens == 0 for result in results)
    assert all(candidate.score is not None for result in results for candidate in result.candidates)


@pytest.mark.parametrize("name", ["confidence", "lowest-confidence"])
def test_a_generator_alone_searches(name: str):
    orchestrator = load_orchestrator(RuntimeSettings(verifier=name, kv_memory=2**28))
    assert list(orchestrator.engine.schedulers) == ["generator"]
    assert orchestrator.describe_models()["verifier_family"] == name
    problem = "Tom has 38 coins. (a) He finds 47 more. How many?"
    for algorithm in AlgorithmName:
        (result,) = run(orchestrator, SearchRequest(problem, algorithm))
        assert result.answer, algorithm
        assert not result.error
    orchestrator.close()


def test_what_it_cannot_do_is_said():
    with pytest.raises(CheckpointError, match="--verify-incremental: confidence reads"):
        load_orchestrator(RuntimeSettings(verifier="confidence", verify_incremental=True, kv_memory=2**28))
    with pytest.raises(CheckpointError, match="confidence scores steps as a generator samples them"):
        load_verifier_alone(RuntimeSettings(verifier="confidence"))
