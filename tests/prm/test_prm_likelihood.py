"""Likelihood ratios: what a verifier and the generator find of a path, the latter as it was sampled."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import plain_families
import pytest
from paths import PROBLEM
from test_prm_in_search import BEAM, BEST_OF_N, nodes_of, run, scored_paths

from espalier.engine.engine import Engine
from espalier.engine.errors import InvalidRequestError, ScoreMismatchError
from espalier.prm.base import PrmFamily
from espalier.prm.families.likelihood import LikelihoodRatio
from espalier.prm.verifier import Verifier
from espalier.search.request import SearchRequest
from espalier.search.run.generator import Generator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.scores import ScoreRequest

RATIO = "likelihood-ratio"
Make = Callable[..., Orchestrator]


@pytest.fixture
def search_with(load_family: Callable[[str], PrmFamily], make_engine: Callable[..., Engine]) -> Make:
    def make(full_rescore: bool = False, **options: object) -> Orchestrator:
        family = load_family(RATIO)
        engine = make_engine("talker", family.model, **{"kv_memory_bytes": 2**23, **options})
        generator = Generator(engine, "", {"temperature": 1.0, "top_p": 1.0})
        return Orchestrator(engine, generator, Verifier(family, full_rescore))

    return make


@pytest.mark.parametrize("full_rescore", [False, True])
@pytest.mark.parametrize("request_", [BEAM, BEST_OF_N], ids=["beam", "best-of-n"])
def test_scores_compare_transformers_likelihood_with_the_generators_as_sampled(
    request_: SearchRequest, full_rescore: bool, search_with: Make, family_folders: dict[str, Path]
):
    orchestrator = search_with(full_rescore, max_batch_tokens=64)
    results = run(orchestrator, *(replace(request_, seed=seed) for seed in (2, 3, 6)))
    paths = sorted((path for result in results for path in scored_paths(result)), key=len)
    assert len(paths[-1]) > 2, "no path is deep: nothing was added to anything"
    compared = set()
    for path in (paths[0], paths[len(paths) // 2], *paths[-3:]):
        texts = [node.text for node in path]
        of_verifier = plain_families.plain_scores("likelihood", family_folders, PROBLEM, texts)
        for end, likelihood in enumerate(of_verifier, start=1):
            tokens = sum(node.tokens for node in path[:end])
            sampled = math.exp(sum(node.log_probability or 0.0 for node in path[:end]) / tokens)
            assert path[end - 1].score == pytest.approx(likelihood / (likelihood + sampled), abs=1e-5)
            compared.add(round(path[end - 1].score or 0.0, 4))
    assert len(compared) > 4


def test_equal_texts_of_other_tokens_keep_scores_of_their_own(search_with: Make):
    """Which of two siblings ends first must not decide whose tokens are compared."""
    request = replace(BEAM, expansion=24, max_steps=2, max_step_tokens=1, seed=5)
    (result,) = run(search_with(), request)
    assert nodes_of(run(search_with(max_batch_tokens=7), request)[0]) == nodes_of(result)
    scored = [(node.parent_id, node.text, node.score) for node in result.nodes if node.score is not None]
    alike = [each for each in scored if sum(other[:2] == each[:2] for other in scored) > 1]
    assert len({score for *_, score in alike}) == len(alike) > 2, "as of half letters, which are all the same text"


def test_the_full_rescore_sees_what_was_sampled_wrong(search_with: Make, monkeypatch: pytest.MonkeyPatch):
    evidence = LikelihoodRatio.evidence

    def forgetful(self, values, before, sampled):
        return evidence(self, values, before, sampled._replace(log_probability=-0.5) if before else sampled)

    monkeypatch.setattr(LikelihoodRatio, "evidence", forgetful)
    orchestrator = search_with(full_rescore=True)
    with pytest.raises(ScoreMismatchError, match="likelihood-ratio gives step 2 of a path"):
        run(orchestrator, *(replace(BEAM, seed=seed) for seed in (2, 3, 6)))
    orchestrator.close()


def test_scarce_memory_changes_nothing(search_with: Make):
    requests = [replace(BEAM, seed=seed) for seed in range(4)]
    ample = run(search_with(kv_memory_bytes=2**24, reserved_share=1.0), *requests)
    scarce = search_with(kv_memory_bytes=2**19 + 2**18, slab_bytes=2**15, reserved_share=0.0)
    assert list(map(nodes_of, run(scarce, *requests))) == list(map(nodes_of, ample))


def test_given_texts_were_never_sampled(search_with: Make):
    with pytest.raises(InvalidRequestError, match="likelihood-ratio scores steps as they are sampled"):
        search_with().submit(ScoreRequest(PROBLEM, (("38+47=85",),)))
