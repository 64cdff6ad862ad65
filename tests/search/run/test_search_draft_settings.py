"""`--draft`: what it loads, what it refuses, and what a result says of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from search_runs import CHAIN, outcome, run
from zoo_models import write_checkpoint

from espalier.engine.errors import CheckpointError
from espalier.engine.roles import DRAFT, GENERATOR
from espalier.search.run.load import load_orchestrator
from espalier.search.run.settings import RuntimeSettings

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def settings(tiny_checkpoints: dict[str, Path]) -> Callable[..., RuntimeSettings]:
    def make(draft: str = "", **options: object) -> RuntimeSettings:
        draft = str(tiny_checkpoints.get(draft, draft))
        generator = str(tiny_checkpoints["talker"])
        return RuntimeSettings(generator, "", kv_memory=2**22, threads=1, load_cache="none", draft=draft, **options)

    return make


def test_a_result_tells_of_its_drafts_and_is_the_same(settings: Callable[..., RuntimeSettings]):
    request = replace(CHAIN, max_tokens=200, max_step_tokens=None, temperature=0.3, max_steps=40)
    plain = load_orchestrator(settings())
    expected = run(plain, request).only
    assert (expected.usage.drafted_tokens, expected.usage.accepted_tokens) == (0, 0)
    for draft in ("tree", "talker"):
        orchestrator = load_orchestrator(settings(draft))
        results = [run(orchestrator, request).only for _ in range(3)]
        assert all(outcome(result) == outcome(expected) for result in results)
        assert {result.digests[GENERATOR] for result in results} == {expected.digests[GENERATOR]}
        assert all(DRAFT not in result.digests for result in results)
        usages = [result.usage for result in results]
        assert draft == "tree" or sum(usage.drafted_tokens for usage in usages) > 0
        assert all(0 <= usage.accepted_tokens <= usage.drafted_tokens for usage in usages)
        stats = orchestrator.engine.stats()
        assert stats[GENERATOR].drafted_tokens == sum(usage.drafted_tokens for usage in usages)
        assert (DRAFT in stats) == (draft != "tree")
        orchestrator.engine.check_drained()


def test_a_draft_model_of_other_tokens_is_refused(settings: Callable[..., RuntimeSettings]):
    with pytest.raises(CheckpointError, match=r"--draft .* has other tokens than the generator: .* take a model with"):
        load_orchestrator(settings("demo-generator"))


def test_a_draft_model_with_states_is_refused(settings: Callable[..., RuntimeSettings], tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"--draft .* has recurrent layers, whose states cannot go back"):
        load_orchestrator(settings(str(write_checkpoint(tmp_path, "qwen3_next"))))
