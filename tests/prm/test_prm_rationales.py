"""ThinkPRM: rationales of the whole path and the verdict after them, by themselves and in searches."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import plain_families
import pytest
import torch
from family_models import write_thinkprm
from paths import PROBLEM, STEPS, begin, child, score_path, score_step, want
from test_prm_in_search import (
    BEAM,
    BEST_OF_N,
    BEST_OF_N_BY_MEAN,
    assert_complete_paths_alone_have_a_score,
    nodes_of,
    run,
    scored_paths,
)

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError, RequestTooLargeError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.work import Generated
from espalier.prm.base import StepPath
from espalier.prm.families import load_verifier
from espalier.prm.families.thinkprm import RationaleSession, ThinkPrm
from espalier.prm.limits import PathLimits, RationaleLimits
from espalier.prm.scorer import ScoreStatus
from espalier.prm.verifier import Verifier, VerifierSession
from espalier.search.algorithms.base import MemoryEstimate
from espalier.search.request import SearchRequest
from espalier.search.run.generator import Generator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.resolve import worst_case_blocks
from espalier.search.tree import Node

Make = Callable[..., tuple[Engine, Verifier]]
SETTINGS = {"greedy": {}, "chains": {"chains": 3, "temperature": 1.0}}
requests_ = pytest.mark.parametrize("request_", [BEAM, BEST_OF_N_BY_MEAN], ids=["beam", "best-of-n"])


@pytest.fixture(scope="session")
def folders(tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny ThinkPRM by how it writes: one greedy rationale, or three that are sampled."""
    root, source = tmp_path_factory.mktemp("thinkprm"), tiny_checkpoints["qwen2-untied"]
    return {name: write_thinkprm(root / name, source, **settings) for name, settings in SETTINGS.items()}


@pytest.fixture
def family_of(folders: dict[str, Path]) -> Callable[[str], ThinkPrm]:
    def load(name: str) -> ThinkPrm:
        family = load_verifier(Checkpoint(folders[name]), torch.float32, "cpu", "thinkprm")
        assert isinstance(family, ThinkPrm)
        return family

    return load


@pytest.fixture
def search_with(
    family_of: Callable[[str], ThinkPrm], make_engine: Callable[..., Engine]
) -> Callable[..., Orchestrator]:
    """An orchestrator over the talkative tiny generator and a ThinkPRM by how it writes."""

    def make(name: str, **options: object) -> Orchestrator:
        family = family_of(name)
        engine = make_engine("talker", family.model, **{"kv_memory_bytes": 2**25, **options})
        return Orchestrator(engine, Generator(engine, "", {"temperature": 1.0, "top_p": 1.0}), Verifier(family))

    return make


def rationales_of(engine: Engine, session: VerifierSession[ThinkPrm], node: Node) -> tuple[list[Generated], float]:
    """Score a node, whose parent is scored: what was written for it, and the score."""
    written: list[Generated] = []
    assert want(session, node).status is ScoreStatus.PENDING
    while engine.busy:
        for done in engine.step():
            written += [done] if isinstance(done, Generated) else []
            for step in session.take(done):
                assert step.score is not None
                return written, step.score
    raise AssertionError("nothing was scored")


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS.keys())
def test_a_score_is_the_mean_verdict_after_the_rationales_that_were_written(
    name: str, steps: list[str], verifier_of: Make, family_of: Callable[[str], ThinkPrm], folders: dict[str, Path]
):
    engine, verifier = verifier_of(family_of(name), max_batch_tokens=29)
    session, node = begin(engine, verifier)
    for text in steps[:-1]:
        node = score_step(engine, session, node, text)
    written, score = rationales_of(engine, session, child(node, steps[-1]))
    session.close()
    tokenizer = plain_families.hf_tokenizer(folders[name])
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("</think>")}
    rationales = [done.token_ids for done in written for _ in done.indices]
    assert len(rationales) == (1 if name == "greedy" else 3)
    assert all(ends.isdisjoint(rationale[:-1]) for rationale in rationales)
    if name == "greedy":
        assert rationales == [plain_families.thinkprm_greedy(folders[name], PROBLEM, steps, 20, ends)]
    cut = [rationale[:-1] if rationale[-1] in ends else rationale for rationale in rationales]
    assert all(len(one) == 20 for one, other in zip(rationales, cut, strict=True) if len(one) == len(other))
    assert score == pytest.approx(plain_families.thinkprm(folders[name], PROBLEM, steps, cut), abs=1e-5)
    assert 0.001 < score < 0.999, "a degenerate verifier would prove nothing"


def test_what_is_kept_of_a_rationale_ends_before_the_first_text_that_ends_it(family_of: Callable[[str], ThinkPrm]):
    family = family_of("greedy")
    tokenizer, path = family.model.tokenizer, StepPath(PROBLEM, ("one", "two"))
    fine = "\nStep 1: fine.\n\nStep 2: fine.\n"
    for ending in ("Step 3: more", "Is the solution correct? yes", "</think>", "</think>\nStep 3:", "<|im_end|>", ""):
        ids = tokenizer.encode(fine + ending)
        kept = family.kept(path, ids)
        assert kept == ids[: len(kept)]
        assert fine.startswith(tokenizer.decode(kept))
        assert len(tokenizer.decode(kept)) >= len(fine) - 2, "no more than the token that reaches into the end is lost"
    assert family.kept(path, tokenizer.encode("</think>")) == []
    assert family.kept(path, tokenizer.encode("<|im_end|>")) == []


def test_steps_of_a_path_are_scored_alike_in_place_and_on_forks_and_a_step_adds_nothing_to_the_root(
    verifier_of: Make, family_of: Callable[[str], ThinkPrm]
):
    engine, verifier = verifier_of(family_of("chains"))
    forked = score_path(engine, begin(engine, verifier), STEPS["two steps"])
    assert score_path(engine, begin(engine, verifier), STEPS["two steps"], in_place=True) == forked
    session, root = begin(engine, verifier)
    held = engine.stats()["verifier"].live_blocks
    score_step(engine, session, root, "38+47=85")
    assert engine.stats()["verifier"].live_blocks == held
    session.close()


def test_the_tokens_of_a_score_are_those_that_were_computed_and_bounded_beforehand(
    verifier_of: Make, family_of: Callable[[str], ThinkPrm]
):
    engine, verifier = verifier_of(family_of("chains"), prefix_cache=False)
    left = [10_000]
    session, root = begin(engine, verifier, budget=lambda node: left[0])
    family = verifier.family
    assert isinstance(family, ThinkPrm)
    steps = ("38+47=85", "So 85")
    most = len(family.text_ids(StepPath(PROBLEM, steps))) + family.rationales_cost
    first = score_step(engine, session, root, steps[0])
    left[0] = most - 1
    assert want(session, child(first, steps[1])).status is ScoreStatus.OVER_BUDGET
    assert not engine.busy
    before = engine.stats()["verifier"].computed_tokens
    left[0] = most
    assert want(session, child(first, steps[1])).tokens == 0
    computed, spent = 0, 0
    while engine.busy:
        for done in engine.step():
            computed += done.computed_tokens
            spent += sum(step.tokens for step in session.take(done))
    assert computed == engine.stats()["verifier"].computed_tokens - before
    assert computed <= spent <= computed + 3, "the last token of each rationale is written and never computed"
    assert spent <= most
    session.close()


def test_what_is_set_aside_for_a_score_covers_all_its_rationales_at_once(
    verifier_of: Make, family_of: Callable[[str], ThinkPrm]
):
    engine, verifier = verifier_of(family_of("chains"), prefix_cache=False)
    (session, root), family = begin(engine, verifier), verifier.family
    assert isinstance(family, ThinkPrm)
    text, size = len(family.text_ids(StepPath(PROBLEM, ("So 85",)))), engine.settings.block_size
    before, most = engine.stats()["verifier"].live_blocks, 0
    assert want(session, child(root, "So 85")).status is ScoreStatus.PENDING
    while engine.busy:
        finished = engine.step()
        most = max(most, engine.stats()["verifier"].live_blocks - before)
        for done in finished:
            list(session.take(done))
    limits = PathLimits(0, 0, 0, rationales=RationaleLimits(text, 3, family.rationale_tokens))
    assert -(-text // size) < most <= worst_case_blocks([MemoryEstimate(paths=1)], limits, size)
    session.close()


def test_a_path_that_leaves_no_room_for_its_rationale_has_no_score(
    verifier_of: Make, family_of: Callable[[str], ThinkPrm]
):
    engine, verifier = verifier_of(family_of("greedy"))
    session, root = begin(engine, verifier)
    family = verifier.family
    assert isinstance(family, ThinkPrm)
    short = len(family.text_ids(StepPath(PROBLEM, ("3",))))
    fitting = "3" * (family.context - short + 1)
    assert len(family.text_ids(StepPath(PROBLEM, (fitting,)))) == family.context
    assert want(session, child(root, fitting + "3")).status is ScoreStatus.UNREADABLE
    assert not engine.busy
    score_step(engine, session, root, fitting)
    session.close()


def test_a_problem_that_leaves_no_room_is_refused_with_what_rationales_take(
    verifier_of: Make, family_of: Callable[[str], ThinkPrm], search_with: Callable[..., Orchestrator]
):
    _, verifier = verifier_of(family_of("greedy"))
    with pytest.raises(RequestTooLargeError, match=r"context is 1024, of which rationales leave \d+"):
        verifier.prompt("3" * 990)
    orchestrator = search_with("greedy")
    assert isinstance(orchestrator._scorer, Verifier)
    family = orchestrator._scorer.family
    assert isinstance(family, ThinkPrm)
    family.settings = replace(family.settings, tokens=700)
    with pytest.raises(RequestTooLargeError, match=r"context is 1024, of which rationales leave \d+"):
        orchestrator.submit(replace(BEAM, problem="3" * 300))


@requests_
@pytest.mark.parametrize("name", SETTINGS)
def test_a_search_gives_the_same_scores_alone_in_company_and_with_scarce_memory(
    name: str, request_: SearchRequest, search_with: Callable[..., Orchestrator], folders: dict[str, Path]
):
    requests = [replace(request_, seed=seed) for seed in range(2)]
    alone = [run(search_with(name, max_batch_tokens=64), request)[0] for request in requests]
    company = run(search_with(name, max_batch_tokens=300), *requests)
    assert list(map(nodes_of, company)) == list(map(nodes_of, alone))
    orchestrator = search_with(name)
    blocks = orchestrator.check(request_).blocks
    pools = {role: scheduler.pools[0] for role, scheduler in orchestrator.engine.schedulers.items()}
    needed = sum(blocks[role] * pool.layout.block_bytes for role, pool in pools.items())
    memory = {"kv_memory_bytes": int(1.2 * needed) + 2**17, "slab_bytes": 2**15}
    scarce = run(search_with(name, reserved_share=0.0, prefix_cache=False, **memory), *requests)
    assert list(map(nodes_of, scarce)) == list(map(nodes_of, alone))
    assert any(result.best and result.best.score is not None for result in alone)
    paths = [path for result in alone for path in scored_paths(result)]
    assert len(paths) > 10
    assert any(len(path) > 1 for path in paths)
    for result in alone:
        usage = result.usage
        assert 0 < usage.verifier_tokens <= usage.verifier_tree_tokens
    if name == "greedy":
        ends = {plain_families.hf_tokenizer(folders[name]).convert_tokens_to_ids(i) for i in ("</think>", "<|im_end|>")}
        for path in (paths[0], max(paths, key=len)):
            steps = [node.text for node in path]
            rationale = plain_families.thinkprm_greedy(folders[name], PROBLEM, steps, 20, ends)
            cut = [rationale[:-1] if rationale[-1] in ends else rationale]
            assert path[-1].score == pytest.approx(
                plain_families.thinkprm(folders[name], PROBLEM, steps, cut), abs=1e-5
            )


@pytest.mark.parametrize("name", SETTINGS)
def test_best_of_n_writes_about_whole_paths_alone_where_their_last_score_is_the_one_that_counts(
    name: str, search_with: Callable[..., Orchestrator]
):
    (result,), (of_all_steps,) = (run(search_with(name), request) for request in (BEST_OF_N, BEST_OF_N_BY_MEAN))
    assert_complete_paths_alone_have_a_score(result, of_all_steps)
    assert result.usage.verifier_tree_tokens < 0.7 * of_all_steps.usage.verifier_tree_tokens


def test_another_seed_writes_other_rationales_and_the_same_text_gets_the_same_ones(
    verifier_of: Make, family_of: Callable[[str], ThinkPrm]
):
    engine, verifier = verifier_of(family_of("chains"))
    texts = []
    for owner, seed in (("me", 1), ("you", 1), ("me", 2)):
        session, root = begin(engine, verifier, owner=owner, seed=seed)
        written, _ = rationales_of(engine, session, child(root, "38+47=85"))
        texts.append(sorted((done.indices, done.token_ids) for done in written))
        session.close()
    assert texts[0] == texts[1] != texts[2]


@requests_
@pytest.mark.parametrize("budget", [500, 1200, 3000, 6000])
def test_no_search_reads_or_writes_more_verifier_tokens_than_its_budget(
    budget: int, request_: SearchRequest, search_with: Callable[..., Orchestrator]
):
    request = replace(request_, verifier_budget=budget)
    results = [run(search_with("chains", prefix_cache=kept), request)[0] for kept in (True, False)]
    for result in results:
        assert result.usage.verifier_tokens <= result.usage.verifier_tree_tokens <= budget
    assert nodes_of(results[0]) == nodes_of(results[1])
    if budget == 500:
        assert results[0].stop_reason == "budget"


@pytest.mark.parametrize("name", SETTINGS)
def test_a_search_cancelled_at_any_time_leaves_nothing(name: str, search_with: Callable[..., Orchestrator]):
    orchestrator = search_with(name)
    opened = 0
    for steps in range(1, 160, 17):
        search_id = orchestrator.submit(BEST_OF_N)
        for _ in range(steps):
            orchestrator.step()
        for search in orchestrator._searches.values():
            session = search._tree._session
            opened += isinstance(session, RationaleSession) and bool(session._opened)
        orchestrator.cancel(search_id)
        while orchestrator.busy:
            orchestrator.step()
        orchestrator.engine.check_drained()
    assert opened, "nothing was being read when a search was cancelled"


def test_the_full_rescore_has_nothing_to_compare_and_says_so(verifier_of: Make, family_of: Callable[[str], ThinkPrm]):
    with pytest.raises(CheckpointError, match=r"--verify-incremental: thinkprm reads the whole text for every step"):
        verifier_of(family_of("greedy"), full_rescore=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chains": 2}, "2 rationales at temperature 0 are all the same"),
        ({"chains": 0}, "whole numbers from 1"),
        ({"temperature": -1.0}, "a number from 0"),
        ({"tokens": 5}, "has chains and critique_tokens"),
        ({"critique_tokens": 1020}, r"leave nothing of its context of 1024; set a smaller prm\.critique_tokens"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    settings: dict[str, float], message: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
):
    folder = write_thinkprm(tmp_path / "thinkprm", tiny_checkpoints["qwen2-untied"], **settings)
    with pytest.raises(CheckpointError, match=message):
        load_verifier(Checkpoint(folder), torch.float32, "cpu", "thinkprm")


def test_a_checkpoint_without_the_labels_or_that_does_not_write_is_refused(tiny_checkpoints: dict[str, Path]):
    with pytest.raises(CheckpointError, match="no single token for ' yes'"):
        load_verifier(Checkpoint(tiny_checkpoints["qwen2-untied"]), torch.float32, "cpu", "thinkprm")
    with pytest.raises(CheckpointError, match="thinkprm generates text and needs a"):
        load_verifier(Checkpoint(tiny_checkpoints["classifier"]), torch.float32, "cpu", "thinkprm")
