"""Searches over verifiers of every family, each score checked against the whole text."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import family_models
import plain_families
import pytest
import torch
from paths import PROBLEM
from test_prm_exactness import STEPWISE
from tiny_models import edit_tensors

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError, InvalidRequestError, ScoreMismatchError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.prm.base import PrmFamily, ScoreInput, StepPath
from espalier.prm.families import load_verifier
from espalier.prm.families.universal import UniversalPrm
from espalier.prm.verifier import StepSession, Verifier
from espalier.search.algorithms.base import MemoryEstimate
from espalier.search.growth.search import RunningSearch
from espalier.search.request import Aggregation, AlgorithmName, SearchRequest, Vote
from espalier.search.result import NodeRecord, SearchResult
from espalier.search.run.executor import ResolvedRequest
from espalier.search.run.generator import Generator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.resolve import worst_case_blocks, worst_case_states

BEAM = SearchRequest(
    PROBLEM, AlgorithmName.BEAM, beam_width=2, expansion=3, max_steps=4, max_tokens=60, max_step_tokens=20
)
BEST_OF_N = SearchRequest(
    PROBLEM, AlgorithmName.BEST_OF_N, beam_width=6, expansion=1, max_steps=4, max_tokens=60, max_step_tokens=20
)
BEST_OF_N_BY_MEAN = replace(BEST_OF_N, aggregation=Aggregation.MEAN)  # the score of every step counts
Make = Callable[..., Orchestrator]


@pytest.fixture
def search_with(load_family: Callable[[str], PrmFamily], make_engine: Callable[..., Engine]) -> Make:
    """An orchestrator over the talkative tiny generator and a verifier of a named family."""

    def make(name: str, full_rescore: bool = False, **options: object) -> Orchestrator:
        family = load_family(name)
        engine = make_engine("talker", family.model, **{"kv_memory_bytes": 2**23, **options})
        generator = Generator(engine, "", {"temperature": 1.0, "top_p": 1.0})
        return Orchestrator(engine, generator, Verifier(family, full_rescore))

    return make


def run(orchestrator: Orchestrator, *requests: SearchRequest) -> list[SearchResult]:
    ids = [orchestrator.submit(request) for request in requests]
    results: dict[str, SearchResult] = {}
    while orchestrator.busy:
        for result in orchestrator.step():
            assert isinstance(result, SearchResult)
            results[result.search_id] = result
        engine = orchestrator.engine
        if engine.settings.reserved_share == 1:
            for role, stats in engine.stats().items():
                assert stats.live_blocks <= engine.admission.reserved_blocks[role], f"{role} holds more than reserved"
    return [results[search_id] for search_id in ids]


def scored_paths(result: SearchResult) -> list[list[NodeRecord]]:
    """Paths to every node with a score; steps without text are left out, as no verifier reads them."""
    nodes = {node.node_id: node for node in result.nodes}
    paths = []
    for node in result.nodes:
        path, step = [], node
        while step.parent_id is not None:
            path.append(step)
            step = nodes[step.parent_id]
        if node.score is not None:
            paths.append([step for step in path[::-1] if step.text.strip()])
    return paths


def nodes_of(result: SearchResult) -> list[tuple[object, ...]]:
    return sorted((node.path, node.text, node.score, node.termination) for node in result.nodes)


@pytest.mark.parametrize("request_", [BEAM, BEST_OF_N_BY_MEAN], ids=["beam", "best-of-n"])
@pytest.mark.parametrize("name", STEPWISE)
def test_a_searchs_scores_are_the_recipes_and_the_full_rescore_agrees(
    name: str, request_: SearchRequest, search_with: Make, family_folders: dict[str, Path]
):
    requests = [replace(request_, seed=seed) for seed in (2, 3, 6)]  # with paths of three steps
    plain = run(search_with(name, max_batch_tokens=64), *requests)
    checked = run(search_with(name, full_rescore=True, max_batch_tokens=64), *requests)
    assert list(map(nodes_of, checked)) == list(map(nodes_of, plain))
    for one, other in zip(plain, checked, strict=True):
        assert one.answer == other.answer
        assert one.usage.verifier_tokens == other.usage.verifier_tokens
        assert one.usage.verifier_tokens <= 1.05 * one.usage.verifier_tree_tokens
    paths = sorted((path for result in plain for path in scored_paths(result)), key=len)
    assert len(paths) > 10
    assert len(paths[-1]) > 2, "no path is deep: nothing was added to anything"
    for path in (paths[0], paths[len(paths) // 2], *paths[-3:]):
        expected = plain_families.plain_scores(name, family_folders, PROBLEM, [node.text for node in path])
        assert [node.score for node in path] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("algorithm", [AlgorithmName.BEAM, AlgorithmName.DVTS, AlgorithmName.BEST_OF_N])
@pytest.mark.parametrize("name", ["value-guided", "token-classifier", "qwen2.5-math-prm"])
def test_blocks_of_tokens_have_a_value_each_read_at_their_ends(
    name: str, algorithm: AlgorithmName, search_with: Make, family_folders: dict[str, Path]
):
    request = replace(BEAM, algorithm=algorithm, step_rule="tokens:6", max_steps=8, max_step_tokens=None, seed=6)
    (result,) = run(search_with(name, full_rescore=True, max_batch_tokens=64), request)
    assert result.error == ""
    nodes = {node.node_id: node for node in result.nodes}
    inner = [nodes[node.parent_id] for node in result.nodes if node.parent_id]
    assert inner
    assert all(6 <= node.tokens <= 6 + 8 for node in inner), "blocks end at six tokens, or where their letter ends"
    paths = sorted(scored_paths(result), key=len)
    assert len(paths[-1]) > 2
    for path in (paths[0], *paths[-3:]):
        expected = plain_families.plain_scores(name, family_folders, PROBLEM, [node.text for node in path])
        assert [node.score for node in path] == pytest.approx(expected, abs=1e-5)
    assert all(candidate.score is not None for candidate in result.candidates)


@pytest.mark.parametrize("labels", [1, 3])
def test_a_value_model_has_one_label_or_three(labels: int, family_folders: dict[str, Path], tmp_path: Path):
    folder = tmp_path / "value"
    shutil.copytree(family_folders["value-guided"], folder)
    edit_tensors(folder / "model.safetensors", {"score.2.weight": torch.ones(labels, 40)})
    family = load_verifier(Checkpoint(folder), torch.float32, "cpu")
    hidden, inner = torch.randn(5, 40), family_models.tensors(folder)["score.0.weight"]
    logits = torch.relu(hidden @ inner.T).sum(1, keepdim=True)
    expected = torch.sigmoid(logits) if labels == 1 else torch.full((5, 1), 1 / 3)
    torch.testing.assert_close(family.model.head(hidden), expected)
    edit_tensors(folder / "model.safetensors", {"score.2.weight": torch.ones(2, 40)})
    with pytest.raises(CheckpointError, match="has 2 labels; a reward model of this family has 3"):
        load_verifier(Checkpoint(folder), torch.float32, "cpu")


@pytest.mark.parametrize("full_rescore", [False, True])
@pytest.mark.parametrize(
    ("name", "request_"),
    [
        *((name, request) for name in ("universal-prm", "rlhflow", "eurus-prm") for request in (BEAM, BEST_OF_N)),
        ("math-shepherd", BEAM),
        ("judge", BEAM),
        ("outcome", BEST_OF_N),
    ],
    ids=lambda value: value.algorithm if isinstance(value, SearchRequest) else value,
)
def test_no_search_holds_more_than_was_set_aside_for_it_and_scarce_memory_changes_nothing(
    name: str, request_: SearchRequest, full_rescore: bool, search_with: Make
):
    requests = [replace(request_, seed=seed) for seed in range(4)]
    ample = run(search_with(name, full_rescore, kv_memory_bytes=2**24, reserved_share=1.0), *requests)
    orchestrator = search_with(name, full_rescore)
    blocks = orchestrator.check(request_).blocks
    pools = {role: scheduler.pools[0] for role, scheduler in orchestrator.engine.schedulers.items()}
    needed = sum(blocks[role] * pool.layout.block_bytes for role, pool in pools.items())
    memory = {"kv_memory_bytes": int(1.2 * needed) + 2**17, "slab_bytes": 2**15}
    scarce = search_with(name, full_rescore, reserved_share=0.0, **memory)
    assert list(map(nodes_of, run(scarce, *requests))) == list(map(nodes_of, ample))


@pytest.mark.parametrize("full_rescore", [False, True])
def test_an_outcome_model_scores_the_complete_answers_of_best_of_n(
    full_rescore: bool, search_with: Make, family_folders: dict[str, Path]
):
    (result,) = run(search_with("outcome", full_rescore=full_rescore), BEST_OF_N)
    paths = scored_paths(result)
    nodes = {node.node_id: node for node in result.nodes}
    complete = [node for node in result.nodes if node.termination in ("eos", "boxed")]
    assert len(complete) > 2
    assert all(nodes[node.node_id].score is not None for node in complete)
    assert all(node.score is None for node in result.nodes if node not in complete)
    for node, path in zip([n for n in result.nodes if n.score is not None], paths, strict=True):
        with torch.inference_mode():
            expected = plain_families.outcome(family_folders["outcome"], PROBLEM, [step.text for step in path])
        assert node.score == pytest.approx(expected, abs=1e-5)
    assert {candidate.score for candidate in result.candidates} == {node.score for node in complete}


@pytest.mark.parametrize("full_rescore", [False, True])
@pytest.mark.parametrize("name", ["yes-no", "judge"])
def test_best_of_n_asks_about_whole_paths_alone_where_their_last_score_is_the_one_that_counts(
    name: str, full_rescore: bool, search_with: Make, family_folders: dict[str, Path]
):
    (result,) = run(search_with(name, full_rescore), BEST_OF_N)
    (of_all_steps,) = run(search_with(name), BEST_OF_N_BY_MEAN)
    assert_complete_paths_alone_have_a_score(result, of_all_steps)
    assert result.usage.verifier_tree_tokens < 0.8 * of_all_steps.usage.verifier_tree_tokens
    for path in scored_paths(result):
        expected = plain_families.plain_scores(name, family_folders, PROBLEM, [node.text for node in path])
        assert path[-1].score == pytest.approx(expected[-1], abs=1e-5)


@pytest.mark.parametrize("name", ["yes-no", "outcome"])
def test_what_is_read_at_once_may_be_as_long_as_a_path(name: str, search_with: Make):
    limits = search_with(name).check(replace(BEST_OF_N, max_step_tokens=4)).verifier_limits
    assert limits is not None
    assert limits.step_tokens == limits.path_tokens >= 60


def assert_complete_paths_alone_have_a_score(result: SearchResult, of_all_steps: SearchResult) -> None:
    """And every one has; `of_all_steps` is of the same paths, whose steps have the same scores."""
    assert [(node.path, node.text) for node in result.nodes] == [(node.path, node.text) for node in of_all_steps.nodes]
    scores = {node.path: node.score for node in result.nodes if node.score is not None}
    assert scores.keys() == {node.path for node in result.nodes if node.termination in ("eos", "boxed")}
    known = {node.path: node.score for node in of_all_steps.nodes if node.score is not None}
    ends = {path: score for path, score in known.items() if path in scores}
    assert 2 < len(ends) < len(known), "no path has two steps"
    assert {path: scores[path] for path in ends} == pytest.approx(ends, abs=1e-5)


@pytest.mark.parametrize(
    "algorithm", sorted(set(AlgorithmName) - {"best-of-n", "adaptive", "greedy", "chain", "majority"})
)
def test_a_search_that_reads_steps_is_refused_an_outcome_model_with_what_fits(algorithm: str, search_with: Make):
    orchestrator = search_with("outcome")
    request = replace(BEAM, algorithm=AlgorithmName(algorithm))
    with pytest.raises(
        InvalidRequestError, match=r"outcome scores whole answers; choose majority or best-of-n or adaptive"
    ):
        orchestrator.submit(request)
    assert not orchestrator.busy


def test_an_outcome_models_default_search_is_one_that_reads_answers(search_with: Make):
    (result,) = run(search_with("outcome"), replace(BEAM, algorithm=None))
    assert result.configuration.algorithm is AlgorithmName.BEST_OF_N
    assert not result.warnings


@pytest.mark.parametrize("algorithm", [AlgorithmName.MAJORITY, AlgorithmName.ADAPTIVE])
def test_searches_that_read_answers_or_nothing_run_with_an_outcome_model(algorithm: AlgorithmName, search_with: Make):
    request = replace(BEST_OF_N, algorithm=algorithm, vote=Vote.WEIGHTED)
    if algorithm is AlgorithmName.MAJORITY:
        request = replace(request, vote=Vote.MAJORITY)
    (result,) = run(search_with("outcome"), request)
    assert result.candidates


def test_a_score_that_differs_ends_the_search_with_the_numbers_and_leaves_nothing(
    search_with: Make, monkeypatch: pytest.MonkeyPatch
):
    read = UniversalPrm.read

    def forgetful(self: UniversalPrm, path: StepPath) -> ScoreInput:
        reading = read(self, path)
        if len(path.steps) == 1:
            return reading
        return ScoreInput(reading.token_ids[1:], (reading.score_positions[0] - 1,), 1)

    monkeypatch.setattr(UniversalPrm, "read", forgetful)
    orchestrator = search_with("universal-prm", full_rescore=True)
    with pytest.raises(ScoreMismatchError, match=r"universal-prm gives step 2 of a path 0\.\d+ step by step and 0\."):
        run(orchestrator, *(replace(BEAM, seed=seed) for seed in range(4)))
    orchestrator.close()


@pytest.mark.parametrize("name", ["universal-prm", "eurus-prm", "outcome"])
def test_a_search_cancelled_at_any_time_leaves_nothing(name: str, search_with: Make):
    orchestrator = search_with(name, full_rescore=True)
    opened = 0
    for steps in range(1, 60, 4):
        search_id = orchestrator.submit(BEST_OF_N)
        for _ in range(steps):
            orchestrator.step()
        for search in orchestrator._searches.values():
            assert isinstance(search, RunningSearch)
            session = search._tree._session
            opened += isinstance(session, StepSession) and bool(session._opened or session.pending)
        orchestrator.cancel(search_id)
        while orchestrator.busy:
            orchestrator.step()
        orchestrator.engine.check_drained()
    assert opened, "nothing was being read when a search was cancelled"


def test_what_is_held_for_readings_only_is_set_aside_too(search_with: Make):
    plain, checked = (search_with("universal-prm", full_rescore=full_rescore) for full_rescore in (False, True))
    blocks = [orchestrator.check(BEAM).blocks["verifier"] for orchestrator in (plain, checked)]
    resolved = plain.check(BEAM)
    assert isinstance(resolved, ResolvedRequest)
    limits = resolved.verifier_limits
    assert limits is not None
    size = plain.engine.settings.block_size
    without = worst_case_blocks([MemoryEstimate(paths=2, steps=6)], replace(limits, max_probe_tokens=0), size)
    assert blocks[0] == without + 8 * 2, "a block for the token, and a copy of the last one, for each of eight"
    assert blocks[1] > blocks[0] + limits.path_tokens // size


def test_every_probe_of_a_step_has_memory_set_aside(search_with: Make, load_family: Callable[[str], PrmFamily]):
    orchestrator = search_with("judge", kv_memory_bytes=2**24)
    resolved, probes = orchestrator.check(BEAM), 1 + len(load_family("judge").other_probes)
    assert isinstance(resolved, ResolvedRequest)
    limits = resolved.verifier_limits
    assert limits is not None
    size = orchestrator.engine.settings.block_size
    estimates = [MemoryEstimate(paths=2, steps=6)]
    without = worst_case_blocks(estimates, replace(limits, max_probe_tokens=0), size)
    of_a_step = probes * (1 + -(-load_family("judge").max_probe_tokens // size))
    assert resolved.blocks["verifier"] == without + 8 * of_a_step
    states = worst_case_states(estimates, limits)
    assert states - worst_case_states(estimates, replace(limits, max_probe_tokens=0)) == 8 * probes == 48
