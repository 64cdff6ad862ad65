import dataclasses
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_driver import scripted
from plain import plain_classifier_scores, plain_math_prm_scores
from search_runs import (
    ALL,
    AUTO,
    BEAM,
    BEST_OF_N,
    GIBBS,
    GREEDY,
    LOOKAHEAD,
    MAJORITY,
    MCTS,
    PROBLEM,
    REBASE,
    check_reserved,
    crowd,
    outcome,
    run,
)
from tiny_models import edit_json

from espalier.engine.engine import Engine
from espalier.engine.errors import InvalidRequestError, PoolTooSmallError, RequestTooLargeError
from espalier.engine.models.model import Model
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.engine.work import Done
from espalier.prm.base import StepPath
from espalier.search.request import AlgorithmName, SearchRequest, SubmitOptions, Vote
from espalier.search.result import (
    CandidateDone,
    Event,
    Finished,
    NodeRecord,
    SearchResult,
    Started,
    StepDone,
    StopReason,
)
from espalier.search.run.load import load_orchestrator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.settings import RuntimeSettings

Make = Callable[..., Orchestrator]


def with_(request: SearchRequest, **fields: object) -> SearchRequest:
    return dataclasses.replace(request, **fields)


def paths(result: SearchResult) -> list[list[NodeRecord]]:
    """The lineage of every node but the root."""
    by_id = {node.node_id: node for node in result.nodes}

    def lineage(node: NodeRecord) -> list[NodeRecord]:
        return [] if node.parent_id is None else [*lineage(by_id[node.parent_id]), node]

    return [lineage(node) for node in result.nodes if node.parent_id is not None]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
@pytest.mark.parametrize("request_", ALL.values(), ids=ALL.keys())
def test_every_algorithm_ends_and_leaves_nothing_behind(request_: SearchRequest, seed: int, make_orchestrator: Make):
    orchestrator = make_orchestrator()
    result = run(orchestrator, with_(request_, seed=seed)).only
    orchestrator.engine.check_drained()
    assert result.stop_reason is StopReason.FINISHED
    assert all(candidate.steps for candidate in result.candidates)
    ends = {"", "eos", "boxed", "length", "degenerate", "duplicate", "pruned"}
    assert {node.termination for node in result.nodes} <= ends
    if result.best:
        assert (result.answer, result.score) == (result.best.answer, result.best.score)
        assert result.best in result.candidates


def test_the_tiny_searches_are_worth_testing_with(make_orchestrator: Make):
    """Steps, ends, boxes, cuts, prunings and votes all occur; else the tests here would prove nothing."""
    orchestrator = make_orchestrator(kv_memory_bytes=2**23)
    requests = [with_(request, seed=seed) for request in (BEAM, BEST_OF_N) for seed in range(8)]
    results = run(orchestrator, *requests, with_(BEAM, temperature=0.3))
    nodes = [node for result in results.results for node in result.nodes]
    assert {"", "eos", "boxed", "length", "pruned"} <= {node.termination for node in nodes}
    assert max(node.multiplicity for node in nodes) >= 2
    assert max(node.depth for node in nodes) >= 4
    assert len({result.answer for result in results.results}) >= 3


@pytest.mark.parametrize("request_", [BEAM, BEST_OF_N], ids=["beam", "best-of-n"])
@pytest.mark.parametrize("verifier", ["classifier", "chat-classifier", "math-prm"])
def test_every_score_in_the_tree_equals_a_full_recompute_through_transformers(
    request_: SearchRequest, verifier: str, make_orchestrator: Make, tiny_checkpoints: dict[str, Path]
):
    orchestrator = make_orchestrator(verifier=verifier, kv_memory_bytes=2**23, max_batch_tokens=64)
    result = run(orchestrator, with_(request_, beam_width=4 * request_.beam_width)).only
    scored = [path for path in paths(result) if path[-1].score is not None]
    assert len(scored) >= 8
    for path in scored:
        steps = [node.text for node in path]
        folder, chat = tiny_checkpoints[verifier], verifier == "chat-classifier"
        if verifier == "math-prm":
            expected = plain_math_prm_scores(folder, PROBLEM, steps)
        else:
            expected = plain_classifier_scores(folder, PROBLEM, steps, "\n\n" if chat else "\n", chat)
        assert [node.score for node in path] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("request_", ALL.values(), ids=ALL.keys())
def test_every_token_of_the_tree_is_computed_about_once(request_: SearchRequest, make_orchestrator: Make):
    orchestrator = make_orchestrator(kv_memory_bytes=2**23, max_batch_tokens=48)
    accounts = [result.usage for result in run(orchestrator, *(with_(request_, seed=s) for s in range(4))).results]
    for account in accounts:
        assert account.generator_tokens <= 1.05 * account.generator_tree_tokens
        assert account.verifier_tokens <= 1.05 * account.verifier_tree_tokens
    stats = orchestrator.engine.stats()
    assert stats["generator"].computed_tokens == sum(a.generator_tokens for a in accounts)
    assert stats["verifier"].computed_tokens == sum(a.verifier_tokens for a in accounts)


def test_the_account_counts_the_tree(make_orchestrator: Make):
    orchestrator = make_orchestrator()
    result = run(orchestrator, BEAM).only
    account, engine = result.usage, orchestrator.engine
    nodes = [node for node in result.nodes if node.parent_id is not None]
    assert account.nodes == len(nodes) + account.duplicates
    assert account.pruned == sum(node.termination == "pruned" for node in nodes)
    family = orchestrator._scorer.family  # type: ignore[union-attr]
    read = [family.read(StepPath(PROBLEM, (node.text,))) for node in nodes if node.score is not None]
    scored = sum(len(reading.token_ids) for reading in read)
    assert account.verifier_tree_tokens == len(family.prompt_ids(PROBLEM)) + scored
    assert account.logical_blocks > account.physical_blocks > 0
    assert 0 < account.peak_kv_bytes <= engine.kv_pool.num_bytes
    assert set(result.digests) == {"generator", "verifier"}


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_merged_siblings_are_counted_on_the_one_that_stays(temperature: float, make_orchestrator: Make):
    result = run(make_orchestrator(), with_(BEAM, temperature=temperature)).only
    stays = [node for node in result.nodes if node.termination != "duplicate"]
    assert len(stays) - 1 + result.usage.duplicates == result.usage.nodes
    siblings = [(node.parent_id, node.text) for node in stays]
    assert len(set(siblings)) == len(siblings)
    if temperature == 0.0:
        assert result.usage.duplicates >= 8


@pytest.mark.parametrize("temperature", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("request_", [BEST_OF_N, MAJORITY], ids=["best-of-n", "majority"])
def test_independent_paths_that_grow_alike_are_counted_and_not_computed_twice(
    request_: SearchRequest, temperature: float, make_orchestrator: Make
):
    result = run(make_orchestrator(), with_(request_, beam_width=12, temperature=temperature)).only
    parents = {node.parent_id for node in result.nodes}
    leaves = [node for node in result.nodes if node.node_id not in parents]
    assert sum(leaf.multiplicity for leaf in leaves) == 12
    for node in result.nodes[1:]:
        children = [child for child in result.nodes if child.parent_id == node.node_id]
        assert not children or sum(child.multiplicity for child in children) == node.multiplicity
    account = result.usage
    assert account.nodes == sum(node.multiplicity for node in result.nodes[1:])
    if temperature == 0.0:
        assert len(leaves) == 1
        assert account.generator_tokens < account.generated_tokens / 2


@pytest.mark.parametrize("order", [1, -1])
def test_a_complete_step_is_not_merged_into_one_of_the_same_text_that_was_cut_short(
    order: int, load_model: Callable[[str], Model], make_orchestrator: Make
):
    """Siblings say the same, but some end the sequence there and others run into the length limit."""
    talker = load_model("talker")
    (box,) = talker.tokenizer.encode("\\boxed{1}")
    ends_or_goes_on: Any = (talker.tokenizer.token_id("<|im_end|>"), talker.tokenizer.token_id("<|im_start|>"))
    for seed in range(6):
        orchestrator = make_orchestrator(scripted(talker, [box, ends_or_goes_on[::order]]), "classifier")
        result = run(orchestrator, with_(BEAM, max_tokens=2, seed=seed)).only
        assert result.answer == "1", f"seed {seed}: {[(n.termination, n.multiplicity) for n in result.nodes]}"


LARGEST = [
    *ALL.values(),
    with_(BEAM, beam_width=1, expansion=8),
    with_(BEAM, beam_width=8, expansion=1),
    with_(BEAM, max_step_tokens=1, max_steps=20, max_tokens=20),
    with_(BEAM, max_step_tokens=40, max_steps=20),
    with_(BEAM, temperature=0.4, beam_width=5),
    with_(BEST_OF_N, max_step_tokens=3, max_steps=20),
    with_(LOOKAHEAD, lookahead_steps=3, max_step_tokens=3, max_steps=20),
    with_(REBASE, max_step_tokens=3, max_steps=20, rebase_temperature=100.0),
    with_(GIBBS, max_step_tokens=2, max_steps=20),
    with_(MCTS, max_step_tokens=3, max_steps=20, simulations=20),
    with_(AUTO, max_step_tokens=3, max_steps=20),
]


@pytest.mark.parametrize(
    ("request_", "block_size"),
    [
        pytest.param(request, size, marks=() if i % 3 == j else pytest.mark.slow)
        for i, request in enumerate(LARGEST)
        for j, size in enumerate([1, 4, 16])
    ],
)
def test_a_search_never_holds_more_blocks_than_its_worst_case(
    request_: SearchRequest, block_size: int, make_orchestrator: Make
):
    orchestrator = make_orchestrator(block_size=block_size, kv_memory_bytes=2**23)
    for seed in range(3):  # one by one: what one leaves over would hide what another takes too much
        result = run(orchestrator, with_(request_, seed=seed)).only  # checked after every step
        assert result.usage.physical_blocks > 0


def test_a_tiny_pool_makes_searches_wait_and_all_of_them_end(make_orchestrator: Make):
    orchestrator = make_orchestrator(kv_memory_bytes=600_000)
    watched = run(orchestrator, *crowd(12))
    assert 1 <= watched.most_running < 6
    assert all(result.stop_reason is StopReason.FINISHED for result in watched.results)
    assert max(result.usage.queue_seconds for result in watched.results) > 0


def test_searches_start_in_order_of_arrival(make_orchestrator: Make):
    orchestrator, started = make_orchestrator(max_running=2), []

    def note(event: Event) -> None:
        if isinstance(event, Started):
            started.append(event.search_id)

    ids = [orchestrator.submit(request, note) for request in crowd(7)]
    while orchestrator.busy:
        orchestrator.step()
        assert orchestrator.running <= 2
    assert started == ids


@pytest.mark.parametrize("request_", ALL.values(), ids=ALL.keys())
def test_events_run_from_started_to_finished(request_: SearchRequest, make_orchestrator: Make):
    watched = run(make_orchestrator(), *(with_(request_, seed=seed) for seed in range(3)))
    for result in watched.results:
        events = watched.events[result.search_id]
        assert isinstance(events[0], Started)
        assert isinstance(events[-1], Finished)
        assert events[-1].result == result
        inner = events[1:-1]
        assert all(isinstance(event, StepDone | CandidateDone) for event in inner)
        depths = [event.depth for event in inner if isinstance(event, StepDone)]
        assert depths == sorted(depths)
        told = [event.candidate for event in inner if isinstance(event, CandidateDone)]
        for candidate in result.candidates:
            assert any(candidate.steps == earlier.steps for earlier in told)


def test_started_and_result_carry_the_request_with_every_default_filled_in(make_orchestrator: Make):
    watched = run(make_orchestrator(), SearchRequest(PROBLEM, max_steps=2, max_step_tokens=8))
    started = watched.events[watched.only.search_id][0]
    assert isinstance(started, Started)
    assert started.configuration == watched.only.configuration
    effective = started.configuration
    assert (effective.vote, effective.temperature, effective.top_p) == (Vote.WEIGHTED, 1.0, 1.0)
    assert effective.max_tokens == 512 - len(make_orchestrator()._generator.prompt_ids(PROBLEM))


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9, 14])
@pytest.mark.parametrize("request_", [BEAM, BEST_OF_N, MAJORITY], ids=["beam", "best-of-n", "majority"])
def test_a_search_cancelled_on_the_way_frees_every_block_and_says_so(
    request_: SearchRequest, steps: int, make_orchestrator: Make
):
    orchestrator, events = make_orchestrator(), []
    search_id = orchestrator.submit(request_, events.append)
    for _ in range(steps):
        assert orchestrator.step() == []
    orchestrator.cancel(search_id)
    (result,) = orchestrator.step()
    orchestrator.engine.check_drained()
    assert result.stop_reason is StopReason.CANCELLED
    assert events[-1] == Finished(search_id, result)
    assert sum(isinstance(event, Finished) for event in events) == 1
    assert not orchestrator.busy


def test_a_cancelled_search_answers_with_the_complete_paths_it_has(make_orchestrator: Make):
    orchestrator, told = make_orchestrator(), []

    def note(event: Event) -> None:
        if isinstance(event, CandidateDone) and event.candidate.answer:
            told.append(event.candidate)

    search_id = orchestrator.submit(with_(MAJORITY, beam_width=24, temperature=1.0), note)
    results: list[SearchResult] = []
    while orchestrator.busy:
        if told:
            orchestrator.cancel(search_id)
        results += orchestrator.step()
    (result,) = results
    assert result.stop_reason is StopReason.CANCELLED
    assert result.answer in {candidate.answer for candidate in told}


def test_cancelling_one_search_does_not_disturb_the_others(make_orchestrator: Make):
    alone = run(make_orchestrator(), BEAM).only
    orchestrator = make_orchestrator(kv_memory_bytes=2**23)
    doomed = [orchestrator.submit(request) for request in crowd(6)]
    kept = orchestrator.submit(BEAM)
    results: dict[str, SearchResult] = {}
    for i in range(10_000):
        if i < len(doomed):
            orchestrator.cancel(doomed[i])
        results |= {result.search_id: result for result in orchestrator.step()}
        check_reserved(orchestrator.engine)
        if not orchestrator.busy:
            break
    assert results[kept].answer == alone.answer
    assert [c.steps for c in results[kept].candidates] == [c.steps for c in alone.candidates]
    assert sum(r.stop_reason is StopReason.CANCELLED for r in results.values()) >= 4


def test_a_search_cancelled_in_the_queue_never_starts(make_orchestrator: Make):
    orchestrator, events = make_orchestrator(max_running=1), []
    first = orchestrator.submit(BEAM)
    queued = orchestrator.submit(BEAM, events.append)
    orchestrator.step()
    orchestrator.cancel(queued)
    (result,) = orchestrator.step()
    assert (result.search_id, result.stop_reason, result.answer) == (queued, StopReason.CANCELLED, "")
    assert [type(event) for event in events] == [Finished]
    assert (orchestrator.running, orchestrator.occupancy().waiting) == (1, 0)
    orchestrator.cancel(first)
    orchestrator.step()


def test_cancelling_what_has_ended_or_never_was_is_harmless(make_orchestrator: Make):
    orchestrator = make_orchestrator()
    result = run(orchestrator, GREEDY).only
    orchestrator.cancel(result.search_id)
    orchestrator.cancel("never was")
    assert orchestrator.step() == []


def test_close_ends_everything(make_orchestrator: Make):
    orchestrator = make_orchestrator(max_running=3)
    for request in crowd(6):
        orchestrator.submit(request)
    for _ in range(5):
        orchestrator.step()
    orchestrator.close()
    orchestrator.engine.check_drained()
    assert not orchestrator.busy


def test_a_prompt_longer_than_a_models_context_is_refused_before_anything_starts(make_orchestrator: Make):
    orchestrator = make_orchestrator()
    with pytest.raises(RequestTooLargeError, match="tokens and the generator's context is 512"):
        orchestrator.submit(with_(BEAM, problem="3" * 600))
    assert not orchestrator.busy


def test_a_prompt_that_fits_the_generator_but_not_the_verifier_is_refused(
    make_orchestrator: Make, tiny_checkpoints: dict[str, Path], tmp_path: Path
):
    folder = Path(shutil.copytree(tiny_checkpoints["classifier"], tmp_path / "short"))
    edit_json(folder / "config.json", {"max_position_embeddings": 20})
    orchestrator = make_orchestrator(verifier=folder)
    with pytest.raises(RequestTooLargeError, match="verifier tokens and the verifier's context is 20"):
        orchestrator.submit(with_(BEAM, problem="3" * 20))
    run(orchestrator, with_(MAJORITY, problem="3" * 20))  # needs no verifier


def test_a_search_that_could_never_fit_is_refused_with_the_numbers(make_orchestrator: Make):
    orchestrator = make_orchestrator(kv_memory_bytes=2**17)
    with pytest.raises(PoolTooSmallError, match=r"pool holds [\d.]+ KiB; raise --kv-memory") as caught:
        orchestrator.submit(with_(BEAM, beam_width=16, expansion=16))
    assert caught.value.needed_bytes > caught.value.pool_bytes
    assert not orchestrator.busy


@pytest.mark.parametrize(
    ("verifier", "width", "wanted"),
    [("classifier", 2, "beam"), ("classifier", 1, "beam"), (None, 2, "majority"), (None, 1, "greedy")],
)
def test_a_request_that_names_no_search_gets_one_that_the_verifier_suffices_for(
    make_orchestrator: Make, verifier: str | None, width: int, wanted: str
):
    result = run(make_orchestrator(verifier=verifier), with_(BEAM, algorithm=None, beam_width=width)).only
    assert result.configuration.algorithm == wanted
    assert bool(result.warnings) == (verifier is None)
    assert "--verifier-family likelihood-ratio" in "".join(result.warnings) or verifier


def test_a_search_that_reads_scores_is_refused_without_a_verifier(make_orchestrator: Make):
    orchestrator = make_orchestrator(verifier=None)
    with pytest.raises(InvalidRequestError, match="beam needs a verifier"):
        orchestrator.submit(BEAM)
    result = run(orchestrator, MAJORITY).only
    assert all(node.score is None for node in result.nodes)


def test_an_invalid_request_is_refused_before_it_is_queued(make_orchestrator: Make):
    orchestrator = make_orchestrator()
    with pytest.raises(InvalidRequestError):
        orchestrator.submit(with_(BEAM, beam_width=0, seed=-1))
    assert not orchestrator.busy


@pytest.mark.parametrize("request_", [BEAM, BEST_OF_N], ids=["beam", "best-of-n"])
def test_a_step_too_long_for_the_verifier_never_votes(
    request_: SearchRequest, make_orchestrator: Make, tiny_checkpoints: dict[str, Path], tmp_path: Path
):
    folder = Path(shutil.copytree(tiny_checkpoints["classifier"], tmp_path / "short"))
    orchestrator = make_orchestrator()
    prompt = len(orchestrator._scorer.family.prompt_ids(PROBLEM))  # type: ignore[union-attr]
    edit_json(folder / "config.json", {"max_position_embeddings": prompt + 12})
    orchestrator = make_orchestrator(verifier=folder, kv_memory_bytes=2**23)
    unscored = 0
    for result in run(orchestrator, *(with_(request_, seed=seed) for seed in range(8))).results:
        for candidate in result.candidates:
            assert all(step.score is not None for step in candidate.steps if step.text.strip())
        for path in paths(result):
            if path[-1].text.strip() and path[-1].score is None and path[-1].termination not in ("", "duplicate"):
                assert path[-1].termination == "length"
                unscored += 1
    assert unscored > 8, "no step was too long: nothing was tested"


def test_paths_are_held_to_their_limits(make_orchestrator: Make):
    result = run(make_orchestrator(), with_(BEST_OF_N, max_steps=3, max_step_tokens=6, max_tokens=15)).only
    assert max(node.depth for node in result.nodes) <= 3
    assert result.usage.generated_tokens <= 6 * 15
    for candidate in result.candidates:
        assert len(candidate.steps) <= 3


def test_greedy_gives_the_same_answer_whatever_its_seed(make_orchestrator: Make):
    first, second = (run(make_orchestrator(), with_(GREEDY, seed=seed)).only for seed in (1, 2))
    assert [node.text for node in first.nodes] == [node.text for node in second.nodes]


def test_other_seeds_give_other_trees(make_orchestrator: Make):
    first, second = (run(make_orchestrator(), with_(BEAM, seed=seed)).only for seed in (1, 2))
    assert [node.text for node in first.nodes] != [node.text for node in second.nodes]


def test_turns_do_not_change_the_outcome(make_orchestrator: Make):
    fed = run(make_orchestrator(), BEAM).only
    verifier_first = SimpleNamespace(choose=lambda generator, verifier: VERIFIER if verifier.busy else GENERATOR)
    assert outcome(run(make_orchestrator(role_policy=verifier_first), BEAM).only) == outcome(fed)


def test_a_checkpoint_given_by_folder_runs_through_the_public_road(tiny_checkpoints: dict[str, Path]):
    settings = RuntimeSettings(
        generator=str(tiny_checkpoints["talker"]),
        verifier=str(tiny_checkpoints["math-prm"]),
        device="cpu",
        kv_memory=2**22,
    )
    orchestrator = load_orchestrator(settings)
    result = run(orchestrator, with_(BEAM, algorithm=AlgorithmName.BEAM)).only
    assert result.stop_reason is StopReason.FINISHED
    engine: Engine = orchestrator.engine
    engine.check_drained()


def test_searches_of_a_larger_priority_start_first_and_others_in_order_of_arrival(make_orchestrator: Make):
    orchestrator = make_orchestrator(max_running=1)
    started: list[str] = []

    def watch(event: Event) -> None:
        if isinstance(event, Started):
            started.append(event.configuration.problem)

    for problem, priority in (("a", 0), ("b", 0), ("urgent", 2), ("soon", 1), ("urgent too", 2)):
        orchestrator.submit(with_(GREEDY, problem=problem), watch, SubmitOptions(priority))
    while orchestrator.busy:
        orchestrator.step()
    assert started == ["urgent", "urgent too", "soon", "a", "b"]


@pytest.mark.parametrize("role", ["generator", "verifier"])
def test_searches_share_what_was_computed_of_a_prompt_under_the_same_salt_alone(role: str, make_orchestrator: Make):
    orchestrator = make_orchestrator()

    def hits(salt: bytes) -> int:
        before = orchestrator.engine.stats()[role].cache_hits
        orchestrator.submit(
            with_(BEAM, problem="How many coins are in the jar? " * 2), options=SubmitOptions(salt=salt)
        )
        while orchestrator.busy:
            orchestrator.step()
        return orchestrator.engine.stats()[role].cache_hits - before

    assert [hits(salt) > 0 for salt in (b"alice", b"bob", b"alice", b"bob", b"")] == [False, False, True, True, False]


def test_an_interrupted_step_is_carried_through_and_the_next_goes_on(
    make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch
):
    undisturbed = outcome(run(make_orchestrator(), BEAM).only)
    orchestrator = make_orchestrator()
    orchestrator.submit(BEAM)
    step = Engine.step

    def interrupt(engine: Engine) -> list[Done]:
        done = step(engine)
        signal.raise_signal(signal.SIGINT)
        return done

    results, interrupts = [], 0
    while orchestrator.busy:
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", interrupt)
            with pytest.raises(KeyboardInterrupt):
                orchestrator.step()
        interrupts += 1
        results += orchestrator.step()
    assert interrupts > 5
    assert [outcome(result) for result in results] == [undisturbed]
